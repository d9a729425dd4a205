"""Real ranks that die, hang, run out of memory or lose their checkpoint: one sentence each, and the
next run is right.
"""

from __future__ import annotations

import time

import psutil
import pytest
import torch
from pipemesh.lab.bench.pools import confined
from pipemesh.lab.commands.parity import BOUND, Case, conditioning, relative_error, stock_model
from pipemesh.parallel_runtime.client.remote_patcher import parallelize
from pipemesh.parallel_runtime.client.remote_pool import RemotePool
from pipemesh.parallel_runtime.client.run import PooledModel
from pipemesh.parallel_runtime.client.session import Resident, ResidentState
from pipemesh.parallel_runtime.errors import (
    ModelError,
    OutOfMemory,
    PoolFailed,
    PoolSpent,
    Refused,
    SharedMemoryFull,
)
from pipemesh.parallel_runtime.families.catalogue import FAMILIES
from pipemesh.pool.handle import PoolHandle
from pipemesh.pool.pool import WorkerPool

from ..kit.at_once import Once, in_forward, kill
from ..kit.fake_pools import DEADLINE_S, cpus, is_alive
from ..kit.holdings import NOTHING, Holdings
from ..kit.models import write_model
from ..kit.patched import advanced, custom, execute
from ..kit.pipelines import with_callback
from ..wire.test_arena import largest_file

SAMPLE = next(one for one in FAMILIES[0].samples if one.prompt_extras)  # with a reference
EDIT = Case(SAMPLE.name, "ulysses2", "odd", 2, 1.0, False, "euler")


@pytest.fixture(scope="module")
def before(truth, setup):
    """What this process holds once there has been a pool: the process that ranks are forked from
    stays.
    """
    handle = PoolHandle(cpus(1), setup)
    handle.ensure()
    handle.close()
    return Holdings.now()


@pytest.fixture(scope="module")
def handle(setup, before):
    """Two ranks of this module's own, which may die."""
    handle = PoolHandle(cpus(2), setup)
    yield handle
    handle.close()


@pytest.fixture(scope="module")
def client(handle):
    return RemotePool(handle)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("faults") / "model.safetensors", blocks=(4, 4))


def load(path):
    import comfy.sd

    return comfy.sd.load_diffusion_model(str(path))


def picture(model, size=(40, 40), steps=1, after_step=None):
    import comfy.sample

    latent = torch.zeros(1, 16, *size)
    with torch.inference_mode():
        noise = comfy.sample.prepare_noise(latent, 7)
        prompts = conditioning(1, 13), conditioning(2, 7)
        return comfy.sample.sample(
            model,
            noise,
            steps,
            1.0,
            "euler",
            "simple",
            *prompts,
            latent,
            disable_pbar=True,
            seed=7,
            callback=after_step,
        )


@pytest.fixture(scope="module")
def truth(checkpoint):
    return picture(load(checkpoint))


@pytest.fixture(scope="module")
def parallel(checkpoint, client):
    return parallelize(load(checkpoint), client, holds_ui_device=False)


def is_right(model, truth) -> bool:
    return relative_error(picture(model), truth) <= BOUND


KILLED = (
    r"^Rank 1 on cpu was killed \(signal 9; the system does this when memory runs out\) while {}: "
    r"run again, a fresh pool will be started\.$"
)


def test_a_rank_killed_while_loading_is_named_and_the_next_run_is_right(handle, parallel, truth):
    def loading() -> bool:
        pool = handle.live()
        return pool is not None and pool.arena.board.phase(1) == "loading"

    killer = Once(loading, lambda: kill(handle.live(), 1))
    with pytest.raises(PoolFailed, match=KILLED.format("loading")):
        picture(parallel)
    killer.join()
    assert is_right(parallel, truth)


def test_the_run_after_an_idle_rank_died_is_right_at_once_and_unloading_models_raises_nothing(
    handle, parallel, truth
):
    import comfy.model_management as mm

    for act in (lambda: None, mm.unload_all_models):
        assert is_right(parallel, truth)
        pool = handle.live()
        kill(pool, 1)
        assert pool.ranks._crew.supervisor.exit_of(1, DEADLINE_S) == -9
        act()
        assert is_right(parallel, truth)


def edited(model, after_step=lambda: None):
    """Three steps of an image with a reference."""
    return with_callback(model, EDIT, after_step)


@pytest.fixture(scope="module")
def kept_references(client):
    """The edited image by stock with Flux KV Cache, and the MODEL made parallel."""
    stock = execute("nodes_flux", "FluxKVCache", stock_model(EDIT.heads, family=EDIT.family))
    return edited(stock), parallelize(stock, client, holds_ui_device=False)


