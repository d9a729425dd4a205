"""A checkpoint that another process overwrites, cuts short, replaces or deletes while ComfyUI has
its MODEL: the image is of the bytes that were loaded, or there is one sentence. ComfyUI never dies.
"""

import gc
import shutil
import subprocess
import threading
from contextlib import ExitStack

import comfy.utils
import pytest
import torch
from pipemesh.lab.commands.parity import BOUND, relative_error
from pipemesh.nodes.auto.mode import Auto
from pipemesh.nodes.auto.switch import Switch
from pipemesh.nodes.notices import Notices
from pipemesh.parallel_runtime import lease
from pipemesh.parallel_runtime.client.remote_patcher import Patching, parallelize
from pipemesh.parallel_runtime.crossing.source import describe_source
from pipemesh.parallel_runtime.errors import PipeMeshError, Refused
from pipemesh.parallel_runtime.memory import is_unwritten
from pipemesh.parallel_runtime.weights import loan
from pipemesh.parallel_runtime.weights.slots import slots

from .conftest import ALL
from .holdings import NOTHING, Holdings
from .models import load, run, with_lora, write_lora, write_model
from .shared_runtime import SharedRuntime

WAYS = {
    "overwritten": "cp {other} {path}",
    "overwritten without being cut short": "dd if={other} of={path} conv=notrunc status=none",
    "cut short": "dd if=/dev/null of={path} bs=4096 seek=1 status=none",
    "replaced": "cp {other} {path}.new && mv {path}.new {path}",
    "deleted": "rm {path}",
}
IN_PLACE = {"overwritten", "overwritten without being cut short", "cut short"}
PRODUCT = [(way, during) for way in WAYS for during in (False, True)]
COVER = [
    ("overwritten", False),
    ("overwritten without being cut short", True),
    ("cut short", True),
    ("replaced", True),
    ("deleted", False),
]
TIMES = {True: "during", False: "before"}
cases = pytest.mark.parametrize(
    ("way", "during"), PRODUCT if ALL else COVER, ids=lambda one: TIMES.get(one, one)
)


class File:
    """A checkpoint and another model of its size."""

    def __init__(self, folder):
        self.path = write_model(folder / "model.safetensors", blocks=(1, 1))
        self.other = write_model(folder / "other.safetensors", blocks=(1, 1), seed=5)

    def change(self, way):
        """As another process does it."""
        subprocess.run(WAYS[way].format(path=self.path, other=self.other), shell=True, check=True)

    def during(self, way):
        """A callback for a sampler: changes the file after the first step."""
        return lambda step, *_: self.change(way) if step == 0 else None


@pytest.fixture
def file(tmp_path):
    return File(tmp_path)


@pytest.fixture
def served(file, client):
    """A stock MODEL that a pool has served, the same through the pool, and stock's image of it."""
    stock = load(str(file.path))
    parallel = parallelize(stock, client, holds_ui_device=True)
    run(parallel)
    return stock, parallel, run(stock)


@pytest.fixture
def auto(client, tmp_path):
    (tmp_path / "switch.json").write_text('{"PipeMesh.Auto": true}')
    runtime = SharedRuntime(client)
    made = Auto(lambda: runtime, Switch({}, lambda: tmp_path / "switch.json"), Notices())
    made.install()
    yield made
    made.remove()


def image_or_sentence(truth, sample):
    """Holds the image to stock's, or the error to one sentence. Returns whether there is one."""
    try:
        image = sample()
    except PipeMeshError as error:
        assert "\n" not in str(error).strip()
        return False
    assert relative_error(image, truth) <= BOUND
    return True


@pytest.mark.cover(2)
@cases
def test_stock_samples_the_weights_that_it_loaded(file, served, way, during):
    stock, _parallel, truth = served
    if not during:
        file.change(way)
    image = run(stock, callback=file.during(way) if during else None)
    assert torch.equal(image, truth)
    assert torch.equal(run(stock), truth)


@cases
def test_a_pool_makes_the_image_of_what_was_loaded_or_says_one_sentence(
    file, served, client, files, way, during
):
    _stock, parallel, truth = served
    if not during:
        file.change(way)
    for callback in (file.during(way) if during else None, None):  # the same again, no second fault
        made = image_or_sentence(truth, lambda callback=callback: run(parallel, callback=callback))
        assert made == (way not in IN_PLACE)
    run(parallelize(load(files["other"]), client, holds_ui_device=True))


@pytest.mark.parametrize("degrees", [(1, 1, 1, 2), (1, 1, 2)], ids=["cfg 2", "pipefusion 2"])
def test_groups_and_stages_say_the_same_sentence_and_their_run_keeps_it(file, clients, degrees):
    """What they wait for is collected elsewhere than where the forward asks for it."""
    pool = clients(*degrees)
    patching = Patching(2, 1) if pool.layout.pipefusion > 1 else None
    parallel = parallelize(load(str(file.path)), pool, 0.0, patching)
    with pytest.raises(Refused, match="changed on disk") as refused:
        run(parallel, steps=4, cfg=4.0, callback=file.during("cut short"))
    assert pool.runs.faults[pool.last_run] == str(refused.value)
    assert not image_or_sentence(None, lambda: run(parallel, cfg=4.0)), "the same again, no second fault"


