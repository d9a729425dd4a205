"""Measure whole prompts of stock graphs, from the first node to the picture: by ComfyUI alone and
in auto mode, on one server, in turns.

``run_speedup`` is the time of a prompt by ComfyUI over its time in auto mode, ``sampling_speedup``
that of its sampler's node alone, ``pixels`` how far the pictures are apart, of 255. Prompts of the
first rounds are not timed: there VAEs and upscalers are tried out (``nodes/auto/decoding.py``).
``predicted_stock`` and ``predicted_auto`` of three graphs are what ``prompt_plan`` predicts over
what a prompt took; what one takes beside steps and decoding is that of a prompt of half the side.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from ...launcher.errors import LaunchError
from ...parallel_runtime.families.sample import Size
from ..comfyui.api import Graph, RunResult, node
from ..comfyui.server import CUSTOM_NODES, ONE_THREAD, ROOT, ComfyServer
from .figures import CaseFigures, Figure, Goal, Options, Round, ratio, typical
from .prompt_plan import Asked, known, together

STAND_INS = ROOT / "lab" / "templates" / "stand_ins" / "pack.py"
SMALLEST = ("flux",)
UNTIMED = 5  # rounds: two by ComfyUI's VAE, the pool's first two, and one that counts
SETTING = "/settings/PipeMesh.Auto"
STEPS = 4
FLUX = Size(heads=2, head_dim=128, blocks=(2, 6))
WAN = Size(heads=2, head_dim=128, blocks=(6,), text_dim=4096)
TEXT, FRAMES = 77, 9
OFF = 0.15  # of a prediction
QWEN = "qwen_image_edit_2509_bf16.safetensors"  # stood in for
IMAGE, VIDEO, UPSCALER = "image_vae.safetensors", "video_vae.safetensors", "upscaler.safetensors"


def loaders(model: str, vae: str) -> Graph:
    return {
        "model": node("UNETLoader", unet_name=model, weight_dtype="default"),
        "vae": node("VAELoader", vae_name=vae),
    }


def sampled(seed: int, denoise: float, steps: int = STEPS) -> Graph:
    """``denoise``: another one, next to 1, has ComfyUI sample again what it has kept."""
    links = {"model": ["model", 0], "positive": ["text", 0], "negative": ["text", 0]}
    how = {"steps": steps, "cfg": 1.0, "sampler_name": "euler", "scheduler": "simple", "denoise": denoise}
    sampler = node("KSampler", seed=seed, latent_image=["empty", 0], **links, **how)
    return {"sampler": sampler, "save": node("SaveImage", images=["decode", 0], filename_prefix="prompt")}


def decoded(tiles: Mapping[str, int] | None = None, images: str = "decode") -> Graph:
    name = "VAEDecodeTiled" if tiles else "VAEDecode"
    return {images: node(name, samples=["sampler", 0], vae=["vae", 0], **(tiles or {}))}


def flux(side: int, batch: int = 1, **tiles: int) -> Graph:
    text = node("PipeMeshDemoConditioning", seed=1, tokens=TEXT, context_dim=64, vec_dim=32)
    empty = node("EmptySD3LatentImage", width=side, height=side, batch_size=batch)
    return {**loaders("flux.safetensors", IMAGE), "text": text, "empty": empty, **decoded(tiles)}


def wan(side: int) -> Graph:
    text = node("PipeMeshDemoConditioning", seed=1, tokens=TEXT, context_dim=4096, vec_dim=32)
    empty = node("EmptyHunyuanLatentVideo", width=side, height=side, length=FRAMES, batch_size=1)
    return {**loaders("wan.safetensors", VIDEO), "text": text, "empty": empty, **decoded()}


def qwen_edit(side: int) -> Graph:
    links = {"clip": ["clip", 0], "vae": ["vae", 0], "image1": ["picture", 0]}
    return {
        **loaders(QWEN, VIDEO),
        "clip": node("CLIPLoader", clip_name="qwen_2.5_vl_7b.safetensors", type="qwen_image"),
        "picture": node("EmptyImage", width=side, height=side, batch_size=1, color=0x4080C0),
        "text": node("TextEncodeQwenImageEditPlus", prompt="bluer", **links),
        "empty": node("VAEEncode", pixels=["picture", 0], vae=["vae", 0]),
        **decoded(),
    }


def upscaled(side: int) -> Graph:
    return {
        **flux(side),
        **decoded(images="small"),
        "upscaler": node("UpscaleModelLoader", model_name=UPSCALER),
        "decode": node("ImageUpscaleWithModel", upscale_model=["upscaler", 0], image=["small", 0]),
    }


CASES: Mapping[str, Callable[[int], Graph]] = {
    "flux": flux,
    "pair": lambda side: flux(side // 4 * 3, batch=2),
    "wan": lambda side: wan(side // 2),
    "qwen edit": lambda side: qwen_edit(side // 2),
    "tiled": lambda side: flux(side, tile_size=256, overlap=64, temporal_size=64, temporal_overlap=8),
    "upscaler": lambda side: upscaled(side // 2),
}
COVER = ("wan", "tiled", "upscaler")  # which the tests run


def write_models(models: Path, width: int) -> None:
    """``width``: channels of the image's decoder, and of the video's, a power of two from 32 on."""
    from safetensors.torch import save_file

    from ...parallel_runtime.families.catalogue import SAMPLES
    from ..dry_run.decoding import vae_of
    from ..random_files import write_model
    from .vae import random_weights

    for folder in ("diffusion_models", "vae", "upscale_models"):
        (models / folder).mkdir(parents=True, exist_ok=True)
    flux, wan = (SAMPLES[name].form for name in ("flux", "wan2.1-t2v"))
    unets = models / "diffusion_models"
    write_model(unets / "flux.safetensors", flux, FLUX)
    write_model(unets / "wan.safetensors", wan, WAN)
    for name, module in (("vae/" + IMAGE, image_vae(width)), ("vae/" + VIDEO, vae_of("Wan21", width))):
        save_file(random_weights(module).state_dict(), models / name)
    save_file(random_weights(upscaler()).state_dict(), models / "upscale_models" / UPSCALER)


def image_vae(width: int) -> Any:
    from comfy.ldm.modules.diffusionmodules.model import Decoder
    from torch import nn

    form = {"ch": width, "out_ch": 3, "ch_mult": [1, 2, 4, 4], "num_res_blocks": 2, "attn_resolutions": []}
    decoder = Decoder(**form, in_channels=3, resolution=256, z_channels=16)
    return nn.ModuleDict({"decoder": decoder, "post_quant_conv": nn.Conv2d(16, 16, 1)})


def upscaler() -> Any:
    from spandrel.architectures.ESRGAN import ESRGAN

    return ESRGAN(num_blocks=1, num_filters=32, scale=2)


def asked(case: str, side: int, width: int) -> Asked | None:
    """Return what is predicted of a case; None where nothing is."""
    flux = Asked("flux", FLUX, TEXT, 1, "Flux", width, side)
    return {
        "flux": flux,
        "pair": replace(flux, side=side // 4 * 3, batch=2),
        "wan": Asked("wan2.1-t2v", WAN, TEXT, FRAMES, "Wan21", width, side // 2),
    }.get(case)


class Prompts:
    """Runs the prompts of one graph on a server."""

    def __init__(self, server: ComfyServer, graph: Graph):
        self._server, self._graph = server, graph

    def run(self, seed: int, *, is_auto: bool) -> RunResult:
        self._server.post(SETTING, is_auto)
        result = self._server.run({**self._graph, **sampled(seed, 0.99995 if is_auto else 1.0)})
        if result.error is not None:
            raise LaunchError(f"{result.error}\n{self._server.log_tail()}")
        return result

    def pictures(self, result: RunResult) -> Any:
        """(B, H, W, C), 0 to 255."""
        import numpy
        from PIL import Image

        shown = result.outputs["save"]["images"]
        files = [self._server.output / one["subfolder"] / one["filename"] for one in shown]
        return numpy.stack([numpy.asarray(Image.open(file)).astype(int) for file in files])

    def round(self, seed: int) -> tuple[Round, int]:
        """The seconds by ComfyUI and in auto mode, and how far their pictures are apart."""
        results = {name: self.run(seed, is_auto=name == "auto") for name in ("stock", "auto")}
        stock, auto = map(self.pictures, results.values())
        seconds = {name: one.duration_s for name, one in results.items()}
        for name, one in results.items():
            seconds[f"{name} sampling"] = one.node_s("sampler")
            computed = STEPS * median(one.steps_s("sampler")) + one.node_s("decode")
            seconds[f"{name} beside"] = seconds[name] - computed
        return seconds, int(abs(stock - auto).max())


def server_in(folder: Path, options: Options) -> ComfyServer:
    packs = {**CUSTOM_NODES, "stand_ins.py": STAND_INS}
    env = {**ONE_THREAD, "PIPEMESH_CACHE": str(folder / "cache")}
    args = ["--force-fp32", "--fp32-vae", "--use-pytorch-cross-attention"]
    return ComfyServer(options.host, base=folder, env=env, args=args, custom_nodes=packs)


def bench(options: Options) -> Iterator[Figure]:
    side, width = options.choose((512, 64), (128, 32))
    only, untimed = options.choose((options.only, UNTIMED), (options.only or SMALLEST, 0))
    with tempfile.TemporaryDirectory(prefix="pipemesh-prompts-") as folder:
        server = server_in(Path(folder), options)
        write_models(server.models, width)
        with server:
            for case, graph in CASES.items():
                if only and case not in only:
                    continue
                prompts, prompt = Prompts(server, graph(side)), asked(case, side, width)
                before = known(options, prompt) if prompt is not None else None
                found = [prompts.round(seed) for seed in range(untimed + options.rounds)]
                apart = max(pixels for _, pixels in found)
                made = CaseFigures("prompts", case, [seconds for seconds, _ in found[untimed:]])
                yield made.counted("pixels", apart, "of 255", Goal(at_most=1))
                yield made.estimated("run_speedup", ratio("stock", "auto"), "x")
                yield made.estimated("sampling_speedup", ratio("stock sampling", "auto sampling"), "x")
                if prompt is None or before is None:
                    continue
                smaller = Prompts(server, graph(side // 2))
                small = [smaller.round(seed)[0] for seed in range(untimed + options.rounds)][untimed:]
                speeds = together(before, known(options, prompt))
                predicted = speeds.predicted(STEPS, prompt.batch)
                for name, seconds in predicted.items():
                    whole = seconds + typical(small, f"{name} beside")

                    def over(rounds: Sequence[Round], whole: float = whole, name: str = name) -> float:
                        return whole / typical(rounds, name)

                    yield made.estimated(f"predicted_{name}", over, "ratio", Goal.within(OFF, 1.0))
