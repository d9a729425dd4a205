"""Record evaluations as CUDA graphs, each replayed by one call of the CPU.

A graph does again what kernels did to the memory that it was recorded on, and no code runs again:
inputs are copied to where the recorded ones lie, what was read besides is kept, and what a graph
would repeat as it was is refused while it is recorded.
"""

from __future__ import annotations

import gc
import logging
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping
from functools import cache
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten_with_path, tree_leaves, tree_map_only

from ..families.plan import COMPILE

VARIABLE = "PIPEMESH_GRAPHS"
MOST = 8  # graphs of a model
KEYS = 64  # of evaluations that were held up, or are not recorded
# Evaluations that the CPU held up before one is recorded. On an H100 a rank took as long to
# record as 10 to 25 replays spare (lab/docs/CUDA.md): what is recorded then costs at most as much
# again as had been lost without, and what is evaluated fewer times is never recorded.
WORTH = 16
COPIES = {"aten::_to_copy", "aten::to", "aten::copy_"}
PLAIN = (bool, int, float, str, torch.dtype, torch.device, type(None))
OF_ITS_TIME = {  # what a graph has of the moment in which it was recorded
    torch.Tag.data_dependent_output: "reads numbers of the GPU",
    torch.Tag.dynamic_output_shape: "has a result whose shape depends on numbers of the GPU",
}
log = logging.getLogger("pipemesh")


def when_wanted(backend: str, environ: Mapping[str, str]) -> str:
    """Return when graphs are recorded: never, always, or late, where the GPU waits for the CPU."""
    named = {"1": "late", "all": "always"}
    return named.get(environ.get(VARIABLE, ""), "never") if backend == "nccl" else "never"


class Unlike(ValueError):
    """An evaluation is not of the kind that can be recorded."""


class Recording(NamedTuple):
    """``read``: what lay in memory before, and must stay there. ``sent_bytes``: by axis.
    ``number``: of the evaluation behind which it was recorded. ``kept_bytes``: of the GPU, which
    torch keeps for it. ``lasts``: another run may replay it, as it reads nothing that a run keeps.
    """

    graph: torch.cuda.CUDAGraph
    inputs: list[torch.Tensor]
    output: Any
    read: list[torch.Tensor]
    sent_bytes: Mapping[str, int]
    number: int
    kept_bytes: int
    lasts: bool

    @property
    def nbytes(self) -> int:
        return self.kept_bytes + sum(one.nbytes for one in (*self.inputs, *tensors_in(self.output)))


class Region(TorchDispatchMode):
    """What is asked of torch while a graph is recorded: ``read``, and what is made. Weights are
    left out of ``read``: where they change, graphs are void. Raises Unlike.
    """

    def __init__(self) -> None:
        super().__init__()
        self.read: dict[int, torch.Tensor] = {}
        self._made: dict[int, weakref.ref[torch.Tensor]] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs, name = kwargs or {}, func._schema.name
        given = [*flat(args), *flat(kwargs.values())]
        tensors = [one for one in given if isinstance(one, torch.Tensor)]
        devices = {one.type for one in given if isinstance(one, torch.device)} | {
            one.device.type for one in tensors if one.ndim or one.is_cuda or name in COPIES
        }
        if kwargs.get("pin_memory"):
            raise Unlike(f"{name} takes pinned memory")
        if {"cpu", "cuda"} <= devices:
            raise Unlike(f"{name} is on the CPU and the GPU")
        for why in reasons(func) if "cuda" in devices else ():
            raise Unlike(f"{name} {why}")
        for one in tensors:
            if not self._has_made(one) and not isinstance(one, torch.nn.Parameter):
                self.read[id(one)] = one
        made = func(*args, **kwargs)
        for one in flat([made]):
            if isinstance(one, torch.Tensor) and not any(one is other for other in tensors):
                self._made[id(one)] = weakref.ref(one)
        return made

    def _has_made(self, tensor: torch.Tensor) -> bool:
        made = self._made.get(id(tensor))
        return made is not None and made() is tensor

    def left(self, output: Any) -> int:
        """Return how many tensors somebody else than ``output`` keeps: replays overwrite them."""
        returned = {id(one) for one in tree_leaves(output)}

        def count() -> int:
            alive = [one for one in (made() for made in self._made.values()) if one is not None]
            return sum(one.is_cuda and id(one) not in returned for one in alive)

        if count():
            gc.collect()  # rows refer to what refers to them
        return count()


