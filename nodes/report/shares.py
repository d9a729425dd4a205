"""What ranks on unlike devices take of a run: as words that every language has a text for, and in
English for the report.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ...launcher.pool.devices import Placement
from ...parallel_runtime.comm.shares import group_speeds, shares_of, stage_speeds

TAKES = {
    "tokens": "{} takes {} of the tokens, because it is {}x slower than {}",
    "stage": "stage {} is {}x slower than the fastest: give it fewer blocks",
    "group": "the group of {} is {}x slower, and gets fewer prompts and images",
}


@dataclass(frozen=True)
class Share:
    """What a slower rank, stage or group takes. ``word``: of ``TAKES``; ``values``: what goes into
    its text.
    """

    word: str
    values: tuple[str, ...]

    @property
    def english(self) -> str:
        return TAKES[self.word].format(*self.values)


def unlike_shares(placement: Placement) -> tuple[Share, ...]:
    """Say of each slower rank what it takes, and why: of tokens within its sequence, of blocks
    where it is a stage, of prompts and images where its group is slower. Empty where devices are
    alike.
    """
    if not placement.speeds:
        return ()
    return (*_of_tokens(placement), *_of_stages(placement), *_of_groups(placement))


def _of_tokens(placement: Placement) -> Iterator[Share]:
    layout, speeds = placement.layout, placement.speeds
    size = layout.sequence_size
    for rank, device in enumerate(placement.devices):
        first = rank - rank % size
        tokens = shares_of(layout, rank, speeds).tokens
        own, most = speeds[rank], max(speeds[first : first + size])
        if tokens and own < most and tokens[rank - first] * size < sum(tokens):
            fastest, share = (
                placement.devices[speeds.index(most, first)].name,
                _percent(tokens[rank - first], tokens),
            )
            yield Share("tokens", (device.name, share, f"{most / own:.1f}", fastest))


def _of_stages(placement: Placement) -> Iterator[Share]:
    speeds = stage_speeds(placement.layout, placement.speeds)
    for stage, speed in enumerate(speeds):
        if speed < max(speeds):
            yield Share("stage", (str(stage), f"{max(speeds) / speed:.1f}"))


def _of_groups(placement: Placement) -> Iterator[Share]:
    speeds = group_speeds(placement.speeds, placement.layout.groups)
    for group, speed in enumerate(speeds):
        if speed < max(speeds):
            names = ", ".join(
                dict.fromkeys(placement.devices[rank].name for rank in placement.layout.members(group))
            )
            yield Share("group", (names, f"{max(speeds) / speed:.1f}"))


def _percent(own: float, of: Sequence[float]) -> str:
    return f"{100 * own / sum(of):.0f} %"
