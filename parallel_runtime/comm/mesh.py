"""Make the grid of ranks: each axis's groups, and the communicators that methods use.

All groups are made and opened here, in one order on every rank: making a group is itself a
collective, and so is its first message, at which NCCL connects its members.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from types import MappingProxyType
from typing import NamedTuple

import torch
import torch.distributed as dist

from .exchange import Exchange, StopFlag
from .in_step import InStep
from .ring import Ring
from .shard_gather import ShardGather, sequence_group
from .shares import EVEN, Shares, shares_of
from .stage_link import StageLink

OF_A_SEQUENCE = ("ulysses", "ring")
STAGE_STEPS = 1 << 20  # of progress: more than a stage makes in one request


class Axis(NamedTuple):
    """One axis as a rank sees it. ``ranks`` are the global ranks that differ from this one on this
    axis alone, ``rank`` is this one's index among them.

    ``group`` is None where no collective runs along the axis.
    """

    rank: int
    ranks: tuple[int, ...]
    group: dist.ProcessGroup | None

    @property
    def size(self) -> int:
        return len(self.ranks)


class Paths(NamedTuple):
    """The communicators of one sequence, the steps that its ranks take in them, and their shares
    of it.
    """

    ulysses: Exchange
    ring: Ring
    world: Exchange
    in_step: InStep
    shares: Shares


class SequenceComm:
    """Communicates among the ranks that share one sequence: ``ulysses`` and ``ring`` along those
    axes, ``world`` among all of them; ``in_step`` where one fails; ``weights`` once a model has its
    weights shared out. ``shares`` of the tokens and heads. ``device_type``: where messages lie.

    Neighbouring groups may share a longer sequence for an evaluation: ``use`` says how many do, of
    the numbers that were given to ``join``.
    """

    def __init__(
        self,
        ulysses: Exchange,
        ring: Ring,
        world: Exchange,
        stop: StopFlag,
        device_type: str = "cpu",
        shares: Shares = EVEN,
    ):
        self.ulysses = ulysses
        self.ring = ring
        self.world = world
        self.stop = stop
        self.weights: ShardGather | None = None
        self.device_type = device_type
        self._by_width: dict[int, Paths] = {}
        self.join(1, ulysses, ring, world, shares)
        self.in_step, self.shares = self._by_width[1].in_step, shares

    def join(self, width: int, ulysses: Exchange, ring: Ring, world: Exchange, shares: Shares = EVEN) -> None:
        """Have these be used where ``width`` neighbouring groups share a sequence."""
        in_step = InStep(self._ask, self.stop.decide, width)
        self._by_width[width] = Paths(ulysses, ring, world, in_step, shares)
        for axis, part in (("ulysses", ulysses), ("ring", ring), ("gather", world)):
            in_step.join(axis, part)

    def use(self, width: int) -> None:
        """Communicate with the ranks of ``width`` neighbouring groups from the next evaluation on.
        All of these ranks must call it.
        """
        self.ulysses, self.ring, self.world, self.in_step, self.shares = self._by_width[width]
        self.in_step.note("weights")

    @property
    def rank(self) -> int:
        return self.world.rank

    @property
    def size(self) -> int:
        return self.world.size

    @property
    def seconds(self) -> float:
        """Spent waiting for messages since ``begin``."""
        return sum(part.seconds for part in self.parts.values())

    @property
    def sent_bytes(self) -> int:
        return sum(part.sent_bytes for part in self.parts.values())

    @property
    def parts(self) -> dict[str, Exchange | Ring | ShardGather]:
        """Return what counts messages, by axis: those to gather an output's rows under ``gather``,
        those of shared weights under ``weights``.
        """
        parts: dict[str, Exchange | Ring | ShardGather] = {
            "ulysses": self.ulysses,
            "ring": self.ring,
            "gather": self.world,
        }
        if self.weights is not None:
            parts["weights"] = self.weights
        return parts

    def share_weights(self, group: dist.ProcessGroup | None) -> None:
        """Have weights gathered in ``group``, which is of the ranks of this sequence."""
        self.weights = ShardGather(group, self.rank, self.size, via_cpu=self.world.via_cpu)
        for paths in self._by_width.values():
            paths.in_step.join("weights", self.weights)
        self.in_step.note("weights")

    def _ask(self, has_failed: bool, known: int) -> tuple[bool, int]:
        """Ask all ranks of the sequence, as ``InStep`` has it."""
        if self.size == 1:
            return has_failed, known
        told = torch.tensor([int(has_failed), known, -known], device=self.device_type)
        any_failed, most, least = self.world.largest(told).tolist()
        return bool(any_failed), most if most == -least else 0

    def decide(self, flag: torch.Tensor) -> None:
        """Raise Stopped, on all ranks alike, if any wishes it: ``flag`` holds all wishes."""
        self.in_step.decide(flag)

    def begin(self, attentions: int) -> None:
        """Begin an evaluation of so many attentions: set the counters to zero."""
        for part in self.parts.values():
            part.begin()
        self.stop.begin(attentions)

    def free_buffers(self) -> None:
        """Free the memory of messages. What the ranks know of them stays: it belongs to models."""
        for paths in self._by_width.values():
            for part in (paths.ulysses, paths.ring, paths.world):
                part.free_buffers()


@dataclass(frozen=True)
class Mesh:
    """One rank's place in the grid, and its communicators. ``degrees`` and ``axes`` are innermost
    first; ``link`` leads to the stages before and after, None where there is one stage. ``speeds``
    of all ranks in percent of the fastest; empty where they are alike.
    """

    rank: int
    degrees: Mapping[str, int]
    axes: Mapping[str, Axis]
    sequence: SequenceComm
    link: StageLink | None = None
    speeds: tuple[int, ...] = ()

    @property
    def sequence_ranks(self) -> range:
        """The ranks that share this one's sequence, which are numbered in a row."""
        size = self.sequence.size
        return range(self.rank - self.rank % size, self.rank - self.rank % size + size)

    @property
    def parts(self) -> dict[str, Exchange | Ring | ShardGather | StageLink]:
        """Return what counts messages since the evaluation, or the patch of it, began, by axis."""
        parts: dict[str, Exchange | Ring | ShardGather | StageLink] = {**self.sequence.parts}
        if self.link is not None:
            parts["pipefusion"] = self.link
        return parts

    @property
    def waited_s(self) -> dict[str, float]:
        """Return the seconds spent waiting for messages, by axis."""
        return {axis: part.seconds for axis, part in self.parts.items() if part.seconds}

    @property
    def sent_bytes(self) -> int:
        return sum(part.sent_bytes for part in self.parts.values())


