"""A checkpoint that another process overwrites, cuts short, replaces or deletes while ComfyUI has
its MODEL: the image is of the bytes that were loaded, or there is one sentence. ComfyUI never dies.
"""

import subprocess

import pytest
import torch
from pipemesh.lab.commands.parity import BOUND, relative_error
from pipemesh.nodes.auto.mode import Auto
from pipemesh.nodes.auto.switch import Switch
from pipemesh.nodes.notices import Notices
from pipemesh.parallel_runtime.client.remote_patcher import Patching, parallelize
from pipemesh.parallel_runtime.errors import PipeMeshError, Refused

from ..fixtures import ALL
from ..kit.models import load, run, with_lora, write_lora, write_model
from ..kit.shared_runtime import SharedRuntime

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
def served_model(file, client):
    """A stock MODEL that a pool has served, the same through the pool, and stock's image of it."""
    stock = load(str(file.path))
    parallel = parallelize(stock, client, holds_ui_device=True)
    run(parallel)
    return stock, parallel, run(stock)


@pytest.fixture
def auto_on(client, tmp_path):
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
def test_stock_samples_the_weights_that_it_loaded(file, served_model, way, during):
    stock, _parallel, truth = served_model
    if not during:
        file.change(way)
    image = run(stock, callback=file.during(way) if during else None)
    assert torch.equal(image, truth)
    assert torch.equal(run(stock), truth)


@cases
def test_a_pool_makes_the_image_of_what_was_loaded_or_says_one_sentence(
    file, served_model, client, files, way, during
):
    _stock, parallel, truth = served_model
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
    assert pool.runs.last.fault == str(refused.value)
    assert not image_or_sentence(None, lambda: run(parallel, cfg=4.0)), "the same again, no second fault"


@pytest.mark.cover(3)
@cases
def test_auto_mode_makes_stocks_image_or_says_one_sentence(file, served_model, auto_on, way, during):
    stock, _parallel, truth = served_model
    if not during:
        file.change(way)
    made = image_or_sentence(truth, lambda: run(stock, callback=file.during(way) if during else None))
    assert made or during
    assert image_or_sentence(truth, lambda: run(stock)), "the next run"


def test_what_a_node_wrote_and_what_comfyui_keeps_of_a_patched_weight_outlive_the_file(file, served_model):
    stock, _parallel, truth = served_model
    lora = write_lora(file.path.parent / "lora.safetensors", file.path, rank=4)
    patched = run(with_lora(stock, {"lora": str(lora)}, 1.0))
    file.change("cut short")
    assert torch.equal(run(stock), truth), "from the backup of what was patched"
    assert torch.equal(run(with_lora(stock, {"lora": str(lora)}, 1.0)), patched)
