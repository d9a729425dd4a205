"""A real ComfyUI server for tests: what is installed in it, workflows as its API takes them, and
questions to it.
"""

from __future__ import annotations

import socket
import time
from contextlib import contextmanager
from pathlib import Path

from pipemesh.lab.comfyui.api import node
from pipemesh.lab.comfyui.server import CUSTOM_NODES, ROOT, ComfyServer
from safetensors.torch import load_file

SMALL, LARGE = 128, 1024  # pixels: 64 and 4096 image tokens
STEPS = 3
TITLE = 30  # height of a node's title, above its position
# In PYTHONPATH: a server's ranks, or a machine's, are forked with ComfyUI imported, as others are
AT_HAND = str(Path(__file__).with_name("at_hand"))


def start(host, models, *, pack=True, packs=None, base=None, tries_hosts=False, args=()):
    """``pack``: PipeMesh is among its packs. ``packs``: these instead, beside what lies in the
    custom_nodes of the folder ``base``. No speeds of this machine are known there.
    """
    server = ComfyServer(
        host,
        base=base,
        env={
            "OMP_NUM_THREADS": "1",
            "PIPEMESH_CACHE": str(models / "cache"),
            "PIPEMESH_TRIAL": str(int(tries_hosts)),
            "PIPEMESH_TESTS_SERVED": "1",
            "PYTHONPATH": AT_HAND,
        },
        # As on GPUs: by itself ComfyUI has a slower attention on CPUs than ranks have
        args=["--use-pytorch-cross-attention", *args],
        custom_nodes=packs_for_tests(pack) if packs is None else packs,
    )
    for folder, name in (("diffusion_models", "model"), ("loras", "lora")):
        target = server.models / folder / f"{name}.safetensors"
        target.parent.mkdir(parents=True, exist_ok=True)
        target.symlink_to(models / f"{name}.safetensors")
    return server


def packs_for_tests(pack):
    packs = {name: folder for name, folder in CUSTOM_NODES.items() if pack or name != "pipemesh"}
    packs["foreign"] = Path(__file__).with_name("foreign_pack")
    if pack:
        packs["stand_ins.py"] = ROOT / "lab" / "templates" / "stand_ins" / "pack.py"
    return packs


def graph(
    name,
    *,
    ranks=2,
    parallel=True,
    lora=None,
    lora_after=False,
    seed=5,
    pixels=SMALL,
    steps=STEPS,
    sampler="KSampler",
    between=(),
    unet="model",
):
    """A stock workflow, with ``parallel`` through PipeMesh Parallelize; ``between``: nodes from the
    loader to the sampler.
    """
    model = ["unet", 0]
    nodes = {
        "unet": node("UNETLoader", unet_name=f"{unet}.safetensors", weight_dtype="default"),
        "positive": node("PipeMeshDemoConditioning", seed=1, tokens=13, context_dim=64, vec_dim=32),
        "negative": node("PipeMeshDemoConditioning", seed=2, tokens=7, context_dim=64, vec_dim=32),
        "empty": node("EmptySD3LatentImage", width=pixels, height=pixels, batch_size=1),
        "save": node("PipeMeshDemoSaveLatent", samples=["sampler", 0], name=name),
    }

    def with_lora(model):
        nodes["lora"] = node(
            "LoraLoaderModelOnly", model=model, lora_name="lora.safetensors", strength_model=lora
        )
        return ["lora", 0]

    if lora is not None and not lora_after:
        model = with_lora(model)
    for index, (class_type, inputs) in enumerate(between):
        nodes[f"between{index}"] = node(class_type, model=model, **inputs)
        model = [f"between{index}", 0]
    if parallel:
        nodes["pool"] = node("PipeMeshPool", devices="cpu", layout="by hand", ulysses=ranks)
        if sampler.startswith("PipeMesh"):
            parallel_input = {"pool": ["pool", 0]}
        else:
            nodes["parallel"] = node("PipeMeshParallelize", model=model, pool=["pool", 0])
            model, parallel_input = ["parallel", 0], {}
    if lora is not None and lora_after:
        model = with_lora(model)
    common = {
        "model": model,
        **{name: [name, 0] for name in ("positive", "negative")},
        "latent_image": ["empty", 0],
        "steps": steps,
        "cfg": 2.0,
        "sampler_name": "euler",
        "scheduler": "simple",
        **(parallel_input if parallel else {}),
    }
    if "Advanced" in sampler:
        common |= {"add_noise": "enable", "noise_seed": seed, "start_at_step": 0, "end_at_step": 10000}
        common |= {"return_with_leftover_noise": "disable"}
    else:
        common |= {"seed": seed, "denoise": 1.0}
    nodes["sampler"] = node(sampler, **common)
    return nodes