def connect(
    degrees: Mapping[str, int],
    rank: int,
    *,
    device_type: str,
    via_cpu: bool,
    wants_stop: Callable[[], bool],
    tick: Callable[[int], None] = lambda steps: None,
    joined: Mapping[int, Mapping[str, int]] = MappingProxyType({}),
    speeds: Sequence[int] = (),
) -> Mesh:
    """Make the mesh of ``degrees`` (axis -> degree, innermost first). Every rank must call it,
    after init_process_group where there are several.

    ``joined``: the degrees where so many neighbouring groups share a sequence. ``tick`` is told how
    far a rank has come before it waits for the stage before it: further than every rank of that
    stage, however many steps theirs takes. ``speeds``: as the mesh has them.
    """
    axes = make_axes(degrees, rank)
    stages = axes["pipefusion"]
    shares = shares_of(degrees, rank, speeds)
    sequence = SequenceComm(
        *paths_of(degrees, rank, axes, via_cpu), StopFlag(wants_stop), device_type, shares
    )
    link = None
    if stages.size > 1:
        before = stages.ranks[stages.rank - 1] if stages.rank else None
        after = stages.ranks[stages.rank + 1] if stages.rank + 1 < stages.size else None
        link = StageLink(
            before,
            after,
            via_cpu=via_cpu,
            device_type=device_type,
            before_waiting=lambda: tick(stages.rank * STAGE_STEPS),
        )
    mesh = Mesh(rank, degrees, axes, sequence, link, tuple(speeds))
    open_connections(mesh, device_type)
    for width, wider in joined.items():
        axes = make_axes(wider, rank)
        sequence.join(width, *paths_of(wider, rank, axes, via_cpu), shares_of(wider, rank, speeds))
        sequence.use(width)
        open_connections(Mesh(rank, wider, axes, sequence), device_type)
    sequence.use(1)
    return mesh