class RecordedForward:
    """The graphs of one model's evaluations, by what each is like. The log says once why something
    is not recorded. ``note`` is told when a recording begins, and of no end before the answer is
    sent: what it breaks of the GPU may show then.
    """

    def __init__(self, note: Callable[[str], None] = lambda phase: None) -> None:
        self._note = note
        self._recordings: dict[Hashable, Recording] = {}
        self._refused: set[Hashable] = set()
        self._held_up: Counter[Hashable] = Counter()
        self._replays: Counter[Hashable] = Counter()
        self._worth = WORTH
        self._has_told = False

    def __contains__(self, key: Hashable) -> bool:
        return key in self._recordings

    def number_of(self, key: Hashable) -> int:
        """Return behind which evaluation the graph was recorded, 0 where there is none."""
        return self._recordings[key].number if key in self else 0

    @property
    def kept_bytes(self) -> int:
        return sum(one.kept_bytes for one in self._recordings.values())

    def lacks(self, key: Hashable) -> bool:
        """Return whether there is no such graph, and one may be recorded."""
        return key not in self._recordings and key not in self._refused

    def pays(self, key: Hashable) -> bool:
        """Note an evaluation that the CPU held up. Return whether there were enough of them: twice
        as many while graphs that the model has have not paid. A size that changes after every 20
        evaluations would cost a recording each time.
        """
        if len(self._held_up) > KEYS:  # an option that is another number in every step makes a new one
            self._held_up.clear()
        self._held_up[key] += 1
        return self._held_up[key] >= self._worth * (1 if self._have_paid(self._recordings) else 2)

    def void(self) -> None:
        """Give up all graphs: what they read has changed, or the memory is needed."""
        self._part_with(self._recordings)
        self._recordings, self._refused, self._held_up = {}, set(), Counter()

    def _have_paid(self, keys: Collection[Hashable]) -> bool:
        """Return whether these graphs were replayed so often that recording them was worth it."""
        return sum(self._replays[key] for key in keys) >= WORTH * len(keys)

    def _part_with(self, keys: Collection[Hashable]) -> None:
        """Ask for twice as many evaluations before others are recorded if these graphs have not
        paid, as with a LoRA that changes after every 20.
        """
        if keys:
            self._worth = WORTH if self._have_paid(keys) else 2 * self._worth
        for key in keys:
            self._replays.pop(key, None)
            self._held_up.pop(key, None)

    def key_of(self, arguments: dict[str, Any], *others: Hashable) -> Hashable:
        """Return what evaluations have in common that one graph computes: all but what tensors
        hold, and ``others``. None where there is no such graph.
        """
        try:
            if COMPILE in arguments.get("transformer_options", {}):
                raise Unlike("blocks are compiled")
            return others, *((path, described(leaf)) for path, leaf in tree_flatten_with_path(arguments)[0])
        except Unlike as error:
            return self.refuse(str(error))

    def refuse(self, why: str, key: Hashable = None) -> None:
        if not self._has_told:
            log.warning("[PipeMesh] No CUDA graph is recorded, ranks compute as they did: %s.", why)
        self._has_told = True
        if len(self._refused) > KEYS:
            self._refused.clear()
        self._refused.add(key)

    def replay(self, key: Hashable, arguments: dict[str, Any], sent_bytes: Counter[str]) -> Any:
        """Compute an evaluation like the recorded one. What takes memory comes before the graph,
        whose messages go out once.
        """
        recording = self._recordings[key]
        output = tree_map_only(torch.Tensor, torch.empty_like, recording.output)
        for own, given in zip(recording.inputs, tensors_in(arguments), strict=True):
            own.copy_(given)
        recording.graph.replay()
        self._replays[key] += 1
        for given, own in zip(tensors_in(recording.output), tensors_in(output), strict=True):
            own.copy_(given)
        sent_bytes.update(recording.sent_bytes)
        return output

    def record(
        self,
        key: Hashable,
        arguments: dict[str, Any],
        compute: Callable,
        sent_bytes: Counter[str],
        lasting: Collection[torch.Tensor],
        number: int,
    ) -> None:
        """Record ``compute`` of such arguments behind an evaluation like it, which has chosen
        kernels, taken memory and connected ranks, and is the ``number``-th. Recording computes and
        sends nothing. ``lasting``: what another run reads in the same place.
        """
        try:
            if len(self._recordings) == MOST:
                raise Unlike(f"the model has {MOST} of them")
            self._note("recording")
            inputs = tree_map_only(torch.Tensor, torch.clone, arguments)
            self._recordings[key] = self._recorded(inputs, compute, sent_bytes, lasting, number)
        except Exception as error:  # noqa: BLE001 it was computed already
            self.refuse(str(error), key)  # a log may keep what it is told, and with it the frames

    def _recorded(
        self,
        arguments: dict[str, Any],
        compute: Callable,
        sent_bytes: Counter[str],
        lasting: Collection[torch.Tensor],
        number: int,
    ) -> Recording:
        graph, region, sent = torch.cuda.CUDAGraph(), Region(), sent_bytes.copy()
        pool = next((one.graph.pool() for one in self._recordings.values()), None)
        inputs = tensors_in(arguments)
        try:
            with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"), region:
                before = torch.cuda.memory_reserved()
                output = compute(arguments)
                kept = torch.cuda.memory_reserved() - before
        finally:
            sent_bytes.clear()
            sent_bytes.update(sent)
        if left := region.left(output):
            raise Unlike(f"the model keeps {left} tensors of an evaluation")
        read = [*region.read.values()]
        lasts = all(lies_in(one, (*inputs, *lasting)) for one in read)
        # Of what was reserved, the output stays allocated
        kept = max(0, kept - sum(one.nbytes for one in tensors_in(output)))
        return Recording(graph, inputs, output, read, sent, number, kept, lasts)

    def end_run(self, room: int) -> None:
        """Keep the graphs that other runs may replay, in at most ``room`` bytes (-1: none). What
        only this run could replay is not recorded again.
        """
        recorded, self._recordings = self._recordings, {}
        lasting = {key: one for key, one in recorded.items() if one.lasts}
        if sum(one.nbytes for one in lasting.values()) <= room:
            self._recordings = lasting
        for key in recorded.keys() - lasting.keys() if room >= 0 else ():
            self.refuse("the model keeps tensors for a run that a graph reads", key)
        self._part_with(recorded.keys() - self._recordings.keys())


