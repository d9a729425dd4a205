"""What ComfyUI's process and the ranks keep stays within its bound, whatever is sampled one after
the other, and is back to it after a run: bytes of the arena, of memory that is registered with
GPUs, of copies on the UI's GPU, and of what ranks keep.
"""

import os
from itertools import count
from types import SimpleNamespace

import pytest
import torch
from greenlet import getcurrent
from pipemesh.nodes.status.collection import shared_figures
from pipemesh.parallel_runtime.client import calls, runs
from pipemesh.parallel_runtime.client.branch import Branch
from pipemesh.parallel_runtime.client.conditioning import ConditioningCache
from pipemesh.parallel_runtime.client.evaluations import Work
from pipemesh.parallel_runtime.client.residency import Residency
from pipemesh.parallel_runtime.client.run import PooledModel
from pipemesh.parallel_runtime.client.session import Sessions
from pipemesh.parallel_runtime.errors import Refused
from pipemesh.parallel_runtime.layout import Layout
from pipemesh.parallel_runtime.weights.background_check import BackgroundCheck
from pipemesh.parallel_runtime.weights.comparison import Weights
from pipemesh.parallel_runtime.wire.arena import Arena
from pipemesh.parallel_runtime.worker import device_memory
from pipemesh.parallel_runtime.worker.arena_io import ArenaIO
from pipemesh.parallel_runtime.worker.handler import RequestHandler

from ..kit.joint_model import CONDS
from ..kit.late_device import late_device
from ..kit.late_pool import pooled
from ..kit.late_ranks import own_gpu

CONDITIONING, FIRST, BOUND = 1 << 10, 16 << 10, 64 << 10  # bytes, in the place of the product's
RESIDUALS = 512 << 10
MODELS = tuple(f"m{number}" for number in range(5))
STEPS = 12
NAMED = 4 << 10  # what one evaluation names, writes and makes


@pytest.fixture(autouse=True)
def small(monkeypatch):
    bounds = {ConditioningCache: (CONDITIONING,), Arena: (FIRST, BOUND), ArenaIO: (CONDITIONING,)}
    for made, defaults in bounds.items():
        monkeypatch.setattr(made.__init__, "__defaults__", defaults)


def text(seed):
    return torch.randn(1, 5, 6, generator=torch.Generator().manual_seed(seed)).to(own_gpu())


def made(remote, run, seed, step=0, **options):
    """The output of the text of ``seed`` in a window of its own, on the CPU."""
    arguments = {name: CONDS[0][name].to(own_gpu()) for name in ("img", "mask")}  # these are of no cond
    arguments |= {"txt": text(seed), "transformer_options": options}
    work = Work(arguments, Branch(window=(step,)))
    (output,) = remote.evaluations.dispatch(run, [work], lambda: False)
    return output.cpu()


def is_made(*asked, **options):
    """Whether what is ``made`` is finite."""
    return bool(made(*asked, **options).isfinite().all())


