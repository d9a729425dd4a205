"""Time the exchange between GPUs when a pool starts. Names of GPUs do not tell how fast it is: two
RTX 4090 exchange 2 GB/s on one board and 12 on another.
"""

from __future__ import annotations

import time

import torch

from .exchange import Exchange
from .mesh import Mesh

SHORT, LONG = 1 << 18, 1 << 22  # numbers of 4 bytes in a rank's message, its own part too: 1 and 16 MiB
WARM_UP, TIMES = 20, 10  # GPUs and links that were idle are slow at first
ROW = 32  # numbers: parts of messages begin at 128 bytes, as those of evaluations do


def link_speeds(mesh: Mesh, long: int = LONG) -> tuple[tuple[int, float, float], ...]:
    """Return, for groups of 2 neighbours, of 4, ... and of all ranks that may share a sequence, the
    bytes that this rank sends in a second while all groups exchange all with all, and the seconds
    that a short message takes; () for one rank. All ranks of the pool must call it. It takes some
    tenths of a second and 32 MiB, and keeps no memory.
    """
    sequence, widest = mesh.sequence, mesh.layout.widths[-1]
    sequence.use(widest)
    world = sequence.world
    try:
        if world.size > 1:
            _seconds(world, _rows(world.size, long, sequence.device), WARM_UP)
        return tuple((size, *_speed(world, size, long, sequence.device)) for size in nested(world.size))
    finally:
        sequence.use(1)


def nested(ranks: int) -> list[int]:
    """Return sizes of groups that each hold whole groups of the size before: of 8 ranks 2, 4 and 8,
    of 6 ranks 2 and 6.
    """
    sizes: list[int] = []
    for size in range(2, ranks + 1):
        if ranks % size == 0 and (not sizes or size % sizes[-1] == 0):
            sizes.append(size)
    return sizes


def _rows(size: int, numbers: int, device: torch.device) -> torch.Tensor:
    return torch.zeros(size, max(1, numbers // size // ROW) * ROW, dtype=torch.int32, device=device)


def _speed(world: Exchange, size: int, long: int, device: torch.device) -> tuple[float, float]:
    sent, took = [], []
    for numbers in (min(SHORT, long // 2), long):
        rows = _rows(size, numbers, device)
        took.append(_seconds(world, rows, TIMES))
        sent.append(rows[: size - 1].nbytes)
    each = (took[1] - took[0]) / (sent[1] - sent[0])
    each = each if each > 0 else took[1] / sent[1]  # a short message that was late
    return 1 / each, max(0.0, took[0] - sent[0] * each)


def _seconds(world: Exchange, rows: torch.Tensor, times: int) -> float:
    """Return how long each of so many exchanges takes, of which the CPU starts the next while the
    GPU is at one.
    """
    came, began = torch.empty_like(rows), time.perf_counter()
    for _ in range(times):
        world.swap(rows, came)
    if rows.device.type == "cuda":
        torch.cuda.synchronize(rows.device)
    return (time.perf_counter() - began) / times
