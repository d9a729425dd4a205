"""What ranks on unlike devices take of a run, in the report's words."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ...launcher.pool.devices import Placement
from ...parallel_runtime.comm.shares import group_speeds, shares_of, stage_speeds


def shares_text(placement: Placement) -> tuple[str, ...]:
    """Say of each slower rank what it takes, and why: of tokens within its sequence, of blocks
    where it is a stage, of prompts and images where its group is slower. Empty where devices are
    alike.
    """
    if not placement.speeds:
        return ()
    return (*_of_tokens(placement), *_of_stages(placement), *_of_groups(placement))


def _of_tokens(placement: Placement) -> Iterator[str]:
    layout, speeds = placement.layout, placement.speeds
    size = layout.ulysses * layout.ring
    for rank, device in enumerate(placement.devices):
        first = rank - rank % size
        tokens = shares_of(layout.degrees(), rank, speeds).tokens
        own, most = speeds[rank], max(speeds[first : first + size])
        if tokens and own < most and tokens[rank - first] * size < sum(tokens):
            fastest, share = placement.devices[speeds.index(most, first)].name, _percent(tokens[rank - first], tokens)
            yield f"{device.name} takes {share} of the tokens, as it is {most / own:.1f}x slower than {fastest}"


def _of_stages(placement: Placement) -> Iterator[str]:
    speeds = stage_speeds(placement.layout.degrees(), placement.speeds)
    for stage, speed in enumerate(speeds):
        if speed < max(speeds):
            yield f"stage {stage} is {max(speeds) / speed:.1f}x slower than the fastest: fewer blocks suit it"


def _of_groups(placement: Placement) -> Iterator[str]:
    speeds = group_speeds(placement.speeds, placement.layout.groups)
    for group, speed in enumerate(speeds):
        if speed < max(speeds):
            names = ", ".join(dict.fromkeys(placement.devices[rank].name for rank in placement.layout.members(group)))
            yield f"the group of {names} is {max(speeds) / speed:.1f}x slower, and gets prompts and images by that"


def _percent(own: float, of: Sequence[float]) -> str:
    return f"{100 * own / sum(of):.0f} %"
