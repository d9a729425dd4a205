"""Measure how well the planner predicts this machine: every layout of one and two ranks, of three
families at two sizes.

Speeds of the devices come from forwards of the same models at other sizes, alone and both at once,
that of a ring's merges from one attention, whole and in two parts, those of the link from messages
of two sizes; all within the same rounds.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import fmean
from typing import Any, NamedTuple

import msgspec
import torch

from ...parallel_runtime.comm.mesh import Mesh
from ...parallel_runtime.comm.parts import to_all
from ...parallel_runtime.comm.traffic import no_wish
from ...parallel_runtime.families import plan_for
from ...parallel_runtime.families.catalogue import SAMPLES
from ...parallel_runtime.families.sample import Extent, Released, Sample, Size
from ...parallel_runtime.layout import Layout
from ...parallel_runtime.patches import Part
from ...parallel_runtime.planner.box import Box, DeviceSpeeds, Level
from ...parallel_runtime.planner.cost import MERGE_BYTES
from ...parallel_runtime.planner.evaluation_count import ITEM_BYTES as COUNTED_BYTES
from ...parallel_runtime.planner.evaluation_count import Attended, Whole
from ...parallel_runtime.planner.job import Job
from ...parallel_runtime.planner.prediction import predict
from ...parallel_runtime.stages import share_out
from .figures import CaseFigures, Estimate, Figure, Goal, Options, Round, percentile, typical
from .lockstep import Phase, Ranks, attend_with_sdpa, merge, run, timed

FAMILIES = 3
HEADS, BLOCKS = 16, 3
TEXT = 32
FRAMES = 5  # of families that make videos
ITEM_BYTES = 4  # ranks on CPUs compute in fp32
MESSAGES = (1 << 12, 1 << 22)  # bytes
SEQUENCES = (Layout(ulysses=2), Layout(ring=2))
STAGES = Layout(pipefusion=2)
EVALUATIONS = 4  # of a run in stages, of which the first is whole
GROUPS = (Layout(cfg=2), Layout(data=2))  # forwards of their own, both at once
MOVED = 2 * 4 << 20  # bytes that doubling a million numbers moves
GOALS = {"mean_error": 0.10, "largest_error": 0.25, "regret": 0.03}
DRAWS = 100
PLENTY = 1e15

Wholes = Mapping[str, Mapping[int, Whole]]  # model -> side -> counts


class Sides(NamedTuple):
    """Pixels of the pictures: of those that are predicted; of those that speeds come from, of the
    smallest of which most is beside what blocks compute; of the one whose attention is cut.
    """

    predicted: tuple[int, ...] = (320, 448)
    calibrated: tuple[int, ...] = (96, 256, 384, 512)
    in_parts: int = 384


SIDES, LEAST = Sides(), Sides((96,), (64,), 64)


class Case(NamedTuple):
    """A layout of a job, with the seconds that were predicted and those that it took."""

    job: str
    layout: Layout
    predicted: float
    achieved: float


@dataclass(frozen=True, kw_only=True)
class Speeds:
    """What was measured. ``matmul`` and ``attention``: FLOPs per second of a model's forward while
    all ranks compute; ``beside_s``: of each block beside those; ``memory``: bytes per second; of
    what the parts of a ring's attention take beyond one over all keys, ``merge``; of the link
    between two ranks ``latency_s`` and ``link``, bytes per second.
    """

    matmul: float
    attention: float
    beside_s: float
    memory: float
    merge: float
    latency_s: float
    link: float

    def box(self, ranks: int, item_bytes: int) -> Box:
        """Return so many ranks that send elements of ``item_bytes``; counts are of bf16."""
        device = DeviceSpeeds(
            name="here",
            matmul_flops_per_s=self.matmul,
            attention_flops_per_s=self.attention,
            memory_bytes=PLENTY,
            memory_bytes_per_s=self.memory,
            beside_s=self.beside_s,
            merge_bytes_per_s=self.merge,
        )
        level = Level(ranks=1, bytes_per_s=self.link * COUNTED_BYTES / item_bytes, latency_s=self.latency_s)
        return Box(
            name="here",
            devices=(device,) * ranks,
            levels=(level,),
            host_bytes_per_s=PLENTY,
            hop_s=0.0,
            overlaps=False,
        )


def tried(families: int) -> list[tuple[Sample, Released]]:
    """Return a small model of so many families whose released ones the dry run knows."""
    found: dict[str, tuple[Sample, Released]] = {}
    for sample in SAMPLES.values():
        for released in sample.form.released[:1]:
            size = sample.tiny.size(HEADS)
            size = Size(heads=HEADS, head_dim=size.head_dim, blocks=(BLOCKS,) * len(size.blocks))
            frames = FRAMES if released.extent[2] > 1 else 1
            small = Released(
                name=sample.name,
                size=size,
                text=TEXT,
                extent=(SIDES.predicted[0], SIDES.predicted[0], frames),
            )
            found.setdefault(sample.form.config_class, (sample, small))
    return list(found.values())[:families]


class Forwards:
    """One process's forwards of a model at one size: whole, and under a method."""

    def __init__(self, model: Any, sample: Sample, small: Released, extent: Extent):
        from ...parallel_runtime.forward import forward_name
        from ..dry_run.ranks import parts_of
        from ..dry_run.released_model import DryModel, arguments_of, latent_shapes

        dry = DryModel(sample, small, extent)
        self.whole = dry.whole()
        self.parts = parts_of(dry, self.whole, STAGES, patches=0)
        self._transformer = model.diffusion_model
        shapes = latent_shapes(model, small, extent)
        self._arguments = arguments_of(model, sample, small, shapes, torch.device("cpu"))
        self._forward = getattr(self._transformer, forward_name(self._transformer))

    def alone(self) -> float:
        return timed(lambda: self._forward(**self._arguments))

    def rank(self, comm: Any) -> Callable[[], float]:
        """Return a call that times the evaluation as this rank of the mesh of ``comm``."""
        from .forwards import OwnRank

        rank = OwnRank(self._transformer, self._forward, comm)

        def through() -> float:
            with rank.attached():
                return timed(lambda: rank.evaluate(self._arguments))

        return through

    def in_stages(self, stage: OwnStage) -> float:
        """Seconds of a run in patches, in the mean of its evaluations."""
        return timed(lambda: stage.sample(self._arguments, self.parts)) / EVALUATIONS


