"""The bench's statistics, goals, schema and stand-in; never absolute speed."""

import json
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
from pipemesh.lab.bench.figures import Estimate, Figure, Goal, Options, estimate, exactly, percentile, ratio
from pipemesh.lab.bench.forwards import StandinExchange, StandinRing
from pipemesh.lab.bench.lockstep import Phase, Ranks, merge, wait_for
from pipemesh.lab.bench.plan import MESSAGES
from pipemesh.lab.bench.queue import CALIBRATED
from pipemesh.lab.comfyui.api import Event, RunResult, Tick
from pipemesh.lab.commands.parity import stock_model
from pipemesh.lab.dry_run.expected import even_bytes
from pipemesh.launcher.errors import LaunchError
from pipemesh.parallel_runtime.comm.exchange import StopFlag
from pipemesh.parallel_runtime.comm.mesh import SequenceComm
from pipemesh.parallel_runtime.errors import PipeMeshError
from pipemesh.parallel_runtime.families import file_of
from pipemesh.parallel_runtime.layout import Layout
from pipemesh.tests.fixtures import ALL
from pipemesh.tests.kit.models import evaluate
from pipemesh.tests.kit.planned import attention_alone

near = pytest.approx


def by_metric(figures):
    return {figure.metric: figure for figure in figures}


@given(st.lists(st.floats(0.01, 10), min_size=1, max_size=40))
def test_an_estimate_lies_in_its_interval_and_among_the_samples(samples):
    value, low, high = estimate(samples, median)
    assert min(samples) <= low <= high <= max(samples)
    assert value == median(samples)


def test_the_interval_covers_the_truth_as_often_as_it_says_and_a_percentile_is_a_measured_value():
    draw, hits = random.Random(1), 0
    for seed in range(40):
        _, low, high = estimate([draw.gauss(1.0, 0.2) for _ in range(25)], median, seed)
        hits += low <= 1.0 <= high
    assert 32 <= hits <= 40  # 90 % of 40, give or take two standard deviations
    measured = [percentile([*range(100, 0, -1)], share) for share in (0.0, 0.5, 0.501, 0.99, 1.0)]
    assert measured == [1, 50, 51, 99, 100]


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


def test_the_ratios_are_those_of_the_definition():
    rounds = [{"alone": 1.0, "both": 1.25, "shards": 1.1, "parallel": 0.8, "exchange": 0.08}] * 3
    assert capacity(rounds) == near(2 * 1.0 / 1.25)
    assert sp.efficiency(rounds) == near(1.1 / (0.8 * 1.6))
    assert sp.speedup(rounds) == near(1.0 / 0.8)
    assert sp.patch_tax(rounds) == near(1.1)
    assert sp.exchange_share(rounds) == near(0.1)
    layouts = Layout(ulysses=2), Layout(ulysses=4), Layout(ring=2), Layout(ring=4)
    sent = [even_bytes(layout, 1024, 256, 24, 4) / (1024 * 256 * 24 * 4) for layout in layouts]
    assert sent == near([1, 0.75, 1, 1.5])  # 4 (N - 1) / N^2, and 2 (N - 1) / N


def test_a_phase_lasts_as_long_as_its_slowest_rank_and_one_for_one_is_run_by_the_ranks_in_turn():
    assert merge([[{"alone": 3.0, "both": 1.0}], [{"both": 2.0}]]) == [{"alone": 3.0, "both": 2.0}]
    ranks = object.__new__(Ranks)
    ranks.rank, ranks.size, ranks._barrier = 0, 2, lambda: None
    rounds = ranks.measure({"alone": Phase(lambda: 1.0, alone=True), "both": Phase(lambda: 2.0)}, rounds=4)
    assert rounds == [{"alone": 1.0, "both": 2.0}, {"both": 2.0}] * 2


class WatchedStandin(StandinExchange):
    def __init__(self, rank: int, size: int, axis: str = "ulysses"):
        super().__init__(rank, size, axis)
        self.received = []

    def _exchange(self, receiving, sending, receive_sizes, send_sizes):
        super()._exchange(receiving, sending, receive_sizes, send_sizes)
        self.received.append(receiving.clone())


def test_the_standin_receives_ordinary_numbers():
    standin = WatchedStandin(0, 2)
    comm = SequenceComm(standin, StandinRing(0, 1), WatchedStandin(0, 2, "gather"), StopFlag(lambda: False))
    assert torch.isfinite(evaluate(stock_model(heads=5).model.diffusion_model, comm, (13, 12))).all()
    for received in standin.received:
        assert torch.isfinite(received).all()
        assert (received[:-1].abs() > torch.finfo(torch.float32).tiny).float().mean() > 0.99
        assert received[-1] == 0  # the last rank's flag: nobody wishes to stop


# -- the command


