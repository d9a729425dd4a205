"""Residency: ranks load a model once, patch it when its weight patches change, and release it when
no loader's output uses it any more.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

from ..crossing.source import Source
from ..errors import ModelError, OutOfMemory, PipeMeshError, PoolFailed, Refused
from ..planner.balance import Sizes
from ..planner.keeping import WHOLE, WeightsWish, least
from ..wire.messages import EndRun, Load, ReadWeights, Release
from ..wire.parcel import Parcel
from .patched_weights import PatchedWeights, drop_sets, send_weights
from .run import PooledModel
from .runs import Runs
from .session import Resident, ResidentState, Session, Sessions

T = TypeVar("T")
MOST_UNUSED = 200  # models, of some 1 KiB
log = logging.getLogger("pipemesh")


class Residency:
    """Keeps the models of one pool handle. A new pool holds none; the count of users goes on."""

    def __init__(self, sessions: Sessions, runs: Runs):
        self._sessions = sessions
        self._runs = runs
        self.models: dict[str, PooledModel] = {}  # by name
        # Of the UI's own model objects
        self._uses: weakref.WeakKeyDictionary[Any, tuple[PooledModel, Source]] = weakref.WeakKeyDictionary()
        self._thread = 0  # that asks for models: requests of another could come between its own
        sessions.at_close.append(partial(end_checks, self.models, runs))

    # -- who uses a model

    def use(self, host_model: Any, describe: Callable[[], Source]) -> tuple[PooledModel, Source]:
        """Registers ``host_model``, the UI's own model object, as a user of its source.

        For as long as a loader's output lives the pool's copy is worth keeping, however many
        clones, LoRA strengths and sampler runs come and go; and it stays the file it was when it
        was first described.
        """
        if host_model not in self._uses:
            source = describe()
            model = self.models.setdefault(source.model, PooledModel(source.model, source.title))
            self._uses[host_model] = model, source
            model.users += 1
            forget_unused(self.models, self._sessions.live)
            weakref.finalize(host_model, self._drop_user, model).atexit = False
        return self._uses[host_model]

    def _drop_user(self, model: PooledModel) -> None:
        """Counts a user less. The garbage collector calls this on any thread, even amid a request:
        then the model is released later.
        """
        model.users -= 1
        session = self._sessions.live if not model.users else None
        if session is not None and session.pool.idle and threading.get_ident() == self._thread:
            self._release_unused(session)

    def _release_unused(self, session: Session) -> None:
        for model in [model for model in session.models if not model.users]:
            self.release(model)

    # -- what ranks hold

    def held(self, model: PooledModel) -> Resident | None:
        """Returns the record of a model that ranks may hold, so that it can be released."""
        session = self._sessions.live
        return session.models.get(model) if session is not None else None

    def load(
        self,
        model: PooledModel,
        source: Source,
        state: Callable[[], dict],
        interrupted: Callable[[], bool],
        wish: WeightsWish = WHOLE,
    ) -> None:
        """Loads the model in every rank that lacks it; starts the pool if need be.

        ``state`` gives the state dict; it is called only if the source has no factory and no rank
        holds the model. Raises ModelError, Refused, PoolFailed, RunCancelled.
        """
        session = self._open(interrupted)
        held = session.models.get(model)
        if held is None or held.state is ResidentState.LOADING:
            self.retry_with_room(model, lambda: self._load(session, model, source, state, interrupted, wish))

    def _load(
        self,
        session: Session,
        model: PooledModel,
        source: Source,
        state: Callable[[], dict],
        interrupted: Callable[[], bool],
        wish: WeightsWish,
    ) -> None:
        """Loads it in every rank. A load that is cancelled may still end there: it stays listed, so
        that it can be released.
        """
        stages = model.balance.wanted
        if wish.depends_on_room:
            drop_sets(session)
            # Of no run: ranks tell of their memory as it is now
            session.ask(EndRun, (), interrupted, model=model.name)
        ranks = session.pool.facts.names, self._sessions.layout, session.pool.memory
        weights, stages = wish.cut_for(*ranks, stages, self._sessions.speeds_of_stages())
        parcel = Parcel(source.tree() if source.factory else state())
        resident = session.models[model] = Resident(stages, wish.asked, weights)
        title = title_in(model.title, stages)
        fds, told = [parcel.segment.fd], {"model": model.name, "source": parcel.tree, "title": title}
        load = partial(session.ask, Load, fds, interrupted, **told)
        try:
            if source.factory and any("/" in name for name in session.pool.facts.names):
                load(checks=True)
            answers = load(
                stages=stages, weights=weights.kept, budget=weights.budget, by_layer=weights.by_layer
            )
            if any(answer.unread for answer in answers):
                session.ask(ReadWeights, (), interrupted, model=model.name, title=title)
        except (ModelError, Refused):
            self.release(model)  # ranks that did load it
            raise
        finally:
            parcel.segment.close()
        resident.state = ResidentState.READY
        session.loads += 1
        model.loads += 1

    def set_weight_patches(
        self,
        model: PooledModel,
        patches_id: str,
        patches: dict,
        objects: tuple[str, dict],
        interrupted: Callable[[], bool],
        comes_back: bool = False,
    ) -> None:
        """Brings every rank that holds the model to ``patches_id``. ``objects``: as
        ``PatchedWeights`` has them; ``comes_back``: sets take turns, so ranks keep what they
        computed. Raises ModelError, Refused, PoolFailed, RunCancelled.

        Does nothing if the pool was lost since the model was loaded: its session reports that.
        """
        session = self._open(interrupted)
        resident = session.models.get(model)
        if resident is None or resident.state is ResidentState.LOADING:
            return
        comes_back = comes_back and resident.weights.kept != "offloaded"  # those merge in every layer
        patched = PatchedWeights(patches_id, patches, objects, comes_back)
        self.retry_with_room(model, lambda: send_weights(session, model, patched, interrupted))
        resident.state, resident.patches_id, resident.objects_id = ResidentState.READY, patches_id, objects[0]
        session.patchings += 1

    def _open(self, interrupted: Callable[[], bool]) -> Session:
        session = self._sessions.open(interrupted)
        self._thread = threading.get_ident()
        self._release_unused(session)
        return session

    # -- room

    def retry_with_room(self, model: PooledModel, attempt: Callable[[], T]) -> T:
        """Calls ``attempt``. If the ranks run out of memory, it releases another model, the least
        recently used first, and calls it again.
        """
        while True:
            try:
                return attempt()
            except OutOfMemory:
                if not self.make_room(model, of_runs=True):
                    raise

    def make_room(self, model: PooledModel, of_runs: bool = False) -> bool:
        """Frees sets of patched weights that ranks keep, and if they keep none the least recently
        used model, but not ``model``, nor one that is in a run unless ``of_runs``. Returns False if
        there is no such model.
        """
        if drop_sets(self._sessions.live, is_short=True):
            return True
        session = self._sessions.live
        spared = {model} if of_runs else {model, *self._runs.models()}
        others = [name for name in list(session.models) if name not in spared] if session is not None else []
        if others:
            self.release(others[0])
        return bool(others)

    def release(self, model: PooledModel) -> None:
        """Frees a model's weights in every rank, once nothing is in flight. The checkpoint's pages
        stay in the page cache.

        A cancel does not stop it, because ranks must not keep a model that the UI forgets. Errors
        of the ranks do not reach the caller, mostly a node for which ComfyUI frees memory.
        """
        session = self._sessions.live
        if session is None or model not in session.models:
            return
        if session.tickets:
            session.leaving.append(model)
            return
        del session.models[model]
        try:
            session.ask(Release, model=model.name)
        except PipeMeshError as error:
            log.warning("[PipeMesh] The workers could not free %s: %s", model.title, error)

    def release_leaving(self, session: Session) -> None:
        """Releases the models whose release had to wait for evaluations in flight, once none is in
        flight.
        """
        while session.leaving and not session.tickets:
            self.release(session.leaving.pop())

    def recut(
        self, model: PooledModel, asked: Sizes, weights: str = "whole", left_free: Callable[[], int] = least
    ) -> None:
        """Decides, between runs, how many blocks each stage has. Releases a model if its stages
        change, if its ``weights`` are to be kept in another way, or if they leave less memory free
        than a run needs. The model is loaded again, from the page cache, when it is next used.
        """
        session = self._sessions.live
        stages = session.pool.facts.stages if session is not None else 0
        wanted = model.balance.choose(asked, stages, self._sessions.speeds_of_stages())
        held = self.held(model)
        if held is not None and (
            (held.stages, held.asked) != (wanted, weights) or held.weights.leaves_less(left_free)
        ):
            self.release(model)


def end_checks(models: Mapping[str, PooledModel], runs: Runs) -> None:
    """Ends the comparisons of models that no sampler announced, which no run's end would end: the
    ranks of these models are gone.
    """
    for model in {*models.values()} - runs.models():
        model.end_check()


def forget_unused(models: dict[str, PooledModel], session: Session | None) -> None:
    """Forgets the oldest models that no loader's output uses and no rank holds, but for
    ``MOST_UNUSED``: each loader's output makes a VAE another model.
    """
    held = session.models if session is not None else {}
    unused = [name for name, model in models.items() if not model.users and model not in held]
    for name in unused[:-MOST_UNUSED]:
        del models[name]


def title_in(title: str, stages: Sequence[int]) -> str:
    """Names a model, and the blocks of each stage if they were shared out anew."""
    return f"{title} into stages of {', '.join(map(str, stages))} blocks" if stages else title


def load_of(residency: Residency, model: PooledModel) -> int:
    """Returns which of the model's loads ranks hold, counted over all pools; 0: none."""
    held = residency.held(model)
    return model.loads if held is not None and held.state is not ResidentState.LOADING else 0


def require_state(residency: Residency, runs: Runs, model: PooledModel) -> None:
    """Raises PoolFailed if ranks have lost the state that a node's code in the blocks kept of a run
    that goes on: the rest of the run would make another image.
    """
    if model.run is not None and model.run.names.load != load_of(residency, model) and model in runs.models():
        raise PoolFailed(
            f"The workers lost {model.title} in the middle of a run, and with it the state that a node's"
            " code in its blocks kept from earlier steps, such as references or a count: run again from the"
            " first step."
        )
