"""Record what a rank computes between two messages as CUDA graphs, *pieces*, which one call of the
CPU replays. Messages stay what they are, and go out one by one.

A piece does again what kernels did to the memory that it was recorded on, and no code of the model
runs again: the inputs are copied to where the recorded ones lie, and what was read besides is kept.
What a replay would repeat as it was, such as a random number, is refused while it is recorded.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from ..comm.exchange import StopFlag
from ..comm.mesh import SequenceComm
from ..comm.traffic import Flag, Tensors, at_once

COPIES = {"aten::_to_copy", "aten::to", "aten::copy_"}
WITHOUT_KERNEL = {"aten::empty", "aten::empty_like", "aten::empty_strided", "aten::new_empty"}
RANDOM, READS = "draws random numbers", "reads numbers of the GPU"
OF_ITS_TIME = {  # what a graph would repeat as it was when it was recorded
    torch.Tag.data_dependent_output: READS,
    torch.Tag.dynamic_output_shape: "has a result whose shape depends on numbers of the GPU",
    torch.Tag.nondeterministic_seeded: RANDOM,
}
aten = torch.ops.aten
# Operations made of others, of which one reads numbers of the GPU; torch tags that one alone
BY_INDEX = {"aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"}
READING = {
    *(aten.where.default, aten.nonzero_numpy.default, aten.argwhere.default, aten.item.default),
    *(aten.is_nonzero.default, aten.allclose.default, aten.repeat_interleave.self_Tensor),
}


class NotRecordable(BaseException):
    """An evaluation is not of the kind that can be recorded. Not an Exception: host code catches
    those around attention, and computes it by another kernel, which would be recorded.
    """


class GraphPiece(NamedTuple):
    """What a rank does up to a message, and the message. ``graph``: None if no kernel is started.
    ``looks``, such as at cancel flags that came, ``ticks`` of progress. ``move`` does the message,
    which has ``sent`` and ``come`` as ``at_once`` has them; behind the last piece there is none.
    """

    graph: torch.cuda.CUDAGraph | None
    looks: tuple[Callable[[], None], ...]
    ticks: int
    move: Callable[[], None] | None = None
    sent: tuple[torch.Tensor, ...] = ()
    come: tuple[torch.Tensor, ...] = ()


class Recording(NamedTuple):
    """The pieces of one evaluation. ``held``: what lay in memory before and must stay there, and
    what was copied to the GPU once. ``pool_bytes``: of the GPU, which torch keeps for the pieces.
    ``lasts``: another run may replay it, because it reads nothing that a run keeps.
    """

    pieces: tuple[GraphPiece, ...]
    inputs: list[torch.Tensor]
    output: Any
    held: list[torch.Tensor]
    pool_bytes: int
    lasts: bool

    @property
    def nbytes(self) -> int:
        held = (*self.inputs, *tensors_held(self.output), *self.held)
        return self.pool_bytes + sum({one.data_ptr(): one.nbytes for one in held}.values())

    def replay(self, arguments: Any, tick: Callable[[], None]) -> Any:
        """Compute an evaluation like the recorded one. Raises Stopped as computing does."""
        self.take(arguments)
        for piece in self.pieces:
            if piece.graph is not None:
                piece.graph.replay()
            for look in piece.looks:
                look()
            for _ in range(piece.ticks):
                tick()
            if piece.move is not None:
                piece.move()
        return tree_map_only(torch.Tensor, torch.clone, self.output)

    def take(self, arguments: Any) -> None:
        for own, given in zip(self.inputs, tensors_held(arguments), strict=True):
            own.copy_(given)


class RecordedOperations(TorchDispatchMode):
    """What is asked of torch while a graph is recorded. ``read``: what lay in memory before;
    weights are left out, because graphs are void if these change. ``brought``: what was copied from
    the CPU, once, because it is the same in all evaluations that replay the graph. ``kernels`` is
    how many were recorded. Raises NotRecordable.
    """

    def __init__(self, aside: torch.cuda.Stream) -> None:
        super().__init__()
        self.read: dict[int, torch.Tensor] = {}
        self.brought: list[torch.Tensor] = []
        self.kernels = 0
        self.is_off = False  # while torch begins or ends a recording, by operations of its own
        self._aside = aside
        self._made: dict[int, weakref.ref[torch.Tensor]] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs, name = kwargs or {}, func._schema.name
        if self.is_off:
            return func(*args, **kwargs)
        given = [*flat(args), *flat(kwargs.values())]
        tensors = [one for one in given if isinstance(one, torch.Tensor)]
        for why in [READS] if has_mask(args) and name in BY_INDEX else reasons(func):
            if why != RANDOM or draws(name, args):
                raise NotRecordable(f"{name} {why}")
        to_gpu = any(isinstance(one, torch.device) and one.type == "cuda" for one in given)
        if not to_gpu and not any(one.is_cuda for one in tensors):
            return func(*args, **kwargs)
        on_cpu = [one for one in tensors if not one.is_cuda and (one.ndim or name in COPIES)]
        to_cpu = any(isinstance(one, torch.device) and one.type == "cpu" for one in given)
        if to_cpu or (name == "aten::copy_" and not args[0].is_cuda):
            raise NotRecordable(f"{name} {READS}")
        if any(isinstance(one, torch.nn.Parameter) for one in on_cpu):
            raise NotRecordable("a weight lies in main memory")  # its copy on the GPU would stay there
        if on_cpu and name == "aten::copy_":
            target, source, *others = args
            args = target, self._bring(torch.ops.aten._to_copy.default, source, device=target.device), *others
            tensors, on_cpu = [target], []
        elif on_cpu and name in COPIES:
            func, args, kwargs = aten.clone.default, (self._bring(func, *args, **kwargs),), {}
            tensors, on_cpu = [], []  # a copy of it, because the model may write into what it gets
        if on_cpu:
            raise NotRecordable(f"{name} is on the CPU and the GPU")
        for one in tensors:
            if one.is_cuda and not self._has_made(one) and not isinstance(one, torch.nn.Parameter):
                self.read[id(one)] = one
        made = func(*args, **kwargs)
        self.kernels += not (func.is_view or name in WITHOUT_KERNEL)
        for one in flat([made]):
            if isinstance(one, torch.Tensor) and not any(one is other for other in tensors):
                self._made[id(one)] = weakref.ref(one)
        return made

    def _bring(self, func: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        with torch.cuda.stream(self._aside):
            made = func(*args, **kwargs)
            self._aside.synchronize()
        self.brought.append(made)
        return made

    def _has_made(self, tensor: torch.Tensor) -> bool:
        made = self._made.get(id(tensor))
        return made is not None and made() is tensor

    def left(self, kept: Any) -> int:
        """Return how many tensors somebody keeps beside the recording, which has ``kept``: replays
        overwrite them.
        """
        returned = {id(one) for one in tree_leaves(kept)}

        def count() -> int:
            alive = [one for one in (made() for made in self._made.values()) if one is not None]
            return sum(one.is_cuda and id(one) not in returned for one in alive)

        if count():
            gc.collect()  # rows refer to what refers to them
        return count()


class LooksLater(StopFlag):
    """Stands for an evaluation's StopFlag while pieces are recorded: each replay looks at the flags
    that came, and whether ranks have compared their tokens, as the evaluation at hand does.
    """

    def __init__(self, comm: SequenceComm):
        super().__init__(comm.stop.wants_stop)
        self.flags: list[Flag] = []  # that replays look at
        self.looks: list[Callable[[], None]] = []  # of the piece at hand
        self._comm = comm

    def look(self, act: Callable[[], None]) -> None:
        self.looks.append(act)

    def decide(self, flag: Flag) -> None:
        self.flags.append(flag)
        self.looks.append(partial(self._decide, flag))

    def _decide(self, flag: Flag) -> None:
        self._comm.stop.decide(flag)


class PieceRecorder:
    """Records one evaluation: cuts it where a message goes out, and sends none. ``streams``: one to
    record in, and one for copies from the CPU. ``ticks`` are those of the piece at hand.
    ``is_broken``: a recording failed, and could not be ended.
    """

    def __init__(self, comm: SequenceComm, streams: Sequence[torch.cuda.Stream], pool: Any):
        self.ticks = 0
        self.is_broken = False
        self._comm = comm
        self._pool = pool
        self._pieces: list[GraphPiece] = []
        self._stop = LooksLater(comm)
        self._graph: torch.cuda.CUDAGraph | None = None
        self._streams = streams
        self._region = RecordedOperations(streams[1])
        self._recorded = 0  # kernels, in earlier pieces

    def tick(self) -> None:
        self.ticks += 1

    def record(
        self,
        arguments: Any,
        compute: Callable[[Any], Any],
        forget: Callable[[], None],
        lasting: Sequence[torch.Tensor],
    ) -> Recording:
        """``compute`` evaluates such arguments, which stay; ``forget`` lets go of what that has
        made. ``lasting``: what another run reads in the same place. Raises NotRecordable, and what
        recording raises.
        """
        torch.cuda.empty_cache()  # graphs take memory of the driver alone
        inputs, before = tensors_held(arguments), torch.cuda.memory_reserved()
        for stream in self._streams:
            stream.wait_stream(torch.cuda.current_stream())
        with self._in_place_of_messages(), torch.cuda.stream(self._streams[0]):
            self._begin()
            try:
                with self._region:
                    output = compute(arguments)
            except BaseException:
                self._leave()
                raise
            graph = self._end()
        self._add(graph if self._region.kernels > self._recorded else None)
        forget()
        if left := self._region.left((output, self._stop.flags)):
            raise NotRecordable(f"the model keeps tensors of an evaluation ({left})")
        read = [*self._region.read.values()]
        lasts = all(lies_in(one, (*inputs, *self._region.brought, *lasting)) for one in read)
        pool_bytes = torch.cuda.memory_reserved() - before - sum(one.nbytes for one in tensors_held(output))
        held = [*read, *self._region.brought]
        return Recording(tuple(self._pieces), inputs, output, held, max(0, pool_bytes), lasts)

    @contextmanager
    def _in_place_of_messages(self) -> Iterator[None]:
        traffic, stop = self._comm.traffic, self._comm.stop
        self._comm.stop, traffic.perform = self._stop, self._perform
        try:
            yield
        finally:
            self._comm.stop, traffic.perform = stop, at_once

    def _perform(self, move: Callable[[], None], sent: Tensors = (), come: Tensors = ()) -> None:
        graph = None
        if self._region.kernels > self._recorded:
            graph, self._recorded = self._end(), self._region.kernels
            self._begin()
        self._add(graph, move, tuple(sent), tuple(come))

    def _add(self, graph: torch.cuda.CUDAGraph | None, *message: Any) -> None:
        self._pieces.append(GraphPiece(graph, tuple(self._stop.looks), self.ticks, *message))
        self._stop.looks.clear()
        self.ticks = 0

    def _begin(self) -> None:
        self._graph = torch.cuda.CUDAGraph()
        self._region.is_off = True
        # Copies aside and NCCL's watchdog ask for what a stricter mode forbids to every stream
        self._graph.capture_begin(pool=self._pool, capture_error_mode="relaxed")
        self._region.is_off = False

    def _end(self) -> torch.cuda.CUDAGraph | None:
        graph, self._graph = self._graph, None
        self._region.is_off = True
        if graph is not None:
            graph.capture_end()
        self._region.is_off = False
        return graph

    def _leave(self) -> None:
        """End a recording that has failed. If the driver cannot, torch 2.11 would go on taking
        memory from the recording's pool: it is told, and nothing is recorded here any more.
        """
        try:
            self._end()
        except RuntimeError:
            self.is_broken = True
            with suppress(RuntimeError, AttributeError):
                torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), self._pool)
                torch._C._cuda_releasePool(torch.cuda.current_device(), self._pool)


class ReplayProof:
    """Computes an evaluation, and replays each piece beside it, from what messages brought, before
    its message goes out. Each message goes out once, with what was computed. ``wrong`` (pieces,)
    counts on the GPU what was not equal to the bit.
    """

    def __init__(self, recording: Recording, comm: SequenceComm):
        self._recording = recording
        self._comm = comm
        self._at = 0
        self.wrong = torch.zeros(len(recording.pieces), dtype=torch.int32, device=recording.inputs[0].device)

    def compute(self, arguments: Any, compute: Callable[[Any], Any]) -> Any:
        traffic = self._comm.traffic
        self._recording.take(arguments)
        traffic.perform = self._perform
        try:
            output = compute(arguments)
        finally:
            traffic.perform = at_once
        self._replay(tensors_held(output), tensors_held(self._recording.output))
        if self._at < len(self._recording.pieces):
            self.wrong[self._at :] += 1  # messages were left out
        return output

    def _perform(self, move: Callable[[], None], sent: Tensors = (), come: Tensors = ()) -> None:
        own, pieces = [one.clone() for one in sent], self._recording.pieces
        piece = pieces[self._at] if self._at < len(pieces) else GraphPiece(None, (), 0)
        for place in piece.sent:  # it has what was computed, so it must not pass for what is replayed
            place.copy_(bits(place).bitwise_not().view(place.dtype).view(place.shape))
        self._replay(own, piece.sent)
        for place, one in zip(sent, own, strict=True):
            place.copy_(one)
        move()
        for theirs, ours in zip(come, piece.come, strict=False):
            if theirs.data_ptr() != ours.data_ptr():
                ours.copy_(theirs)  # another model has outgrown the memory of messages

    def _replay(self, computed: Tensors, replayed: Tensors) -> None:
        """Replay the next piece; then ``replayed`` has what was ``computed``."""
        if self._at == len(self._recording.pieces):
            return
        graph, at = self._recording.pieces[self._at].graph, self._at
        if graph is not None:
            graph.replay()
        self._at += 1
        if [one.shape for one in computed] != [one.shape for one in replayed]:
            self.wrong[at] += 1
            return
        for one, other in zip(computed, replayed, strict=True):
            self.wrong[at] += (bits(one) != bits(other)).any()


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8)


def flat(values: Iterable[Any]) -> list[Any]:
    """Return an operation's arguments, or results, those in lists too."""
    found: list[Any] = []
    for one in values:
        found += one if isinstance(one, (list, tuple)) else [one]
    return found


