"""Other packs themselves on a real server, where the environment names a folder that has them:
weights that ComfyUI-GGUF loads, and KJNodes' patches inside blocks, by stock and through a pool.
"""

import importlib.util
from itertools import count

import pytest
from pipemesh.lab import random_files
from pipemesh.lab.comfyui.api import node
from pipemesh.lab.comfyui.server import CUSTOM_NODES, ComfyServer
from pipemesh.lab.commands.parity import BOUND, relative_error
from pipemesh.parallel_runtime.families.catalogue import FAMILIES, PLAIN, SAMPLES
from pipemesh.parallel_runtime.families.sample import Size
from safetensors.torch import load_file

from ..fixtures import PACKS
from ..kit.models import VIDEO, write_lora, write_model
from ..kit.served import graph, latent

GGUF, KJNODES = PACKS / "ComfyUI-GGUF", PACKS / "ComfyUI-KJNodes"
ARCHITECTURE = {
    name: next(family for family in FAMILIES if SAMPLES[name] in family.samples).name
    for name in (PLAIN, VIDEO)
}
LAYOUTS = {
    "ulysses": {"ulysses": 2},
    "ring": {"ulysses": 1, "ring": 2},
    "pipefusion": {"ulysses": 1, "pipefusion": 2, "warm_up": 10000},
}
NAG = ("WanVideoNAG", {"conditioning": ["positive", 0], "nag_scale": 11.0, "nag_alpha": 0.25, "nag_tau": 2.5})
CHUNKED = ("WanChunkFeedForward", {"chunks": 2, "dim_threshold": 1024})
WIDE = 1024  # pixels: tokens beyond the threshold

pytestmark = pytest.mark.skipif(
    not (GGUF.is_dir() and KJNODES.is_dir()), reason="set PIPEMESH_TEST_PACKS to a folder with other packs"
)


def write_gguf(source, target, architecture, kind):
    """A file with its large layers quantised, by the library that the pack reads it with."""
    import gguf

    writer = gguf.GGUFWriter(str(target), architecture)
    for name, weight in load_file(source).items():
        if weight.dim() == 2 and min(weight.shape) >= 128:
            quantised = gguf.GGMLQuantizationType[kind]
            writer.add_tensor(
                name, gguf.quants.quantize(weight.float().numpy(), quantised), raw_dtype=quantised
            )
        else:
            writer.add_tensor(name, weight.float().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture(scope="module")
def server(host, tmp_path_factory):
    made = tmp_path_factory.mktemp("models")
    write_model(made / f"{PLAIN}.safetensors", blocks=(2, 2))
    random_files.write_model(
        made / f"{VIDEO}.safetensors",
        SAMPLES[VIDEO].form,
        Size(heads=2, head_dim=128, blocks=(2,), text_dim=4096),
    )
    write_lora(made / "lora.safetensors", made / f"{PLAIN}.safetensors", rank=4)
    for name, architecture in ARCHITECTURE.items() if importlib.util.find_spec("gguf") else ():
        for kind in ("Q8_0", "Q4_0"):
            write_gguf(made / f"{name}.safetensors", made / f"{name}-{kind}.gguf", architecture, kind)
    packs = {**CUSTOM_NODES, "ComfyUI-GGUF": GGUF, "comfyui-kjnodes": KJNODES}
    server = ComfyServer(
        host, env={"OMP_NUM_THREADS": "1", "PIPEMESH_PATCH_PACKS": "comfyui-kjnodes"}, custom_nodes=packs
    )
    for file in made.iterdir():
        folder = server.models / ("loras" if file.stem == "lora" else "diffusion_models")
        folder.mkdir(parents=True, exist_ok=True)
        (folder / file.name).symlink_to(file)
    with server:
        yield server


@pytest.fixture
def latent_of(server, runs=count()):  # noqa: B008
    """(a loader of one model, the layout, a graph's other options) -> the latent. No layout: by
    stock.
    """

    def made(loader, layout=None, pixels=128, **options):
        nodes = graph(f"run{next(runs)}", parallel=layout is not None, **options)
        nodes["unet"] = loader
        if VIDEO in loader["inputs"]["unet_name"]:
            nodes["empty"] = node(
                "EmptyHunyuanLatentVideo", width=pixels, height=pixels, length=1, batch_size=1
            )
            for prompt in ("positive", "negative"):
                nodes[prompt]["inputs"]["context_dim"] = 4096
        if layout is not None:
            nodes["pool"]["inputs"] |= LAYOUTS[layout]
        return latent(server, nodes)[0]

    return made


def plain_loader(name):
    return node("UNETLoader", unet_name=f"{name}.safetensors", weight_dtype="default")


@pytest.mark.skipif(
    importlib.util.find_spec("gguf") is None, reason="pip install gguf, which ComfyUI-GGUF needs"
)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0"])
@pytest.mark.parametrize("name, lora", [(PLAIN, None), (PLAIN, 0.7), (VIDEO, None)])
def test_weights_of_gguf_files_are_dequantised_as_by_the_pack(latent_of, name, lora, kind, layout):
    loader = node("UnetLoaderGGUF", unet_name=f"{name}-{kind}.gguf")
    stock = latent_of(loader, lora=lora)
    assert relative_error(stock, latent_of(plain_loader(name), lora=lora)) > 100 * BOUND, (
        "nothing is quantised"
    )
    assert relative_error(latent_of(loader, layout, lora=lora), stock) <= BOUND


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("patch, pixels", [(NAG, 128), (CHUNKED, WIDE)], ids=["NAG", "chunked feed-forward"])
def test_patches_of_kjnodes_inside_blocks_run_in_the_ranks(latent_of, patch, pixels, layout):
    stock = latent_of(plain_loader(VIDEO), pixels=pixels, between=[patch])
    if patch is NAG:
        assert relative_error(stock, latent_of(plain_loader(VIDEO), pixels=pixels)) > 100 * BOUND, (
            "the patch does nothing"
        )
    assert (
        relative_error(latent_of(plain_loader(VIDEO), layout, pixels=pixels, between=[patch]), stock) <= BOUND
    )
