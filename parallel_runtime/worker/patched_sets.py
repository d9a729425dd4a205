"""Keep sets of patched weights of a model for their next use: while hooks of conds change weights,
ComfyUI asks for another set before nearly every evaluation.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any, NamedTuple

import torch

from ..weights.placement import WeightPlacement

SHARE_OF_SETS = 0.25  # of what is free for a rank, on its device and in main memory
CPU = torch.device("cpu")


class PatchedSet(NamedTuple):
    """``weights`` maps names to weights on ``device``, as ``WeightPlacement.aside`` returned
    them.
    """

    device: torch.device
    nbytes: int
    weights: dict[str, Any]


class PatchedSets:
    """The sets of one model that are not in place now. A set stays on the rank's device if there is
    room, else in main memory; there, the sets that were used longest ago make room for it.

    The loaded weights stay on a GPU too if there is room: else each switch would copy them from the
    file's pages again.
    """

    def __init__(
        self, weights: WeightPlacement, device: torch.device, free_bytes: Callable[[torch.device], int]
    ):
        """``free_bytes`` returns how many bytes are free for this rank, on its device or in main
        memory.
        """
        self._weights = weights
        self._device = device
        self._free_bytes = free_bytes
        self._kept: dict[str, PatchedSet] = {}  # least recently used first
        self._loaded = PatchedSet(device, 0, {})
        self._used: set[str] = set()  # in this run
        self._takes_turns = False  # the set in place, with others
        self.in_place: Collection[str] = ()  # the weights of that set

    def nbytes(self, on_device: bool) -> int:
        """Returns the bytes of all sets on the device, or of all sets in main memory."""
        every = (self._loaded, *self._kept.values())
        return sum(one.nbytes for one in every if (one.device == self._device) == on_device)

    def has(self, name: str) -> bool:
        return name in self._kept

    def names_in(self, name: str) -> Collection[str]:
        """Returns the names of the weights in a set, none if it is not kept."""
        return self._kept[name].weights if name in self._kept else ()

    def leave(self, name: str, takes_turns: bool) -> None:
        """Keeps the set ``name``, which is in place, if it or the next one ``takes_turns`` with
        others and there is room.
        """
        self._used.add(name)
        takes_turns, self._takes_turns = takes_turns or self._takes_turns, takes_turns
        if takes_turns and self.in_place and name not in self._kept:
            self._put_aside(name, self.in_place)

    def _put_aside(self, name: str, weights: Collection[str]) -> None:
        nbytes = sum(map(self._weights.aside_bytes, weights))
        for device in dict.fromkeys((self._device, CPU)):
            if self._has_room(nbytes, device):
                aside = {weight: self._weights.aside(weight, device) for weight in weights}
                self._kept[name] = PatchedSet(device, nbytes, aside)
                return

    def keep_loaded(self, weights: Iterable[str]) -> None:
        """Keeps ``weights`` on a GPU with room, as they were loaded, before a set that takes turns
        is merged into them.
        """
        if not self._takes_turns:
            return
        new = [weight for weight in weights if weight not in self._loaded.weights]
        nbytes = sum(map(self._weights.aside_bytes, new))
        if self._device != CPU and self._has_room(nbytes, self._device):
            aside = {weight: self._weights.aside(weight, self._device) for weight in new}
            self._loaded.weights.update(aside)
            self._loaded = self._loaded._replace(nbytes=self._loaded.nbytes + nbytes)

    def _has_room(self, nbytes: int, device: torch.device) -> bool:
        """Returns whether ``nbytes`` more fit. To make room in main memory, it drops the sets there
        that were used longest ago.
        """
        on_device = device == self._device
        held = self.nbytes(on_device)
        limit = int(SHARE_OF_SETS * (self._free_bytes(device) + held))
        others = [name for name, one in self._kept.items() if one.device == device == CPU]
        while nbytes <= limit and held + nbytes > limit and others:
            held -= self._kept.pop(others.pop(0)).nbytes
        return held + nbytes <= limit

    def put(self, name: str) -> None:
        """Puts a kept set into place. One in main memory stays there too, for the next time."""
        one = self._kept[name]
        self._used.add(name)
        self.in_place = tuple(one.weights)
        for weight, aside in one.weights.items():
            self._weights.put_back(weight, aside)
        del self._kept[name]
        if one.device != self._device:
            self._kept[name] = one  # the last used

    def restore(self, but: Collection[str]) -> None:
        """Puts all other weights back as they were loaded."""
        self._weights.restore(but, self._loaded.weights)
        self.in_place = ()

    def end_run(self) -> None:
        """Drops the sets that the run did not ask for."""
        self._kept = {name: one for name, one in self._kept.items() if name in self._used}
        self._used.clear()

    def leave_gpu(self) -> None:
        """Drops the sets that are kept on a GPU, because another process needs the memory."""
        self._kept = {name: one for name, one in self._kept.items() if one.device == CPU}
        self._loaded = PatchedSet(self._device, 0, {})

    def drop(self) -> None:
        self._kept.clear()
        self.leave_gpu()