@pytest.mark.parametrize("loss", ["a rank died", "the pool was closed", "the model was released"])
def test_a_run_goes_on_after_a_loss_unless_a_nodes_code_keeps_a_state_of_it(
    handle, client, kept_references, loss
):
    stock = stock_model(EDIT.heads, family=EDIT.family)
    plain = edited(stock), parallelize(stock, client, holds_ui_device=False)

    def lose() -> None:
        pool = handle.live()
        if loss == "a rank died":
            kill(pool, 1)
            pool.ranks._crew.supervisor.exit_of(1, DEADLINE_S)
        elif loss == "the pool was closed":
            handle.close()
        else:
            client.residency.release(model.remote.model)

    truth, model = plain
    assert relative_error(edited(model, lose), truth) <= BOUND
    truth, model = kept_references
    with pytest.raises(PoolFailed, match=r"^The workers lost .* in the middle of a run"):
        edited(model, lose)
    assert relative_error(edited(model), truth) <= BOUND


def test_after_a_lack_of_memory_a_nodes_code_begins_anew_in_the_first_evaluation_and_not_in_a_later_one(
    client, kept_references, monkeypatch
):
    """Of all ranks, behind their last message, while another model has the rest of it."""
    truth, model = kept_references
    assert relative_error(edited(model), truth) <= BOUND
    session, lacks, other = client.sessions.live, [], PooledModel("other", "other", users=1)

    def collect(number, interrupted):
        answers = WorkerPool.collect(session.pool, number, interrupted)
        if lacks:
            lacks.clear()
            raise OutOfMemory("Rank 0 on cpu ran out of memory.")
        return answers

    def lack():
        session.models = {other: Resident(state=ResidentState.READY), **session.models}
        lacks.append(True)

    monkeypatch.setattr(session.pool, "collect", collect)
    sent, begin = session.patchings, client.runs.begin
    monkeypatch.setattr(client.runs, "begin", lambda name: lack() or begin(name))
    assert relative_error(edited(model), truth) <= BOUND
    assert session.patchings == sent + 1 and other not in session.models
    monkeypatch.setattr(client.runs, "begin", begin)
    with pytest.raises(OutOfMemory, match=r"out of memory\. Other models used the memory and were unloaded"):
        edited(model, lack)
    assert relative_error(edited(model), truth) <= BOUND and other not in session.models


def test_shared_memory_that_runs_out_is_one_sentence_and_the_same_pool_goes_on(handle, parallel, truth):
    assert is_right(parallel, truth)
    pool = handle.live()
    sentence = (
        r"^Shared memory is full: [\d.]+ MiB more could not be reserved \(File too large\); close other"
        r" programs, "
    )
    with largest_file(pool.arena.nbytes), pytest.raises(SharedMemoryFull, match=sentence):
        picture(parallel, (1024, 1024))
    assert handle.live() is pool
    assert is_right(parallel, truth)


OUT_OF_MEMORY = (
    r"^Rank {} on cpu ran out of memory while computing \([\d.]+ MiB of [\d.]+ MiB free, [\d.]+ MiB held by"
    r" models; {}\): "
    r"use more ranks, a smaller image or batch, or free memory\."
)


def test_every_rank_out_of_memory_is_one_sentence_and_the_same_pool_goes_on(handle, parallel, truth):
    """All have less room than the evaluation takes: all are refused alike, and go on when they
    have it.
    """
    assert is_right(parallel, truth)
    pool = handle.live()
    sentence = OUT_OF_MEMORY.format(0, ".*can't allocate memory.*")
    with confined(pool.ranks.pids, room=4 << 20), pytest.raises(OutOfMemory, match=sentence):
        picture(parallel, (512, 512))
    assert handle.live() is pool
    low = pool.arena.take(8 << 20)  # so that what comes now lies where the ranks had no room
    assert is_right(parallel, truth)
    pool.arena.give(low, 8 << 20)


def test_one_rank_out_of_memory_inside_a_forward_is_named_and_the_next_run_is_right(handle, parallel, truth):
    assert is_right(parallel, truth)
    pool = handle.live()
    with (
        confined(pool.ranks.pids[1:], room=8 << 20),
        pytest.raises(PoolSpent, match=OUT_OF_MEMORY.format(1, ".*can't allocate memory.*")),
    ):
        picture(parallel, (128, 128))
    assert pool.state == "failed"
    assert is_right(parallel, truth)


def test_one_rank_out_of_memory_beside_another_model_computes_again_in_a_fresh_pool(
    handle, client, parallel, checkpoint, truth
):
    """That has the other model's room. The image is stock's, by one pool."""
    other = parallelize(stock_model(1), client, holds_ui_device=False)
    picture(other)
    assert is_right(parallel, truth)
    pool, large = handle.live(), picture(load(checkpoint), (128, 128))
    with confined(pool.ranks.pids[1:], room=8 << 20):
        assert relative_error(picture(parallel, (128, 128)), large) <= BOUND
    assert handle.live() is not pool and client.runs.last.restarts == 1
    assert is_right(parallel, truth)


