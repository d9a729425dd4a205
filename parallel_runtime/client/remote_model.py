"""One model as the pool holds it: loaded once, patched when its weight patches change, called once
per evaluation.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import count
from statistics import median
from typing import Any, Protocol, TypeVar

import torch

from ..comfy_bridge.source import Source
from ..errors import ModelError, OutOfMemory, PipeMeshError, PoolFailed, Refused
from ..patches import Part
from ..stages import share_out, slowest
from ..wire.arena import Arena, Frame
from ..wire.messages import Adopt, Done, Fetch, Forget, Forward, Load, Memory, Release, SetWeightPatches
from ..wire.parcel import Parcel
from ..wire.segment import Segment, TensorRef, aligned, dtype_name, mib
from ..wire.tree import decode_tree, encode_tree
from .conditioning import ConditioningCache
from .run_figures import RunFigures, measured
from .tickets import Ticket, Written

T = TypeVar("T")
log = logging.getLogger("pipemesh")

MAX_RECUT_RATIO = 0.95  # stages are cut anew where the slowest one gets faster than by this
CONTROL = "control"  # the argument that brings a ControlNet's residuals
ABSENT = "absent"  # in place of a patches id: not loaded by every rank, as far as the UI knows


class Pool(Protocol):
    """What the client needs of a running pool."""

    arena: Arena
    memory: list[Memory]
    state: str
    size: int
    writer: int
    stages: int
    idle: bool

    def next_request(self) -> int: ...
    def settle(self, interrupted: Callable[[], bool] = ...) -> None: ...
    def call(self, request: Any, fds: Any = (), interrupted: Callable[[], bool] = ..., right: Callable[[], bool] = ...) -> list[Done]: ...
    def submit(self, request: Forward) -> None: ...
    def collect(self, number: int, interrupted: Callable[[], bool] = ...) -> list[Done]: ...
    def abandon(self) -> None: ...


class Handle(Protocol):
    def ensure(self, interrupted: Callable[[], bool] = ...) -> Pool: ...
    def live(self) -> Pool | None: ...


class PoolMemory:
    """What one live pool holds, as the UI knows it; made anew with every new pool."""

    def __init__(self, pool: Pool):
        self.pool = pool
        self.conditioning = ConditioningCache(pool.arena)
        self.patches: dict[str, str] = {}  # resident model -> patches id, least recently used first
        self.figures = RunFigures()
        self.stages: dict[str, tuple[int, ...]] = {}  # model -> how many blocks each stage has of it; empty: as many each
        self.tickets: list[Ticket] = []  # submitted and not collected
        self.parting: set[str] = set()  # models to be released when nothing is in flight
        self.loads = 0  # models that every rank has loaded, over the pool's life
        self.patchings = 0  # likewise, sets of weight patches and object patches


class Client:
    """The UI's view of one pool handle, shared by every model that runs on it."""

    def __init__(self, handle: Handle, shares_weights: bool):
        """``shares_weights``: the ranks live in one host's memory, so patched weights are computed
        once and mapped by all.
        """
        self._handle = handle
        self._shares_weights = shares_weights
        self._memory: PoolMemory | None = None
        self._users: Counter[str] = Counter()
        self._sources: weakref.WeakKeyDictionary[Any, Source] = weakref.WeakKeyDictionary()
        self._abandoned: list[str] = []
        self._runs = count(1)
        self._in_run: set[str] = set()
        self._seconds: defaultdict[str, defaultdict[tuple, list[float]]] = defaultdict(lambda: defaultdict(list))  # by block and patch
        self._balanced: dict[str, tuple[int, ...]] = {}  # model -> blocks of each stage by these costs
        self._stages: dict[str, tuple[int, ...]] = {}  # likewise, as they are to be
        self._loads: Counter[str] = Counter()  # how often a model was loaded, by this pool or one before

    @property
    def memory(self) -> PoolMemory | None:
        """None unless the pool this memory belongs to is still the live one."""
        pool = self._handle.live()
        return self._memory if pool is not None and self._memory is not None and self._memory.pool is pool else None

    def _ensure(self, interrupted: Callable[[], bool]) -> PoolMemory:
        pool = self._handle.ensure(interrupted)
        if self._memory is None or self._memory.pool is not pool:
            self._memory = PoolMemory(pool)
        pool.settle(interrupted)
        self._sweep()
        return self._memory

    # -- who uses a model

    def use(self, host_model: Any, describe: Callable[[], Source]) -> Source:
        """``host_model`` is the UI's own model object: for as long as a loader's output lives, the
        pool's copy is worth keeping, however many clones, LoRA strengths and sampler runs come and
        go; and it stays the file it was when it was first described.
        """
        if host_model not in self._sources:
            source = self._sources[host_model] = describe()
            self._users[source.model] += 1
            weakref.finalize(host_model, self._abandon, source.model).atexit = False
        return self._sources[host_model]

    def _abandon(self, model: str) -> None:
        """Called by the garbage collector, so from anywhere, even amid a request: then the model is
        released later.
        """
        self._users[model] -= 1
        if not self._users[model]:
            self._abandoned.append(model)
            if self.memory is not None and self.memory.pool.idle:
                self._sweep()

    def _sweep(self) -> None:
        while self._abandoned:
            model = self._abandoned.pop()
            if not self._users[model]:
                self.release(model)

    def ready_for(self, model: str, patches_id: str) -> bool:
        """Whether every rank holds ``model`` under these patches; the model counts as used from
        now.
        """
        if not self.holds(model) or self.memory.patches[model] != patches_id:
            return False
        self.memory.patches[model] = self.memory.patches.pop(model)
        return True

    def holds(self, model: str) -> bool:
        """Whether ranks may hold it, so that it can be released."""
        return self.memory is not None and model in self.memory.patches

    def free_memory(self) -> int | None:
        return min(memory.free for memory in self.memory.pool.memory) if self.memory else None

    def loads_of(self, model: str) -> int:
        return self._loads[model]

    @property
    def in_flight(self) -> bool:
        """Whether something was submitted and not collected."""
        return self._memory is not None and bool(self._memory.tickets)

    def settle(self, interrupted: Callable[[], bool]) -> None:
        """What ranks still owe of a cancelled request is not taken for an answer to what comes
        next.
        """
        if self.memory is not None:
            self.memory.pool.settle(interrupted)

    def next_run(self) -> int:
        return next(self._runs)

    def begin_run(self, model: str) -> None:
        self._in_run.add(model)
        if self.memory is not None:
            self.memory.conditioning.begin_run()
            self.memory.figures = RunFigures()

    def note_mode(self, mode: str) -> None:
        if self.memory is not None:
            self.memory.figures.mode = mode

    # -- weights

    def load(self, source: Source, state: Callable[[], dict], interrupted: Callable[[], bool]) -> None:
        """Starts the pool if need be. ``state`` is asked for only when the model has no factory and
        no rank holds it.
        """
        held = self._ensure(interrupted)
        if held.patches.get(source.model, ABSENT) != ABSENT:
            return

        def attempt() -> None:
            held.patches[source.model] = ABSENT  # a load that is cancelled may still end in the ranks: it can be released then
            try:
                self._load(held, source, state, interrupted)
            except (ModelError, Refused):
                self.release(source.model)  # ranks that did load it
                raise
            held.patches[source.model] = ""

        self._making_room(held, source.model, attempt)

    def _making_room(self, held: PoolMemory, model: str, attempt: Callable[[], T]) -> T:
        """``attempt``; where the ranks ran out of memory, again after each other model is released,
        least recently used first.
        """
        while True:
            try:
                return attempt()
            except OutOfMemory:
                if not self.make_room(model, of_runs=True):
                    raise

    def _load(self, held: PoolMemory, source: Source, state: Callable[[], dict], interrupted: Callable[[], bool]) -> None:
        tree: dict[str, Any] = {"factory": source.factory, "args": source.args, "index": source.index, "file": source.file}
        parcel = Parcel(tree if source.factory else state())
        try:
            stages = held.stages[source.model] = self._stages.get(source.model, ())
            request = Load(request=held.pool.next_request(), model=source.model, source=parcel.tree, stages=stages)
            held.pool.call(request, [parcel.segment.fd], interrupted)
            held.loads += 1
            self._loads[source.model] += 1
        finally:
            parcel.segment.close()

    def patch(
        self, model: str, patches_id: str, patches: dict, objects: dict, weights: dict[str, torch.Tensor], interrupted: Callable[[], bool]
    ) -> None:
        """Brings every rank to ``patches_id``. ``weights``: the UI's tensors of the patched keys,
        for their shapes and dtypes.
        """
        held = self._ensure(interrupted)
        self._making_room(held, model, lambda: self._patch(held, model, patches_id, patches, objects, weights, interrupted))
        held.patches[model] = patches_id
        held.patchings += 1

    def _patch(
        self,
        held: PoolMemory,
        model: str,
        patches_id: str,
        patches: dict,
        objects: dict,
        weights: dict[str, torch.Tensor],
        interrupted: Callable[[], bool],
    ) -> None:
        held.patches[model] = "unknown"  # until every rank has acknowledged
        parcel = Parcel({"patches": patches, "objects": objects})
        shared, place = self._shared_weights(held, list(patches), weights) if patches and self._shares_weights else (None, None)
        try:
            request = SetWeightPatches(
                request=held.pool.next_request(),
                model=model,
                patches_id=patches_id,
                payload=parcel.tree,
                shared=shared,
            )
            held.pool.call(request, [parcel.segment.fd, *([place.fd] if place else [])], interrupted)
            if place:
                held.pool.call(Adopt(request=held.pool.next_request(), model=model), (), interrupted)
        finally:
            parcel.segment.close()
            if place:
                place.close()

    def _shared_weights(
        self, held: PoolMemory, keys: list[str], weights: dict[str, torch.Tensor]
    ) -> tuple[dict[str, tuple[int, TensorRef]], Segment]:
        """Where each patched weight goes, and which rank computes it: largest first, always to the
        least loaded rank.
        """
        loads = [0] * held.pool.size
        shared, offset = {}, 0
        for key in sorted(keys, key=lambda key: (-weights[key].numel(), key)):
            rank = loads.index(min(loads))
            ref = TensorRef(offset, tuple(weights[key].shape), dtype_name(weights[key].dtype))
            shared[key] = (rank, ref)
            loads[rank] += ref.nbytes
            offset += aligned(ref.nbytes)
        return shared, Segment.create("patched", max(offset, 1))

    def release(self, model: str) -> None:
        """Frees a model's weights in every rank, once nothing is in flight. The checkpoint's pages
        stay in the page cache.

        A cancel does not stop it: what the UI forgets, the ranks must not keep.
        """
        if self.holds(model):
            held = self.memory
            if held.tickets:
                held.parting.add(model)
                return
            del held.patches[model]
            try:
                held.pool.call(Release(request=held.pool.next_request(), model=model))
            except PoolFailed as error:  # what was to be freed went with the pool; the host's memory manager must not fall over it
                log.warning("[PipeMesh] %s", error)

    def end_run(self, model: str) -> None:
        """What ranks keep of the run is void, and its memory free for what comes next, in other
        programs too.

        Ranks that are still at what was cancelled are not waited for: they forget when the next run
        begins. Raises nothing: what the run ended with is to be told.
        """
        self._in_run.discard(model)
        held = self.memory
        if held is not None and model in held.patches and held.pool.stages > 1 and held.pool.idle:
            try:
                held.pool.call(Forget(request=held.pool.next_request(), model=model))
            except PipeMeshError as error:
                log.warning("[PipeMesh] %s", error)

    def make_room(self, model: str, of_runs: bool = False) -> bool:
        """Releases the model that was not used for longest, but ``model``, and none that is in a
        run unless ``of_runs``.

        False: there is no such model.
        """
        spared = {model} if of_runs else {model, *self._in_run}
        others = [name for name in self.memory.patches if name not in spared] if self.memory else []
        if others:
            self.release(others[0])
        return bool(others)

    # -- evaluations

    def forward(self, model: str, patches_id: str, arguments: dict[str, Any], branch: tuple, interrupted: Callable[[], bool]) -> Any:
        """One evaluation. ``arguments`` by name, the first two change with every evaluation;
        returns the leader's output as own tensors.
        """
        held = self._ensure(interrupted)
        began = time.perf_counter()
        expected: list[Callable[[], bool]] = []
        replies: list[Done] = []
        with one_thread(), held.pool.arena.frame() as frame:

            def expect(path: str, tensor: torch.Tensor) -> TensorRef:
                ref, right = held.conditioning.expect(branch, path, tensor)
                expected.append(right)
                return ref

            put = putting(arguments, frame, expect)
            x = next(iter(arguments.values()))
            out = frame.blank(sum(aligned(t.numel() * 4) for t in (x if isinstance(x, list) else [x])))

            def attempt() -> list[Done]:
                expected.clear()
                tree = encode_tree(arguments, put)
                request = Forward(
                    request=held.pool.next_request(),
                    model=model,
                    patches_id=patches_id,
                    arguments=tree,
                    arena_bytes=held.pool.arena.nbytes,
                    out=out,
                )
                return held.pool.call(request, (), interrupted, right=lambda: all([right() for right in expected]))

            while not replies:  # again where conditioning was not what it was expected to be: then it is looked at first
                replies = self._making_room(held, model, attempt)
            leader = replies[held.pool.writer]
            if leader.needs_bytes:
                out = frame.blank(leader.needs_bytes)
                fetch = Fetch(request=held.pool.next_request(), arena_bytes=held.pool.arena.nbytes, out=out)
                leader = held.pool.call(fetch, (), interrupted)[held.pool.writer]
            device = (x[0] if isinstance(x, list) else x).device
            output = decode_tree(leader.output, lambda ref: held.pool.arena.segment.tensor(ref).to(device, copy=True))
        held.figures.evaluations.append(measured(began, replies))
        return output

    # -- evaluations through a pipeline

    def submit(self, model: str, patches_id: str, arguments: dict[str, Any], branch: tuple, part: Part) -> Ticket:
        """Starts one patch of an evaluation, or all of it. ``collect`` follows in the order of
        submission, or ``abandon``.

        Patches of the same ``arguments`` that are in flight together share what was written of
        them. Raises PoolFailed.
        """
        held = self._memory if self.in_flight else self.memory
        if held is None:
            raise PoolFailed("The pool was lost in the middle of a run: run again, a fresh one will be started.")
        began = time.perf_counter()
        latent = next(iter(arguments.values()))
        written = next((other.written for other in held.tickets if other.written.arguments is arguments), None)
        frame = Frame(held.pool.arena)
        try:
            out = frame.blank(aligned(latent.numel() * 4))
            written = written or self._write(held, arguments, branch)
        except BaseException:  # nobody else knows of the frame yet
            frame.release()
            raise
        ticket = Ticket(held.pool.next_request(), model, written, frame, latent.device, began, part)
        held.tickets.append(ticket)
        request = Forward(
            request=ticket.number,
            model=model,
            patches_id=patches_id,
            arguments=written.tree,
            arena_bytes=held.pool.arena.nbytes,
            out=out,
            part=part,
        )
        held.pool.submit(request)
        return ticket

    def _write(self, held: PoolMemory, arguments: dict[str, Any], branch: tuple) -> Written:
        frame = Frame(held.pool.arena)
        put = putting(arguments, frame, partial(held.conditioning.put, branch))
        try:
            with one_thread():
                return Written(arguments, encode_tree(arguments, put), frame)
        except BaseException:
            frame.release()
            raise

    def collect(self, ticket: Ticket, interrupted: Callable[[], bool]) -> torch.Tensor:
        """The output as an own tensor. Raises RunCancelled, ModelError, Refused, OutOfMemory,
        PoolFailed.
        """
        held = self._memory
        replies = held.pool.collect(ticket.number, interrupted)
        written = replies[held.pool.writer]
        if written.needs_bytes:
            raise ModelError(f"The output takes {mib(written.needs_bytes)}, more than the latent that went in: set pipefusion to 1.")
        output = decode_tree(written.output, lambda ref: held.pool.arena.segment.tensor(ref).to(ticket.device, copy=True))
        self._done_with(held, ticket)
        self._part(held)
        self._learn(ticket.model, ticket.part, replies)
        held.figures.evaluations.append(measured(ticket.began, replies, ticket.part))
        return output

    def _learn(self, model: str, part: Part, replies: list[Done]) -> None:
        """What each block takes for each patch, until stages are cut by it."""
        if model not in self._balanced:
            for reply in replies:
                for block, seconds in reply.block_s.items():
                    self._seconds[model][block, part.branch, part.patch].append(seconds)

    def _costs_of(self, model: str) -> list[float]:
        """Of every block in order: what all patches of an evaluation take in it. Medians, since a
        rank may lose its core now and then.
        """
        costs: defaultdict[int, float] = defaultdict(float)
        for (block, *_patch), seconds in self._seconds[model].items():
            costs[block] += median(seconds)
        return [cost for _, cost in sorted(costs.items())]

    def share_out(self, model: str, asked: tuple[int, ...]) -> None:
        """Between runs: how many blocks each stage has from now on; where nothing is ``asked``, by
        what they were measured to cost.

        A model that is cut otherwise is released, and loaded again, from the page cache, when it is
        next used.
        """
        self._stages[model] = asked or self._balance(model)
        if asked:
            self._seconds.pop(model, None)  # nobody will ask for them
        held = self.memory
        if held is not None and self.holds(model) and held.stages.get(model) != self._stages[model]:
            self.release(model)

    def _balance(self, model: str) -> tuple[int, ...]:
        """By what the first run measured, and by that alone: stages that followed every run would
        be loaded again and again.

        Empty before it, and where as many blocks each are as good.
        """
        held = self.memory
        if model not in self._balanced and held is not None and (costs := self._costs_of(model)):
            even, best = (share_out(of, held.pool.stages) for of in ([1.0] * len(costs), costs))
            worth_it = slowest(costs, best) < MAX_RECUT_RATIO * slowest(costs, even)
            self._balanced[model] = tuple(stage.size for stage in best) if worth_it else ()
        return self._balanced.get(model, ())

    def abandon(self) -> None:
        """Ends what was submitted and not collected."""
        held = self._memory
        if held is not None and held.tickets:
            held.pool.abandon()
            for ticket in list(held.tickets):
                self._done_with(held, ticket)
            self._part(held)

    def _done_with(self, held: PoolMemory, ticket: Ticket) -> None:
        held.tickets.remove(ticket)
        ticket.out.release()
        if not any(other.written is ticket.written for other in held.tickets):
            ticket.written.frame.release()

    def _part(self, held: PoolMemory) -> None:
        while held.parting and not held.tickets:
            self.release(held.parting.pop())


def putting(
    arguments: dict[str, Any], frame: Frame, rest: Callable[[str, torch.Tensor], TensorRef]
) -> Callable[[str, torch.Tensor], TensorRef]:
    """What writes the tensors of ``arguments``: into ``frame`` what may be another one in every
    evaluation, by ``rest`` what may not.
    """
    changing = {*list(arguments)[:2], CONTROL, "transformer_options"}

    def put(path: str, tensor: torch.Tensor) -> TensorRef:
        argument = path.partition("/")[0]
        return frame.put(tensor, in_place=argument == CONTROL) if argument in changing else rest(path, tensor)

    return put


@contextmanager
def one_thread() -> Iterator[None]:
    """Copies of a megabyte gain nothing from more, and torch's waiting threads spin on the cores
    that CPU ranks need.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
