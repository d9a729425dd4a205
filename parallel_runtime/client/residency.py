"""Residency: ranks load a model once, patch it when its weight patches change, and release it when
no loader's output uses it any more.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

from ..crossing.source import Source
from ..errors import ModelError, OutOfMemory, PipeMeshError, PoolFailed, Refused
from ..planner.balance import Sizes, StageBalance
from ..planner.keeping import WHOLE, WeightsWish, least
from ..wire.messages import EndRun, Load, ReadWeights, Release
from ..wire.parcel import Parcel
from .patched_weights import PatchedWeights, drop_sets, send_weights
from .runs import Runs
from .session import Resident, ResidentState, Session, Sessions

T = TypeVar("T")
log = logging.getLogger("pipemesh")


class Residency:
    """Keeps the models of one pool handle. A new pool holds none; the count of users goes on."""

    def __init__(self, sessions: Sessions, runs: Runs, balance: StageBalance):
        self._sessions = sessions
        self._runs = runs
        self._balance = balance
        self._users: Counter[str] = Counter()
        self._sources: weakref.WeakKeyDictionary[Any, Source] = weakref.WeakKeyDictionary()
        self._unused: list[str] = []  # to be released at the next occasion
        self._thread = 0  # that asks for models: requests of another could come between its own
        self.titles: dict[str, str] = {}  # of each model, the name by which users know it
        self.loads: Counter[str] = Counter()  # of each model, by this pool and those before

    # -- who uses a model

    def use(self, host_model: Any, describe: Callable[[], Source]) -> Source:
        """Registers ``host_model``, the UI's own model object, as a user of its source.

        For as long as a loader's output lives the pool's copy is worth keeping, however many
        clones, LoRA strengths and sampler runs come and go; and it stays the file it was when it
        was first described.
        """
        if host_model not in self._sources:
            source = self._sources[host_model] = describe()
            self.titles[source.model] = source.title
            self._users[source.model] += 1
            weakref.finalize(host_model, self._drop_user, source.model).atexit = False
        return self._sources[host_model]

    def _drop_user(self, model: str) -> None:
        """Counts a user less. The garbage collector calls this on any thread, even amid a request:
        then the model is released later.
        """
        self._users[model] -= 1
        if not self._users[model]:
            self._unused.append(model)
            session = self._sessions.live
            if session is not None and session.pool.idle and threading.get_ident() == self._thread:
                self._release_unused()

    def _release_unused(self) -> None:
        while self._unused:
            model = self._unused.pop()
            if not self._users[model]:
                self.release(model)

    # -- what ranks hold

    def held(self, model: str) -> Resident | None:
        """Returns what is known of a model that ranks may hold, so that it can be released."""
        session = self._sessions.live
        return session.models.get(model) if session is not None else None

    def is_ready(self, model: str, patches_id: str) -> bool:
        """Returns whether every rank holds the model under exactly these weight patches. Then it
        counts as just used.
        """
        session = self._sessions.live
        resident = session.models.get(model) if session is not None else None
        if (
            session is None
            or resident is None
            or resident.state is not ResidentState.READY
            or resident.patches_id != patches_id
        ):
            return False
        session.models[model] = session.models.pop(model)
        return True

    def load(
        self,
        source: Source,
        state: Callable[[], dict],
        interrupted: Callable[[], bool],
        wish: WeightsWish = WHOLE,
    ) -> None:
        """Loads the model in every rank that lacks it; starts the pool if need be.

        ``state`` gives the state dict; it is asked only where the source has no factory and no rank
        holds the model. Raises ModelError, Refused, PoolFailed, RunCancelled.
        """
        session = self._open(interrupted)
        held = session.models.get(source.model)
        if held is None or held.state is ResidentState.LOADING:
            self.retry_with_room(source.model, lambda: self._load(session, source, state, interrupted, wish))

    def _load(
        self,
        session: Session,
        source: Source,
        state: Callable[[], dict],
        interrupted: Callable[[], bool],
        wish: WeightsWish,
    ) -> None:
        """Loads it in every rank. A load that is cancelled may still end there: it stays listed, so
        that it can be released.
        """
        stages = self._balance.sizes_of(source.model)
        if wish.depends_on_room:
            drop_sets(session)
            # Of no run: ranks tell of their memory as it is now
            session.ask(EndRun, (), interrupted, model=source.model)
        ranks = session.pool.facts.names, self._sessions.layout, session.pool.memory
        weights, stages = wish.cut_for(*ranks, stages, self._sessions.speeds_of_stages())
        parcel = Parcel(source.tree() if source.factory else state())
        resident = session.models[source.model] = Resident(stages, wish.asked, weights)
        title = title_in(source.title, stages)
        fds, told = [parcel.segment.fd], {"model": source.model, "source": parcel.tree, "title": title}
        load = partial(session.ask, Load, fds, interrupted, **told)
        try:
            if source.factory and any("/" in name for name in session.pool.facts.names):
                load(checks=True)
            answers = load(
                stages=stages, weights=weights.kept, budget=weights.budget, by_layer=weights.by_layer
            )
            if any(answer.unread for answer in answers):
                session.ask(ReadWeights, (), interrupted, model=source.model, title=title)
        except (ModelError, Refused):
            self.release(source.model)  # ranks that did load it
            raise
        finally:
            parcel.segment.close()
        resident.state = ResidentState.READY
        session.loads += 1
        self.loads[source.model] += 1

    def set_weight_patches(
        self,
        model: str,
        patches_id: str,
        patches: dict,
        objects: tuple[str, dict],
        interrupted: Callable[[], bool],
        comes_back: bool = False,
    ) -> None:
        """Brings every rank that holds the model to ``patches_id``. ``objects``: as
        ``PatchedWeights`` has them; ``comes_back``: sets take turns, so ranks keep what they
        computed. Raises ModelError, Refused, PoolFailed, RunCancelled.

        Nothing is done where the pool was lost since the model was loaded: ``is_ready`` tells.
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
        self._release_unused()
        return session

    # -- room

    def retry_with_room(self, model: str, attempt: Callable[[], T]) -> T:
        """Calls ``attempt``, and where the ranks run out of memory again after each other model is
        released, least recently used first.
        """
        while True:
            try:
                return attempt()
            except OutOfMemory:
                if not self.make_room(model, of_runs=True):
                    raise

    def make_room(self, model: str, of_runs: bool = False) -> bool:
        """Frees sets of patched weights that ranks keep, and if they keep none the least recently
        used model, but not ``model``, nor one that is in a run unless ``of_runs``. Returns False if
        there is no such model.
        """
        if drop_sets(self._sessions.live):
            return True
        session = self._sessions.live
        spared = {model} if of_runs else {model, *self._runs.models()}
        others = [name for name in list(session.models) if name not in spared] if session is not None else []
        if others:
            self.release(others[0])
        return bool(others)

    def release(self, model: str) -> None:
        """Frees a model's weights in every rank, once nothing is in flight. The checkpoint's pages
        stay in the page cache.

        A cancel does not stop it: what the UI forgets, the ranks must not keep. Nor does an error
        of theirs reach the caller, mostly a node that ComfyUI frees memory for.
        """
        session = self._sessions.live
        if session is None or model not in session.models:
            return
        if session.tickets:
            session.leaving.append(model)
            return
        del session.models[model]
        try:
            session.ask(Release, model=model)
        except PipeMeshError as error:
            log.warning("[PipeMesh] Releasing %s in the pool: %s", self.titles.get(model, model), error)

    def release_leaving(self, session: Session) -> None:
        """Releases what was to go while evaluations were in flight, once none is."""
        while session.leaving and not session.tickets:
            self.release(session.leaving.pop())

    def recut(
        self, model: str, asked: Sizes, weights: str = "whole", left_free: Callable[[], int] = least
    ) -> None:
        """Decides, between runs, how many blocks each stage has. A model that is cut otherwise,
        whose ``weights`` were asked to be kept otherwise, or leave less free than a run needs, is
        released, and loaded again, from the page cache, when it is next used.
        """
        session = self._sessions.live
        stages = session.pool.facts.stages if session is not None else 0
        wanted = self._balance.choose(model, asked, stages, self._sessions.speeds_of_stages())
        held = self.held(model)
        if held is not None and (
            (held.stages, held.asked) != (wanted, weights) or held.weights.leaves_less(left_free)
        ):
            self.release(model)


def title_in(title: str, stages: Sequence[int]) -> str:
    """Names a model, and its blocks in each stage where they were shared out anew."""
    return f"{title} into stages of {', '.join(map(str, stages))} blocks" if stages else title


def load_of(residency: Residency, model: str) -> int:
    """Returns which of the model's loads ranks hold, counted over all pools; 0: none."""
    held = residency.held(model)
    return residency.loads[model] if held is not None and held.state is not ResidentState.LOADING else 0


def require_states(residency: Residency, runs: Runs) -> None:
    """Raises PoolFailed if ranks have lost what a node's code in the blocks kept of a run that goes
    on: the rest of it would be another image.
    """
    sampled = runs.models()
    for model, load in runs.stateful.items():
        if model in sampled and load_of(residency, model) != load:
            raise PoolFailed(
                f"The workers lost {residency.titles.get(model, model)} in the middle of a run, and with it"
                " what a node's code in its blocks had kept of the steps before, such as references or a"
                " count: run again, from the first step."
            )
