"""Try the connections between ranks when a pool starts: some corrupt the data that they carry, and
neither a GPU nor a transport says so. Images would come out wrong, or black.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
import torch.distributed as dist

from .mesh import Mesh, naming

NUMBERS = 1 << 18  # of 4 bytes each: 1 MiB; short messages go another way


def try_connections(mesh: Mesh, machines: Sequence[int]) -> None:
    """Send a known pattern once between each two ranks that will exchange messages, and compare it
    on arrival. Every rank must call it. Raises RuntimeError that names both ranks. ``machines``: as
    in ``Start``.
    """
    sequence, rank, widest = mesh.sequence, mesh.rank, mesh.layout.widths[-1]
    ranks = mesh.layout.joined(widest).sequence(rank)
    sequence.use(widest)
    try:
        if len(ranks) > 1:
            with naming("The sequence of", ranks):
                came = sequence.world.swap(
                    torch.stack([pattern(rank, peer, sequence.device) for peer in ranks])
                )
                came.sum().item()  # NCCL tells of a failure here
            for peer, numbers in zip(ranks, came, strict=True):
                compare(numbers, peer, rank, machines)
    finally:
        sequence.use(1)
    for before, after in pairwise(mesh.layout.of_stages(rank)):
        if mesh.link is not None and rank in (before, after):
            numbers = pattern(before, after, sequence.device)
            numbers = numbers if rank == before else torch.zeros_like(numbers)
            with naming("The stages of", (before, after)):
                mesh.link.open(numbers, to_next=rank == before)
            compare(numbers, before, after, machines)


def pattern(source: int, target: int, device: torch.device) -> torch.Tensor:
    """Return numbers (NUMBERS,) in which all bits change, others for other ranks: so a message that
    went astray is seen too.
    """
    every = torch.arange(NUMBERS, dtype=torch.int32, device=device)
    return every * -1640531527 + (source << 16) + target  # near 2^32 over the golden ratio: it wraps around


def compare(came: torch.Tensor, source: int, target: int, machines: Sequence[int]) -> None:
    """Raises RuntimeError unless the numbers are the ones that ``source`` sent."""
    wrong = int((came != pattern(source, target, came.device)).sum())
    if wrong:
        ends = [machines[rank] if machines else 0 for rank in (source, target)]
        raise RuntimeError(
            f"Of {NUMBERS} numbers that rank {source} sent to rank {target} when the pool started, {wrong}"
            f" arrived changed, so their connection corrupts data: {remedy(dist.get_backend(), *ends)}, or"
            " leave one of the two devices out of the pool."
        )


def remedy(backend: str, one: int, other: int) -> str:
    """Return a user's next move. Machine 0 is ComfyUI's."""
    if one != other:
        interface = f"{backend.upper()}_SOCKET_IFNAME"
        return f"check the network between their machines, or name another interface in {interface}"
    if backend == "nccl":
        program = "node on their machine" if one else "ComfyUI"
        return f"start {program} with NCCL_P2P_DISABLE=1 in its environment"
    return "test their machine's memory"
