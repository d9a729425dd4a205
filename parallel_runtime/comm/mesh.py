"""Make the grid of ranks: each axis's groups, and the communicators that methods use.

All groups are made and opened here, in one order on every rank: making a group is itself a
collective, and so is its first message, at which NCCL connects its members.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import torch
import torch.distributed as dist

from ..layout import ALONE, OF_A_SEQUENCE, Layout
from .exchange import Comparison, Exchange, StopFlag
from .parts import runs_of, to_all
from .ring import Ring
from .shard_gather import ShardGather
from .shares import EVEN, Shares, shares_of
from .stage_link import CPU, StageLink
from .traffic import Traffic

Groups = Mapping[str, dist.ProcessGroup | None]  # axis of a sequence -> its group
STAGE_STEPS = 1 << 20  # of progress: more than a stage makes in one request


class Paths(NamedTuple):
    """The communicators of one sequence, and the shares of its ranks."""

    ulysses: Exchange
    ring: Ring
    world: Exchange
    shares: Shares


class SequenceComm:
    """Communicates among the ranks that share one sequence: ``ulysses`` and ``ring`` along these
    axes, ``world`` among all of them (counted as ``gather``), ``weights`` once a model has its
    weights sharded. ``shares`` divides tokens and heads among the ranks. Messages lie on
    ``device``. ``traffic`` counts the cost of the present evaluation's messages.

    Neighbouring groups may share a longer sequence in an evaluation: ``use`` sets how many do, one
    of the widths that were given to ``join``. With ``ALONE`` this rank computes by itself.
    """

    def __init__(
        self,
        ulysses: Exchange,
        ring: Ring,
        world: Exchange,
        stop: StopFlag,
        device: torch.device = CPU,
        shares: Shares = EVEN,
    ):
        self.stop = stop
        self.weights: ShardGather | None = None
        self.device = device
        self.traffic = Traffic()
        self._by_width: dict[int, Paths] = {}
        self._comparison = Comparison()
        self.join(1, ulysses, ring, world, shares)
        self.use(1)

    def join(self, width: int, ulysses: Exchange, ring: Ring, world: Exchange, shares: Shares = EVEN) -> None:
        """Set the communicators for ``width`` neighbouring groups that share a sequence."""
        self._by_width[width] = Paths(ulysses, ring, world, shares)
        for mover in (ulysses, ring, world):
            mover.traffic = self.traffic

    def use(self, width: int) -> None:
        """Communicate with the ranks of ``width`` neighbouring groups from the next evaluation on.
        All of them must call it.
        """
        self.ulysses, self.ring, self.world, self.shares = self._by_width[width]
        if self.weights is not None:
            self.weights.width = width

    def share_weights(self, group: dist.ProcessGroup | None) -> ShardGather:
        """Have weights gathered in ``group``, which is of the ranks of this sequence."""
        world = self.world
        self.weights = gather = ShardGather(group, world.rank, world.size, via_cpu=world.via_cpu)
        gather.traffic = self.traffic
        return gather

    def compare(self, tokens: Hashable, count: int) -> None:
        """Compare with the other ranks as ``Comparison`` does. A replay of CUDA graphs does so too,
        because it may be the first evaluation of its part.
        """
        compare = self._comparison.compare
        self.stop.look(partial(compare, self.world, tokens, count, self.shares, self.device))

    def any_wishes(self, wish: bool) -> bool:
        """Return whether any rank of the sequence wishes it. All must ask, within an evaluation.
        Raises Stopped on all ranks alike.
        """
        if self.world.size == 1:
            return wish
        own = torch.tensor([float(wish)], device=self.device)
        all_of = own.new_empty(self.world.size)
        into = runs_of(all_of, 0, [1] * self.world.size)
        self.stop.decide(self.world.all_to_all([to_all(own, self.world.size)], into, self.stop.wants_stop))
        return bool(all_of.any())

    def begin(self, attentions: int, part: Hashable) -> None:
        """Begin the evaluation of ``part``, of so many attentions."""
        self.traffic.clear()
        self.stop = StopFlag(self.stop.wants_stop, attentions)
        self._comparison.part = part

    @property
    def _movers(self) -> list[Exchange | Ring]:
        return [
            part for paths in self._by_width.values() for part in (paths.ulysses, paths.ring, paths.world)
        ]

    @property
    def buffers(self) -> list[torch.Tensor]:
        return [buffer for part in self._movers for buffer in part.buffers]

    def free_buffers(self, room: int = -1) -> None:
        """Free the memory of messages unless it is at most ``room`` bytes."""
        if sum(buffer.nbytes for buffer in self.buffers) > room:
            for part in self._movers:
                part.free_buffers()


@dataclass(frozen=True)
class Mesh:
    """One rank's place in the grid, and its communicators. ``link`` leads to the stages before and
    after, None if there is one stage. ``speeds`` of all ranks in percent of the fastest; empty if
    they are alike. ``unrecorded``: why models record no CUDA graphs; empty if they may.
    """

    rank: int
    layout: Layout
    sequence: SequenceComm
    link: StageLink | None = None
    speeds: tuple[int, ...] = ()
    unrecorded: str = "nobody asked for it"


def connect(
    layout: Layout,
    rank: int,
    *,
    device: torch.device = CPU,
    via_cpu: bool,
    wants_stop: Callable[[], bool],
    tick: Callable[[int], None] = lambda steps: None,
    speeds: Sequence[int] = (),
) -> Mesh:
    """Make the mesh of ``layout``, and the communicators of each of its widths. Every rank must
    call it, after init_process_group if there are several.

    ``tick(steps)`` reports progress just before this rank blocks on the previous stage. The number
    exceeds any that stage can report, so that the watchdog blames the earlier stage.
    """
    groups, shares = axis_groups(layout, rank), shares_of(layout, rank, speeds)
    sequence = SequenceComm(*paths_of(layout, rank, groups, via_cpu), StopFlag(wants_stop), device, shares)
    stage, stages, link = layout.stage(rank), layout.of_stages(rank), None
    if len(stages) > 1:
        between = link_groups(layout, rank)
        before, after = (None, *stages)[stage], (*stages, None)[stage + 1]
        link = StageLink(
            before,
            after,
            from_before=between.get((before, rank)),
            to_after=between.get((rank, after)),
            via_cpu=via_cpu,
            device=device,
            traffic=sequence.traffic,
            before_waiting=lambda: tick(stage * STAGE_STEPS),
        )
    open_connections(layout, rank, sequence, link)
    for width in layout.widths[1:]:
        wider = layout.joined(width)
        groups = axis_groups(wider, rank)
        sequence.join(width, *paths_of(wider, rank, groups, via_cpu), shares_of(wider, rank, speeds))
        sequence.use(width)
        open_connections(wider, rank, sequence)
    sequence.join(ALONE, *paths_of(Layout(), 0, dict.fromkeys(OF_A_SEQUENCE), via_cpu))
    sequence.use(1)
    return Mesh(rank, layout, sequence, link, tuple(speeds))


def paths_of(layout: Layout, rank: int, groups: Groups, via_cpu: bool) -> tuple[Exchange, Ring, Exchange]:
    """Make the communicators of this rank's sequence. Every rank must call it."""
    place, size = layout.coordinates(rank), layout.sequence_size
    return (
        Exchange(groups["ulysses"], place["ulysses"], layout.ulysses, axis="ulysses", via_cpu=via_cpu),
        Ring(groups["ring"], layout.group("ring", rank), place["ring"], via_cpu=via_cpu),
        Exchange(sequence_of(layout, rank, groups), rank % size, size, axis="gather", via_cpu=via_cpu),
    )


