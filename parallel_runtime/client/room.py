"""Find memory for an evaluation in the ranks: by its count before it is sent, and again after ranks
ran out of memory.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from typing import Any

from ..crossing.block_code import runs_code_in_blocks
from ..errors import OutOfMemory, PoolSpent
from .free_gpu import unload_unused
from .remote_pool import RemotePool
from .separability import known_guider

log = logging.getLogger("pipemesh")


def find_room(patcher: Any, latent: Sequence[int], bring_up: Callable[[Any], None]) -> None:
    """Frees memory before an evaluation is sent, the first of a run or one of a larger ``latent``
    than before, if ranks have less free than its count. It frees other models first, then ComfyUI's
    models on its own GPU that the run does not use, at last the model's own weights, which
    ``bring_up`` loads anew, once, so that they leave more free. If that is not enough, the
    evaluation is sent all the same: a count may be too high.
    """
    remote, needs = patcher.remote, patcher.remote.pool.memory_needs
    is_first, sampled = remote.sampled.note_latent(latent)
    reloads = is_first or can_repeat(patcher)
    while short := needs.short(remote.model, sampled, measures=is_first):
        if not frees(patcher, short):
            if not (reloads and needs.load_anew(remote.model)):
                break
            reloads = False
        bring_up(patcher)
        if not is_first:  # ranks tell of their memory with an evaluation, and none is sent
            break
    remote.sampled.needed = sampled.needed


def require_more_room(patcher: Any, error: OutOfMemory, unloads: bool) -> bool:
    """Frees memory after ranks ran out of it, so that the evaluation can be computed again: other
    models leave first, one at a time. If the pool has ended, all of them have left, and the
    evaluation is computed in a fresh pool. Raises the error if no more can be freed, or if the run
    cannot go on so. ``unloads`` says that ComfyUI was not asked yet; returns whether that still
    holds.
    """
    remote, needs = patcher.remote, patcher.remote.pool.memory_needs
    needs.lacked_room(remote.model, remote.sampled)
    if is_over := isinstance(error, PoolSpent):
        remote.require_same_file()
        if not needs.may_start_again(remote.pool.runs.of(remote.model)):
            raise error
        freed = needs.held_others(remote.model)
    else:
        freed = remote.pool.residency.make_room(remote.model, of_runs=True)
    if not freed and unloads and remote.sampling.can_repeat:
        unloads, freed = False, unload(patcher)
    move = "Other models used the memory and were unloaded: run again."
    if not freed:
        if not needs.leave_more(remote.model):
            raise error
        move = "The weights left too little memory: run again, and they will leave more free."
    if not can_repeat(patcher):
        raise type(error)(f"{error} {move}") from error
    if is_over:
        tell_of_fresh_workers(remote.pool, error)
    elif not freed:
        log.info("[PipeMesh] %s The weights are loaded anew, and leave more memory free.", error)
    held = remote.pool.residency.held(remote.model)
    if held is not None and runs_code_in_blocks(patcher):  # it may count what was begun: it is sent anew
        held.patches_id = held.objects_id = ""
    return unloads


def tell_of_fresh_workers(pool: RemotePool, error: OutOfMemory) -> None:
    """Tells on the node that its run goes on after the lack of memory that has ended the pool."""
    cause = str(error).removesuffix(PoolSpent.ENDED)
    pool.admission.firsts.notice(f"{cause} This run goes on in fresh workers, which load its model again.")


def can_repeat(patcher: Any) -> bool:
    """Returns whether ranks can compute an evaluation of a run again, also on a model that was
    loaded anew.
    """
    remote = patcher.remote
    return remote.sampling.can_repeat and not (remote.model.run is not None and remote.model.run.names.load)


def frees(patcher: Any, short: Collection[int]) -> bool:
    """Frees memory for the ranks that are ``short`` of memory, but no memory that a run uses.
    Returns False if there is no more to free.
    """
    pool = patcher.remote.pool
    if pool.residency.make_room(patcher.remote.model):
        return True
    beside_ui = pool.runs.beside_ui
    return (beside_ui is None or not {*beside_ui}.isdisjoint(short)) and unload(patcher)


def unload(patcher: Any) -> bool:
    """Has ComfyUI unload models from its own GPU that the present run does not use. Returns False
    if that frees nothing.
    """
    given = patcher.remote.sampling.conds.given
    return given is not None and unload_unused(given.guider, is_known=known_guider(given.guider))
