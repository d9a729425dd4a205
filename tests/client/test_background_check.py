"""A write to a weight that no quick look finds: found while the pool samples, and told in one
sentence; the next run is stock's. Nothing of the comparison outlives its run.
"""

import os
import shutil
import threading

import comfy.model_management as mm
import comfy.sd
import comfy.utils
import pytest
import torch
from comfy.model_patcher import ModelPatcher
from pipemesh.lab.commands.parity import BOUND, relative_error
from pipemesh.parallel_runtime.client import remote_patcher
from pipemesh.parallel_runtime.client.remote_model import Remote
from pipemesh.parallel_runtime.client.remote_patcher import RemotePatcher, parallelize
from pipemesh.parallel_runtime.errors import Refused
from pipemesh.parallel_runtime.weights import checksum as sums
from pipemesh.parallel_runtime.weights import comparison
from pipemesh.parallel_runtime.weights.background_check import BackgroundCheck
from pipemesh.parallel_runtime.weights.checksum import checksum

from ..kit.models import load, run, write_model
from ..weights.test_weights import NAME, by_data, by_numpy, compared, in_inference, parameter
from .test_two_models import guided

PLACE = 211, 34  # neither its row nor its column is looked at there
SENTENCE = (
    rf"^A node has written to the weight {NAME} of .* the old one: run again, and they get the new one\.$"
)


def of_a_state(path):
    """As a server loads it: torch counts no writes to such weights."""
    with torch.inference_mode():
        return comfy.sd.load_diffusion_model_state_dict(comfy.utils.load_torch_file(path))


@pytest.fixture(scope="module")
def half(tmp_path_factory):
    """A file whose weights ComfyUI casts as it loads them."""
    return str(write_model(tmp_path_factory.mktemp("half") / "half.safetensors", dtype=torch.bfloat16))


def is_checking():
    return any(thread.name == "pipemesh-weights" for thread in threading.enumerate())


@pytest.mark.parametrize(
    ("loader", "write", "weights"),
    [(load, by_data, "whole"), (load, by_numpy, "sharded"), (of_a_state, in_inference, "whole")],
    ids=["another dtype", "sharded", "no file"],
)
def test_one_element_ends_the_run_with_a_sentence_and_is_the_ranks_own_in_the_next(
    half, client, loader, write, weights
):
    stock, model = loader(half), loader(half)
    parallel, before = parallelize(model, client, True, weights=weights), run(stock)
    for _ in range(2):  # what is sent is known with the second
        assert relative_error(run(parallel), before) <= BOUND
    for one in (stock, model):
        with torch.inference_mode(parameter(one).is_inference()):
            write(parameter(one), PLACE)
            parameter(one).data[PLACE] *= 100
    truth = run(stock)
    assert relative_error(truth, before) > 10 * BOUND, "the write does nothing"
    with pytest.raises(Refused, match=SENTENCE):
        run(parallel)
    for _ in range(2):
        assert relative_error(run(parallel), truth) <= BOUND
    assert not is_checking()


@pytest.mark.parametrize("is_replaced", [False, True], ids=["deleted", "replaced"])
def test_what_was_written_is_the_ranks_own_though_the_file_is_gone(tmp_path, half, is_replaced):
    path = tmp_path / "model.safetensors"
    shutil.copy(half, path)
    patcher = load(str(path))
    weights, other = compared(patcher), NAME.replace("1.", "0.", 1)
    os.replace(shutil.copy(half, tmp_path / "another"), path) if is_replaced else path.unlink()
    parameter(patcher).data[PLACE] += 1
    patcher.model.diffusion_model.get_parameter(other).data[PLACE] += 1
    with pytest.raises(Refused, match=r"^A node has written"):
        BackgroundCheck(weights, "half").require_unchanged(60.0)
    weights.compare(patcher.model)
    assert weights.changed == {NAME, other}, "those, and no others"
    assert BackgroundCheck(weights, "half").require_unchanged(60.0)


@pytest.mark.parametrize("beside", ["one of its pool", "a stock model", "one of another pool"])
def test_it_is_found_in_a_model_that_a_guider_evaluates_beside_the_sampled_one(
    files, half, client, clients, monkeypatch, beside
):
    main = load(files["model"])
    if beside != "a stock model":
        pool = client if beside == "one of its pool" else clients(ulysses=1, cfg=2)
        main = parallelize(main, pool, True)
    ours = main, parallelize(load(half), client, True)
    guided(*ours)
    parameter(ours[1]).data[PLACE] += 50
    cleanup, are_done = RemotePatcher.cleanup, threading.Event()
    monkeypatch.setattr(RemotePatcher, "cleanup", lambda self: are_done.set() or cleanup(self))
    blocked(monkeypatch, are_done)
    with pytest.raises(Refused, match=SENTENCE):
        guided(*ours)
    guided(*ours)
    assert not is_checking()


