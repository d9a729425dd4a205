"""Time ranks of a layout on a released model with random weights: one alone, whose messages nobody
takes, or all of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple
from unittest.mock import patch

import torch

from ...parallel_runtime.comm.exchange import Exchange
from ...parallel_runtime.comm.mesh import Mesh, connect
from ...parallel_runtime.comm.traffic import Mover
from ...parallel_runtime.families import plan_for
from ...parallel_runtime.families.catalogue import RELEASED
from ...parallel_runtime.families.sample import Released, Size
from ...parallel_runtime.forward import forward_name
from ...parallel_runtime.layout import Layout
from ...parallel_runtime.methods.recordings import Recordings
from ...parallel_runtime.methods.usp import SequenceParallel
from ...parallel_runtime.patches import Part
from ...parallel_runtime.planner.cost import costs_of, launches_of
from ...parallel_runtime.planner.dry_run import count_evaluation
from ...parallel_runtime.planner.evaluation_count import Whole
from ...parallel_runtime.planner.host_call import kernels_that_count
from ...parallel_runtime.planner.job import Job
from ...parallel_runtime.planner.machine import RankDevice, machine_box
from ...parallel_runtime.planner.prediction import predict
from ...parallel_runtime.wire.segment import mib
from ..dry_run.ranks import joined
from ..dry_run.released_model import DryModel, arguments_of, empty_model, latent_shapes
from .place import Broken, Line, Place, messages_on, milliseconds, on_ranks, use_host, wait

MODEL = next(name for name, (_, one) in RELEASED.items() if one.title)  # of the documents' table
SMALL = (64, 64, 1)  # pixels: a GPU computes them faster than a CPU starts the kernels
ROOM = 30 << 30  # bytes, under which the model has fewer blocks
BOUND = 0.85  # of the time: what a CPU takes alone


class Taken(NamedTuple):
    """One evaluation: its time, that of its kernels, their number, and what the CPU takes to start
    them. ``pieces``: of the same as CUDA graphs between messages, None if none are recorded.
    """

    ms: float
    busy_ms: float
    kernels: int
    starting_ms: float
    pieces: Replayed | None = None


class Replayed(NamedTuple):
    """``starting_ms``: what the CPU takes for the graphs and what lies between them;
    ``recording_ms``: of the evaluation behind which they were recorded, with that. ``is_same``:
    whether all that was held to what kernels compute was equal to the bit.
    """

    ms: float
    starting_ms: float
    recording_ms: float
    graphs: int
    messages: int
    nbytes: int
    is_same: bool


class Tried:
    """The model with random weights on ``device``, and its arguments, large and small."""

    def __init__(self, place: Place, device: torch.device):
        use_host(place)
        self.sample, released = RELEASED[MODEL]
        self.device, self.dtype = device, torch.float32 if place.is_tiny else torch.bfloat16
        self.released, self.rounds = sized(released, place, device), place.rounds(9)
        self.model: Any = empty_model(self.sample, self.released, self.dtype, device)
        with torch.inference_mode():
            for weight in self.model.diffusion_model.parameters():
                weight.normal_(0.0, 0.02)
        self.transformer = self.model.diffusion_model
        self.usual, self.small = (self._arguments(extent) for extent in (self.released.extent, SMALL))

    def _arguments(self, extent: tuple[int, int, int]) -> dict[str, Any]:
        shapes = latent_shapes(self.model, self.released, extent)
        made = arguments_of(self.model, self.sample, self.released, shapes, self.device)
        return {name: value.to(self.dtype) if is_number(value) else value for name, value in made.items()}

    def taken(self, mesh: Mesh | None) -> Taken:
        """``mesh``: of this rank; None for the model as ComfyUI runs it."""
        with torch.inference_mode(), self._evaluating(mesh) as evaluate:
            if not bool(evaluate(self.usual).isfinite().all()):
                raise Broken("an evaluation has numbers that are not finite")
            large = milliseconds(lambda: evaluate(self.usual), self.device, self.rounds)
            starting = []
            for _ in range(self.rounds + 2):
                wait(self.device)
                began = perf_counter()
                evaluate(self.small)
                starting.append(1e3 * (perf_counter() - began))
            busy, kernels = profiled(lambda: evaluate(self.usual), self.device)
        pieces = None
        if mesh is not None and mesh.sequence.device.type == "cuda":
            with torch.inference_mode():
                pieces = self._replayed(mesh)
        return Taken(large, busy, kernels, median(starting[2:]), pieces)

    def _replayed(self, mesh: Mesh) -> Replayed:
        recordings = Recordings(self.transformer, mesh.sequence, lambda: None, worth=1)

        def timed() -> float:
            wait(self.device)
            began = perf_counter()
            evaluate(self.usual)
            return 1e3 * (perf_counter() - began)

        with self._evaluating(mesh, recordings) as evaluate:
            computed = evaluate(self.usual)
            recordings.is_wanted = True
            recording = timed()
            if not recordings.recorded:
                raise Broken("no pieces are recorded: the log says why")
            (found,) = recordings.recorded.values()
            replays = [timed() for _ in range(2 + self.rounds)]
            same = torch.equal(evaluate(self.usual), computed) and bool(recordings.recorded)
            ms = milliseconds(lambda: evaluate(self.usual), self.device, self.rounds)
        return Replayed(
            ms,
            median(replays[2:]),
            recording,
            sum(one.graph is not None for one in found.pieces),
            sum(bool(one.sent) for one in found.pieces),
            found.nbytes,
            same,
        )

    @contextmanager
    def _evaluating(self, mesh: Mesh | None, recordings: Recordings | None = None) -> Iterator[Any]:
        forward = getattr(self.transformer, forward_name(self.transformer))
        if mesh is None:
            yield lambda arguments: forward(**arguments)
            return
        plan = plan_for(type(self.transformer))
        assert plan is not None
        method = SequenceParallel(self.transformer, plan, mesh.sequence)
        method.attach()

        def evaluate(arguments: dict[str, Any]) -> Any:
            method.begin(Part(1, 0))
            if recordings is None:
                return method.forward(forward, dict(arguments), 1)
            compute = partial(method.forward, forward, number=1)
            return recordings.evaluate(dict(arguments), compute, method.forget)

        try:
            yield evaluate
        finally:
            method.detach()


def sized(released: Released, place: Place, device: torch.device) -> Released:
    """Return the model as large as it is where there is room for it."""
    if place.is_tiny:
        size = Size(heads=8, head_dim=32, blocks=(1, 1))
        return replace(released, size=size, text=32, extent=(128, 128, 1))
    if torch.cuda.mem_get_info(device)[0] > ROOM:
        return released
    return replace(released, size=replace(released.size, blocks=(3, 6)))


def is_number(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def profiled(act: Any, device: torch.device) -> tuple[float, int]:
    """Return the milliseconds of a device's kernels, and how many there are; on a CPU, of
    operations that call no other.
    """
    kinds = [torch.profiler.ProfilerActivity.CPU]
    if device.type == "cuda":
        kinds.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=kinds) as profile:
        act()
        wait(device)
    events = profile.events() or ()
    if device.type == "cuda":
        own = [one for one in events if one.device_type.name == "CUDA"]
        return sum(one.device_time_total for one in own) / 1e3, len(own)
    own = [one for one in events if not one.cpu_children and one.name.startswith("aten::")]
    return sum(one.cpu_time_total for one in own) / 1e3, len(own)


@contextmanager
def nothing_comes() -> Iterator[None]:
    """Have what arrives be zeros, where no other rank is: nobody wishes to stop, or differs."""
    real = Mover._buffer

    def zeros(self: Mover, *args: Any) -> torch.Tensor:
        return real(self, *args).zero_()

    with patch.object(Mover, "_buffer", zeros), patch.object(Exchange, "largest", lambda _, flag: flag):
        yield


def alone(place: Place) -> Iterator[Line]:
    """One rank of each layout by itself."""
    tried = Tried(place, place.own())
    whole = None if place.on_cpu else whole_of(tried.released)
    layouts = [Layout(), *(Layout(**{axis: ranks}) for axis in ("ulysses", "ring") for ranks in (2, 4, 8))]
    for layout in (*layouts[:2], layouts[5]) if place.is_tiny else layouts:
        shared = layout.world_size > 1
        with nothing_comes() if shared else nullcontext(), joined(layout, 0) as mesh:
            mesh.sequence.device = place.own()
            yield line_of(layout, tried.taken(mesh if shared else None), whole)


def together(place: Place) -> Iterator[Line]:
    """All ranks of each layout of as many as there are."""
    ranks = place.ranks
    layouts = [Layout(ulysses=ranks), Layout(ring=ranks)]
    if ranks > 2 and ranks % 2 == 0:
        layouts.append(Layout(ulysses=ranks // 2, ring=2))

    def of_rank(rank: int, backend: str) -> tuple[list[Taken], Released]:
        tried, via_cpu = Tried(place, place.own(rank)), backend == "gloo" and not place.on_cpu
        how = {
            "device": messages_on(place.own(rank), via_cpu),
            "via_cpu": via_cpu,
            "wants_stop": lambda: False,
        }
        return [tried.taken(connect(layout, rank, **how)) for layout in layouts], tried.released

    _, found = on_ranks(place, ranks, False, of_rank, limit_s=240.0 * len(layouts))
    use_host(place)
    # Not before: to ask a GPU for its name takes a context, with which no process can be forked
    whole = None if place.on_cpu else whole_of(found[0][1])
    for at, layout in enumerate(layouts):
        yield line_of(layout, max(taken[at] for taken, _ in found), whole)


def whole_of(released: Released) -> Whole:
    """Count the model, as the planner does."""
    with kernels_that_count() as attention:
        dry = DryModel(RELEASED[MODEL][0], released)
        return count_evaluation(dry.model, dry.plan, dry.arguments, dry.mode, attention)


def line_of(layout: Layout, taken: Taken, whole: Whole | None) -> Line:
    """``whole``: to say beside it what the planner says of the layout on GPUs like this one."""
    unit = "operations" if whole is None else "kernels"
    each = 1e3 * taken.starting_ms / max(1, taken.kernels)
    figure = (
        f"{layout.product()}: {taken.ms:.1f} ms, {taken.kernels} {unit} in {taken.busy_ms:.1f} ms, started in"
        f" {taken.starting_ms:.1f} ms ({each:.0f} us each)"
    )
    if whole is not None:
        found = torch.cuda.get_device_properties(0)
        device = RankDevice(title=found.name, memory_bytes=found.total_memory)
        box = machine_box([device] * layout.world_size).box
        predicted = min((one.seconds for one in predict(Job(whole=whole), layout, box)), default=0.0)
        costs = costs_of(Job(whole=whole), layout, box)
        figure += f"; predicted {1e3 * predicted:.1f} ms, {launches_of(costs, 0)} kernels"
    if taken.pieces is not None:
        one = taken.pieces
        figure += (
            f"; as {one.graphs} CUDA graphs between {one.messages} messages {one.ms:.1f} ms, started in"
            f" {one.starting_ms:.1f} ms, recorded in {one.recording_ms:.0f} ms, {mib(one.nbytes)}"
        )
        if not one.is_same:
            return Line(figure, "the graphs compute other numbers", fails=True)
    bound = taken.starting_ms > BOUND * taken.ms
    return Line(figure, "bound by the CPU that starts kernels" if bound else "bound by the device")
