"""Pipelines in which something goes wrong: what is told, whether the pool goes on, and that the
next run is right.
"""

import pytest
from pipemesh.lab.commands.parity import BOUND, relative_error, sample
from pipemesh.nodes.report.text import run_text
from pipemesh.nodes.status.sums import run_figures
from pipemesh.parallel_runtime.client.remote_patcher import Patching, parallelize
from pipemesh.parallel_runtime.errors import ModelError, OutOfMemory, PoolFailed, PoolSpent, Refused
from pipemesh.parallel_runtime.families.catalogue import PLAIN

from ..fixtures import ALL, running_clients
from ..kit.models import ATTENDS_TWICE
from ..kit.patched import advanced, together
from ..kit.pipelines import case, with_callback


@pytest.fixture(scope="module")
def clients(setup):
    """Pools of this module: a dozen ranks, which would take the room of others."""
    with running_clients(setup) as client:
        yield client


def test_a_cancel_with_patches_of_both_prompts_in_flight_leaves_a_warm_pool_that_is_right(
    pipeline, truths, clients, monkeypatch
):
    import comfy.model_management as mm

    model, of = pipeline(PLAIN, (2, 1), 3), case()
    sample(model, of)
    client = clients(1, 1, 2)
    pool, pids = client.sessions.live.pool, client.sessions.live.pool.ranks.pids
    flying, abandon = [], client.evaluations.abandon
    monkeypatch.setattr(
        client.evaluations, "abandon", lambda: (flying.append(len(client.sessions.live.tickets)), abandon())
    )
    with pytest.raises(mm.InterruptProcessingException):
        with_callback(model, of, mm.interrupt_current_processing)
    mm.interrupt_current_processing(False)
    assert max(flying) > 3, "of both prompts, of which each has three; a quick rank may have answered one"
    assert (
        client.sessions.live.pool is pool
        and pool.ranks.pids == pids
        and pool.idle
        and not client.sessions.live.tickets
    )
    assert relative_error(sample(model, of), truths.patched(of, 3)) <= truths.bound(of)


def test_stages_leave_the_patches_that_were_cancelled_before_they_came_to_them(
    broken_pipeline, truths, monkeypatch
):
    import comfy.model_management as mm

    (model, client), of = broken_pipeline("slow_stage"), case()
    client.sessions.open(lambda: False)
    pool, left = client.sessions.live.pool, []
    listen = pool.ranks.listen

    def noted(wait_s):
        said = listen(wait_s)
        left.extend(rank for rank, message in said if getattr(message, "cancelled", False))
        return said

    monkeypatch.setattr(pool.ranks, "listen", noted)
    with pytest.raises(mm.InterruptProcessingException):
        with_callback(model, of, mm.interrupt_current_processing)
    mm.interrupt_current_processing(False)
    assert left.count(1) >= 3, "of six on their way to it, one of them at work"
    assert client.sessions.live.pool is pool and pool.idle
    of = case(cfg=1.0)
    truth = sample(truths.own_model(PLAIN, 3), of, steps=2)
    assert relative_error(sample(model, of, steps=2), truth) <= truths.bound(of)


@pytest.fixture(scope="module")
def doomed(setup):
    """A pool to be killed."""
    with running_clients(setup) as clients:
        yield clients(1, 1, 2)


@pytest.mark.parametrize("rank", [0, 1] if ALL else [1])
def test_a_stage_killed_in_mid_pipeline_is_named_and_the_next_run_is_right(doomed, truths, rank):
    import psutil

    model, of = (
        parallelize(truths.stock_model(PLAIN), doomed, holds_ui_device=False, patching=Patching(3)),
        case(),
    )
    with pytest.raises(PoolFailed, match=f"^Rank {rank} on cpu was killed"):
        with_callback(model, of, lambda: psutil.Process(doomed.sessions.live.pool.ranks.pids[rank]).kill())
    assert relative_error(sample(model, of), truths.patched(of, 3)) <= truths.bound(of)


@pytest.mark.parametrize(
    ("mutation", "error", "words"),
    [
        (
            "falls_over",
            ModelError,
            r"failed while computing: ZeroDivisionError: made\. .*; the workers are ready for the next run\.",
        ),
        (
            "has_no_memory_left",
            OutOfMemory,
            r"ran out of memory while computing .*: use more ranks, a smaller image or batch, or free memory",
        ),
    ],
)
def test_a_stage_that_fails_before_its_message_came_takes_it_all_the_same(
    broken_pipeline, mutation, error, words
):
    """Else the next patch would find the message of this one."""
    model, client = broken_pipeline(mutation)
    client.sessions.open(lambda: False)
    pool = client.sessions.live.pool
    with pytest.raises(error, match=rf"^Rank 1 on cpu {words}"):
        sample(model, case())
    assert client.sessions.live.pool is pool and pool.idle


