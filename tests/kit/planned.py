"""Counts of released models, as ``dryrun`` had them, and jobs and boxes made of numbers alone."""

import json
from collections.abc import Mapping
from itertools import chain, repeat
from pathlib import Path
from types import MappingProxyType
from typing import Any

from pipemesh.parallel_runtime.planner.box import Box, DeviceSpeeds, Level
from pipemesh.parallel_runtime.planner.evaluation_count import Activations, Attended, Shareable, Whole

SAVED = Path(__file__).parent / "saved" / "counts.json"
LISTS = ("block_weight_bytes", "block_flops", "attended_by_block", "block_launches")


def saved() -> dict:
    return json.loads(SAVED.read_text(encoding="utf-8"))


def counts(name: str) -> Whole:
    """Of ``saved``, where runs of equal blocks are written as (how many, what)."""
    found = saved()[name]["whole"]
    lists = {key: unrolled(found[key]) for key in LISTS}
    attended = [[Attended(*one) for one in block] for block in lists.pop("attended_by_block")]
    shareable = Shareable(**{**found["shareable"], "blocks": unrolled(found["shareable"]["blocks"])})
    activations = Activations(**found["activations"])
    own = {"attended_by_block": attended, "shareable": shareable, "activations": activations}
    return Whole(**{**found, **lists, **own})


def unrolled(runs: list) -> list:
    return list(chain.from_iterable(repeat(one, many) for many, one in runs))


def attention_alone(tokens: int, heads: int = 32, head_dim: int = 128) -> Whole:
    one = Attended(tokens, heads, head_dim)
    return Whole(
        weight_bytes=0,
        block_weight_bytes=[0],
        block_flops=[one.flops],
        around_flops=0,
        activations=Activations(0),
        attended_by_block=[[one]],
        tokens={"img": tokens},
        hidden=heads * head_dim,
        shareable=Shareable([0], 0, 0, 0),
    )


def box(
    ranks: int,
    *,
    port: float = 1e15,
    latency: float = 0.0,
    memory: float = 1e15,
    flops: float = 1e12,
    levels: tuple = (),
    device: Mapping[str, Any] = MappingProxyType({}),
    **more: Any,
) -> Box:
    """A box whose links cost nothing, but for those given. ``device``: more of each device's
    fields; ``more`` of the box's.
    """
    speeds = {"matmul_flops_per_s": flops, "attention_flops_per_s": flops, "memory_bytes_per_s": 1e15}
    one = DeviceSpeeds(name="d", memory_bytes=memory, **{**speeds, **device})
    ports = Level(ranks=1, bytes_per_s=port, latency_s=latency)
    return Box(
        name="box",
        devices=(one,) * ranks,
        levels=(ports, *levels),
        host_bytes_per_s=1e9,
        hop_s=0.0,
        **more,
    )