class Attention:
    """One process's part of a model's attention: half of the queries, to all keys."""

    def __init__(self, attended: Attended):
        queries, keys = (
            (1, attended.heads, tokens, attended.head_dim)
            for tokens in (attended.tokens // 2, attended.tokens)
        )
        self._q, self._k, self._v = torch.randn(queries), torch.randn(keys), torch.randn(keys)

    def whole(self) -> float:
        import torch.nn.functional as F

        return timed(lambda: F.scaled_dot_product_attention(self._q, self._k, self._v))

    def in_parts(self) -> float:
        """Seconds of attending to one half of the keys after the other, as in a ring of two."""
        from ...parallel_runtime.attention.kernels import merge_partials, partial_attention

        keys, values = (one.chunk(2, dim=2) for one in (self._k, self._v))
        halves = [(k.contiguous(), v.contiguous()) for k, v in zip(keys, values, strict=True)]
        return timed(lambda: merge_partials(*(partial_attention(self._q, k, v, None) for k, v in halves)))


class OwnStage:
    """One process's stage of a model. As the method's rank it has got all requests of a run."""

    def __init__(self, transformer: Any, mesh: Mesh, block_flops: Sequence[int]):
        from ...parallel_runtime.forward import forward_name
        from ...parallel_runtime.methods.factory import make_method
        from ..dry_run.ranks import IdleRank

        plan = plan_for(type(transformer))
        assert plan is not None
        self._rank, self._run = IdleRank(()), 0
        self._forward = getattr(transformer, forward_name(transformer))
        sizes = [stage.size for stage in share_out(block_flops, STAGES.pipefusion)]
        self._method = make_method(transformer, plan, mesh, self._rank, sizes)
        self._method.attach()

    def sample(self, arguments: dict[str, Any], parts: Sequence[Part]) -> None:
        """Compute a run of ``EVALUATIONS``: all tokens first, then patches."""
        self._run += 1
        whole, *patches = (part._replace(run=self._run) for part in parts)
        self._rank.parts = [whole, *patches * (EVALUATIONS - 1)]
        for at, part in enumerate(self._rank.parts):
            self._rank.at = at
            self._method.begin(part)
            self._method.forward(self._forward, dict(arguments), at + 1)
        self._method.end_run()


def measure(ranks: Ranks, rounds: int) -> dict[str, Any]:
    """Time every case in each round. Return the rounds, and the counts of each model and size."""
    torch.set_num_threads(max(1, len(ranks.own_cores)))  # as a pool's rank on the CPU
    attend_with_sdpa()
    comms = [ranks.connect(layout).sequence for layout in SEQUENCES]
    stages = ranks.connect(STAGES)
    phases: dict[str, Phase] = {}
    counted: dict[str, dict[int, Forwards]] = {}
    families, sides = ranks.choose((FAMILIES, SIDES), (1, LEAST))
    for sample, small in tried(families):
        model = sample.form.random_model(small.size).model
        frames = small.extent[2]
        counted[sample.name] = {
            side: Forwards(model, sample, small, (side, side, frames))
            for side in (*sides.predicted, *sides.calibrated)
        }
        whole = counted[sample.name][sides.predicted[0]].whole
        attention = Attention(counted[sample.name][sides.in_parts].whole.attended[0])
        phases[f"{sample.name} attention"] = Phase(attention.whole)
        phases[f"{sample.name} attention in parts"] = Phase(attention.in_parts)
        stage = OwnStage(
            sample.form.random_model(small.size).model.diffusion_model, stages, whole.block_flops
        )
        for side, forwards in counted[sample.name].items():
            phases[f"{sample.name} {side} alone"] = Phase(forwards.alone, alone=True)
            phases[f"{sample.name} {side} both"] = Phase(forwards.alone)
            for layout, comm in zip(SEQUENCES, comms, strict=True) if side in sides.predicted else ():
                phases[f"{sample.name} {side} {layout.product()}"] = Phase(forwards.rank(comm))
            if side in sides.predicted:
                phases[f"{sample.name} {side} {STAGES.product()}"] = Phase(
                    lambda forwards=forwards, stage=stage: forwards.in_stages(stage)
                )
    phases |= of_link(comms[0].ulysses)
    return {
        "rounds": ranks.measure(phases, rounds),
        "wholes": {
            name: {side: asdict(one.whole) for side, one in sizes.items()} for name, sizes in counted.items()
        },
    }


def of_link(exchange: Any) -> dict[str, Phase]:
    """Return the phases that a link's speed and the memory's are measured by."""

    def message(tensor: torch.Tensor) -> Callable[[], float]:
        into = tensor.new_empty(2, *tensor.shape)
        return lambda: timed(lambda: exchange.all_to_all([to_all(tensor, 2)], [into], no_wish))

    some = torch.ones(1 << 20)
    messages = {f"message {nbytes}": Phase(message(torch.ones(nbytes // 4))) for nbytes in MESSAGES}
    return {**messages, "memory": Phase(lambda: timed(lambda: some * 2.0), alone=True)}


def wholes_of(found: dict[str, dict[str, Any]]) -> Wholes:
    """Return the counts of each model and size that were json."""
    return {model: counts_of(sizes) for model, sizes in found.items()}


def counts_of(found: Mapping[str, Any]) -> dict[int, Whole]:
    return {int(size): msgspec.convert(counted, Whole) for size, counted in found.items()}


@dataclass(frozen=True)
class Timed:
    """One forward of a whole model, and the seconds that it took."""

    matmul_flops: float
    attention_flops: float
    blocks: int
    seconds: float

    @classmethod
    def of(cls, whole: Whole, seconds: float) -> Timed:
        attention = sum(one.flops for one in whole.attended)
        return cls(whole.flops - attention, attention, len(whole.block_flops), seconds)


def speeds_of(timed: Sequence[Timed]) -> tuple[float, float, float]:
    """Return the FLOPs per second of matrix products and of attention, and the seconds of each
    block beside them, that come nearest to what was measured, by the sum of squared relative
    errors. None is less than 0 and no speed infinite: where times do not tell two speeds apart, it
    is one for both, and where they tell nothing of blocks, these take no time.
    """
    names = "matmul_flops", "attention_flops", "blocks"
    matmul, attention, blocks = ([getattr(one, name) / one.seconds for one in timed] for name in names)
    together, ones = (
        [a + b for a, b in zip(matmul, attention, strict=True)],
        torch.ones(len(timed), 1, dtype=torch.float64),
    )
    found: list[tuple[float, tuple[float, float, float]]] = []
    for speeds, others in (
        ([matmul, attention], [blocks]),
        ([matmul, attention], []),
        ([together], [blocks]),
        ([together], []),
    ):
        columns = torch.tensor([*speeds, *others], dtype=torch.float64).T
        scale = columns.amax(0).clamp(min=1e-30)
        if torch.linalg.matrix_rank(columns / scale, rtol=1e-6) < columns.shape[1]:
            continue
        scaled = torch.linalg.lstsq(columns / scale, ones).solution
        error, fit = float((columns / scale @ scaled - ones).square().sum()), (scaled[:, 0] / scale).tolist()
        if min(fit) > 0:
            found.append(
                (round(error, 12), (1 / fit[0], 1 / fit[len(speeds) - 1], fit[-1] if others else 0.0))
            )
    return min(found, key=lambda one: one[0])[1]


def link_of(few: tuple[int, float], many: tuple[int, float]) -> tuple[float, float]:
    """Return latency and bytes per second of a link, of two messages (bytes, seconds)."""
    (few_bytes, few_s), (many_bytes, many_s) = few, many
    speed = (many_bytes - few_bytes) / max(1e-9, many_s - few_s)
    return max(0.0, few_s - few_bytes / speed), speed


def speeds(
    rounds: Sequence[Round], wholes: Mapping[int, Whole], model: str, phase: str, sides: Sides = SIDES
) -> Speeds:
    """Return this machine's speeds for a model, of forwards ``alone`` or ``both`` at once."""
    timed = [Timed.of(wholes[side], typical(rounds, f"{model} {side} {phase}")) for side in sides.calibrated]
    found = measured(timed, rounds)
    one, more_s = (
        wholes[sides.in_parts].attended[0],
        typical(rounds, f"{model} attention in parts") - typical(rounds, f"{model} attention"),
    )
    merge = MERGE_BYTES * (one.tokens // 2) * one.heads * one.head_dim / max(1e-9, more_s)
    return replace(found, merge=min(found.memory, merge))


def measured(timed: Sequence[Timed], rounds: Sequence[Round]) -> Speeds:
    """Return the speeds of forwards, and of the link and the memory as rounds have them; merges
    move what the memory does.
    """
    matmul, attention, beside_s = speeds_of(timed)
    few, many = ((nbytes, typical(rounds, f"message {nbytes}")) for nbytes in MESSAGES)
    latency_s, link = link_of(few, many)
    memory = MOVED / typical(rounds, "memory")
    return Speeds(
        matmul=matmul,
        attention=attention,
        beside_s=beside_s,
        memory=memory,
        merge=memory,
        latency_s=latency_s,
        link=link,
    )


def cases(rounds: Sequence[Round], wholes: Wholes, sides: Sides = SIDES) -> list[Case]:
    """Predict every layout of every model and size, and say what was achieved."""
    found = []
    for model, of_model in wholes.items():
        alone, both = (speeds(rounds, of_model, model, phase, sides) for phase in ("alone", "both"))
        for side in sides.predicted:
            for layout in (Layout(), *SEQUENCES, *GROUPS, STAGES):
                job = Job(
                    whole=of_model[side], evaluations=EVALUATIONS, branches=layout.cfg, batch=layout.data
                )
                box = (both if layout.world_size > 1 else alone).box(layout.world_size, ITEM_BYTES)
                seconds = min(one.seconds for one in predict(job, layout, box))
                phase = (
                    "alone" if layout.world_size == 1 else "both" if layout in GROUPS else layout.product()
                )
                found.append(
                    Case(f"{model}_{side}", layout, seconds, typical(rounds, f"{model} {side} {phase}"))
                )
    return found


def summed_up(found: Sequence[Case]) -> dict[str, float]:
    """Return how far predictions are off, in parts of what was achieved, and how much slower than
    the fastest exact layout the one is that they choose for one forward, at worst.
    """
    errors = [abs(case.predicted / case.achieved - 1) for case in found]
    of_one = [
        [case for case in found if case.job == job and case.layout not in (*GROUPS, STAGES)]
        for job in {case.job for case in found}
    ]
    regret = max(
        min(job, key=lambda case: case.predicted).achieved / min(case.achieved for case in job) - 1
        for job in of_one
    )
    return {"mean_error": fmean(errors), "largest_error": max(errors), "regret": regret}


def bench(options: Options) -> Iterator[Figure]:
    by_rank = run(options, 2, "plan:measure", rounds=options.rounds)
    rounds, wholes = merge([rank["rounds"] for rank in by_rank]), wholes_of(by_rank[0]["wholes"])
    sides = options.choose(SIDES, LEAST)
    yield from figures(rounds, wholes, sides)


def figures(rounds: Sequence[Round], wholes: Wholes, sides: Sides = SIDES) -> Iterator[Figure]:
    found = cases(rounds, wholes, sides)
    for case in found:
        made = CaseFigures("plan", case.job)
        yield made.counted(case.layout.product(), case.predicted / case.achieved, "ratio")
    draw = random.Random(0)
    draws = DRAWS if len(rounds) > 1 else 1
    drawn = [summed_up(cases(draw.choices(rounds, k=len(rounds)), wholes, sides)) for _ in range(draws)]
    for metric, value in summed_up(found).items():
        low, high = (percentile([one[metric] for one in drawn], share) for share in (0.05, 0.95))
        yield Figure("plan", "all", metric, Estimate(value, low, high), "ratio", Goal(at_most=GOALS[metric]))
