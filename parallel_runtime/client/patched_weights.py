"""Send a set of weight patches to the ranks, or have them take up one that they keep.

The UI alone decides what ranks keep: it knows the bytes of every set, and tells with each set which
earlier ones stay. Where sending fails none do, so that ranks and UI never disagree.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from ..memory import system_memory
from ..wire.messages import Adopt, SetWeightPatches
from ..wire.parcel import Parcel
from ..wire.segment import Segment, TensorRef, aligned
from .session import ResidentState, Session

SHARE_OF_SETS = 0.25  # of the memory that is free


@dataclass(frozen=True)
class PatchedWeights:
    """A set: weight patches and object patches, packed. ``sizes``: the bytes of each patched
    weight, as it will be stored. ``keeps``: it will be asked for again.
    """

    patches_id: str
    patches: dict[str, Any]
    objects: dict[str, Any]
    sizes: dict[str, int]
    keeps: bool


def send_weights(
    session: Session, model: str, patched: PatchedWeights, shares: bool, interrupted: Callable[[], bool]
) -> None:
    """Brings all ranks to a set. ``shares``: its weights are computed once, in shared memory."""
    name, resident = patched.patches_id, session.models[model]
    resident.state = ResidentState.PATCHING
    sets, resident.sets = resident.sets, {}
    room, recalled = room_for_sets(sets), name in sets
    with ExitStack() as closing:
        parcel = Parcel({"patches": {} if recalled else patched.patches, "objects": patched.objects})
        closing.callback(parcel.segment.close)
        shared, fds, own = None, [parcel.segment.fd], sets.pop(name, 0)
        if shares and not recalled:
            shared, place = share_out_weights(session.pool.facts.everyone, patched.sizes)
            closing.callback(place.close)
            fds.append(place.fd)
            own = place.nbytes if patched.keeps and patched.sizes.keys() == patched.patches.keys() else 0
        kept = within({**sets, name: own} if own else sets, room)
        what = {"payload": parcel.tree, "shared": shared, "keeps": tuple(kept), "recalled": recalled}
        session.ask(SetWeightPatches, fds, interrupted, model=model, patches_id=name, **what)
        if shared is not None:
            session.ask(Adopt, (), interrupted, model=model, keeps=name in kept)
    resident.sets = kept


def room_for_sets(sets: Mapping[str, int]) -> int:
    """Returns the bytes of main memory that sets of patched weights may take, those kept too."""
    return int(SHARE_OF_SETS * (system_memory()[0] + sum(sets.values())))


def within(sets: dict[str, int], limit_bytes: int) -> dict[str, int]:
    """Returns the sets, by their bytes, of which the last used are within the limit together."""
    kept: dict[str, int] = {}
    for name, nbytes in reversed(sets.items()):
        limit_bytes -= nbytes
        if limit_bytes < 0:
            break
        kept[name] = nbytes
    return dict(reversed(kept.items()))


def share_out_weights(
    ranks: Sequence[int], sizes: dict[str, int]
) -> tuple[dict[str, tuple[int, TensorRef]], Segment]:
    """Places each patched weight in a new segment and names the rank that computes it: largest
    first, always to the rank with least so far. ``sizes``: the bytes to reserve for each.
    """
    loads = dict.fromkeys(ranks, 0)
    shared: dict[str, tuple[int, TensorRef]] = {}
    offset = 0
    for key in sorted(sizes, key=lambda key: (-sizes[key], key)):
        rank = min(loads, key=lambda rank: loads[rank])
        shared[key] = (rank, TensorRef(offset, (sizes[key],), "uint8"))
        loads[rank] += sizes[key]
        offset += aligned(sizes[key])
    return shared, Segment.create("patched", max(offset, 1))