def open_weights(mesh: Mesh) -> None:
    """Make the group in which ranks gather weights, if there is none yet: NCCL takes memory of each
    GPU for every group. Every rank must call it. Raises RuntimeError that names the group.
    """
    if mesh.sequence.weights is None:
        gather = mesh.sequence.share_weights(new_group(mesh.layout.sequences(), mesh.rank))
        if gather.size > 1:
            with naming("To gather weights,", mesh.layout.sequence(mesh.rank)):
                gather.open(torch.zeros(1, device=mesh.sequence.device)).sum().item()


def open_connections(
    layout: Layout, rank: int, sequence: SequenceComm, link: StageLink | None = None
) -> None:
    """Send a first message in each group, outermost axis first, by the operation that the group
    will use: NCCL connects at the first message, and allocates the memory for that operation. Then
    send from each stage to the next. Every rank must call it. Raises RuntimeError that names the
    group, which an error in the first evaluation would not.
    """
    token = torch.zeros(1, device=sequence.device)
    ring, ulysses = sequence.ring, sequence.ulysses
    for axis, mover, first in (("ring", ring, ring.open), ("ulysses", ulysses, ulysses.largest)):
        if mover.size > 1:
            with naming(f"The {axis} group of", layout.group(axis, rank)):
                first(token).item()  # NCCL tells of a failure here
    if sequence.world.size > 1 and sequence.ulysses.size < sequence.world.size:
        with naming("The sequence of", layout.sequence(rank)):
            sequence.world.largest(token).item()
    for before, after in pairwise(layout.of_stages(rank)):
        if link is not None and rank in (before, after):
            with naming("The stages of", (before, after)):
                link.open(token, to_next=rank == before)