def paths_of(
    degrees: Mapping[str, int], rank: int, axes: Mapping[str, Axis], via_cpu: bool
) -> tuple[Exchange, Ring, Exchange]:
    """Make the communicators of this rank's sequence. Every rank must call it."""
    ulysses, ring = axes["ulysses"], axes["ring"]
    place, size = ring.rank * ulysses.size + ulysses.rank, ring.size * ulysses.size
    return (
        Exchange(ulysses.group, ulysses.rank, ulysses.size, via_cpu=via_cpu),
        Ring(ring.group, ring.ranks, ring.rank, via_cpu=via_cpu),
        Exchange(sequence_of(degrees, rank, axes), place, size, via_cpu=via_cpu),
    )


def open_weights(mesh: Mesh) -> None:
    """Make the group in which ranks gather weights, if there is none yet. Every rank must call it.

    Only then, because NCCL takes memory of each GPU for every group. Raises RuntimeError that names
    the group.
    """
    if mesh.sequence.weights is None:
        group = sequence_group(mesh.degrees, mesh.rank)
        mesh.sequence.share_weights(group)
        if group is not None:
            token = torch.zeros(1, device=mesh.sequence.device_type)
            with naming("To gather weights,", dist.get_process_group_ranks(group)):
                dist.all_reduce(token, group=group)
                token.item()


def open_connections(mesh: Mesh, device_type: str) -> None:
    """Send a first message in each group, outermost axis first, then from each stage to the next.
    Every rank must call it.

    Else the first evaluation would, and a failure there has no name. Raises RuntimeError that names
    the group.
    """
    token = torch.zeros(1, device=device_type)
    for axis, place in [*mesh.axes.items()][::-1]:
        if place.group is not None and place.size > 1:
            with naming(f"The {axis} group of", place.ranks):
                dist.all_reduce(token, group=place.group)
                token.item()  # NCCL tells of a failure here
    if mesh.axes["ulysses"].size > 1 < mesh.axes["ring"].size:
        with naming("The sequence of", mesh.sequence_ranks):
            dist.all_reduce(token, group=mesh.sequence.world.group)
            token.item()
    stages = mesh.axes["pipefusion"]
    for before, after in pairwise(stages.ranks):
        if mesh.rank in (before, after):
            with naming("The stages of", (before, after)):
                dist.send(token, after) if mesh.rank == before else dist.recv(token, before)
                token.item()


@contextmanager
def naming(what: str, ranks: Sequence[int]) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:  # torch's own for whatever a backend meets
        raise RuntimeError(f"{what} ranks {', '.join(map(str, ranks))} could not connect: {error}") from error


def make_axes(degrees: Mapping[str, int], rank: int) -> dict[str, Axis]:
    """Return each axis and this rank's place on it. Process groups are made outermost axis first,
    and only along axes of a sequence: stages send from rank to rank, and groups of ranks that
    compute forwards of their own send each other nothing.
    """
    outermost_first = tuple(degrees)[::-1]
    grid = torch.arange(prod(degrees.values())).view([degrees[axis] for axis in outermost_first])
    place = (grid == rank).nonzero()[0].tolist()
    axes = {}
    for dim, axis in enumerate(outermost_first):
        along = tuple(
            grid[tuple(slice(None) if other == dim else here for other, here in enumerate(place))].tolist()
        )
        lines = grid.movedim(dim, -1).reshape(-1, degrees[axis]).tolist()
        axes[axis] = Axis(place[dim], along, own_group(lines, rank) if axis in OF_A_SEQUENCE else None)
    return {axis: axes[axis] for axis in degrees}


def sequence_of(degrees: Mapping[str, int], rank: int, axes: Mapping[str, Axis]) -> dist.ProcessGroup | None:
    """Return the process group of the ranks that share this rank's sequence; it is that of an axis
    where the sequence has no other, and made where it has two. Every rank must call it.
    """
    size, ranks = prod(degrees[axis] for axis in OF_A_SEQUENCE), prod(degrees.values())
    if size == ranks:
        return dist.group.WORLD
    along = [axes[axis].group for axis in OF_A_SEQUENCE if degrees[axis] > 1]
    if len(along) < len(OF_A_SEQUENCE):
        return along[0] if along else None
    return own_group([list(range(first, first + size)) for first in range(0, ranks, size)], rank)


def own_group(members: Sequence[list[int]], rank: int) -> dist.ProcessGroup | None:
    """Make a process group of each of ``members``, in their order; return that of ``rank``. None
    where ranks are alone. Every rank must call it.
    """
    own = None
    for ranks in members if len(members[0]) > 1 else ():
        group = dist.new_group(ranks)
        own = group if rank in ranks else own
    return own if isinstance(own, dist.ProcessGroup) else None
