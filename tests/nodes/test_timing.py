"""How much faster a pool was: the steps of its runs against those of one GPU, for the same model
and size.
"""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from pipemesh.nodes.auto.seam import ARGUMENTS, GuiderSeam, with_argument
from pipemesh.nodes.bounded_dict import Latest
from pipemesh.nodes.status.sums import times_as_long
from pipemesh.nodes.timing import Speed, StepTimes
from pipemesh.parallel_runtime.client.run import Evaluation, Queued, Run
from pipemesh.parallel_runtime.layout import Layout
from pipemesh.parallel_runtime.occupancy import Span
from pipemesh.parallel_runtime.patches import Part
from pipemesh.pool.devices import Device, Placement, place

from ..kit.fake_pools import cpus
from ..kit.models import run

SIZE = torch.zeros(1, 16, 8, 10)


def stand_in(file="flux.safetensors", dtype="default", cfg=1.0, tokens=256, others=(), **cond):
    patcher = SimpleNamespace(
        cached_patcher_init=(None, (file, dtype)), get_additional_models_with_key=lambda key: others
    )
    conds = {"positive": [{"cross_attn": torch.zeros(1, tokens, 8), **cond}]}
    return SimpleNamespace(model_patcher=patcher, cfg=cfg, original_conds=conds)


@pytest.fixture
def clock():
    return SimpleNamespace(now=0.0)


@pytest.fixture
def times(clock):
    return StepTimes(clock=lambda: clock.now)


def sampled(times, clock, step_s, *, pool_run=None, first_s=100.0, steps=4, **what):
    """A sampling whose first step waits for a load."""
    watched = times.watch(stand_in(**what), SIZE, None, None)
    for step in range(steps):
        clock.now += first_s if step == 0 else step_s
        watched(step)
    watched.run, watched.is_on_one_gpu = pool_run, watched.is_on_one_gpu and pool_run is None
    times.note(watched)


def test_a_run_is_compared_with_one_gpu_for_the_same_model_and_size_and_the_first_step_does_not_count(
    times, clock
):
    ours, short = Run(), Run()
    sampled(times, clock, 0.5, pool_run=ours)
    assert times.speed_of(ours) == Speed(0.5) and times.speed_of(ours).ratio is None
    sampled(times, clock, 1.5)
    assert times.speed_of(ours) == Speed(0.5, 1.5, measured=True)
    assert times.speed_of(ours).ratio == 3.0
    sampled(times, clock, 0.5, pool_run=short, steps=1)
    assert times.speed_of(short) is None, "one step has no time"


OTHERS = (
    {"file": "wan.safetensors"},
    {"dtype": "fp8"},
    {"cfg": 4.0},
    {"tokens": 512},
    {"control": "a net"},
    {"others": ("a second GPU",)},
)


@pytest.mark.parametrize("other", OTHERS, ids=repr)
def test_another_model_or_another_way_to_load_it_or_to_ask_it_is_no_measure(times, clock, other):
    ours = Run()
    sampled(times, clock, 0.5, pool_run=ours)
    sampled(times, clock, 1.5, **other)
    assert times.speed_of(ours) == Speed(0.5)


def test_what_was_never_timed_is_predicted_and_each_of_several_images_at_once_takes_its_part_of_a_step(
    times, clock
):
    """One that was sampled ahead took none."""

    def speed(step_s, longer, *images, **run):
        ran = Run(evaluations=[Evaluation(1.0, 0.0, 0.0, 0, images=one) for one in images])
        ran.queued = run.get("queued", ran.queued)
        times._predict = lambda run: longer
        sampled(times, clock, step_s, pool_run=ran)
        return times.speed_of(ran)

    assert speed(0.5, 4.0) == Speed(0.5, 2.0, measured=False)
    assert speed(1.0, 1.9, 2) == Speed(0.5, 0.95, measured=False)
    assert speed(1.0, 1.9, 2, 2, 1) is None, "the queue was given up"
    assert speed(0.001, 1.9, queued=Queued(0)) is None


