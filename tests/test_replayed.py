"""Runs of which ranks replay CUDA graphs: what ComfyUI's process holds to a computation, and when
it does without graphs.
"""

import gc
import weakref
from types import SimpleNamespace

import pytest
import torch
from greenlet import getcurrent
from pipemesh.parallel_runtime.client.branch import Branch
from pipemesh.parallel_runtime.client.evaluations import Work
from pipemesh.parallel_runtime.client.replayed import Replayed
from pipemesh.parallel_runtime.client.residency import Residency
from pipemesh.parallel_runtime.client.session import Like, Resident, Session, Sessions
from pipemesh.parallel_runtime.errors import ModelError, PoolFailed, RunCancelled
from pipemesh.parallel_runtime.layout import Layout
from pipemesh.parallel_runtime.methods.recorded import RecordedForward
from pipemesh.parallel_runtime.patches import Part
from pipemesh.parallel_runtime.wire.arena import Arena

from .late_pool import pooled
from .test_late_methods import on_gpu
from .test_late_pool import Sampler, arguments_of, assert_same, at_once
from .test_late_pool import asked as asked_of


def session_of(*models):
    """The session of a pool with these models."""
    session = Session(
        SimpleNamespace(arena=SimpleNamespace(at_close=[]), facts=SimpleNamespace(speeds=())), Layout()
    )
    session.models |= {name: Resident() for name in models}
    return session


def test_a_graph_that_was_recorded_anew_is_compared_anew():
    session = session_of("m")
    like, run = Like(Part(0, 0), 1, (0, 1)), SimpleNamespace(model="m")

    def compared(*numbers):
        """Whether graphs of these numbers count as compared, when ranks have told of them."""
        answers = [SimpleNamespace(confirmed=1, recorded=number) for number in numbers]
        session.confirm(SimpleNamespace(run=run, like=like), answers)
        return like in session.models["m"].recorded and session.models["m"].recorded[like].are_right

    def hold_to(numbers):
        ticket = SimpleNamespace(run=run, like=like, unproven=numbers)
        replayed, answered = Replayed(SimpleNamespace(latest=session), "m"), [(torch.ones(2), None)]
        assert not replayed.counts([ticket], answered) and replayed.counts([ticket], answered)

    assert not compared(3, 4)
    hold_to((1, 2))  # what was replayed then is gone
    assert not compared(3, 4)
    hold_to((3, 4))
    assert compared(4, 3) and not compared(4, 5)
    hold_to((4, 5))
    assert compared(4, 5) and not compared(0, 5) and not compared(4, 5)


class StopsTheSecond(Sampler):
    def sampled(self, remote):
        self.stops = 3 if self.runs[0] is not None and self.runs[1] is None else -1
        return super().sampled(remote)


def test_stop_ends_a_run_that_is_replayed_and_the_next_is_right():
    sampler = StopsTheSecond(Layout(ulysses=2), runs=3)
    gpus = pooled(sampler.layout, sampler, records="always")
    assert sampler.runs[1] is RunCancelled and all(gpu.replays for gpu in gpus)
    for outputs in (sampler.runs[0], sampler.runs[2]):
        assert_same(outputs, at_once(sampler.layout))


@pytest.mark.parametrize("seed", [0, 3])
def test_a_pool_that_replays_computes_what_one_does_that_does_not(seed):
    layout = Layout(ulysses=2)
    sampler = Sampler(layout)
    gpus = pooled(layout, sampler, seed, records="always")
    for outputs in sampler.runs:
        assert_same(outputs, at_once(layout))
    assert all(gpu.replays for gpu in gpus)


class WholeEvaluations(Sampler):
    """Each is dispatched, as one that ranks share is."""

    def sampled(self, remote):
        run, outputs = remote.runs.begin("m"), []
        for step, branch, _ in asked_of(self.layout):
            arguments = {**on_gpu(arguments_of(step, branch)), "transformer_options": {}}
            work = Work(arguments, Branch((str(branch),)))
            outputs += remote.evaluations.dispatch(run, [work], lambda: False)
        return [one.to("cpu", copy=True) for one in outputs]


@pytest.mark.parametrize("factor", [1.0, 1.5, float("nan")], ids=["right", "other", "NaN"])
def test_a_graph_that_computes_something_else_is_told_of_and_changes_no_image(monkeypatch, caplog, factor):
    """Of each graph the first replay is compared."""
    real = RecordedForward.replay
    monkeypatch.setattr(RecordedForward, "replay", lambda self, *args: real(self, *args) * factor)
    sampler = WholeEvaluations(Layout(ulysses=2))
    gpus = pooled(sampler.layout, sampler, records="always")
    for outputs in sampler.runs:
        assert_same(outputs, at_once(sampler.layout))
    replays, warned = (
        {gpu.replays for gpu in gpus},
        [line for line in caplog.messages if "A CUDA graph came" in line],
    )
    assert (replays == {1}) == (len(warned) == 1) == (factor != 1)


