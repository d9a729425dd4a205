"""PipeMesh Report: what the pool did in its last run, as text on the node, and as a picture where
stages worked one behind the other.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from comfy_api.latest import io, ui
from comfy_execution.graph_utils import ExecutionBlocker

from ...launcher.pool.devices import Placement
from ...parallel_runtime.wire.segment import mib
from ..pool import CATEGORY, Pool
from ..runtime import Choice, Runtime

NO_POOL = (
    "Nothing has been sampled by a pool yet: put PipeMesh Parallelize before the sampler, "
    "connect the sampler's LATENT to this node and run."
)
WAITED_FOR = 1.2  # times as busy as the one with the least to do
NO_LATENT = "PipeMesh Report has no latent to pass on: connect the sampler's LATENT to its latent input."


def report_node(runtime: Runtime) -> type[io.ComfyNode]:
    class PipeMeshReport(io.ComfyNode):
        @classmethod
        def define_schema(cls) -> io.Schema:
            return io.Schema(
                node_id="PipeMeshReport",
                display_name="PipeMesh Report",
                category=CATEGORY,
                description="Shows what the pool did in its last run: layout, time per evaluation, communication, memory of every rank.",
                search_aliases=["multi gpu", "speed", "memory", "benchmark", "statistics"],
                is_output_node=True,
                inputs=[
                    io.Latent.Input(
                        "latent", optional=True, tooltip="The sampler's LATENT, so that the report comes after the run. It is passed on."
                    ),
                    Pool.Input("pool", optional=True, tooltip="Which pool to report on. Without it: the one that sampled last."),
                ],
                outputs=[
                    io.Latent.Output(tooltip="The latent, unchanged."),
                    io.String.Output(display_name="report", tooltip="The text that the node shows."),
                ],
            )

        @classmethod
        def fingerprint_inputs(cls, **_inputs: Any) -> float:
            """Never equal to itself: times and memory are those of now, whatever the inputs are."""
            return float("nan")

        @classmethod
        def execute(cls, latent: dict | None = None, pool: Choice | None = None) -> io.NodeOutput:
            text = report_text(runtime.report(pool), pool and pool.placement)
            shown, drawn = ui.PreviewText(text).as_dict(), runtime.timeline(pool)
            if drawn is not None:
                pixels = torch.from_numpy(np.array(drawn, dtype=np.float32) / 255)
                shown |= ui.PreviewImage(pixels.unsqueeze(0), cls=cls).as_dict()
            return io.NodeOutput(ExecutionBlocker(NO_LATENT) if latent is None else latent, text, ui=shown)

    return PipeMeshReport


def report_text(report: dict[str, Any], asked: Placement | None = None) -> str:
    """Of the pool ``asked`` for, else of the one that sampled last, from what ``Runtime.report``
    says; lines up in a monospaced font.
    """
    pools = report["pools"]
    ran = [pool for pool in pools if pool["last_run"]]
    if not ran:
        return _not_run(pools[-1]) if pools else _unused(asked) if asked else NO_POOL
    pool = max(ran, key=lambda pool: pool["last_run"]["began"])
    others = [f"Another pool: {other['layout']}, {other['state']}" for other in pools if other is not pool]
    parts = [f"{pool['layout']}, {pool['backend']}, {pool['state']}\n{pool['grid']}", _run(pool["last_run"]), _held(pool), _memory(pool)]
    return "\n\n".join([*parts, *(["\n".join(others)] if others else [])])


def _unused(pool: Placement) -> str:
    devices = ", ".join(dict.fromkeys(device.name for device in pool.devices))
    return (
        f"The pool {pool.layout.equation()} on {devices} ({pool.backend}) has sampled nothing: connect the same PipeMesh Pool to the "
        "PipeMesh Parallelize before the sampler, or leave this node's pool open to see the pool that sampled last."
    )


def _not_run(pool: dict[str, Any]) -> str:
    return f"The pool {pool['layout']} is {pool['state']} and has no run to report: run a sampler on it, its LATENT connected to this node."


def _run(run: dict[str, Any]) -> str:
    evaluations, share, in_patches = run["evaluations"], run["exchange_share"], run["in_patches"]
    sent = ("sent per rank and evaluation", f"{run['bytes_per_evaluation'] / 2**20:.2f} MiB")
    title = f"Last run: {evaluations} evaluation{'' if evaluations == 1 else 's'}"
    if in_patches:
        rows = [
            ("of them whole (warm-up)", str(in_patches["whole"])),
            ("time per evaluation (mean)", f"{run['step_ms_mean']:.1f} ms"),
            sent,
            *([("ranks that computed", _busy(run["busy"]))] if run["busy"] else []),
        ]
        return "\n".join([f"{title}, {_sampled(**in_patches)}", *_aligned(rows)])
    rows = [
        ("time per evaluation", f"{run['step_ms_p50']:.1f} ms"),
        ("share of communication", "not measured with nccl" if share is None else f"{100 * share:.1f} %"),
        ("hop to the pool and back", f"{run['hop_ms_p50']:.2f} ms"),
        sent,
    ]
    return "\n".join([title if evaluations == 1 else f"{title}, times are medians", *_aligned(rows)])


def _busy(shares: list[float]) -> str:
    """How much of the time each rank computed; the one that the others wait for by name."""
    slowest = max(range(len(shares)), key=shares.__getitem__)
    text = ", ".join(f"{share:.0%}" for share in shares)
    return f"{text}; the others wait for rank {slowest}" if shares[slowest] > WAITED_FOR * min(shares) else text


def _sampled(mode: str, patches: int, whole: int) -> str:
    """Not in patches where all evaluations were whole."""
    how = f"in {patches} patches, {mode}" if patches else "whole"
    return f"sampled {how}"


def _held(pool: dict[str, Any]) -> str:
    rows = [
        ("models it holds", str(len(pool["models"]))),
        ("models loaded so far", str(pool["loads"])),
        ("weight patches so far", str(pool["patches"])),
        ("conditioning uploads so far", str(pool["conditioning_uploads"])),
    ]
    return "\n".join(["Pool", *_aligned(rows)])


def _memory(pool: dict[str, Any]) -> str:
    rows = [("rank", "device", "models", "free", "total")]
    for rank in pool["ranks"]:
        held = rank["memory"]
        sizes = [_size(held[kind]) for kind in ("model", "free", "total")] if held else ["-"] * 3
        rows.append((str(rank["rank"]), rank["device"], *sizes))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)


def _size(nbytes: int) -> str:
    return f"{nbytes / 2**30:.1f} GiB" if nbytes >= 2**30 else mib(nbytes)


def _aligned(rows: list[tuple[str, str]]) -> list[str]:
    width = max(len(value) for _name, value in rows)
    return [f"  {name:30}{value:>{width}}" for name, value in rows]
