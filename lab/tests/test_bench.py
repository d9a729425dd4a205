"""The bench's statistics, goals, schema and stand-in; never absolute speed."""

import json
import os
import random
import subprocess
import sys
from functools import partial
from statistics import median

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pipemesh.lab.bench import against, machines, mixed, pipefusion, plan, sp, trial
from pipemesh.lab.bench import command as bench
from pipemesh.lab.bench import compile as compile_bench
from pipemesh.lab.bench import run as bench_run
from pipemesh.lab.bench.capacity import capacity
from pipemesh.lab.bench.figures import (
    Estimate,
    Figure,
    Goal,
    Options,
    estimate,
    exactly,
    percentile,
    ratio,
)
from pipemesh.lab.bench.forwards import StandinExchange, StandinRing
from pipemesh.lab.bench.lockstep import Phase, Ranks, merge, wait_for
from pipemesh.lab.bench.plan import MESSAGES
from pipemesh.lab.bench.queue import CALIBRATED
from pipemesh.lab.comfyui.api import Event, RunResult, Tick
from pipemesh.lab.dry_run.expected import even_bytes
from pipemesh.launcher.comfyui.host_record import ComfyInstall
from pipemesh.launcher.errors import LaunchError
from pipemesh.parallel_runtime.comm.exchange import StopFlag
from pipemesh.parallel_runtime.comm.mesh import SequenceComm
from pipemesh.parallel_runtime.errors import PipeMeshError
from pipemesh.parallel_runtime.families import file_of
from pipemesh.parallel_runtime.layout import Layout
from pipemesh.tests.fixtures import ALL
from pipemesh.tests.kit.models import evaluate
from pipemesh.tests.kit.planned import attention_alone

SECONDS = st.lists(st.floats(0.01, 10), min_size=1, max_size=40)


@given(SECONDS)
def test_an_estimate_lies_in_its_interval_and_among_the_samples(samples):
    value, low, high = estimate(samples, median)
    assert min(samples) <= low <= high <= max(samples)
    assert value == median(samples)


def test_the_interval_covers_the_truth_about_as_often_as_it_says():
    draw = random.Random(1)
    hits = 0
    for seed in range(40):
        _, low, high = estimate([draw.gauss(1.0, 0.2) for _ in range(25)], median, seed)
        hits += low <= 1.0 <= high
    assert 32 <= hits <= 40  # 90 % of 40, give or take two standard deviations


@pytest.mark.parametrize(("share", "value"), [(0.0, 1), (0.5, 50), (0.501, 51), (0.99, 99), (1.0, 100)])
def test_a_percentile_is_a_measured_value(share, value):
    assert percentile(list(range(100, 0, -1)), share) == value


@pytest.mark.parametrize(
    ("goal", "low", "high", "met"),
    [
        (Goal(at_least=0.88), 0.80, 0.89, True),
        (Goal(at_least=0.88), 0.80, 0.87, False),
        (Goal(at_most=1.0), 0.9, 1.5, True),
        (Goal(at_most=1.0), 1.1, 1.5, False),
        (Goal.within(0.02, 100.0), 101.9, 101.9, True),
        (Goal.within(0.02, 100.0), 97.9, 97.9, False),
        (Goal.within(0.02, -100.0), -102.1, -102.1, False),
    ],
)
def test_a_goal_fails_only_where_the_favourable_end_misses_it(goal, low, high, met):
    assert goal.is_met(Estimate((low + high) / 2, low, high)) is met


ROUNDS = [{"alone": 1.0, "both": 1.25, "shards": 1.1, "parallel": 0.8, "exchange": 0.08}] * 3


