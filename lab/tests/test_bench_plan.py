"""The planner's bench: speeds from measured times, and predictions held to what was achieved."""

import json
from dataclasses import asdict, replace
from unittest.mock import create_autospec

import pytest
from pipemesh.lab.bench import plan as bench
from pipemesh.lab.bench.plan import Speeds, Timed, link_of, speeds_of
from pipemesh.lab.boxes import published_box
from pipemesh.lab.commands.parity import stock_model
from pipemesh.lab.dry_run.ranks import WARM_UP
from pipemesh.parallel_runtime.layout import Layout
from pipemesh.parallel_runtime.methods.pipefusion.stage import PipeFusion
from pipemesh.parallel_runtime.patches import Part
from pipemesh.parallel_runtime.planner.job import Job
from pipemesh.parallel_runtime.planner.prediction import predict
from pipemesh.tests.kit.planned import attention_alone, counts


@pytest.mark.parametrize("beside_s", [1e-4, 0.0])
def test_speeds_are_those_that_the_times_were_made_of(beside_s):
    measured = ((1e8, 1e6), (1e9, 1e8), (4e9, 1e9), (9e9, 6e9))
    made = [Timed(a, b, 7, a / 2e12 + b / 5e11 + 7 * beside_s) for a, b in measured]
    assert speeds_of(made) == pytest.approx((2e12, 5e11, beside_s), rel=1e-6, abs=1e-9)


@pytest.mark.parametrize("times", [[(1e9, 2e9), (2e9, 4e9)], [(1e9, 0.0)], [(1e9, 1e9), (1e9, 9e9)]])
def test_times_that_do_not_tell_two_speeds_apart_give_one(times):
    """In proportion, without attention, or faster with more of it."""
    made = [Timed(matmul, attention, 3, 1.0 / (index + 1)) for index, (matmul, attention) in enumerate(times)]
    matmul, attention, beside_s = speeds_of(made)
    assert 0 < matmul == attention < 1e12 and beside_s == 0


def test_a_link_has_the_latency_and_the_speed_of_its_messages():
    assert link_of((4096, 1e-4 + 4096 / 1e9), (1 << 22, 1e-4 + (1 << 22) / 1e9)) == pytest.approx((1e-4, 1e9))
    latency_s, speed = link_of((4096, 1e-4), (1 << 22, 1e-4))  # too fast for the clock
    assert latency_s >= 0 < speed


def test_a_box_of_measured_speeds_takes_the_measured_times():
    speeds = Speeds(
        matmul=2e12, attention=5e11, beside_s=1e-3, memory=1e11, merge=1e10, latency_s=1e-4, link=1e9
    )
    whole = counts("flux 1024")
    timed = Timed.of(whole, 1.0)
    alone = predict(Job(whole=whole), Layout(), speeds.box(1, 2))[0]
    due = timed.matmul_flops / 2e12 + timed.attention_flops / 5e11 + timed.blocks * 1e-3
    assert alone.seconds == pytest.approx(due)
    one = Job(whole=attention_alone(1024))
    sent = [predict(one, Layout(ulysses=2), speeds.box(2, size))[0].parts["ulysses"] for size in (2, 4)]
    assert sent[1] - 2e-4 == pytest.approx(2 * (sent[0] - 2e-4))  # two exchanges, whose latency stays


def test_counts_come_back_from_the_ranks_as_they_were():
    whole = counts("flux 1024")
    (back,) = bench.wholes_of({"m": json.loads(json.dumps({"1024": asdict(whole)}))})["m"].values()
    box = published_box("2xH100-PCIe")
    for layout in (Layout(), Layout(ulysses=2), Layout(pipefusion=2)):
        before, after = (predict(Job(whole=one), layout, box) for one in (whole, back))
        assert before == after != []


def test_the_bench_holds_predictions_to_what_was_achieved():
    """Times made of known speeds are predicted exactly; ones that are not are off, and the choice
    that follows from them costs what the fastest would have saved.
    """
    one, doubled = attention_alone(512), ("block_flops", "block_weight_bytes", "attended_by_block")
    twice = {name: getattr(one, name) * 2 for name in doubled}
    whole = replace(one, **twice, shareable=one.shareable._replace(blocks=[0, 0]))
    wholes = {"model": dict.fromkeys((*bench.SIDES.predicted, *bench.SIDES.calibrated), whole)}
    flops = Timed.of(whole, 1.0).attention_flops
    rounds = {f"model {side} {phase}": flops / 1e9 for side in wholes["model"] for phase in ("alone", "both")}
    rounds |= {f"message {nbytes}": nbytes * 1e-12 for nbytes in bench.MESSAGES} | {"memory": 1e-9}
    rounds |= {"model attention": 1e-9, "model attention in parts": 1e-9}
    for side in bench.SIDES.predicted:
        rounds |= {f"model {side} ulysses 2": flops / 2e9, f"model {side} ring 2": flops / 2e9}
        # One whole, three in three patches, and drained
        rounds |= {f"model {side} pipefusion 2": flops / 1e9 * (1 + 3 / 2 + 1 / 6) / 4}
    slower = rounds | {"model attention in parts": 1e-9 + bench.MERGE_BYTES * 256 * 32 * 128 / 1e8}
    assert bench.speeds([slower], wholes["model"], "model", "both").merge == pytest.approx(1e8)

    def errors(rounds):
        return bench.summed_up(bench.cases([rounds], wholes))

    names = ("mean_error", "largest_error", "regret")
    assert errors(rounds) == pytest.approx(dict.fromkeys(names, 0), abs=1e-3)
    slow = rounds | {
        f"model {side} {layout.product()}": flops / 0.5e9
        for side in bench.SIDES.predicted
        for layout in bench.SEQUENCES
    }
    assert errors(slow) == pytest.approx(dict(zip(names, (0.75 / 3, 0.75, 1.0), strict=True)), abs=1e-3)
    found = {figure.metric: figure for figure in bench.figures([slow], wholes)}
    assert {metric for metric, figure in found.items() if not figure.is_met} == {*names}
    assert found["ring 2"].estimate.value == pytest.approx(0.25, abs=1e-3)


def test_a_stage_computes_a_run_of_one_whole_evaluation_and_of_patches(monkeypatch):
    method = create_autospec(PipeFusion, instance=True)
    monkeypatch.setattr("pipemesh.parallel_runtime.methods.factory.make_method", lambda *_: method)
    stage = bench.OwnStage(stock_model(5).model.diffusion_model, None, [1.0] * 5)
    stage.sample({}, [WARM_UP, *(Part(1, 0, patch) for patch in ((0, 4, False), (4, 4, True)))])
    assert method.forward.call_count == 1 + 2 * (bench.EVALUATIONS - 1)
    method.end_run.assert_called_once_with()
