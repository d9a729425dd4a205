"""A latent decoded and encoded by two ranks of a running server, by ComfyUI's own nodes."""

import numpy
from PIL import Image
from pipemesh.lab.comfyui.api import node
from safetensors.torch import save_file

from ..kit.served import graph, live_pool, pids
from ..kit.vaes import image_weights


def write_vae(server, name):
    path = server.models / "vae" / f"{name}.safetensors"
    path.parent.mkdir(exist_ok=True)
    save_file(image_weights(), path)


def decoded(server, name, *, parallel):
    nodes = graph(name, parallel=parallel)
    nodes["vae"] = node("VAELoader", vae_name="tiny.safetensors")
    vae = ["vae", 0]
    if parallel:
        nodes["parallel_vae"] = node("PipeMeshParallelizeVAE", vae=vae)
        vae = ["parallel_vae", 0]
    nodes["decode"] = node("VAEDecode", samples=["sampler", 0], vae=vae)
    nodes["save"] = node("SaveImage", images=["decode", 0], filename_prefix=name)
    result = server.run(nodes)
    assert result.error is None, f"{result.error}\n{server.log_tail()}"
    (shown,) = result.outputs["save"]["images"]
    return numpy.asarray(Image.open(server.output / shown["subfolder"] / shown["filename"])).astype(int)


def test_what_two_ranks_sample_they_decode_to_the_picture_of_stock(server):
    write_vae(server, "tiny")
    stock = decoded(server, "vae_stock", parallel=False)
    ours = decoded(server, "vae_ours", parallel=True)
    before = pids(server)
    assert stock.shape == ours.shape and stock.std() > 10
    assert abs(stock - ours).max() <= 1
    assert decoded(server, "vae_again", parallel=True).shape == ours.shape and pids(server) == before
    assert len(live_pool(server)["models"]) == 2, "the transformer and the VAE"
    assert "on one device" not in server.log_tail()
