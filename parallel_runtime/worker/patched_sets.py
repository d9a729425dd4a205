"""Keep the weights that ranks of one machine patched together, in segments that all of them map."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

from ..errors import Refused
from ..wire.reserved import read_tree
from ..wire.segment import Segment, TensorRef

Places = Mapping[str, tuple[int, TensorRef]]  # key -> the rank that patches it, and where


class PatchedSet(NamedTuple):
    patches_id: str
    places: Places
    segment: Segment

    def put(self, replace: Callable[[str, Any], None]) -> None:
        for key, (_rank, place) in self.places.items():
            replace(key, read_tree(self.segment, place))


class PatchedSets:
    """The sets of one model. The UI decides which are kept: it knows their bytes, and whether all
    ranks have them.
    """

    def __init__(self):
        self._pending: PatchedSet | None = None
        self._kept: dict[str, PatchedSet] = {}

    def keep(self, names: Collection[str]) -> None:
        """Drops all other sets."""
        self._kept = {name: one for name, one in self._kept.items() if name in names}

    def begin(self, one: PatchedSet) -> None:
        """Notes a set that every rank computes its part of; ``adopt`` follows."""
        self._pending = one

    def forget_pending(self) -> None:
        self._pending = None

    def adopt(self, replace: Callable[[str, Any], None], keeps: bool) -> None:
        """Puts the set into place, all of which is computed now."""
        assert self._pending is not None
        one, self._pending = self._pending, None
        one.put(replace)
        if keeps:
            self._kept[one.patches_id] = one

    def recall(self, patches_id: str, replace: Callable[[str, Any], None]) -> None:
        """Puts a kept set into place. Raises Refused where there is none."""
        if patches_id not in self._kept:
            raise Refused(f"Weight patches {patches_id!r} are not kept any more: run again.")
        self._kept[patches_id].put(replace)
