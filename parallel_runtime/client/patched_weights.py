"""Send a set of weight patches to the ranks, or have them take up one that they keep."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..wire.messages import Done, DropSets, SetWeightPatches
from ..wire.parcel import Parcel
from .run import PooledModel
from .session import ResidentState, Session


@dataclass(frozen=True)
class PatchedWeights:
    """A set: weight patches, packed, and object patches with a name of their content.
    ``comes_back``: it takes turns with others, so ranks keep it if they have room.
    """

    patches_id: str
    patches: dict[str, Any]
    objects: tuple[str, dict[str, Any]]
    comes_back: bool


def send_weights(
    session: Session, model: PooledModel, patched: PatchedWeights, interrupted: Callable[[], bool]
) -> None:
    """Brings all ranks to a set. The patches are sent only if a rank lacks the set, object patches
    only if ranks have others.
    """
    resident, (name, objects) = session.models[model], patched.objects
    here = resident.objects_id if resident.state is ResidentState.READY else None
    other = {} if here == name else {"objects": objects}
    resident.state = ResidentState.PATCHING

    def send(**payload: Any) -> list[Done]:
        parcel = Parcel({**payload, **other})
        what = {"patches_id": patched.patches_id, "comes_back": patched.comes_back}
        try:
            return session.ask(
                SetWeightPatches,
                [parcel.segment.fd],
                interrupted,
                model=model.name,
                payload=parcel.tree,
                **what,
            )
        finally:
            parcel.segment.close()

    if not (patched.comes_back and patched.patches) or any(answer.lacks for answer in send()):
        send(patches=patched.patches)


def drop_sets(session: Session | None, is_short: bool = False) -> bool:
    """Frees the sets of patched weights that ranks keep to put them back, and their CUDA graphs.
    Returns False if they keep none, or compute. ``is_short``: an evaluation lacked memory.
    """
    if session is None or session.tickets:
        return False
    if not any(one.sets or one.sets_in_main or one.graphs for one in session.pool.memory):
        return False
    session.ask(DropSets, is_short=is_short)
    return True
