"""Measure what the exchanges around an attention take of the CPU, beside the kernels of the GPU: a
rank attends with tensors of next to nothing, in a group whose messages go nowhere.

``ranks_ratio``: eight ranks over two, whose kernels are as many. Eight fast GPUs compute a block in
little more than that, and wait for the CPU.
"""

from __future__ import annotations

import time
from collections.abc import Hashable, Iterator
from statistics import median

import torch
import torch.distributed as dist

from ...parallel_runtime.attention.kernels import TORCHS
from ...parallel_runtime.comm.exchange import Exchange, StopFlag
from ...parallel_runtime.comm.mesh import SequenceComm
from ...parallel_runtime.comm.ring import Ring
from ...parallel_runtime.families import plan_for
from ...parallel_runtime.families.catalogue import sample_with
from ...parallel_runtime.layout import Layout
from ...parallel_runtime.methods.usp import SequenceSharding
from ...parallel_runtime.patches import Part
from ..dry_run.ranks import joined
from .figures import CaseFigures, Figure, Goal, Options, ratio

RANKS = {"two": 2, "eight": 8}
HEADS, TOKENS, DIM = 8, 16, 2
ATTENTIONS = 50
GOAL = Goal(at_most=1.2)


class FromNobody(Exchange):
    """Receives zeros: nobody wishes to stop, or differs."""

    def largest(self, flag: torch.Tensor) -> torch.Tensor:
        return flag

    def _buffer(self, use: Hashable, count: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return super()._buffer(use, count, dtype, device).zero_()


def among(ranks: int) -> SequenceComm:
    """Make the communicators of the first of so many ranks."""
    group = dist.new_group([*range(ranks)])
    assert isinstance(group, dist.ProcessGroup)
    ulysses, world = (FromNobody(group, 0, ranks, axis=axis, via_cpu=False) for axis in ("ulysses", "gather"))
    return SequenceComm(ulysses, Ring(None, [0], 0, via_cpu=False), world, StopFlag(lambda: False))


class Attentions:
    """The attentions of one rank's evaluations."""

    def __init__(self, comm: SequenceComm):
        sample, size = sample_with("bench")
        plan = plan_for(type(sample.form.random_model(size).model.diffusion_model))
        assert plan is not None
        self._comm = comm
        self._sharding = SequenceSharding(plan, comm, lambda: None, TORCHS)
        self._tokens = dict.fromkeys(plan.streams, TOKENS)
        local = len(plan.streams) * TOKENS // comm.world.size
        self._q, self._k, self._v = torch.randn(3, 1, HEADS, local, DIM)
        self.evaluate()  # in which ranks compare their tokens

    def evaluate(self) -> float:
        """Return the CPU's seconds for the attentions of an evaluation."""
        with torch.inference_mode():
            self._comm.begin(ATTENTIONS, Part(1, 0))
            rows = self._sharding.choose_rows(self._tokens)
            assert rows is not None
            began = time.process_time()
            for _ in range(ATTENTIONS):
                self._sharding.attend(
                    rows, queries, self._q, self._k, self._v, HEADS, None, skip_reshape=True
                )
            return time.process_time() - began


def queries(q: torch.Tensor, *_, **__) -> torch.Tensor:
    return q


def bench(options: Options) -> Iterator[Figure]:
    torch.set_num_threads(1)
    with joined(Layout(ulysses=max(RANKS.values())), 0):
        made = {name: Attentions(among(ranks)) for name, ranks in RANKS.items()}
        rounds = [{name: one.evaluate() for name, one in made.items()} for _ in range(options.rounds)]
    made = CaseFigures("exchange", "an attention", rounds)
    yield made.estimated("ranks_ratio", ratio("eight", "two"), "ratio", GOAL)
    for name in RANKS:
        us = [1e6 * one[name] / ATTENTIONS for one in rounds]
        yield CaseFigures("exchange", name, us).estimated("cpu", median, "us")
