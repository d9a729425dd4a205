"""Sessions: the UI's knowledge of one live pool, from its start to its end."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Protocol

import torch

from ..comm.shares import group_speeds, stage_speeds
from ..errors import PoolFailed, PoolSpent
from ..layout import Layout
from ..patches import Part
from ..planner.keeping import Keeping
from ..wire.arena import Arena, Frame
from ..wire.messages import Done, Memory, Recorded, Request
from ..wire.segment import TensorRef
from .conditioning import ConditioningCache
from .run import PooledModel, Run

log = logging.getLogger("pipemesh")


class PoolFacts(Protocol):
    """Facts of a pool that do not change while it lives."""

    @property
    def names(self) -> Sequence[str]: ...
    @property
    def everyone(self) -> tuple[int, ...]: ...
    @property
    def stages(self) -> int: ...
    @property
    def speeds(self) -> tuple[int, ...]: ...


class Pool(Protocol):
    """A running pool; ``memory`` as every rank last told it."""

    arena: Arena
    memory: list[Memory]

    @property
    def facts(self) -> PoolFacts: ...
    @property
    def idle(self) -> bool: ...
    @property
    def next_request(self) -> Callable[[], int]: ...

    def ask(
        self, request: Request, fds: Sequence[int] = (), interrupted: Callable[[], bool] = ...
    ) -> list[Done]: ...
    def submit(self, request: Request, group: Sequence[int]) -> None: ...
    def collect(self, number: int, interrupted: Callable[[], bool] = ...) -> dict[int, Done]: ...
    def call_back(self) -> None: ...
    def abandon(self) -> None: ...
    def settle(self, interrupted: Callable[[], bool] = ...) -> None: ...


class Handle(Protocol):
    """Starts a pool of ``layout`` if there is none."""

    @property
    def layout(self) -> Layout: ...
    def ensure(self, interrupted: Callable[[], bool] = ...) -> Pool: ...
    def live(self) -> Pool | None: ...


class ResidentState(Enum):
    """States of a model in the ranks, as far as the UI knows."""

    LOADING = "a load was sent, and some ranks may hold the model"
    PATCHING = "every rank holds it, under weight patches that not all have acknowledged"
    READY = "every rank holds it, under the weight patches of ``patches_id``"


@dataclass(eq=False)
class Resident:
    """Keeps the state of one model that ranks hold. ``stages``: the number of blocks of each stage;
    empty: as many each. ``asked`` and ``weights``: how the weights were to be kept, and how they
    are. ``objects_id``: a name of the object patches' content. ``is_held_up``: a rank's GPU waited
    for its process in the last evaluation. ``recorded``: what ranks replayed of the last run.
    """

    stages: tuple[int, ...] = ()
    asked: str = "whole"
    weights: Keeping = field(default_factory=Keeping)
    state: ResidentState = ResidentState.LOADING
    patches_id: str = ""
    objects_id: str = ""
    is_held_up: bool = False
    recorded: tuple[Recorded | None, ...] = ()


@dataclass(frozen=True, eq=False)
class WrittenArguments:
    """The arguments of an evaluation as they lie in the arena. ``is_right`` tells whether the
    assumed conditioning was right. ``places`` has the conditioning's places by ``identity``,
    ``versions`` the versions of all conditioning.
    """

    arguments: dict[str, Any]
    tree: bytes
    frame: Frame
    places: Mapping[tuple, tuple[torch.Tensor, TensorRef]]
    versions: Collection[int]
    is_right: Callable[[], bool]


@dataclass(frozen=True, eq=False)
class Ticket:
    """Names a submission: its request, and the arena's memory that it holds until it is collected.
    ``began``: seconds of the UI's performance counter.
    """

    number: int
    run: Run
    part: Part
    written: WrittenArguments
    out: Frame
    device: torch.device
    began: float


class Session:
    """Keeps the state of one live pool; a new pool has a new one. ``models``: least recently used
    first.
    """

    def __init__(self, pool: Pool, layout: Layout):
        self.pool = pool
        # Of groups and of stages; empty where they are alike
        self.group_speeds = group_speeds(pool.facts.speeds, layout.groups)
        self.stage_speeds = stage_speeds(layout, pool.facts.speeds)
        self.conditioning = ConditioningCache(pool.arena)
        pool.arena.at_close.append(self.conditioning.close)
        self.models: dict[PooledModel, Resident] = {}
        self.tickets: list[Ticket] = []  # submitted and not collected
        self.leaving: list[PooledModel] = []  # to be released when nothing is in flight
        self.owed: list[PooledModel] = []  # of ended runs, until their ranks have heard of it
        self.loads = 0  # models that every rank has loaded, over the pool's life
        self.patchings = 0  # likewise, sets of weight patches and object patches

    @property
    def room(self) -> list[int]:
        """Returns the bytes that each rank may take on its device, by its last report: an equal
        share of the free memory, and of the memory that methods keep for their next evaluation.
        """
        sharers = Counter(self.pool.facts.names)
        told = zip(self.pool.facts.names, self.pool.memory, strict=True)
        return [(memory.free + memory.kept) // sharers[name] for name, memory in told]

    def is_ready(self, model: PooledModel, patches_id: str) -> bool:
        """Returns whether every rank holds the model under exactly these weight patches. Then it
        counts as just used.
        """
        resident = self.models.get(model)
        if resident is None or resident.state is not ResidentState.READY or resident.patches_id != patches_id:
            return False
        self.models[model] = self.models.pop(model)
        return True

    @property
    def free_bytes(self) -> int:
        """Returns the free bytes of the rank that has least, as it last told."""
        return min(memory.free for memory in self.pool.memory)

    def evict(self, end: int | None = None) -> None:
        """Evicts conditioning down to its bound, and all that lies behind ``end`` of the arena, but
        nothing that is in flight.
        """
        self.conditioning.evict((one for ticket in self.tickets for one in ticket.written.versions), end)

    def cut_arena(self) -> int:
        """Evicts all that lies behind the arena's bound, unless requests are in flight, and
        conditioning beyond its own bound. Returns how many bytes of the arena ranks are to keep, so
        that it can shrink; 0 for all.
        """
        arena = self.pool.arena
        end = arena.bound if not self.tickets and arena.nbytes > arena.bound else None
        self.conditioning.collected.clear()
        self.evict(end)
        return end or 0

    def ask(
        self,
        message: type,
        fds: Sequence[int] = (),
        interrupted: Callable[[], bool] = lambda: False,
        **fields: Any,
    ) -> list[Done]:
        """Sends a request to every rank and waits for the answers, in rank order."""
        return self.pool.ask(message(request=self.pool.next_request(), **fields), fds, interrupted)


class Sessions:
    """Keeps the present session of one pool handle; each new pool gets a new session."""

    def __init__(self, handle: Handle):
        self._handle = handle
        self.layout = handle.layout
        # Of the last pool, which may be gone: what its ranks had, asked after a lack of memory
        self.latest: Session | None = None
        self.at_close: list[Callable[[], None]] = []  # called once a pool is closed

    @property
    def live(self) -> Session | None:
        """Returns the session; None if its pool is gone."""
        pool = self._handle.live()
        return (
            self.latest if pool is not None and self.latest is not None and self.latest.pool is pool else None
        )

    def open(self, interrupted: Callable[[], bool]) -> Session:
        """Returns the session of a live pool with nothing outstanding; starts the pool if need be.
        Raises PoolFailed, RunCancelled.
        """
        self.settle(interrupted)
        pool = self._handle.ensure(interrupted)
        if self.latest is None or self.latest.pool is not pool:
            self.latest = Session(pool, self.layout)
            pool.arena.at_close += self.at_close
        return self.latest

    def speeds_of_stages(self, ranks: Iterable[int] = ()) -> tuple[float, ...]:
        """Returns the speed of each stage of the live pool, or of the stages of ``ranks``; empty if
        all are alike.
        """
        session = self.live
        found = session.stage_speeds if session is not None else ()
        places = [self.layout.stage(rank) for rank in ranks] if found else []
        return tuple(found[place] for place in places) or found

    def settle(self, interrupted: Callable[[], bool]) -> None:
        """Waits until ranks have answered a cancelled request. Raises RunCancelled.

        If the pool fails meanwhile, a fresh one will be started: the failed run was cancelled, so
        the next run need not fail for it.
        """
        pool = self._handle.live()
        if pool is not None and not pool.idle:
            try:
                pool.settle(interrupted)
            except (PoolFailed, PoolSpent) as error:
                log.warning("[PipeMesh] A cancelled request ended with: %s", error)