@cache
def reasons(func: Any) -> list[str]:
    """Return why what ``func`` does cannot be recorded."""
    if func._schema.name in BY_INDEX:
        return []
    return [
        *([READS] if func in READING else []),
        *(OF_ITS_TIME[tag] for tag in OF_ITS_TIME if tag in func.tags),
    ]


def has_mask(args: Sequence[Any]) -> bool:
    """Whether a tensor is indexed by a mask: torch reads it, to count what it chooses."""
    indices = args[1] if len(args) > 1 and isinstance(args[1], (list, tuple)) else ()
    return any(isinstance(one, torch.Tensor) and one.dtype in (torch.bool, torch.uint8) for one in indices)


def draws(name: str, args: Sequence[Any]) -> bool:
    """Whether an operation that may draw random numbers does. Attention draws them for a dropout
    alone, which no model that samples has.
    """
    is_off = name == "aten::dropout" and not (args[1] and args[2])  # (input, p, train)
    return not (is_off or "attention" in name)


def lies_in(tensor: torch.Tensor, places: Iterable[torch.Tensor]) -> bool:
    """Whether ``tensor`` is one of ``places``, or of its memory."""
    return any(0 <= tensor.data_ptr() - one.data_ptr() < max(1, one.nbytes) for one in places)


def tensors_held(tree: Any) -> list[torch.Tensor]:
    return [one for one in tree_leaves(tree) if isinstance(one, torch.Tensor)]