@pytest.mark.parametrize("fills", ["graphs", "models"])
def test_without_memory_graphs_go_first_and_for_good_only_where_that_makes_room(monkeypatch, caplog, fills):
    """One rank has no memory for an evaluation: while it holds a graph, or until a model goes."""
    held, said, lacked, real = [], [], [], RecordedForward._recorded

    def kept(self, *args):
        recording = real(self, *args)
        held.append((getcurrent().gpu, weakref.ref(recording.graph)))
        return recording

    def lack(*_):
        own = getcurrent().gpu
        gc.collect()  # what a late GPU has recorded refers to itself
        has_graph = any(gpu is own and graph() is not None for gpu, graph in held)
        if own.recording is None and (has_graph if fills == "graphs" else held and not said):
            lacked.append(own)
            assert len(lacked) < 10, "it is tried for ever"
            raise torch.OutOfMemoryError("no memory is left")

    def release(*args, **_):
        said.append([graph() for _, graph in held])
        return len(said) < 3

    class Watched(WholeEvaluations):
        def sampled(self, remote):
            self.sessions = remote.sessions
            return super().sampled(remote)

    monkeypatch.setattr(RecordedForward, "_recorded", kept)
    monkeypatch.setattr(Residency, "make_room", release)
    sampler = Watched(Layout(ulysses=2))
    pooled(
        sampler.layout,
        sampler,
        prepare=lambda rank, model: rank or model.register_forward_pre_hook(lack),
        records="always",
    )
    for outputs in sampler.runs:
        assert_same(outputs, at_once(sampler.layout))
    lines = [line for line in caplog.messages if "until ComfyUI is started again" in line]
    if fills == "graphs":
        assert not said and len(held) == 2  # one of each rank
        assert ["Beside CUDA graphs no memory is left" in line for line in lines] == [True]
    else:
        assert said == [[None, None]] and len(held) > 2
        assert not lines and sampler.sessions.graphs


@pytest.mark.parametrize("others", [False, True], ids=["its own", "another model's"])
def test_a_model_without_memory_gives_up_its_own_graphs_alone(others):
    sessions = Sessions(SimpleNamespace(layout=Layout()))
    sessions.latest = session_of("0", "1")
    models = sessions.latest.models
    models["1" if others else "0"].has_graphs = True
    replayed, sessions.latest.tries_graphs = Replayed(sessions, "0"), True
    assert replayed.make_room() == (not others)
    assert not sessions.latest.tries_graphs, "all ranks have answered"
    assert replayed.graph == ("record" if others else "none")
    assert models["1"].has_graphs == others
    assert not replayed.make_room() and replayed.graph == "record"


@pytest.mark.parametrize("error", [ModelError, PoolFailed, RunCancelled])
def test_where_a_first_replay_fails_the_next_run_replays_none(caplog, error):
    """Of a pool that was lost, and of one that a user stopped, the next pool tells."""
    tries = []

    class Fails(WholeEvaluations):
        def sampled(self, remote):
            session = remote.sessions.open(lambda: False)
            collect = session.pool.collect

            def fail(number, interrupted):
                if any(ticket.unproven for ticket in session.tickets):
                    raise error("Rank 1 failed")
                return collect(number, interrupted)

            session.pool.collect = fail
            with pytest.raises(error):
                super().sampled(remote)
            tries.append(session.tries_graphs)
            session.pool.collect = collect
            outputs = super().sampled(remote)
            tries.append(session.tries_graphs)
            return outputs

    sampler = Fails(Layout(ulysses=2), runs=1)
    gpus = pooled(sampler.layout, sampler, records="always")
    assert_same(sampler.runs[0], at_once(sampler.layout))
    lines = [line for line in caplog.messages if "until ComfyUI is started again" in line]
    assert ["The first replay of a CUDA graph failed" in line for line in lines] == [True] * (
        error is ModelError
    )
    assert ({gpu.replays for gpu in gpus} == {1}) == (error is ModelError)
    assert tries == [True, False]


@pytest.mark.parametrize(
    ("phase", "tries", "why"),
    [
        ("computing", True, "The pool was lost in the first replay of a CUDA graph"),
        ("recording", False, "The pool was lost while a rank recorded a CUDA graph"),
        ("computing", False, ""),
    ],
)
@pytest.mark.parametrize("is_new", [True, False], ids=["another pool", "the same"])
def test_where_a_pool_is_lost_over_a_graph_the_next_one_has_none(caplog, phase, tries, why, is_new):
    """However the UI learned of the loss: a user may have stopped the run."""
    facts = SimpleNamespace(everyone=(0, 1), speeds=())
    pools = [SimpleNamespace(arena=Arena(), facts=facts, idle=True) for _ in range(2)]
    handle = SimpleNamespace(layout=Layout(ulysses=2), live=lambda: pools[0], ensure=lambda _: pools[0])
    sessions = Sessions(handle)
    sessions.open(lambda: False).tries_graphs = tries
    pools[0].arena.board.note(1, phase)
    if is_new:
        pools.pop(0).arena.close()
    sessions.open(lambda: False)
    assert sessions.graphs == (not (why and is_new)) and not sessions.latest.tries_graphs
    assert [why in line for line in caplog.messages] == [True] * (not sessions.graphs)
    for pool in pools:
        pool.arena.close()


def test_a_pool_records_nothing_where_that_is_off():
    gpus = pooled(Layout(ulysses=2), Sampler(Layout(ulysses=2), runs=1))
    assert not any(gpu.recordings for gpu in gpus)