GPUS = (Device("cuda:0", "GPU-0"), Device("cuda:1", "GPU-1"))


def placed(backend="gloo", gpus=GPUS, **degrees):
    return place(Layout(**degrees), "auto", backend, gpus)


def evaluated(began, seconds, *busy, waited=0.0, part=None):
    """An evaluation whose ranks were at work so long, and waited for others beside that."""
    spans = {rank: Span(began, began + each + waited, waited) for rank, each in enumerate(busy)}
    return Evaluation(seconds, 0.0, waited, 0, began=began, part=part, spans=spans)


@pytest.mark.parametrize(
    ("placement", "expected"),
    [
        (placed(ulysses=2), 1.6),
        (placed(gpus=(), ulysses=2), 0.8),  # ranks on the CPU have half of its cores each
        (placed("nccl", ulysses=2), None),
        (placed("nccl", cfg=2), 1.6),  # groups of one rank send nothing
        (Placement(layout=Layout(ulysses=2), devices=GPUS[:1] * 2, backend="gloo"), 0.8),
    ],
)
def test_one_device_would_compute_what_all_ranks_did_and_wait_for_none(placement, expected):
    evaluations = [evaluated(number, 1.0, 0.8, 0.8, waited=0.2) for number in range(4)]
    found = times_as_long(evaluations, placement)
    assert found == (expected and pytest.approx(expected))


def test_the_samplers_own_time_is_the_same_on_one_device_and_a_first_evaluation_does_not_count():
    run = [
        evaluated(-900, 900.0, 900.0, 900.0),
        *(evaluated(10 * number, 5.0, 5.0, 5.0) for number in range(3)),
    ]
    assert times_as_long(run, placed(ulysses=2)) == pytest.approx((10 + 30) / 25)


def test_patches_that_overlap_are_added_up():
    part = Part(1, 0, (0, 10, False))
    patches = [
        replace(
            evaluated(began, 2.0, part=part),
            spans={rank: Span(began + rank, began + rank + 1, 0.0) for rank in (0, 1)},
        )
        for began in range(4)
    ]
    assert times_as_long(patches, placed(pipefusion=2)) == pytest.approx(8 / 5)
    assert times_as_long([], placed(pipefusion=2)) is None


def test_no_more_kinds_are_remembered_than_can_be_of_use():
    kept = Latest(3)
    for kind in "abacd":
        kept[kind] = kind.upper()
    assert list(kept.items()) == [("a", "A"), ("c", "C"), ("d", "D")]


def test_an_argument_is_handed_over_as_the_other_was():
    def handed_over(*args, **kwargs):
        return with_argument(ARGUMENTS, "callback", "ours", args, kwargs)

    assert handed_over(1, 2, 3, 4, None, "theirs", True) == ((1, 2, 3, 4, None, "ours", True), {})
    assert handed_over(1, 2, callback="theirs") == ((1, 2), {"callback": "ours"})
    assert handed_over(1, 2) == ((1, 2), {"callback": "ours"})


def test_stock_samplings_and_those_of_a_pool_are_timed_where_auto_mode_takes_hold(pair, client):
    times = StepTimes()
    seam = GuiderSeam(lambda guider, run: run(), lambda guider: None, times)
    seam.install()
    try:
        for model in pair:
            run(model)
    finally:
        seam.remove()
    stepped = times.stepped(client.runs.last)
    assert stepped.done == stepped.total > 1 and stepped.left_s == 0
    speed = times.speed_of(client.runs.last)
    assert speed.measured and speed.ratio > 0
    waited = times.prompts.of(client.runs.last, speed.ratio)
    assert waited.loading_s > 0 and waited.first_s > 0 and waited.at_most > waited.speedup > 0
    assert times_as_long(client.runs.last.evaluations, cpus(2)) > 0
