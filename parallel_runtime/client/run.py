"""A model in a pool, and its runs: one sampling each, from ``pre_run`` to ``cleanup``, with its
figures.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

from ..branches import first_done
from ..errors import PipeMeshError, RunCancelled
from ..families.plan import COMPILE
from ..occupancy import Span
from ..patches import Part
from ..planner.balance import StageBalance
from ..weights.background_check import BackgroundCheck
from ..wire.messages import Done
from .headroom import Headroom

T = TypeVar("T")


@dataclass(frozen=True)
class Evaluation:
    """Holds the figures of one evaluation, or of one patch of it; patches may overlap.

    It took ``seconds`` in the UI since ``began``, ``hop_s`` of them beside the slowest rank's
    computation. ``exchange_s`` and ``sent_bytes`` are of the rank with most. ``spans`` has the
    working time of each rank that computed it. ``part`` names the part that a pipeline computed;
    None without stages. ``compiles`` says that its MODEL is to be compiled. ``images`` counts the
    prompts whose evaluations it has.
    """

    seconds: float
    hop_s: float
    exchange_s: float
    sent_bytes: int
    began: float = 0.0
    part: Part | None = None
    spans: Mapping[int, Span] = field(default_factory=dict)
    compiles: bool = False
    images: int = 1


class Queued(NamedTuple):
    """Counts images that were sampled ``at_once``, out of ``of`` images in the queue; 0 at once for
    a run whose image another run had sampled.
    """

    at_once: int = 1
    of: int = 1


@dataclass(eq=False)
class PooledModel:
    """Keeps the record of a model on one pool handle, for as long as ComfyUI runs. The copy that
    the ranks of one pool hold is its ``Resident``, which goes with that pool's session.

    Ranks know the model by ``name``, made from its content, users by ``title``. ``users`` counts
    the loaders' outputs that refer to it; with none, it is released. ``loads`` counts how often
    ranks have loaded it, over all pools. ``check`` compares the UI's weights while ranks compute
    with it.
    """

    name: str
    title: str
    users: int = 0
    loads: int = 0
    run: Run | None = None  # that it is in
    check: BackgroundCheck | None = None
    balance: StageBalance = field(default_factory=StageBalance)
    headroom: Headroom = field(default_factory=Headroom)

    def end_check(self) -> None:
        """Ends the comparison of the model's weights while it is in a run."""
        check, self.check = self.check, None
        if check is not None:
            check.end()


@dataclass(eq=False)
class RunNames:
    """Keeps the names by which ranks know a run, until all that they keep of the run is void.
    ``run`` is its number; ``failed`` counts its failed evaluations. ``groups`` has, for each branch
    of a pipeline's, its group of ranks and its cost. ``looked_at`` has the branches whose first
    output was checked, by number and failures. ``load`` is the number of the model's load that has
    a state of the run, such as a node's cache or count in the blocks, which no fresh copy has; 0:
    none.
    """

    run: int = 0
    failed: int = 0
    branches: dict[Hashable, int] = field(default_factory=dict)
    groups: dict[Hashable, tuple[int, float]] = field(default_factory=dict)
    looked_at: set[tuple[int, int]] = field(default_factory=set)
    load: int = 0

    def part(self, branch: Hashable, patch: tuple[int, int, bool] | None = None) -> Part:
        """Returns the name of an evaluation of this branch, or of a patch of it."""
        number = self.branches.setdefault(branch, len(self.branches))
        return Part(self.run, number, patch, self.failed)

    def group_of(self, branch: Hashable, weight: float, groups: int, speeds: Sequence[float] = ()) -> int:
        """Returns the group that computes this branch in all of the run, because it keeps data for
        later evaluations. A new branch gets the group that would be done with it first. ``speeds``
        has the speed of each group; empty if all are alike.
        """
        if branch not in self.groups:
            loads = [
                sum(weight for group, weight in self.groups.values() if group == one) for one in range(groups)
            ]
            self.groups[branch] = first_done(loads, weight, speeds), weight
        return self.groups[branch][0]


@dataclass(eq=False)
class Run:
    """Keeps the figures of one run. ``mode`` of a pipeline; empty without stages. ``is_sampled``: a
    sampler announced the run, and will end it. ``joined``: the models whose runs end with this one.
    ``restarts``: pools that were started for it after a lack of memory. ``fault``: why it ended
    early, in a sentence. ``sums``: sums over its figures, made once it had ended.

    The report may look at any moment, so an evaluation is added whole.
    """

    names: RunNames = field(default_factory=RunNames)
    model: PooledModel = field(default_factory=partial(PooledModel, "", ""))
    mode: str = ""
    began_s: float = field(default_factory=time.time)
    evaluations: list[Evaluation] = field(default_factory=list)
    is_sampled: bool = False
    joined: list[PooledModel] = field(default_factory=list)
    ended_s: float = 0.0  # 0 while it goes on
    fault: str = ""
    sums: dict[Hashable, Any] = field(default_factory=dict)
    is_told = True  # of its figures, and of numbers that are not finite
    queued = Queued()
    restarts = 0

    @property
    def images(self) -> int:
        """How many prompts each evaluation computed; 0 if that number changed."""
        found = {one.images for one in self.evaluations}
        return found.pop() if len(found) == 1 else int(not found)

    def note_fault(self, error: PipeMeshError) -> None:
        """Keeps why the run cannot go on, unless users cancelled it."""
        if not isinstance(error, RunCancelled):
            self.fault = str(error).partition("\n")[0]

    def once(self, what: Hashable, sum_up: Callable[[], T]) -> T:
        """Returns a sum over the run, under a name. After the run's end it is made once, because
        nothing of the run changes any more, and readers ask again and again.
        """
        if not self.ended_s:
            return sum_up()
        if what not in self.sums:
            self.sums[what] = sum_up()
        return self.sums[what]


class Aside(Run):
    """A run that no sampler samples, such as a VAE's."""

    is_told = False


def measured(
    began: float,
    answers: Sequence[Mapping[int, Done]],
    part: Part | None,
    arguments: Mapping[str, Any] = MappingProxyType({}),
) -> Evaluation:
    """Sums up the ranks' answers to requests that were submitted together and ended just now."""
    of_rank: dict[int, list[Done]] = {}
    for replies in answers:
        for rank, reply in replies.items():
            of_rank.setdefault(rank, []).append(reply)
    seconds = time.perf_counter() - began
    spans, computed_s, exchange_s = {}, [], []
    for rank, replies in sorted(of_rank.items()):
        by_axis: Counter[str] = Counter()
        for reply in replies:
            by_axis.update(reply.waited_s)
        computed_s.append(sum(reply.compute_s for reply in replies))
        exchange_s.append(sum(by_axis.values()))
        start, end = replies[0].began_s, replies[-1].began_s + replies[-1].compute_s
        # Between its answers a rank waited for requests
        spans[rank] = Span(start, end, exchange_s[-1] + end - start - computed_s[-1], dict(by_axis))
    return Evaluation(
        seconds=seconds,
        hop_s=seconds - max(computed_s),
        exchange_s=max(exchange_s),
        sent_bytes=max(sum(reply.sent_bytes for reply in replies) for replies in of_rank.values()),
        began=began,
        part=part,
        spans=spans,
        compiles=COMPILE in arguments.get("transformer_options", {}),
    )