def test_json_is_one_object_per_line_and_a_missed_goal_shows_in_the_table_and_the_exit_status(
    monkeypatch, capsys
):
    def of_bench(*figures, argv):
        found = type("", (), {"bench": lambda options: iter(figures)})
        monkeypatch.setattr(bench.importlib, "import_module", lambda *_: found)
        return bench.main(list(argv), host=None), capsys.readouterr().out.splitlines()

    case = ("sp", "ulysses2_1024")
    good = Figure(*case, "efficiency", Estimate(0.91, 0.89, 0.93), "ratio", Goal(at_least=0.88))
    bad = Figure("hop", "back_to_back", "hop_ms_p50", Estimate(1.5, 1.4, 1.6), "ms", Goal(at_most=1.0))
    status, lines = of_bench(good, Figure(*case, "speedup", exactly(1.7), "x"), argv=("sp", "--json"))
    first, second = map(json.loads, lines)
    assert status == 0
    assert list(first) == ["bench", "case", "metric", "value", "low", "high", "unit", "goal"]
    assert list(first.values()) == [*case, "efficiency", 0.91, 0.89, 0.93, "ratio", ">= 0.88"]
    assert second["goal"] is None and second["low"] == second["high"] == 1.7
    status, lines = of_bench(good, bad, argv=("hop",))
    assert (status, [line.split()[-1] for line in lines[1:3]]) == (1, ["ok", "MISS"])
    with pytest.raises(SystemExit):
        bench.main(["speed"], host=None)
    assert "hop" in capsys.readouterr().err, "an unknown bench is refused with the names"


def test_two_checkouts_are_timed_in_turns_each_first_as_often(host):
    asked = []

    def side(name, seconds):
        return lambda seed: asked.append((seed, name)) or seconds

    sides = {"here": side("here", 3.0), "there": side("there", 4.0), "none": side("none", 2.0)}
    rounds = against.in_turns(2, sides)
    assert asked == [*((1, name) for name in sides), *((2, name) for name in [*sides][::-1])]
    assert (ratio("here", "there")(rounds), against.added_ratio(rounds)) == (0.75, 0.5)
    with pytest.raises(LaunchError, match="--against FOLDER"):
        next(against.bench(Options(host=host)))


def test_a_runs_fixed_cost_is_what_its_later_evaluations_do_not_explain():
    """Also of what a server's events tell."""
    evaluations = [(2.0, 5.0), (7.5, 1.0), (9.0, 3.0), (12.0, 2.0)]
    found = bench_run.taken_apart(1.0, evaluations, 14.25)
    assert found == {"fixed": 5.25, "begin": 1.0, "first": 3.0, "end": 0.25, "between": 1.0}
    executed = (("sampler", 1.0), ("save", 14.0), (None, 15.0))
    events = [Event("executing", {"node": node}, at_s) for node, at_s in executed]
    ticks = [Tick("sampler", step, 4, at_s) for step, at_s in enumerate((7.0, 8.0, 11.0, 13.0), 1)]
    assert against.beyond_evaluations(RunResult("", {}, (), ticks, None, 0.0, events)) == 13.0 - 4 * 2.0


@pytest.mark.skipif(not ALL, reason="half a minute; the smallest case of each bench runs")
def test_what_benches_measure_is_what_their_formulas_say(tmp_path, host):
    def figures_of(module, **options):
        return {(one.case, one.metric): one for one in module.bench(Options(host=host, rounds=1, **options))}

    figures = figures_of(pipefusion, pictures=tmp_path, smallest=True)
    names = ("free", "single")
    assert {path.name for path in tmp_path.iterdir()} == {f"pipefusion-{name}-m2.png" for name in names}
    cases = [f"{name}_m2_256" for name in names]
    assert {case for case, metric in figures if metric == "of_schedule"} == {*cases}
    assert all(figures[case, "bytes_per_step"].is_met for case in cases)
    assert 0 < figures["free_m2_256", "occupancy"].estimate.value <= 1
    assert figures["cut_by_hand", "weights_share"].is_met
    # With so few steps the blocks' times are rough
    assert 0.5 < figures["equal_blocks", "weights_share"].estimate.value < 0.9
    layouts = {f"{axis} 2" for axis in ("ulysses", "ring", "cfg", "data", "pipefusion")}
    found = {metric for _case, metric in figures_of(plan)}
    assert found >= layouts | {"mean_error", "largest_error", "regret"}
    of_sp = figures_of(sp, smallest=True).values()
    counted = {one.case: one.is_met for one in of_sp if one.metric == "bytes_per_step"}
    assert counted == dict.fromkeys(("ulysses2_256", "ring2_256", "2x2_256"), True)