def described(leaf: Any) -> Hashable:
    """Raises Unlike for code of others, and for a tensor that is not on the GPU."""
    if isinstance(leaf, torch.Tensor) and leaf.is_cuda:
        return leaf.shape, leaf.stride(), leaf.dtype
    if not isinstance(leaf, PLAIN):
        raise Unlike(f"an argument is a {type(leaf).__name__}, not a number or on the GPU")
    return type(leaf), leaf


def flat(values: Iterable[Any]) -> list[Any]:
    """Return an operation's arguments, or results, those in lists too."""
    found: list[Any] = []
    for one in values:
        found += one if isinstance(one, (list, tuple)) else [one]
    return found


@cache
def reasons(func: Any) -> list[str]:
    """Return why what ``func`` does on a GPU cannot be recorded."""
    return [OF_ITS_TIME[tag] for tag in OF_ITS_TIME if tag in func.tags]


def lies_in(tensor: torch.Tensor, places: Collection[torch.Tensor]) -> bool:
    """Whether ``tensor`` is one of ``places``, or of its memory."""
    return any(0 <= tensor.data_ptr() - one.data_ptr() < max(1, one.nbytes) for one in places)


def tensors_in(tree: Any) -> list[torch.Tensor]:
    return [one for one in tree_leaves(tree) if isinstance(one, torch.Tensor)]
