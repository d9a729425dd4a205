"""``python3 -m lab vaes``: the VAEs of ComfyUI's workflow templates by class, and how a pool
decodes and encodes with each. ``--write`` counts the templates' files on this ComfyUI, has ranks in
one process compute with a small random VAE of each class that has no figures (``--figures``: of
every one), and writes docs/VAES.md and ``lab/vaes.json``, which keeps the counts and the figures.
"""

from __future__ import annotations

import argparse
import importlib
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...launcher.comfyui.host_record import ComfyInstall
from ..comfyui.server import ROOT
from ..templates.files import UNETS, installed, may_sample
from ..templates.stand_ins.names import LTX_2, UnknownName, known_whole

RECORD, PAGE = ROOT / "lab" / "vaes.json", ROOT / "docs" / "VAES.md"
SOUND = "LTXVAudioVAELoader"  # takes the sound's VAE from a file that has one for pictures too
LOADERS = ("VAELoader", "CheckpointLoaderSimple", SOUND)
OFF = (2, 4)  # modes of a node that is muted or bypassed
RANKS, INPUTS = (2, 3), 4  # in bf16 a distance is of so many inputs together
Record = Mapping[str, Any]

HEAD = """\
# VAEs

Written by `python3 -m lab vaes --write`; a test fails if it is stale.

*By bands*: all GPUs compute one picture, each a band of its rows; exact. *By ComfyUI*: on one GPU,
as without PipeMesh. The figures are of small random VAEs of the class, on the CPU, the larger of 2
and 3 ranks with uneven bands: the largest difference from stock ComfyUI relative to its scale in
fp32, decoding and encoding; and in bf16 the distance (root mean square) from the fp32 result,
stock's being 1. A workflow may load several VAEs.

"""


@dataclass(frozen=True)
class Kind:
    """One class of VAEs. ``files``: the whole names that templates give its files. ``cases``: of
    ``tests/vae/test_bands.py``; without any ComfyUI computes, and ``why`` it does.
    """

    name: str
    model: str
    files: str = r"(?!)"
    cases: tuple[str, ...] = ()


KINDS = (
    Kind(
        "SD, Flux, SD3, Z-Image",
        "comfy.ldm.models.autoencoder:AutoencoderKL",
        r"ae|vae_ft_mse_840000_ema|flux1_(dev|schnell)|sd3_5_large|netayumev35_pretrained_all_in_one",
        ("image", "image to latent"),
    ),
    Kind(
        "Flux 2",
        "comfy.ldm.models.autoencoder:AutoencoderKL",
        r"flux2_vae|full_encoder_small_decoder",
        ("image in pairs of rows", "image in pairs of rows to latent"),
    ),
    Kind(
        "Wan 2.1, Qwen-Image",
        "comfy.ldm.wan.vae:WanVAE",
        r"wan_?2_1_vae|wan_alpha_2_1_vae_(alpha|rgb)_channel|qwen_image(_layered)?_vae",
        ("one frame", "video", "one frame to latent", "video to latent"),
    ),
    Kind(
        "Wan 2.2",
        "comfy.ldm.wan.vae2_2:WanVAE",
        r"wan2_2_vae",
        ("video 2.2", "video 2.2 to latent"),
    ),
    Kind(
        "LTX 0.9, 2, 2.3",
        "comfy.ldm.lightricks.vae.causal_video_autoencoder:VideoVAE",
        rf"{LTX_2}|ltx_video_2b_v0_9(_5)?",
        (
            *("frame by pixels", "video by pixels", "first video by pixels"),
            *("frame by pixels to latent", "video by pixels to latent", "first video by pixels to latent"),
        ),
    ),
    Kind(
        "HunyuanVideo 1.5, Hunyuan-Image 2.1's refiner",
        "comfy.ldm.hunyuan_video.vae_refiner:Decoder",
        r"hunyuanvideo15_vae",
        ("unrefined frame", "refined video", "unrefined frame to latent", "refined video to latent"),
    ),
    Kind(
        "HunyuanVideo 1",
        "comfy.ldm.modules.diffusionmodules.model:Decoder",
        r"hunyuan_video_vae",
        ("carried video", "carried video to latent"),
    ),
    Kind(
        "Hunyuan-Image 2.1",
        "comfy.ldm.hunyuan_video.vae:Decoder",
        cases=("shuffled image", "shuffled image to latent"),
    ),
    Kind(
        "CogVideoX",
        "comfy.ldm.cogvideo.vae:AutoencoderKLCogVideoX",
        r"cogvideox_vae",
        ("frame by norms", "video by norms", "video by norms to latent"),
    ),
    Kind(
        "Mage-Flow",
        "comfy.ldm.mage_flow.vae:MageVAE",
        r"mage_flow_vae",
        ("image in windows", "image in few windows", "image in windows to latent"),
    ),
    Kind("LTX 2.5", "comfy.ldm.lightricks.vae.na_diffusion_decoder:CausalDiffusionVAE", r"ltx_2_5_video_vae"),
    Kind("SeedVR2", "comfy.ldm.seedvr.vae:VideoAutoencoderKLWrapper", r"seedvr2_ema_vae"),
    Kind("MiniMax H3", "comfy.ldm.minimax.vae:MiniMaxH3VideoVAE", r"minimax_h3_video_vae"),
    Kind(
        "pixels (HiDream-O1, Chroma Radiance, PixelDiT)",
        "comfy.pixel_space_convert:PixelspaceConversionVAE",
        r"pixel_space|hidream_o1_image(_dev)?",
    ),
    Kind(
        "sound of LTX 2",
        "comfy.ldm.lightricks.vae.audio_vae:AudioVAE",
        rf"sound_of_({LTX_2})|ltx_2_5_audio_vae",
    ),
    Kind("sound of MiniMax H3", "comfy.ldm.minimax.audio_vae:MiniMaxH3AudioVAE", r"minimax_h3_audio_vae"),
)