def test_the_ratios_are_those_of_the_definition():
    assert capacity(ROUNDS) == pytest.approx(2 * 1.0 / 1.25)
    assert sp.efficiency(ROUNDS) == pytest.approx(1.1 / (0.8 * 1.6))
    assert sp.speedup(ROUNDS) == pytest.approx(1.0 / 0.8)
    assert sp.patch_tax(ROUNDS) == pytest.approx(1.1)
    assert sp.exchange_share(ROUNDS) == pytest.approx(0.1)
    whole = 1024 * 256 * 24 * 4
    assert even_bytes(Layout(ulysses=2), 1024, 256, 24, 4) == whole  # 4 (N - 1) / N^2
    assert even_bytes(Layout(ulysses=4), 1024, 256, 24, 4) == pytest.approx(0.75 * whole)
    assert even_bytes(Layout(ring=2), 1024, 256, 24, 4) == whole  # 2 (N - 1) / N
    assert even_bytes(Layout(ring=4), 1024, 256, 24, 4) == pytest.approx(1.5 * whole)


def test_a_phase_lasts_as_long_as_its_slowest_rank():
    assert merge([[{"alone": 3.0, "both": 1.0}], [{"both": 2.0}]]) == [{"alone": 3.0, "both": 2.0}]


def test_a_phase_for_one_is_run_by_the_ranks_in_turn():
    ranks = object.__new__(Ranks)
    ranks.rank, ranks.size, ranks._barrier = 0, 2, lambda: None
    rounds = ranks.measure({"alone": Phase(lambda: 1.0, alone=True), "both": Phase(lambda: 2.0)}, rounds=4)
    assert rounds == [{"alone": 1.0, "both": 2.0}, {"both": 2.0}] * 2


# -- the stand-in


class WatchedStandin(StandinExchange):
    def __init__(self, rank: int, size: int, axis: str = "ulysses"):
        super().__init__(rank, size, axis)
        self.received = []

    def _exchange(self, receiving, sending, receive_sizes, send_sizes):
        super()._exchange(receiving, sending, receive_sizes, send_sizes)
        self.received.append(receiving.clone())


@pytest.fixture(scope="module")
def tiny():
    from pipemesh.lab.commands.parity import stock_model

    return stock_model(heads=5).model.diffusion_model


def run(model, exchange, tokens=(13, 12)):
    world = type(exchange)(exchange.rank, exchange.size, "gather")
    comm = SequenceComm(exchange, StandinRing(0, 1), world, StopFlag(lambda: False))
    return evaluate(model, comm, tokens)


def test_the_standin_receives_ordinary_numbers(tiny):
    standin = WatchedStandin(0, 2)
    output = run(tiny, standin)
    assert torch.isfinite(output).all()
    for received in standin.received:
        assert torch.isfinite(received).all()
        assert (received[:-1].abs() > torch.finfo(torch.float32).tiny).float().mean() > 0.99
        assert received[-1] == 0  # the last rank's flag: nobody wishes to stop


# -- the command


class Bench:
    def __init__(self, *figures):
        self.bench = lambda options: iter(figures)


@pytest.fixture
def run_bench(monkeypatch, capsys):
    def call(*figures, argv=("sp", "--json")):
        monkeypatch.setattr(bench.importlib, "import_module", lambda *_: Bench(*figures))
        status = bench.main(list(argv), host=None)
        return status, capsys.readouterr().out.splitlines()

    return call


GOOD = Figure("sp", "ulysses2_1024", "efficiency", Estimate(0.91, 0.89, 0.93), "ratio", Goal(at_least=0.88))
BAD = Figure("hop", "back_to_back", "hop_ms_p50", Estimate(1.5, 1.4, 1.6), "ms", Goal(at_most=1.0))


def test_json_is_one_object_per_line_and_nothing_else(run_bench):
    status, lines = run_bench(GOOD, Figure("sp", "ulysses2_1024", "speedup", exactly(1.7), "x"))
    assert status == 0
    first, second = map(json.loads, lines)
    assert list(first) == ["bench", "case", "metric", "value", "low", "high", "unit", "goal"]
    assert list(first.values()) == ["sp", "ulysses2_1024", "efficiency", 0.91, 0.89, 0.93, "ratio", ">= 0.88"]
    assert second["goal"] is None and second["low"] == second["high"] == 1.7


