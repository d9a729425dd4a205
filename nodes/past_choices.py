"""The layouts that were chosen last, for which devices and samplings, and by which node."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from ..parallel_runtime.layout import Layout
from ..pool.devices import Device, Placement
from .notices import executed_now

AGAIN = 4  # samplings, within which a workflow comes back to what it sampled


class PastChoice(NamedTuple):
    """A choice that was made for some devices and a kind of sampling: the ``best`` layout, without
    regard to running pools, and the one that was taken. ``by`` is the prompt and its node.
    """

    devices: tuple[Device, ...]
    kind: tuple
    best: Layout | None
    taken: Layout
    by: tuple[str, str]


class PastChoices:
    """Keeps the last choices. May be asked from any thread."""

    def __init__(self) -> None:
        self._made: tuple[PastChoice, ...] = ()  # replaced whole, for others read it meanwhile

    def __iter__(self) -> Iterator[PastChoice]:
        return iter(self._made)

    def note(self, devices: tuple[Device, ...], kind: tuple, best: Layout | None, taken: Layout) -> None:
        self._made = (*self._made, PastChoice(devices, kind, best, taken, executed_now()))[-AGAIN:]

    def led_to(self, placement: Placement) -> bool:
        """Return whether the node that samples now got this layout on these devices by choice: a
        pool by hand may have the layout that another node got so.
        """
        return any(
            one.taken == placement.layout
            and placement.devices == one.devices[: len(placement.devices)]
            and one.by == executed_now()
            for one in self
        )
