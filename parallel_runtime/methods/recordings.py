"""Keep the recordings of a model's evaluations, and choose between computing, recording and
replaying one.

A rank decides by itself: it sends the same messages either way, so others need not know.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_map_only

from ..comm.device_copies import Reached, to_cpu
from ..comm.mesh import SequenceComm
from ..errors import ModelError
from ..families.plan import COMPILE, TokenPlan
from .pieces import NotRecordable, PieceRecorder, Recording, ReplayProof

MOST = 8  # recordings of a model
KEYS = 64  # of evaluations that were counted, or are not recorded
# Evaluations that are computed before one is recorded. On an H100 a rank took as long to record as
# 10 to 25 replays spare (lab/docs/CUDA.md): so recording costs at most as much again as had been
# lost without, and what is evaluated fewer times is never recorded.
WORTH = 16
PROVED = {1, 2, 8, 64}  # replays of a recording that are held to what is computed
PLAIN = (bool, int, float, str, torch.dtype, torch.device, type(None))
VARIABLE = "PIPEMESH_GRAPHS"
NOT_ASKED = f"{VARIABLE} is not 1"
SHORT = "memory was short, so the model's graphs were freed"
GATHERED = "weights are gathered from other ranks"
FEW = f"an evaluation is computed {WORTH} times before it is recorded"
BUSY = "no GPU waited for its process"
NO_ROOM = "graphs took more memory than may stay between runs"
Evaluator = Callable[[dict[str, Any]], Any]
log = logging.getLogger("pipemesh")


@dataclass
class Replays:
    """Of a run's ``evaluations`` on one rank, those that were ``replayed``, and ``why`` others were
    not; empty if nothing hindered them. ``fault``: what is to be said of replays that were wrong.
    """

    evaluations: int = 0
    replayed: int = 0
    why: str = ""
    fault: str = field(default="", compare=False)
    is_replay: bool = field(default=False, compare=False)  # the evaluation at hand


def why_unrecorded(device: torch.device, environ: Mapping[str, str]) -> str:
    """Return why a rank whose messages lie on ``device`` records no CUDA graphs; empty if it may.
    AMD's GPUs are left out until one has shown that it can.
    """
    if environ.get(VARIABLE) not in ("1", "all"):
        return NOT_ASKED
    if device.type != "cuda":
        return "messages go through main memory (gloo)"
    return "" if torch.version.hip is None else "no GPU of AMD has replayed one yet"


def why_not_recorded(plan: TokenPlan) -> str:
    """Return why no evaluation of a model of ``plan`` is recorded; empty if they can be."""
    if plan.prefix is not None or plan.kept is not None:
        return "the model keeps tokens from one evaluation to the next"
    return "" if plan.is_tried else "nobody has tried the model's class"


class GivenWork(Protocol):
    """What a GPU was given of an evaluation."""

    def is_over(self) -> bool:
        """Return whether the GPU has computed nearly all of it."""
        ...


class Worth:
    """Says when an evaluation was computed often enough to be recorded: ``least`` times, say 16. If
    recordings go before they were replayed 16 times each, as with a LoRA that changes after every
    20 evaluations, the next ones come after 32, then 64. While the recordings that the model has
    were not replayed so often, another kind is recorded after twice as many too. ``counts``: how
    often each was computed, or replayed if it is recorded. ``forbids``: why nothing is recorded any
    more.
    """

    def __init__(self, least: int, forbids: str = ""):
        self.counts: Counter[Hashable] = Counter()
        self.forbids = forbids
        self._least = self._now = least

    def pays(self, key: Hashable, recorded: Collection[Hashable]) -> bool:
        """Count an evaluation that is computed. Return whether it is to be recorded."""
        if len(self.counts) > KEYS:  # an option that is another number in every step makes a new one
            self.counts = Counter({one: self.counts[one] for one in recorded})
        self.counts[key] += 1
        return self.counts[key] >= self._now * (1 if self._have_paid(recorded) else 2)

    def part_with(self, keys: Collection[Hashable]) -> None:
        """Forget recordings that are given up."""
        if keys:
            self._now = self._least if self._have_paid(keys) else 2 * self._now
        for key in keys:
            self.counts.pop(key, None)

    def _have_paid(self, keys: Collection[Hashable]) -> bool:
        return sum(self.counts[key] for key in keys) >= self._least * len(keys)


class Recordings:
    """The recordings of ``model`` on one rank. ``tick`` counts progress. ``is_wanted``: a GPU of
    the group waited for its process in the evaluation before, so more may be recorded. ``refuses``:
    why this model's evaluations are not recorded at all; empty if they are. ``worth``: how often
    one is computed before it is recorded.
    """

    def __init__(
        self,
        model: nn.Module,
        comm: SequenceComm,
        tick: Callable[[], None],
        refuses: str = "",
        worth: int = WORTH,
    ):
        self.is_wanted = False
        self.refuses = refuses
        self._model, self._comm, self._tick = model, comm, tick
        self._recorder: PieceRecorder | None = None  # at work
        self._known: dict[Hashable, Recording | str] = {}  # or why it is not recorded
        self._worth = Worth(worth)
        self._proof: tuple[Hashable, torch.Tensor, Reached] | None = None  # that is not read
        self._run = Replays()

    def tick(self) -> None:
        """Count progress, or note it for the replays of what is recorded."""
        (self._tick if self._recorder is None else self._recorder.tick)()

    @property
    def recorded(self) -> dict[Hashable, Recording]:
        return {key: one for key, one in self._known.items() if isinstance(one, Recording)}

    @property
    def nbytes(self) -> int:
        return sum(one.nbytes for one in self.recorded.values())

    @property
    def pool_bytes(self) -> int:
        return sum(one.pool_bytes for one in self.recorded.values())

    @cached_property
    def _streams(self) -> tuple[torch.cuda.Stream, torch.cuda.Stream]:
        """The same for all recordings: in each stream cuBLAS has memory of its own."""
        return torch.cuda.Stream(), torch.cuda.Stream()

    def evaluate(self, arguments: dict[str, Any], compute: Evaluator, forget: Callable[[], None]) -> Any:
        """Return what ``compute`` returns of ``arguments``. Raises what it raises. ``forget`` lets
        go of tensors that computing has made.
        """
        self._run.evaluations += 1
        self._run.is_replay = False
        is_clear, key = self._read_proof(), self._key_of(arguments)
        recording = self._known.get(key)
        if isinstance(recording, str):
            self._run.why = recording
        if not isinstance(recording, Recording) or not is_clear:
            output = compute(arguments)
            if key is None or key in self._known or not is_clear or self._comm.traffic.is_outgrown:
                return output
            self._run.why = FEW if self.is_wanted else BUSY
            if self.is_wanted and self._worth.pays(key, self.recorded):
                self._record(key, arguments, compute, forget)
            return output
        replays = self._worth.counts[key] + 1
        if replays not in PROVED:
            self._worth.counts[key] = replays
            self._run.replayed += 1
            self._run.is_replay = True
            return recording.replay(arguments, self._tick)
        proof = ReplayProof(recording, self._comm)
        output = proof.compute(arguments, compute)
        self._worth.counts[key] = replays  # a proof that is left is due again
        self._proof = key, to_cpu(proof.wrong), Reached(proof.wrong.device)
        return output

    def after(self, given: GivenWork | None) -> bool | None:
        """Return whether the GPU has computed nearly all that it was ``given`` of the evaluation;
        None if that was replayed, or there is no GPU. Raises ModelError if earlier replays of this
        run were not right. Call it when no message of the evaluation is left, because other ranks
        may have found nothing.
        """
        fault, self._run.fault = self._run.fault, ""
        if fault:
            raise ModelError(fault)
        return None if self._run.is_replay or given is None else given.is_over()

    def void(self) -> None:
        """Give up all recordings: what they read has changed. What is refused stays refused."""
        self._worth.part_with(self.recorded)
        self._known = {key: one for key, one in self._known.items() if isinstance(one, str)}
        self._proof = None

    def give_up(self) -> None:
        """Free the memory of all recordings, which an evaluation lacked, and record no more."""
        if self.recorded:
            self.void()
            self._worth = Worth(0, SHORT)
            self._refuse(SHORT)

    def end_run(self, room: int) -> Replays:
        """Keep the recordings that other runs may replay, if they take at most ``room`` bytes.
        Return what was replayed in the run.
        """
        self._read_proof()
        if self._run.fault:  # the run has its image already
            log.warning("[PipeMesh] %s", self._run.fault)
        recorded = self.recorded
        lasting = {key: one for key, one in recorded.items() if one.lasts}
        if sum(one.nbytes for one in lasting.values()) > room:
            lasting, self._run.why = {}, NO_ROOM
        self._worth.part_with(recorded.keys() - lasting.keys())
        for key, one in recorded.items():
            if key not in lasting:
                del self._known[key]
            if not one.lasts:
                self._refuse("the model keeps tensors for a run that a graph reads", key)
        ended, self._run = self._run, Replays()
        return ended

    def _key_of(self, arguments: dict[str, Any]) -> Hashable:
        """Return what evaluations have in common that one recording computes: all but what tensors
        hold, and the ranks that share them. None if no recording computes this one.
        """
        try:
            if self.refuses:
                raise NotRecordable(self.refuses)
            if self._worth.forbids:
                raise NotRecordable(self._worth.forbids)
            if COMPILE in arguments.get("transformer_options", {}):
                raise NotRecordable("blocks are compiled")
            leaves, spec = tree_flatten(arguments)
            return self._comm.world, spec, *map(form_of, leaves)
        except NotRecordable as error:
            self._refuse(str(error))
            return None

    def _record(
        self, key: Hashable, arguments: dict[str, Any], compute: Evaluator, forget: Callable[[], None]
    ) -> None:
        """Record ``compute`` behind an evaluation like it, which has chosen kernels, taken memory
        and connected ranks.
        """
        del self._worth.counts[key]
        try:
            if len(self.recorded) == MOST:
                raise NotRecordable(f"the model has {MOST} recordings already")
            pools = [graph.pool() for one in self.recorded.values() for graph, *_ in one.pieces if graph]
            pool = pools[0] if pools else torch.cuda.graph_pool_handle()
            self._recorder = PieceRecorder(self._comm, self._streams, pool)
            inputs = tree_map_only(torch.Tensor, torch.clone, arguments)
            lasting = (*self._comm.buffers, *self._model.buffers())
            self._known[key] = self._recorder.record(inputs, compute, forget, lasting)
        except (Exception, NotRecordable) as error:  # noqa: BLE001 it was computed already
            self._refuse(str(error), key)  # a log may keep what it is told, and with it the frames
            if self._recorder is not None and self._recorder.is_broken:
                self._worth = Worth(0, str(error))
        finally:
            self._recorder = None
            forget()

    def _read_proof(self) -> bool:
        """Read what the last proof found, if the GPU has come so far. Return whether none is left
        to be read. A recording that was not right is given up; if it was replayed without a proof
        before, that is the run's ``fault``.
        """
        if self._proof is None:
            return True
        key, wrong, reached = self._proof
        if not reached.is_over():
            return False
        reached.wait()
        self._proof = None
        pieces = wrong.nonzero().flatten().tolist()
        if not pieces:
            return True
        replays = self._worth.counts[key] - 1 if key in self.recorded else 0
        self._known[key] = self._run.why = "a CUDA graph computed other numbers than its kernels do"
        what = (
            "A CUDA graph computed other numbers than its kernels do (piece"
            f" {pieces[0] + 1} of {len(wrong)}): please report it. This rank computes such evaluations"
            " without graphs from now on."
        )
        if replays > 1:
            self._run.fault = (
                f"{what} Up to {replays} evaluations before it, of this image or of earlier ones of its"
                " size, may be off: queue them again."
            )
        else:
            log.warning("[PipeMesh] %s The image is right.", what)
        return True

    def _refuse(self, why: str, key: Hashable = None) -> None:
        """Say why evaluations are not recorded: those of ``key``, or the one at hand."""
        if len(self._known) > KEYS:
            self._known = dict(self.recorded)
        if key is not None:
            self._known[key] = why
        self._run.why = why
        tell_unrecorded(why)


@lru_cache(maxsize=KEYS)
def tell_unrecorded(why: str) -> None:
    """Log each reason once."""
    log.warning("[PipeMesh] Evaluations are computed, and not recorded as CUDA graphs: %s.", why)


def form_of(leaf: Any) -> Hashable:
    """Raises NotRecordable for code of others, and for a tensor that is not on the GPU."""
    if isinstance(leaf, torch.Tensor) and leaf.is_cuda:
        return leaf.shape, leaf.stride(), leaf.dtype
    if not isinstance(leaf, PLAIN):
        raise NotRecordable(f"an argument is a {type(leaf).__name__}, not a number or on the GPU")
    return type(leaf), leaf
