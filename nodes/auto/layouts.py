"""Samples a guider's MODELs in the layout that is chosen for the present sampling."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

from comfy.model_patcher import ModelPatcher

from ...parallel_runtime.client.remote_patcher import RemotePatcher
from ...parallel_runtime.client.sampler_arguments import Asked
from ...parallel_runtime.errors import Refused
from ...parallel_runtime.families.unplanned_models import FRAMES_ALONE, takes_rows_for_frames
from ...parallel_runtime.refusals import require_whole_groups
from ..planning import PlannedLayout, Sampling, placed
from ..runtime import Runtime
from ..settings import Choice


def in_chosen_layout(
    runtime: Runtime,
    guider: Any,
    models: Mapping[str, ModelPatcher],
    choice: Choice,
    given: Mapping[str, Any],
) -> tuple[dict[str, RemotePatcher], PlannedLayout]:
    """Returns parallelized clones of a guider's MODELs, all on one pool, and why it is laid out so:
    for the first MODEL, as several in one guider are sampled alike. ``given``: the arguments of
    ``CFGGuider.sample``.
    """
    first = next(iter(models.values()))
    asked = partial(Sampling.of, guider, given.get("noise"), given.get("sigmas"))
    planned = runtime.plan(first, choice, asked, partial(Asked.to_come, guider, given))
    own = placed(choice, planned)
    return {name: runtime.parallelize(model, own, choice) for name, model in models.items()}, planned


def require_more_than_frames(model: ModelPatcher, guider: Any, given: Mapping[str, Any]) -> None:
    """Raises Refused if there is nothing to share out but the frames of one video, before a pool is
    started for it. If another pack's guider cannot be asked, planning reports it, because planning
    asks the same.
    """
    if not takes_rows_for_frames(model.model.diffusion_model):
        return
    branches = 0
    with suppress(Exception):
        branches = Sampling.of(guider, given.get("noise"), given.get("sigmas")).branches
    if branches == 1:
        raise Refused(FRAMES_ALONE)


def require_several(planned: PlannedLayout, model: ModelPatcher, choice: Choice) -> None:
    """Raises Refused if one device is faster than every layout of several devices, or if the
    fastest layout is not known yet and no pool is up.
    """
    if planned.awaits:
        raise Refused(f"PipeMesh does not know yet which layout is the fastest, because {planned.why}.")
    if planned.is_one_device:
        require_whole_groups(model.model.diffusion_model, choice.placement.layout)
        raise Refused(f"One GPU is faster here than several, {planned.why}.")


@contextmanager
def laid_out_anew(
    runtime: Runtime, guider: Any, models: Mapping[str, ModelPatcher], given: Mapping[str, Any]
) -> Iterator[None]:
    """Finds the MODELs of a guider whose pool's layout was left open, puts them into the layout
    that is chosen for this sampling, and takes them out again.
    """
    by_choice: dict[Choice, dict[str, ModelPatcher]] = {}
    for name, model in models.items():
        choice = runtime.planning.left_open(model.remote) if isinstance(model, RemotePatcher) else None
        if choice is not None:
            by_choice.setdefault(choice, {})[name] = model
    made = [
        in_chosen_layout(runtime, guider, several, choice, given) for choice, several in by_choice.items()
    ]
    with in_place_of(guider, {name: patcher for parallel, _ in made for name, patcher in parallel.items()}):
        yield
    for parallel, planned in made:
        note(runtime, parallel, planned)


def note(runtime: Runtime, parallel: Mapping[str, RemotePatcher], planned: PlannedLayout) -> None:
    """Keeps for the report how the last run of each of these MODELs was planned."""
    for patcher in parallel.values():
        runtime.planning.note(patcher.remote.pool.runs.last, planned)


@contextmanager
def in_place_of(guider: Any, models: Mapping[str, ModelPatcher]) -> Iterator[None]:
    """Puts ``models`` into the guider's attributes and, however it goes on, takes them out again.
    The guider keeps its own ``model_options``: a node may have changed them.
    """
    own = {name: getattr(guider, name) for name in models}
    vars(guider).update(models)
    try:
        yield
    finally:
        vars(guider).update(
            {name: model for name, model in own.items() if getattr(guider, name) is models[name]}
        )