def nodes(workflow: Any) -> Iterator[dict[str, Any]]:
    """The nodes of a workflow and of its subgraphs that are on."""
    subgraphs = (workflow.get("definitions") or {}).get("subgraphs") or ()
    for graph in (workflow, *subgraphs):
        yield from (node for node in graph["nodes"] if node.get("mode", 0) not in OFF)


def types(node: Mapping[str, Any], end: str) -> set[str]:
    return {one["type"] for one in node.get(end) or ()}


def first_name(node: Mapping[str, Any]) -> str:
    """The first text that a node is given: of a loader, its file."""
    given = node.get("widgets_values") or ()
    values = given.values() if isinstance(given, dict) else given
    return next((one for one in values if isinstance(one, str)), "")


def samples_pictures(workflow: Any) -> bool:
    """As ``templates.files`` asks of prompts, of the workflow's own file: a transformer is sampled,
    and something makes pictures of latents.
    """
    on = [(node, types(node, "inputs"), types(node, "outputs")) for node in nodes(workflow)]
    models = [first_name(node) for node, _, gives in on if "MODEL" in gives and "oader" in node["type"]]
    return (
        any(not UNETS.match(Path(name).name) for name in models if name)
        and any({"MODEL", "GUIDER"} & takes and "LATENT" in gives for _, takes, gives in on)
        and any("LATENT" in takes and "IMAGE" in gives for _, takes, gives in on)
    )


def vae_files(workflow: Any) -> set[str]:
    return {
        f"{'sound of ' * (node['type'] == SOUND)}{Path(first_name(node)).name}"
        for node in nodes(workflow)
        if node["type"] in LOADERS
        and any(one["type"] == "VAE" and one.get("links") for one in node.get("outputs") or ())
    }


def counted(host: ComfyInstall) -> dict[str, int]:
    """How many of this ComfyUI's templates load a VAE of each kind, and how many there are. Raises
    UnknownName if one loads a file of no kind.
    """
    table = [(kind.files, kind.name) for kind in KINDS]
    found: Counter[str] = Counter()
    for template in installed(host):
        workflow = template.workflow()
        if may_sample(workflow) and samples_pictures(workflow):
            found["workflows"] += 1
            try:
                found.update({known_whole(table, name, "VAE") for name in vae_files(workflow)})
            except UnknownName as error:
                raise UnknownName(f"{template.name}: {error}") from error
    return dict(sorted(found.items()))


def why_by_comfyui(kind: Kind) -> str:
    """Why a pool leaves a class to ComfyUI; empty where it does not. Raises ImportError if this
    ComfyUI has no such class.
    """
    from ...parallel_runtime.vae_modules import why_not_in_bands
    from ...tests.vae.test_bands import CASES

    module, _, name = kind.model.partition(":")
    made = getattr(importlib.import_module(module), name)
    if kind.cases:
        return next(filter(None, (why_not_in_bands(CASES[case][0]()) for case in kind.cases)), "")
    return why_not_in_bands(made.__new__(made))  # its name is enough