def test_a_model_that_nobody_says_is_sampled_is_compared_before_its_first_evaluation(
    served, client, monkeypatch
):
    """As by a guider with a loop of its own."""
    parallel, before = served
    for announces in ("pre_run", "cleanup"):
        monkeypatch.setattr(RemotePatcher, announces, getattr(ModelPatcher, announces))
    assert torch.equal(run(parallel), before)
    parameter(parallel).data[PLACE] += 50
    with pytest.raises(Refused, match=SENTENCE):
        run(parallel)
    assert not torch.equal(run(parallel), before)
    assert not is_checking()
    monkeypatch.undo()
    parallel.cleanup()
    assert parallel.remote.model.check is None


def test_a_model_that_is_loaded_and_not_sampled_is_in_nobodys_way(served, files, client, monkeypatch):
    parallel, _ = served
    blocked(monkeypatch)
    mm.load_models_gpu([parallel])
    assert not is_checking()
    monkeypatch.undo()
    parameter(parallel).data[PLACE] += 50
    run(parallelize(load(files["model"]), client, True))


def blocked(monkeypatch, until=None):
    """Has full comparisons wait for the event ``until``, if there is one, or for their end."""
    until = until or threading.Event()

    def waiting(tensor, is_ended=lambda: False):
        while not (until.wait(0.01) or is_ended()):
            pass
        return checksum(tensor, is_ended)

    monkeypatch.setattr(comparison, "checksum", waiting)


@pytest.fixture
def served(half, client):
    parallel = parallelize(load(half), client, True)
    return parallel, run(parallel)


def test_a_run_waits_for_what_is_not_compared_yet_when_its_steps_are_done(served, monkeypatch):
    parallel, _ = served
    parameter(parallel).data[PLACE] += 50
    steps, are_done = [], threading.Event()

    def callback(step, _denoised, _x, total):
        steps.append(step)
        if step == total - 1:
            are_done.set()

    blocked(monkeypatch, are_done)
    with pytest.raises(Refused, match=SENTENCE):
        run(parallel, callback=callback)
    assert steps == [0, 1, 2]


def test_a_run_that_loads_the_model_compares_it_meanwhile_and_once(half, client, monkeypatch):
    parallel, loads = parallelize(load(half), client, True), []
    parallel.remote.release()
    before, compare = parallel.remote.model.loads, Remote.check_weights

    def noted(remote):
        loads.append(remote.model.loads)
        return compare(remote)

    monkeypatch.setattr(Remote, "check_weights", noted)
    for _ in range(2):
        run(parallel)
    assert loads == [before, before + 1]
    assert not is_checking()


ENDS = {
    "a load that fails": (Refused, "^no$"),
    "stop amid the steps": (mm.InterruptProcessingException, ""),
    "stop while the run waits for it": (mm.InterruptProcessingException, ""),
    "its own error": (OSError, "no such memory"),
}


@pytest.mark.parametrize("end", ENDS)
def test_whatever_ends_the_run_ends_it_too_and_the_next_run_is_right(served, monkeypatch, end):
    (parallel, before), (error, says) = served, ENDS[end]
    blocked(monkeypatch)

    def fails(*_args, **_kwargs):
        assert is_checking()
        raise error(says.strip("^$"))

    def callback(step, _denoised, _x, total):
        if "stop" in end and step == (0 if "amid" in end else total - 1):
            assert is_checking()
            mm.interrupt_current_processing()

    if end == "a load that fails":
        parallel.remote.release()
        monkeypatch.setattr(remote_patcher, "bring_up", fails)
    if end == "its own error":
        monkeypatch.setattr(comparison, "checksum", fails)
    with pytest.raises(error, match=says):
        run(parallel, callback=callback)
    assert not is_checking()
    monkeypatch.undo()
    assert torch.equal(run(parallel), before)


def test_what_is_in_no_file_is_compared_with_what_it_was(files):
    model = load(files["model"])
    model.model.diffusion_model.register_buffer("table", torch.zeros(8, 8), persistent=False)
    weights = compared(model)
    for value, changed in ((1, {"table"}), (0, set())):
        model.model.diffusion_model.table[3, 5] = value
        weights.compare(model.model)
        assert weights.changed == changed


def test_a_weight_is_read_in_pieces_of_bounded_size(monkeypatch):
    monkeypatch.setattr(sums, "PIECE", 1 << 12)
    asked = []
    wide, flat = torch.randn(64, 1 << 8), torch.randn(1 << 14)
    for weight in (wide, flat, wide.t().contiguous().t(), flat.view(1, -1), wide[None]):
        asked.clear()
        whole = checksum(weight, lambda: asked.append(1) or False)
        assert len(asked) == 16
        assert checksum(weight, lambda: len(asked) > 20 or asked.append(1)) == b"" != whole
    assert checksum(wide) == checksum(wide.t().contiguous().t()), "however it lies in memory"


def test_weights_that_are_gone_are_let_be(half):
    model = load(half)
    weights = compared(model)
    parameter(model).data = parameter(model).data + 1
    assert BackgroundCheck(weights, "half").require_unchanged(60.0)
    del model
    assert BackgroundCheck(weights, "half").require_unchanged(60.0)