def test_a_stage_that_fails_before_its_forward_ends_the_pool_with_one_sentence(broken_pipeline):
    """It takes no message then, and the stage before it has sent one."""
    model, client = broken_pipeline("cannot_read_its_input")
    with pytest.raises(PoolSpent, match=r"^Rank 1 on cpu ran out of memory while computing "):
        sample(model, case())
    assert client.sessions.live is None


def test_a_forward_that_leaves_out_a_stages_block_is_refused_before_a_step_is_made_of_it(broken_pipeline):
    model, client = broken_pipeline("leaves_out_its_blocks")
    client.sessions.open(lambda: False)
    pool = client.sessions.live.pool
    with pytest.raises(Refused, match=r"^This model's forward left out a block at which a stage"):
        sample(model, case())
    assert client.sessions.live.pool is pool and pool.idle


def test_the_host_may_unload_the_model_in_mid_run(pipeline, truths, clients):
    """As it does for a VAE or a ControlNet that needs the room."""
    of, client = case(), clients(1, 1, 2)
    for wrap, whole in ((lambda model: model, 2), (together, 4)):
        model = wrap(pipeline(PLAIN, (2, 1), 3))
        name = model.remote.model
        sample(model, of)
        loads = client.sessions.live.loads
        ours = with_callback(model, of, lambda name=name: client.residency.release(name))
        parts = [one.part for one in client.runs.last.evaluations]
        assert sum(part.patch is None for part in parts) == whole
        if whole == 2:  # patches were in flight: it stays until the last of them is back
            assert relative_error(ours, truths.patched(of, 3)) <= truths.bound(of)
            assert client.sessions.live.loads == loads and not client.residency.held(name)
        else:
            assert client.sessions.live.loads == loads + 1 and bool(ours.isfinite().all())


@pytest.mark.parametrize("ulysses", [1, 2] if ALL else [1])
def test_the_stage_that_hangs_is_named_not_those_that_wait_for_it(broken_pipeline, ulysses):
    model, client = broken_pipeline("hangs_before_it_sends", ulysses=ulysses)
    client.sessions.open(lambda: False)
    client.sessions.live.pool._conversation.stall_s = 2.0
    with pytest.raises(
        PoolFailed, match=r"^Rank 0 on cpu made no progress for 2 s while computing: run again"
    ):
        sample(model, case())


def test_a_slow_stage_only_takes_longer_and_the_report_names_it(broken_pipeline, truths):
    model, client = broken_pipeline("slow_stage")
    truth = sample(truths.own_model(PLAIN, 3), case(), steps=2)
    assert relative_error(sample(model, case(), steps=2), truth) <= truths.bound(case())
    last = run_figures(client.runs.last, "model", "gloo")
    assert "; the others wait for rank 1" in run_text(last)
    assert last.busy[1] > 10 * last.busy[0]


def test_a_stage_without_room_ends_the_others_at_once_and_the_pool_goes_on_however_slow_they_are(
    broken_pipeline, monkeypatch
):
    monkeypatch.setattr("pipemesh.pool.verdict.OTHERS_WAIT_S", 0.0)
    model, client = broken_pipeline("no_memory_before_a_slow_stage")
    for _ in range(2):
        sentence = (
            r"^Rank 0 needs [\d.]+ MiB for the keys and values of its blocks and 0\.0 MiB are free: add"
        )
        with pytest.raises(Refused, match=sentence):
            sample(model, case())
        pool = client.sessions.live.pool
        assert pool.idle and pool.arena.board.cancelled_request == pool.next_request() - 2, (
            "the last one was to forget the run"
        )
    assert client.sessions.live.pool is pool


@pytest.mark.parametrize("wrap", [lambda model: model, together], ids=["free", "single"])
def test_another_model_makes_room_for_keys_and_values_and_the_run_begins_again(broken_pipeline, truths, wrap):
    """From random numbers as they were: this sampler draws from torch's own before its first
    evaluation.
    """
    import comfy.samplers

    def churned(model):
        return advanced(model, sampler=comfy.samplers.ksampler("heun", {"s_churn": 2.0}))[0]["samples"]

    other, client = broken_pipeline("no_memory_beside_another_model", ATTENDS_TWICE)
    sample(other, case(ATTENDS_TWICE))
    pool, run = client.sessions.live.pool, client.runs.last.evaluations[-1].part.run
    model = parallelize(truths.stock_model(PLAIN), client, holds_ui_device=False, patching=Patching(3))
    assert relative_error(churned(wrap(model)), churned(truths.own_model(PLAIN, 3))) <= BOUND
    assert {one.part.run for one in client.runs.last.evaluations} == {run + 2}, (
        "what was kept of the first attempt is void"
    )
    assert client.sessions.live.pool is pool and not client.residency.held(other.remote.model)