def figures_of(kind: Kind) -> dict[str, float]:
    """The largest figures of all cases: of decoding and encoding in fp32, and of both in bf16."""
    import pytest
    import torch

    from ...tests.kit.vaes import noise
    from ...tests.vae.test_bands import CASES, Ranks
    from .parity import relative_error

    found: dict[str, float] = {"bf16": 0.0}
    for case in kind.cases:
        make, work, shape, unit = CASES[case]
        model, half = make(), make().bfloat16()

        def by_bands(one: Any, samples: torch.Tensor, ranks: int, work: str = work, unit: int = unit) -> Any:
            with pytest.MonkeyPatch.context() as patch:
                world = Ranks(one, ranks, patch, speeds=(100, 40, 70)[:ranks])
                return world.compute([(work, samples, unit)])[0, 0]

        def by_stock(one: Any, samples: torch.Tensor, work: str = work) -> torch.Tensor:
            with torch.inference_mode():
                return getattr(one, work)(samples)

        truth = by_stock(model, noise(*shape))
        for ranks in RANKS:
            error = relative_error(by_bands(model, noise(*shape), ranks), truth)
            found[work] = max(found.get(work, 0.0), float(f"{error:.1e}"))
        ours = stock = 0.0
        for number in range(INPUTS):
            samples = noise(*shape) + number * noise(*shape).flip(-1)
            truth, less = by_stock(model, samples), samples.bfloat16()
            ours += float((by_bands(half, less, RANKS[0]) - truth).square().mean())
            stock += float((by_stock(half, less) - truth).square().mean())
        found["bf16"] = max(found["bf16"], round((ours / stock) ** 0.5, 2))
    return found


def markdown(record: Record) -> str:
    hosts = sorted(record["workflows"])
    columns = " | ".join(f"Workflows of {host}" for host in hosts)
    lines = [
        f"| VAE of | Class | {columns} | How | Decode | Encode | bf16 |",
        f"|---|---|{'---|' * len(hosts)}---|---|---|---|",
    ]
    for kind in (one for one in KINDS if one.name in record["why"]):
        counts = " | ".join(str(record["workflows"][host].get(kind.name, 0)) for host in hosts)
        why, figures = record["why"][kind.name], record["figures"].get(kind.name, {})
        says = f"by ComfyUI: {why}" if why else "by bands"
        row = (f"{figures[name]:g}" if name in figures else "" for name in ("decode", "encode", "bf16"))
        lines.append(f"| {kind.name} | `{kind.model}` | {counts} | {says} | {' | '.join(row)} |")
    of_all = ", ".join(f"{record['workflows'][host]['workflows']} of ComfyUI {host}" for host in hosts)
    lines += ["", "Counted of the workflow templates that sample a Diffusion Transformer:", f"{of_all}."]
    return HEAD + "\n".join(lines) + "\n"


def renewed(record: Record, host: ComfyInstall, tries: bool, kinds: Sequence[Kind] = KINDS) -> Record:
    """The record, with what this ComfyUI says in the place of what was, and figures of those
    classes that have none, or of all where it ``tries``.
    """
    import comfy.cli_args

    comfy.cli_args.args.cpu = True
    new = {"workflows": {**record["workflows"], host.version: counted(host)}}
    new |= {"why": dict(record["why"]), "figures": dict(record["figures"])}
    for kind in kinds:
        try:
            new["why"][kind.name] = why_by_comfyui(kind)
        except ImportError:
            continue
        if kind.cases and not new["why"][kind.name] and (tries or kind.name not in new["figures"]):
            new["figures"][kind.name] = figures_of(kind)
    return new


def main(argv: Sequence[str], host: ComfyInstall) -> int:
    parser = argparse.ArgumentParser(
        prog="python3 -m lab vaes", description="Which VAEs a pool decodes and encodes with, and how exactly."
    )
    parser.add_argument("--write", action="store_true", help="docs/VAES.md and lab/vaes.json anew")
    parser.add_argument("--figures", action="store_true", help="and all figures anew, in some minutes")
    parser.add_argument("--smallest", action="store_true", help="figures of one class; no file is written")
    options = parser.parse_args(argv)
    record = json.loads(RECORD.read_text(encoding="utf-8"))
    if options.write:
        record = renewed(record, host, options.figures)
        RECORD.write_text(json.dumps(record, indent=1, sort_keys=True) + "\n", encoding="utf-8")
        PAGE.write_text(markdown(record), encoding="utf-8")
    elif options.smallest:
        record = renewed(record, host, True, KINDS[:1])
    print(markdown(record), end="")
    return 0