def test_the_rank_that_hangs_inside_a_forward_is_named_not_the_one_that_waits_for_it(handle, parallel, truth):
    assert is_right(parallel, truth)
    pool = handle.live()
    pool._conversation.stall_s = 2.0
    board, stopped = pool.arena.board, psutil.Process(pool.ranks.pids[1])

    def stopped_while_computing() -> bool:
        """Stops rank 1 until it has stopped between two exchanges, with rank 0 waiting in the
        second.
        """
        if not in_forward(pool, 1):
            return False
        stopped.suspend()
        seen = -1
        while seen != (seen := board.progress(0)):
            time.sleep(0.2)
        if board.progress(1) < seen:
            return True
        here = board.progress(1)
        stopped.resume()
        # Else it is stopped again before it has come any further
        while board.progress(1) == here and pool.state == "busy":
            time.sleep(0.001)
        return False

    once = Once(stopped_while_computing, lambda: None)
    with pytest.raises(
        PoolFailed, match=r"^Rank 1 on cpu made no progress for 2 s while computing: run again"
    ):
        picture(parallel, (96, 96), steps=8)
    once.join()
    assert not is_alive(stopped.pid)


def test_after_all_of_this_nothing_is_left_in_the_ui(handle, parallel, truth, before):
    assert is_right(parallel, truth)
    assert all(map(is_alive, handle.live().ranks.pids))
    handle.close()
    assert Holdings.now().since(before) == NOTHING


def test_an_error_in_every_group_is_one_sentence_and_the_same_pool_goes_on(
    checkpoint, clients, truth, monkeypatch
):
    """Of three prompts of the wrong width one rank has two, and owes an answer when both failed."""
    client = clients(1, cfg=2)
    model = parallelize(load(checkpoint), client, holds_ui_device=False)
    assert is_right(model, truth)
    pool = client.sessions.live.pool

    def answers(listen):
        came = []
        while len(came) < 3:
            came += listen(1.0)
        ranks = [rank for rank, _ in came]
        for said in sorted(came, key=lambda said: ranks.count(said[0])):
            yield [said]

    narrow = [[[text[..., :-1], more] for text, more in conditioning(1, tokens)] for tokens in (50, 13, 13)]
    with monkeypatch.context() as patch:
        said = answers(pool.ranks.listen)
        patch.setattr(pool.ranks, "listen", lambda _: next(said))
        with pytest.raises(
            ModelError, match=r"^Rank [01] on cpu failed while computing: RuntimeError.* ready"
        ):
            advanced(model, custom("DualCFGGuider", model, *narrow, 3.0, 2.0, "regular"), steps=1)
    assert is_right(model, truth)
    assert client.sessions.live.pool is pool and pool.is_whole


# -- checkpoints


@pytest.fixture
def own(tmp_path, clients):
    """A checkpoint that may come to harm, its MODEL made parallel on the shared pool, and its stock
    picture.
    """
    path = write_model(tmp_path / "own.safetensors", heads=1, blocks=(1, 1), seed=len(str(tmp_path)))
    truth = picture(load(path))
    return path, parallelize(load(path), clients(2), holds_ui_device=False), truth


def test_a_checkpoint_that_is_gone_is_named_and_put_back_is_right(own):
    path, model, truth = own
    path.rename(path.with_suffix(".away"))
    with pytest.raises(
        Refused,
        match=f"^The checkpoint {path} is missing: put it back or choose another in the loader node\\.$",
    ):
        picture(model)
    path.with_suffix(".away").rename(path)
    assert is_right(model, truth)


def changed(path, found: str) -> str:
    size = path.stat().st_size
    return (
        f"^The checkpoint {path} changed on disk since it was loaded \\({size} bytes of .* then, {found} of"
        " .* now\\): "
        r"unload models and execution cache in ComfyUI's menu and run again\.$"
    )


def test_a_checkpoint_overwritten_in_place_is_named_and_no_longer_held(own, clients):
    """Ranks have it mapped: from then on they would hold some weights of each file."""
    path, model, truth = own
    client = clients(2)
    assert is_right(model, truth)
    sentence = changed(path, str(path.stat().st_size))
    path.write_bytes(write_model(path.with_suffix(".other"), heads=1, blocks=(1, 1), seed=99).read_bytes())
    with pytest.raises(Refused, match=sentence):
        picture(model)
    assert not client.residency.held(model.remote.model)
    assert is_right(parallelize(load(path), client, holds_ui_device=False), picture(load(path)))


def test_a_checkpoint_that_changed_is_refused_however_often_its_model_is_parallelized(own, clients):
    """As a sampler node does at every run, with the MODEL its loader made before the change."""
    path, _, _ = own
    stock = load(path)
    assert is_right(parallelize(stock, clients(2), holds_ui_device=False), picture(stock))
    sentence = changed(path, str(path.stat().st_size))
    clients(2).residency.release(parallelize(stock, clients(2), holds_ui_device=False).remote.model)
    write_model(path.with_suffix(".other"), heads=1, blocks=(1, 1), seed=99).replace(path)
    for _ in range(2):
        with pytest.raises(Refused, match=sentence):
            picture(parallelize(stock, clients(2), holds_ui_device=False))