def test_a_missed_goal_shows_in_the_table_and_the_exit_status(run_bench):
    status, lines = run_bench(GOOD, BAD, argv=("hop",))
    assert status == 1
    assert lines[1].split()[-1] == "ok"
    assert lines[2].split()[-1] == "MISS"


def test_an_unknown_bench_is_refused_with_the_names(capsys):
    with pytest.raises(SystemExit):
        bench.main(["speed"], host=None)
    assert "hop" in capsys.readouterr().err


def test_two_checkouts_are_timed_in_turns_each_first_as_often():
    asked = []

    def side(name, seconds):
        return lambda seed: asked.append((seed, name)) or seconds

    sides = {"here": side("here", 3.0), "there": side("there", 4.0), "none": side("none", 2.0)}
    rounds = against.in_turns(2, sides)
    assert asked == [*((1, name) for name in sides), *((2, name) for name in [*sides][::-1])]
    assert (ratio("here", "there")(rounds), against.added_ratio(rounds)) == (0.75, 0.5)
    with pytest.raises(LaunchError, match="--against FOLDER"):
        next(against.bench(Options(host=host())))


def test_a_runs_fixed_cost_is_what_its_later_evaluations_do_not_explain():
    evaluations = [(2.0, 5.0), (7.5, 1.0), (9.0, 3.0), (12.0, 2.0)]
    found = bench_run.taken_apart(1.0, evaluations, 14.25)
    assert found == {"fixed": 5.25, "begin": 1.0, "first": 3.0, "end": 0.25, "between": 1.0}


def test_a_servers_events_tell_the_fixed_cost_of_a_run():
    def executing(node, at_s):
        return Event("executing", {"node": node}, at_s)

    events = [executing("sampler", 1.0), executing("save", 14.0), executing(None, 15.0)]
    ticks = [Tick("sampler", step, 4, at_s) for step, at_s in enumerate((7.0, 8.0, 11.0, 13.0), 1)]
    assert against.beyond_evaluations(RunResult("", {}, (), ticks, None, 0.0, events)) == 13.0 - 4 * 2.0


def host():
    return ComfyInstall.from_json(os.environ["PIPEMESH_HOST"])


by_request = pytest.mark.skipif(not ALL, reason="half a minute; the smallest case of each bench runs")


@by_request
def test_the_pipefusion_bench_runs_draws_its_stages_and_its_bytes_are_those_of_the_formula(
    tmp_path,
):
    figures = {
        (figure.case, figure.metric): figure
        for figure in pipefusion.bench(Options(host=host(), rounds=1, pictures=tmp_path, smallest=True))
    }
    assert {path.name for path in tmp_path.iterdir()} == {
        "pipefusion-free-m2.png",
        "pipefusion-single-m2.png",
    }
    assert {case for case, metric in figures if metric == "of_schedule"} == {"free_m2_256", "single_m2_256"}
    assert (
        figures["free_m2_256", "bytes_per_step"].is_met and figures["single_m2_256", "bytes_per_step"].is_met
    )
    assert 0 < figures["free_m2_256", "occupancy"].estimate.value <= 1
    assert figures["cut_by_hand", "weights_share"].is_met
    # With so few steps the blocks' times are rough
    assert 0.5 < figures["equal_blocks", "weights_share"].estimate.value < 0.9


@by_request
def test_the_plan_bench_predicts_every_layout_of_two_ranks():
    figures = {figure.metric for figure in plan.bench(Options(host=host(), rounds=1))}
    assert {
        "ulysses 2",
        "ring 2",
        "cfg 2",
        "data 2",
        "pipefusion 2",
        "mean_error",
        "largest_error",
        "regret",
    } <= figures