def residuals():
    return torch.ones(RESIDUALS // 4).to(own_gpu())


def test_windows_that_shift_models_in_turn_and_residuals_once_leave_what_the_page_says():
    within, after, outputs = [], [], []

    def sample(remote):
        session, seeds, own = remote.sessions.latest, count(), getcurrent().gpu

        def memory():
            return shared_figures(session), max(one.conditioning for one in session.pool.memory)

        for model in map(remote.residency.models.get, MODELS):
            run = remote.runs.begin(model)
            for step in range(STEPS):
                options = {"residuals": residuals()} if (model.name, step) == ("m3", 7) else {}
                outputs.append(is_made(remote, run, next(seeds), step, **options))
                del options
                within.append((*memory(), own.held_bytes))
            remote.runs.end(model)
            after.append((*memory(), sum(own.box.registered.values())))

    pooled(Layout(), sample, at_once=True, pins=True, models=MODELS)
    assert outputs == [True] * len(MODELS) * STEPS
    for shared, in_rank, on_gpu in within:
        assert max(shared.conditioning, shared.copies, on_gpu, in_rank) <= CONDITIONING + NAMED
    assert max(shared.arena for shared, *_ in within) > RESIDUALS, "there was room for them"
    assert max(on_gpu for *_, on_gpu in within) > CONDITIONING // 2, "a bound that is used"
    for shared, in_rank, registered in after:
        assert shared.arena == shared.registered <= BOUND and registered <= 2 * BOUND
        assert in_rank == 0


def test_what_an_evaluation_names_beyond_the_bound_is_sent_once_in_a_run_and_goes_with_it(monkeypatch):
    monkeypatch.setattr(ConditioningCache.__init__, "__defaults__", (0,))

    def sample(remote):
        known, model = remote.sessions.latest.conditioning, remote.residency.models["m"]
        run = remote.runs.begin(model)
        assert is_made(remote, run, 1)
        uploads, nbytes = known.uploads, known.nbytes
        assert nbytes >= text(1).nbytes
        assert all(is_made(remote, run, 1) for _ in range(3))
        assert known.uploads == uploads, "each tensor was sent once"
        assert is_made(remote, run, 2) and known.nbytes == nbytes, "what was named before has gone"
        remote.runs.end(model)
        assert known.nbytes == known.copied_bytes == 0

    pooled(Layout(), sample, at_once=True, pins=True)


WRONG = {
    "a rank fails": ZeroDivisionError("in a node's code"),
    "a rank refuses": Refused("A node's code does not want to."),
    "a rank needs longer": None,
    "something is in use": None,
}
BOTH = pytest.mark.parametrize("layout", [Layout(ulysses=2), Layout(pipefusion=2)], ids=Layout.equation)


@BOTH
@pytest.mark.parametrize("wrong", WRONG)
def test_runs_after_a_shrink_that_goes_wrong_are_right_and_shrink(wrong, layout, monkeypatch):
    real, ends, waiting, sizes = RequestHandler._end_run, [], [], []

    def end_run(handler, request):
        done = real(handler, request)
        ends.append(handler._mesh.rank)
        if ends.count(1) == 1 and ends[-1] == 1:
            if WRONG[wrong] is not None:
                raise WRONG[wrong]
            while waiting:
                waiting[0].give_way(None)
        return done

    monkeypatch.setattr(RequestHandler, "_end_run", end_run)

    def sample(remote):
        waiting.clear()
        arena = remote.sessions.open(lambda: False).pool.arena
        run, outputs = remote.runs.begin(remote.residency.models["m"]), []
        for step in range(2):
            outputs.append(made(remote, run, step, step, residuals=residuals()))
        assert arena.nbytes > RESIDUALS
        return torch.cat(outputs)

    def ui(remote):
        pool = remote.sessions.latest.pool
        arena, own = pool.arena, getcurrent().gpu

        def end():
            remote.runs.end(remote.residency.models["m"])
            of_file, registered = os.fstat(arena.segment.fd).st_size, sum(own.box.registered.values())
            sizes.append((arena.nbytes, of_file, registered))

        first = sample(remote)
        taken = arena.take(BOUND) if wrong == "something is in use" else 0
        with monkeypatch.context() as patch:
            if wrong == "a rank needs longer":
                waiting.append(pool.ranks._world)
                patch.setattr(runs, "END_WAIT_S", -1.0)
            end()
        again = sample(remote)
        if taken:
            arena.give(taken, BOUND)
        end()
        assert torch.equal(first, again) and torch.equal(first, sample(remote))
        end()

    pooled(layout, ui, at_once=True, pins=True)
    first, *others = sizes
    assert first[0] == first[1] and (first[0] <= BOUND) is (WRONG[wrong] is not None)
    for nbytes, of_file, registered in others:
        assert nbytes == of_file == BOUND and registered <= (1 + layout.world_size) * BOUND


@BOTH
def test_ranks_tell_what_their_methods_keep(layout, monkeypatch):
    monkeypatch.setattr(device_memory, "MEMORY_KEPT_S", -1.0)
    told = []

    def sample(remote):
        pool, model = remote.sessions.latest.pool, remote.residency.models["m"]
        run = remote.runs.begin(model)
        assert all(is_made(remote, run, seed) for seed in range(2))
        told.append([one.kept for one in pool.memory])
        remote.runs.end(model)
        told.append([one.kept for one in pool.memory])

    pooled(layout, sample, at_once=True)
    during, after = told
    keys_and_values = 2 * 2 * 4 * (5 + 13) * 6 if layout.stages > 1 else 0  # of a stage's two blocks
    assert all(one >= max(1, keys_and_values) for one in during), told
    assert all(before - left >= keys_and_values for before, left in zip(during, after, strict=True))


def sessions():
    """Those of a pool that has no ranks."""
    facts = SimpleNamespace(speeds=(), everyone=(0,), stages=1)
    pool = SimpleNamespace(arena=Arena(), facts=facts, idle=True)
    return Sessions(SimpleNamespace(layout=Layout(), ensure=lambda *_: pool, live=lambda: pool))


def test_layouts_in_turn_leave_nothing_of_their_pools_on_the_uis_gpu():
    with late_device() as box:
        known = []
        for number in range(20):
            known.append(sessions())
            session = known[-1].open(lambda: False)
            session.conditioning.put(Branch(), "context", text(number))
            assert session.conditioning.copied_bytes == box.own.held_bytes == 120
            session.pool.arena.close()
    assert box.own.held_bytes == 0


def test_comparisons_of_weights_that_no_run_ends_end_with_the_pool():
    known = sessions()
    of_pool = runs.Runs(known)
    models, session = Residency(known, of_pool).models, known.open(lambda: False)
    for name in ("sampled", "by a guider's own loop"):
        models[name] = PooledModel(name, name, check=BackgroundCheck(Weights(), name))
    sampled, other = models.values()
    checked = sampled.check
    of_pool.begin(sampled)
    sampled.check = checked = BackgroundCheck(Weights(), "sampled")
    session.pool.arena.close()
    assert (sampled.check, other.check) == (checked, None), "its run's end tells of a weight that was written"
    of_pool.end(sampled)
    assert sampled.check is None


def test_latents_by_which_calls_are_told_apart_are_forgotten_beyond_their_bound(monkeypatch):
    latent = torch.ones(1, 16)
    monkeypatch.setattr(calls, "KEPT_LATENTS", 4 * latent.nbytes)
    known, moved = calls.Calls(), []
    known.watch(lambda: moved.append("moved"))
    for step in range(200):
        known.begin_evaluation(torch.zeros(2, 16))
        for window in (-1, step):
            branch = known.own_branch(Branch(window=(window,)), [latent])
            known.count(branch)
    assert len(known._latents) == 4 and len(known._counts) == 4 and not moved
    assert known.count(Branch(window=(-1,))) == 200, "of one that comes every time"


def test_names_and_figures_are_forgotten_beyond_their_bounds(monkeypatch):
    monkeypatch.setattr(runs, "MOST_EVALUATIONS", 10)
    known = runs.Runs(SimpleNamespace(live=None, at_close=[]))
    model, short = PooledModel("m", "m"), PooledModel("short", "short")
    for evaluations in (1, 2, 3, 6, 11, 4):
        known.begin(model).evaluations += [None] * evaluations
        known.begin(short)
        assert sum(len(run.evaluations) for run in list(known.recent)[:-2]) <= 10
    for _ in range(100):
        known.begin(model)
    assert len(known.recent) == runs.KEPT
