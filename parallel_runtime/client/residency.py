"""Residency: ranks load a model once, patch it when its weight patches change, and release it when
no loader's output uses it any more.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, TypeVar

from ..comfy_bridge.source import Source
from ..errors import ModelError, OutOfMemory, PoolFailed, Refused
from ..memory import system_memory
from ..planner.balance import Sizes, StageBalance
from ..planner.keeping import WHOLE, WeightsWish, least
from ..wire.messages import Adopt, EndRun, Load, Release, SetWeightPatches
from ..wire.parcel import Parcel
from ..wire.segment import Segment, TensorRef, aligned
from .runs import Runs
from .session import Resident, ResidentState, Session, Sessions

T = TypeVar("T")
SHARE_OF_SETS = 0.25  # of the memory that is free
log = logging.getLogger("pipemesh")


class Residency:
    """Keeps the models of one pool handle. A new pool holds none; the count of users goes on."""

    def __init__(self, sessions: Sessions, runs: Runs, balance: StageBalance, shares_weights: bool):
        """``shares_weights``: the ranks live in one machine's memory, so patched weights are
        computed once and mapped by all.
        """
        self._sessions = sessions
        self._runs = runs
        self._balance = balance
        self._shares_weights = shares_weights
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

    def holds(self, model: str) -> bool:
        """Returns whether ranks may hold it, so that it can be released."""
        session = self._sessions.live
        return session is not None and model in session.models

    def is_ready(self, model: str, patches_id: str) -> bool:
        """Returns whether every rank holds the model under exactly these weight patches. Then it
        counts as just used.
        """
        session = self._sessions.live
        resident = session.models.get(model) if session is not None else None
        if session is None or resident is None or resident.state is not ResidentState.READY or resident.patches_id != patches_id:
            return False
        session.models[model] = session.models.pop(model)
        return True

    def load(self, source: Source, state: Callable[[], dict], interrupted: Callable[[], bool], wish: WeightsWish = WHOLE) -> None:
        """Loads the model in every rank that lacks it; starts the pool if need be.

        ``state`` gives the state dict; it is asked only where the source has no factory and no rank
        holds the model. Raises ModelError, Refused, PoolFailed, RunCancelled.
        """
        session = self._open(interrupted)
        held = session.models.get(source.model)
        if held is None or held.state is ResidentState.LOADING:
            self.retry_with_room(source.model, lambda: self._load(session, source, state, interrupted, wish))

    def _load(
        self, session: Session, source: Source, state: Callable[[], dict], interrupted: Callable[[], bool], wish: WeightsWish
    ) -> None:
        """Loads it in every rank. A load that is cancelled may still end there: it stays listed, so
        that it can be released.
        """
        stages = self._balance.sizes_of(source.model)
        if wish.depends_on_room:
            session.ask(EndRun, (), interrupted, model=source.model)  # of no run: ranks tell of their memory as it is now
        ranks = session.pool.facts.names, self._sessions.layout, session.pool.memory
        weights, stages = wish.cut_for(*ranks, stages, self._sessions.speeds_of_stages())
        resident = session.models[source.model] = Resident(stages, wish.asked, weights)
        parcel = Parcel(source.tree() if source.factory else state())
        try:
            asked = {"stages": stages, "weights": weights.kept, "budget": weights.budget, "title": title_in(source.title, stages)}
            session.ask(Load, [parcel.segment.fd], interrupted, model=source.model, source=parcel.tree, **asked)
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
        objects: dict,
        sizes: dict[str, int],
        interrupted: Callable[[], bool],
        keeps: bool = False,
    ) -> None:
        """Brings every rank that holds the model to ``patches_id``. ``sizes``: the bytes of each
        patched weight, as it will be stored. ``keeps``: the set will be asked for again, so ranks
        keep what they computed, in shared memory. Raises ModelError, Refused, PoolFailed,
        RunCancelled.

        Nothing is done where the pool was lost since the model was loaded: ``is_ready`` tells.
        """
        session = self._open(interrupted)
        resident = session.models.get(model)
        if resident is None or resident.state is ResidentState.LOADING:
            return
        shares = bool(patches) and self._shares_weights and resident.weights.kept != "offloaded"

        def attempt() -> None:
            resident.state = ResidentState.PATCHING
            sets, resident.sets = resident.sets, {}  # where this fails, ranks are told to keep none
            room, recalled = room_for_sets(sets), patches_id in sets
            with ExitStack() as closing:
                parcel = Parcel({"patches": {} if recalled else patches, "objects": objects})
                closing.callback(parcel.segment.close)
                shared, fds, own = None, [parcel.segment.fd], sets.pop(patches_id, 0)
                if shares and not recalled:
                    shared, place = share_out_weights(session.pool.facts.everyone, sizes)
                    closing.callback(place.close)
                    fds.append(place.fd)
                    own = place.nbytes if keeps and sizes.keys() == patches.keys() else 0
                kept = within({**sets, patches_id: own} if own else sets, room)
                what = {"payload": parcel.tree, "shared": shared, "keeps": tuple(kept), "recalled": recalled}
                session.ask(SetWeightPatches, fds, interrupted, model=model, patches_id=patches_id, **what)
                if shared is not None:
                    session.ask(Adopt, (), interrupted, model=model, keeps=patches_id in kept)
            resident.sets = kept

        self.retry_with_room(model, attempt)
        resident.state, resident.patches_id = ResidentState.READY, patches_id
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
        """Releases the least recently used model, but not ``model``, nor one that is in a run
        unless ``of_runs``. Returns False where there is no such model.
        """
        session = self._sessions.live
        spared = {model} if of_runs else {model, *self._runs.models()}
        others = [name for name in list(session.models) if name not in spared] if session is not None else []
        if others:
            self.release(others[0])
        return bool(others)

    def release(self, model: str) -> None:
        """Frees a model's weights in every rank, once nothing is in flight. The checkpoint's pages
        stay in the page cache.

        A cancel does not stop it: what the UI forgets, the ranks must not keep.
        """
        session = self._sessions.live
        if session is None or model not in session.models:
            return
        if session.tickets:
            session.models[model].leaving = True
            return
        del session.models[model]
        try:
            session.ask(Release, model=model)
        except PoolFailed as error:  # its memory went with the pool; ComfyUI's memory manager must not fall over it
            log.warning("[PipeMesh] %s", error)

    def release_leaving(self, session: Session) -> None:
        """Releases what was to go while evaluations were in flight, once none is."""
        for model in [name for name, resident in list(session.models.items()) if resident.leaving] if not session.tickets else ():
            self.release(model)

    def recut(self, model: str, asked: Sizes, weights: str = "whole", left_free: Callable[[], int] = least) -> None:
        """Decides, between runs, how many blocks each stage has. A model that is cut otherwise,
        whose ``weights`` were asked to be kept otherwise, or leave less free than a run needs, is
        released, and loaded again, from the page cache, when it is next used.
        """
        session = self._sessions.live
        stages = session.pool.facts.stages if session is not None else 0
        wanted = self._balance.choose(model, asked, stages, self._sessions.speeds_of_stages())
        held = session.models.get(model) if session is not None else None
        if held is not None and ((held.stages, held.asked) != (wanted, weights) or held.weights.leaves_less(left_free)):
            self.release(model)


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


def title_in(title: str, stages: Sequence[int]) -> str:
    """Names a model, and its blocks in each stage where they were shared out anew."""
    return f"{title} into stages of {', '.join(map(str, stages))} blocks" if stages else title


def share_out_weights(ranks: Sequence[int], sizes: dict[str, int]) -> tuple[dict[str, tuple[int, TensorRef]], Segment]:
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