def test_runs_over_two_machines_are_held_to_what_is_predicted_of_them_by_the_link_between():
    tokens, steps = machines.TOKENS, machines.STEPS["cfg"]
    counted = {count: attention_alone(count) for count in (*CALIBRATED, tokens)}
    # An evaluation takes 1 s; messages nearly nothing, or 1 s for 4 MiB
    near = {f"{count} both": (count / tokens) ** 2 for count in CALIBRATED} | {"memory": 1e-6}
    near |= {f"message {nbytes}": 1e-6 * nbytes / MESSAGES[0] for nbytes in MESSAGES}
    slow = near | {f"message {nbytes}": nbytes / MESSAGES[1] for nbytes in MESSAGES}
    cfg, ulysses = machines.PHASES["cfg"].values()
    of_near, of_slow = (
        {
            layout: machines.predicted([one], counted, "cfg", tokens, steps, layout)
            for layout in (cfg, ulysses)
        }
        for one in (near, slow)
    )
    assert of_near[cfg] == pytest.approx(of_slow[cfg]) == pytest.approx(steps)
    assert of_near[ulysses] < 1.1 * steps < 8 * steps < of_slow[ulysses]
    rounds = [slow | {"alone": 8.0, "both": 8.0, "parallel": of_slow[cfg], "beside": of_slow[ulysses]}]
    found = {one.metric: one for one in machines.figures("cfg", tokens, steps, rounds, counted, ())}
    assert found["over_predicted_cfg2"].estimate.value == pytest.approx(1)
    assert found["over_predicted_ulysses2"].is_met and found["capacity"].estimate.value == 2


def test_of_a_run_that_goes_step_by_step_the_first_steps_say_how_long_all_of_it_takes(monkeypatch):
    clock = [100.0]
    monkeypatch.setattr(pipefusion.time, "perf_counter", lambda: clock[0])
    runs = object.__new__(pipefusion.PipelineRuns)
    runs.length = pipefusion.Length(steps=28)

    def sample(model, steps, after_step):
        for step in range(steps):
            clock[0] += 5.0 if step == 0 else 2.0
            after_step(step)
        clock[0] += 1.0

    runs.sample = sample
    assert runs.step_by_step("model") == 5 + 27 * 2 + 1
    assert clock[0] == 100 + 5 + 7 * 2 + 1
    runs.length = pipefusion.Length(steps=4)
    assert runs.step_by_step("model") == 5 + 3 * 2 + 1


def test_the_trial_bench_has_the_seconds_of_each_class_that_is_asked_for(monkeypatch):
    """Its trials are played: they run in the tests of the trial."""
    asked = []
    monkeypatch.setattr(trial, "try_in_process", lambda *given: asked.append(given[2]) or (True, ""))
    figures = list(trial.bench(Options(host=host(), rounds=2, only=("LTX",))))
    assert [kind.rpartition(":")[2] for kind in asked] == ["LTXAVModel", "LTXVModel"]
    names = [f"{file_of(kind)} {kind.rpartition(':')[2]}" for kind in asked]
    each = ("fingerprint_s", "trial_s", "is_same")
    assert [(one.case, one.metric) for one in figures] == [
        *((name, metric) for name in names for metric in each),
        ("all", "trial_s"),
    ]
    assert all(one.estimate.value > 0 and one.is_met for one in figures)


@by_request
def test_the_bytes_of_the_sp_bench_are_those_of_the_formula():
    figures = list(sp.bench(Options(host=host(), rounds=1, smallest=True)))
    counted = [figure for figure in figures if figure.metric == "bytes_per_step"]
    assert [figure.case for figure in counted] == ["ulysses2_256", "ring2_256", "2x2_256"]
    assert all(figure.is_met for figure in counted)