def test_runs_over_two_machines_are_held_to_what_is_predicted_of_them_by_the_link_between():
    tokens, steps = machines.TOKENS, machines.STEPS["cfg"]
    counted = {count: attention_alone(count) for count in (*CALIBRATED, tokens)}
    # An evaluation takes 1 s; messages nearly nothing, or 1 s for 4 MiB
    fast = {f"{count} both": (count / tokens) ** 2 for count in CALIBRATED} | {"memory": 1e-6}
    fast |= {f"message {nbytes}": 1e-6 * nbytes / MESSAGES[0] for nbytes in MESSAGES}
    slow = fast | {f"message {nbytes}": nbytes / MESSAGES[1] for nbytes in MESSAGES}
    cfg, ulysses = layouts = tuple(machines.PHASES["cfg"].values())
    of_fast, of_slow = (
        {layout: machines.predicted([one], counted, "cfg", tokens, steps, layout) for layout in layouts}
        for one in (fast, slow)
    )
    assert of_fast[cfg] == near(of_slow[cfg]) == near(steps)
    assert of_fast[ulysses] < 1.1 * steps < 8 * steps < of_slow[ulysses]
    rounds = [slow | {"alone": 8.0, "both": 8.0, "parallel": of_slow[cfg], "beside": of_slow[ulysses]}]
    found = by_metric(machines.figures("cfg", tokens, steps, rounds, counted, ()))
    assert found["over_predicted_cfg2"].estimate.value == near(1)
    assert found["over_predicted_ulysses2"].is_met and found["capacity"].estimate.value == 2


def test_of_a_run_that_goes_step_by_step_the_first_steps_say_how_long_all_of_it_takes(monkeypatch):
    clock, runs = [100.0], object.__new__(pipefusion.PipelineRuns)
    monkeypatch.setattr(pipefusion.time, "perf_counter", lambda: clock[0])

    def sample(model, steps, after_step):
        for step in range(steps):
            clock[0] += 5.0 if step == 0 else 2.0
            after_step(step)
        clock[0] += 1.0

    runs.sample, runs.length = sample, pipefusion.Length(steps=28)
    assert runs.step_by_step("model") == 5 + 27 * 2 + 1
    assert clock[0] == 100 + 5 + 7 * 2 + 1
    runs.length = pipefusion.Length(steps=4)
    assert runs.step_by_step("model") == 5 + 3 * 2 + 1


def test_the_trial_bench_has_the_seconds_of_each_class_that_is_asked_for(monkeypatch, host):
    """Its trials are played: they run in the tests of the trial."""
    asked = []
    monkeypatch.setattr(trial, "try_in_process", lambda *given: asked.append(given[2]) or (True, ""))
    figures = list(trial.bench(Options(host=host, rounds=2, only=("LTX",))))
    assert [kind.rpartition(":")[2] for kind in asked] == ["LTXAVModel", "LTXVModel"]
    names = [f"{file_of(kind)} {kind.rpartition(':')[2]}" for kind in asked]
    due = [(name, metric) for name in names for metric in ("fingerprint_s", "trial_s", "is_same")]
    assert [(one.case, one.metric) for one in figures] == [*due, ("all", "trial_s")]
    assert all(one.estimate.value > 0 and one.is_met for one in figures)


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
    assert (seconds.metric, seconds.is_met, seconds.estimate.value) == ("kept", is_met, near(kept))
    assert {one.metric: one.estimate.value for one in gains} == {"gain": ranks / compiled, "stock_gain": 1.25}
    assert share.estimate.value == near(ranks / compiled / 1.25)


def test_where_stock_gains_nothing_nothing_can_be_kept():
    rounds = [{"stock": 10.0, "stock_compiled": 9.9, "ranks": 6.0, "ranks_compiled": 6.0}] * 3
    slower = [{**rounds[0], "ranks_compiled": 7.0}] * 3
    found, worse = (
        {one.metric: one.is_met for one in compile_bench.figures("case", each)} for each in (rounds, slower)
    )
    assert found == {"gain_of_stocks": True, "gain": True, "stock_gain, none to keep": True}
    assert worse == found | {"gain_of_stocks": False}


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


def test_the_bench_holds_the_pair_to_one_that_waits_for_nothing(monkeypatch):
    """A slowed rank sleeps as long as a slower device would go on."""
    rounds = {"alone": 3.0, "both": 3.0, "shards": 3.0, "mixed": 2.0, "even": 3.0}
    found, slow = (
        by_metric(mixed.figures(1024, [rounds | {"mixed": taken}] * 3, 1 / 3)) for taken in (2.0, 2.3)
    )
    assert found["of_ideal"].estimate.value == near(1.0) and found["of_ideal"].is_met
    assert found["even_of_ideal"].estimate.value == near(1.5) and not slow["of_ideal"].is_met
    # Cores of which both at once do 1.5 times as much as one: half of the time both compute
    assert mixed.of_ideal([rounds | {"both": 4.0, "mixed": 2.4}]) == near(1.0)
    clock, slept = [0.0], []
    monkeypatch.setattr(mixed.time, "thread_time", lambda: clock[0])
    monkeypatch.setattr(mixed.time, "sleep", slept.append)
    for one in (mixed.DutyCycle(0.25), mixed.DutyCycle(1.0)):
        one.begin()
        clock[0] += 2.0
        one()
    assert slept == [6.0]