@contextmanager
def held(server, pool):
    """Meanwhile a prompt of such a pool is held behind its sampler: what is queued waits for it."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.settimeout(120)
        nodes = graph("held", seed=99)
        nodes["pool"]["inputs"] |= pool
        port = listening.getsockname()[1]
        nodes["hold"] = node("TestHold", samples=["sampler", 0], port=port)
        nodes["save"]["inputs"]["samples"] = ["hold", 0]
        server.queue(nodes)
        with listening.accept()[0]:
            yield


def custom(name, guider, inputs, *, seed, parallel):
    """The same through SamplerCustomAdvanced with this guider."""
    nodes = graph(name, parallel=parallel)
    model = nodes.pop("sampler")["inputs"]["model"]
    nodes |= {
        "noise": node("RandomNoise", noise_seed=seed),
        "solver": node("KSamplerSelect", sampler_name="dpmpp_2m"),
        "sigmas": node("BasicScheduler", model=model, scheduler="simple", steps=STEPS, denoise=1.0),
        "guider": node(guider, model=model, **inputs),
    }
    links = {"noise": "noise", "guider": "guider", "sampler": "solver", "sigmas": "sigmas"}
    links = {name: [key, 0] for name, key in links.items()}
    nodes["sampler"] = node("SamplerCustomAdvanced", latent_image=["empty", 0], **links)
    return nodes


def linked(nodes, **values):
    """The same workflow, these inputs of its pool linked to nodes that hold the values."""
    for name, value in values.items():
        nodes[name] = node("PrimitiveInt" if isinstance(value, int) else "PrimitiveString", value=value)
        nodes["pool"]["inputs"][name] = [name, 0]
    return nodes


def latent(server, nodes, **kwargs):
    result = server.run(nodes, **kwargs)
    assert result.error is None, f"{result.error}\n{server.log_tail()}"
    return load_file(server.output / f"{nodes['save']['inputs']['name']}.safetensors")["latent"], result


def live_pool(server):
    return next(
        pool for pool in server.get("/pipemesh/status")["pools"] if pool["state"] in ("ready", "busy")
    )


def ranks_of(pool):
    return [rank["pid"] for rank in pool["ranks"]]


def pids(server):
    return ranks_of(live_pool(server))


def once_it_samples(act):
    """Acts when a prompt's sampler begins."""
    return lambda event: event.type == "executing" and event.data.get("node") == "sampler" and act()


def wait_for_phase(server, phase, of=all):
    """Asks until ``of`` a live pool's ranks are in ``phase``; each question is answered by the
    server, so this is no busy sleep.
    """
    deadline = time.monotonic() + 30
    while not any(
        of(rank["pid"] and rank["phase"] == phase for rank in pool["ranks"])
        for pool in server.get("/pipemesh/status")["pools"]
    ):
        assert time.monotonic() < deadline, f"no pool was seen {phase}"


WIDGETS = {"INT": int, "FLOAT": (int, float), "STRING": str, "BOOLEAN": bool, "COMBO": str}


def widgets(info):
    """(name, type, options) in the order in which a saved workflow has their values; the frontend
    adds one behind every seed.
    """
    for group, names in info["input_order"].items():
        for name in names:
            kind, options = (*info["input"][group][name], {})[:2]
            if isinstance(kind, list):
                kind, options = "COMBO", {**options, "options": kind}
            if kind in WIDGETS and not options.get("forceInput"):
                yield name, kind, options
                if options.get("control_after_generate"):
                    yield name, "COMBO", {"options": ["fixed", "increment", "decrement", "randomize"]}


def accepts(name, kind, options, value):
    if kind == "COMBO":  # model files are the user's own
        return value in options["options"] or str(value).endswith(".safetensors")
    number = kind in ("INT", "FLOAT")
    return isinstance(value, WIDGETS[kind]) and (
        not number or options.get("min", value) <= value <= options.get("max", value)
    )


def box(item, info):
    """(left, top, right, bottom) of a node of a saved workflow, with all of its inputs shown: the
    size that it was saved with, or in Nodes 2.0, where rows are taller.
    """
    shown = list(widgets(info)) if info else []
    slots = max(len([one for one in item["inputs"] if "widget" not in one]), len(item["outputs"]))
    advanced = any(options.get("advanced") for _name, _kind, options in shown)
    from_a_pack = bool(info) and info["python_module"].startswith("custom_nodes")
    height = max(item["size"][1], 12 + 20 * slots + 30 * len(shown) + 26 * advanced + 26 * from_a_pack)
    left, top = item["pos"]
    return left, top - TITLE, left + item["size"][0], top + height


def overlap(one, other):
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]