@pytest.mark.cover(3)
@cases
def test_auto_mode_makes_stocks_image_or_says_one_sentence(file, served, auto, way, during):
    stock, _parallel, truth = served
    if not during:
        file.change(way)
    made = image_or_sentence(truth, lambda: run(stock, callback=file.during(way) if during else None))
    assert made or during
    assert image_or_sentence(truth, lambda: run(stock)), "the next run"


# -- what the loan is made of


def are_lent(model):
    return [
        is_unwritten(slot.tensor.data_ptr(), slot.tensor.nbytes)
        for slot in slots(model.model.diffusion_model)
    ]


def test_a_file_that_was_opened_to_be_written_and_was_not_is_lent_again(file, served):
    stock, parallel, truth = served
    assert all(are_lent(stock))
    subprocess.run(["python3", "-c", f"open({str(file.path)!r}, 'r+').close()"], check=True)
    assert not any(are_lent(stock))
    assert relative_error(run(parallel), truth) <= BOUND
    assert all(are_lent(stock)) and torch.equal(run(stock), truth)


def test_what_a_node_wrote_and_what_comfyui_keeps_of_a_patched_weight_outlive_the_file(file, served):
    stock, _parallel, truth = served
    lora = write_lora(file.path.parent / "lora.safetensors", file.path, rank=4)
    patched = run(with_lora(stock, {"lora": str(lora)}, 1.0))
    file.change("cut short")
    assert torch.equal(run(stock), truth), "from the backup of what was patched"
    assert torch.equal(run(with_lora(stock, {"lora": str(lora)}, 1.0)), patched)


def test_bytes_that_were_written_to_lent_weights_are_copied_too(file, served):
    stock, _parallel, _truth = served
    weight = stock.model.diffusion_model.get_parameter("img_in.weight")
    weight.data[3, 5] = 42.0
    before = weight.detach().clone()
    file.change("overwritten")
    assert torch.equal(weight, before)


@pytest.mark.parametrize("why", ["another machine's file system", "open to be written", "no mapping wanted"])
def test_where_no_lease_is_to_be_had_comfyui_keeps_its_own_weights(file, client, monkeypatch, why):
    with ExitStack() as stack:
        if why == "another machine's file system":
            monkeypatch.setattr(lease, "LOCAL", {})
        elif why == "open to be written":
            stack.enter_context(file.path.open("r+b"))
        else:
            monkeypatch.setattr(comfy.utils, "DISABLE_MMAP", True)
        stock = load(str(file.path))
        truth = run(stock)
        parallel = parallelize(stock, client, holds_ui_device=True)
        assert relative_error(run(parallel), truth) <= BOUND
        assert not parallel.remote.source.weights.changed
    assert not any(are_lent(stock))
    for way in ("overwritten", "cut short"):
        file.change(way)
        assert torch.equal(run(stock), truth)
    assert not image_or_sentence(truth, lambda: run(parallel))


@pytest.mark.parametrize("during", [False, True], ids=["before", "during"])
@pytest.mark.parametrize("why", ["the system did not wait long enough", "0 MiB of memory are free"])
def test_weights_that_could_not_be_copied_are_told_in_one_sentence_by_stock_and_pool(
    file, served, monkeypatch, why, during
):
    stock, parallel, _truth = served
    for module in (lease, loan):
        monkeypatch.setattr(module, "seconds_that_others_wait", lambda: 0.0)
    if why.startswith("0 MiB"):
        monkeypatch.setattr(lease, "seconds_that_others_wait", lambda: 45.0)
        monkeypatch.setattr(loan, "system_memory", lambda: (0, 0))
    sentence = rf"model.safetensors was overwritten while .* not all could be copied .*{why}\): unload models"
    if not during:
        file.change("cut short")
    with pytest.raises(Refused, match=sentence):
        run(stock, callback=file.during("cut short") if during else None)
    with pytest.raises(Refused, match=sentence):
        run(parallel)
    shutil.copy(file.other, file.path)
    run(load(str(file.path)))


def test_a_lease_and_its_thread_end_with_the_model(file):
    before = Holdings.now()
    stock = load(str(file.path))
    describe_source(stock).weights.compare(stock)
    assert all(are_lent(stock))
    watching = [thread for thread in threading.enumerate() if thread.name == "pipemesh-lease"]
    assert Holdings.now().since(before) != NOTHING
    del stock
    gc.collect()
    for thread in watching[-1:]:
        thread.join(10)
    assert Holdings.now().since(before) == NOTHING


def test_a_loan_is_of_the_file_itself_and_of_no_other_at_its_path(tmp_path):
    """A new version is written beside a checkpoint and renamed over it."""
    path, newer = tmp_path / "model.safetensors", tmp_path / "newer"
    for file in (path, newer):
        file.write_bytes(b"weights")
    lent = loan.Loan(str(path), "model.safetensors", torch.nn.Linear(1, 1))
    try:
        assert lent.is_of(str(path))
        newer.replace(path)
        assert not lent.is_of(str(path)) and lent.is_open
    finally:
        lent.close_if_unused()