@pytest.mark.parametrize(
    ("ranks", "compiled", "kept", "is_met"),
    [
        (6.0, 5.0, 1.0, True),
        (6.0, 5.08, 0.92, True),
        (6.0, 5.2, 0.8, False),
        (6.0, 6.0, 0.0, False),
        (9.0, 8.0, 1.0, True),
    ],
)
def test_what_ranks_keep_of_stocks_gain_is_seconds_of_computing_whatever_messages_take(
    ranks, compiled, kept, is_met
):
    """Stock takes 10 s, and 8 s compiled: two ranks that save 1 s each have kept all of it."""
    rounds = [{"stock": 10.0, "stock_compiled": 8.0, "ranks": ranks, "ranks_compiled": compiled}] * 3
    share, seconds, *gains = compile_bench.figures("case", rounds)
    assert (seconds.metric, seconds.is_met) == ("kept", is_met) and seconds.estimate.value == pytest.approx(
        kept
    )
    assert [(one.metric, one.estimate.value) for one in gains] == [
        ("gain", ranks / compiled),
        ("stock_gain", 1.25),
    ]
    assert share.estimate.value == pytest.approx(ranks / compiled / 1.25)


def test_where_stock_gains_nothing_nothing_can_be_kept():
    rounds = [{"stock": 10.0, "stock_compiled": 9.9, "ranks": 6.0, "ranks_compiled": 6.0}] * 3
    found = list(compile_bench.figures("case", rounds))
    assert [one.metric for one in found] == ["gain_of_stocks", "gain", "stock_gain, none to keep"]
    assert all(one.is_met for one in found)
    slower = [{**rounds[0], "ranks_compiled": 7.0}] * 3
    assert [one.metric for one in compile_bench.figures("case", slower) if not one.is_met] == [
        "gain_of_stocks"
    ]


# -- processes in lockstep


def test_what_ranks_say_is_shown_and_a_rank_that_never_ends_is_named(capsys):
    start = partial(subprocess.Popen, bufsize=0, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    more_than_is_buffered, waits = "print('x' * (1 << 20))", "print('waits', flush=True); input()"
    wait_for([start([sys.executable, "-c", more_than_is_buffered])], 60.0)
    assert capsys.readouterr().err == "x" * (1 << 20) + "\n"
    fails = f"{more_than_is_buffered}; raise SystemExit(3)"
    silent = start([sys.executable, "-c", waits])
    with pytest.raises(PipeMeshError, match=r"^Rank 0 of the bench has not ended after 0 s"):
        wait_for([silent], 0.0)
    with pytest.raises(PipeMeshError, match=r"^Rank 1 of the bench ended with exit status 3"):
        wait_for([silent, start([sys.executable, "-c", fails])], 60.0)
    assert silent.wait() < 0 and capsys.readouterr().err.count("x") == 1 << 20


# -- unlike devices


def test_the_bench_holds_the_pair_to_one_that_waits_for_nothing():
    rounds = [{"alone": 3.0, "both": 3.0, "shards": 3.0, "mixed": 2.0, "even": 3.0}] * 3
    found = {figure.metric: figure for figure in mixed.figures(1024, rounds, 1 / 3)}
    assert found["of_ideal"].estimate.value == pytest.approx(1.0) and found["of_ideal"].is_met
    assert found["even_of_ideal"].estimate.value == pytest.approx(1.5)
    slow = {figure.metric: figure for figure in mixed.figures(1024, [{**rounds[0], "mixed": 2.3}] * 3, 1 / 3)}
    assert not slow["of_ideal"].is_met
    shared = mixed.of_ideal([{**rounds[0], "both": 4.0, "mixed": 2.4}])
    assert shared == pytest.approx(1.0), (
        "cores of which both at once do 1.5 times as much as one: half of the time both compute"
    )


def test_a_slowed_rank_sleeps_as_long_as_a_slower_device_would_go_on(monkeypatch):
    clock, slept = [0.0], []
    monkeypatch.setattr(mixed.time, "thread_time", lambda: clock[0])
    monkeypatch.setattr(mixed.time, "sleep", slept.append)
    slowed, whole = mixed.DutyCycle(0.25), mixed.DutyCycle(1.0)
    for one in (slowed, whole):
        one.begin()
        clock[0] += 2.0
        one()
    assert slept == [6.0]