@contextmanager
def naming(what: str, ranks: Sequence[int]) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:  # torch's own for whatever a backend meets
        raise RuntimeError(f"{what} ranks {', '.join(map(str, ranks))} could not connect: {error}") from error


def axis_groups(layout: Layout, rank: int) -> dict[str, dist.ProcessGroup | None]:
    """Make the process groups along each axis of a sequence, outermost first; return this rank's.
    Every rank must call it.
    """
    return {axis: own_group(layout.lines(axis), rank) for axis in reversed(OF_A_SEQUENCE)}


def used_in_sequence(layout: Layout) -> list[str]:
    return [axis.name for axis in layout.used() if axis.within == "sequence"]


def sequence_of(layout: Layout, rank: int, groups: Groups) -> dist.ProcessGroup | None:
    """Return the process group of the ranks that share this rank's sequence: that of its only axis
    in use, or a new one. Every rank must call it.
    """
    used = used_in_sequence(layout)
    if len(used) < 2:
        return groups[used[0]] if used else None
    return own_group(layout.sequences(), rank)


def link_groups(layout: Layout, rank: int) -> dict[tuple[int | None, int | None], dist.ProcessGroup | None]:
    """Make a group of each two stages that are neighbours: in one of all ranks, a receive that is
    posted early would hold up the send behind it. Every rank must call it.
    """
    lines = [layout.of_stages(first) for first in range(layout.world_size) if layout.stage(first) == 0]
    return {pair: own_group([pair], rank) for line in lines for pair in pairwise(line)}


def own_group(members: Sequence[Sequence[int]], rank: int) -> dist.ProcessGroup | None:
    """Return the process group of ``rank`` among ``members``: torch's group of all ranks if the
    first of them has all, else a new one. Every rank must call it.
    """
    if len(members[0]) > 1 and len(members[0]) == dist.get_world_size():
        return dist.group.WORLD
    return new_group(members, rank)


def new_group(members: Sequence[Sequence[int]], rank: int) -> dist.ProcessGroup | None:
    """Make a process group of each of ``members``, in their order; return that of ``rank``, None if
    ranks are alone. Every rank must call it.
    """
    own = None
    for ranks in members if len(members[0]) > 1 else ():
        group = dist.new_group([*ranks])
        own = group if rank in ranks else own
    return own if isinstance(own, dist.ProcessGroup) else None
