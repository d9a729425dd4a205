"""A checkpoint that another process overwrites, cuts short, replaces or deletes while ComfyUI has
its MODEL: the image is of the bytes that were loaded, or there is one sentence. ComfyUI never dies.
"""

import subprocess

import pytest
import torch
from pipemesh.launcher.commands.parity import BOUND, relative_error
from pipemesh.nodes.auto.sampling import Auto
from pipemesh.nodes.auto.switch import Switch
from pipemesh.nodes.notices import Notices
from pipemesh.parallel_runtime.client.remote_patcher import parallelize
from pipemesh.parallel_runtime.errors import PipeMeshError

from .models import load, run, write_model
from .shared_runtime import SharedRuntime

WAYS = {
    "overwritten": "cp {other} {path}",
    "overwritten without being cut short": "dd if={other} of={path} conv=notrunc status=none",
    "cut short": "dd if=/dev/null of={path} bs=4096 seek=1 status=none",
    "replaced": "cp {other} {path}.new && mv {path}.new {path}",
    "deleted": "rm {path}",
}
IN_PLACE = {"overwritten", "overwritten without being cut short", "cut short"}


class File:
    """A checkpoint and another model of its size."""

    def __init__(self, folder):
        self.path = write_model(folder / "model.safetensors", blocks=(1, 1))
        self.other = write_model(folder / "other.safetensors", blocks=(1, 1), seed=5)

    def change(self, way):
        """As another process does it."""
        subprocess.run(WAYS[way].format(path=self.path, other=self.other), shell=True, check=True)


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
    made = Auto(SharedRuntime(client), Switch({}, lambda: tmp_path / "switch.json"), Notices())
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


@pytest.mark.parametrize("during", [False, True], ids=["before", "during"])
@pytest.mark.parametrize("way", WAYS)
def test_stock_samples_the_weights_that_it_loaded(file, served, way, during):
    stock, _parallel, truth = served
    if not during:
        file.change(way)
    image = run(stock, callback=lambda step, *_: file.change(way) if during and step == 0 else None)
    assert torch.equal(image, truth)
    assert torch.equal(run(stock), truth)


@pytest.mark.parametrize("during", [False, True], ids=["before", "during"])
@pytest.mark.parametrize("way", WAYS)
def test_a_pool_makes_the_image_of_what_was_loaded_or_says_one_sentence(file, served, client, files, way, during):
    _stock, parallel, truth = served
    if not during:
        file.change(way)
    changed = image_or_sentence(truth, lambda: run(parallel, callback=lambda step, *_: file.change(way) if during and step == 0 else None))
    assert changed == (way not in IN_PLACE)
    assert image_or_sentence(truth, lambda: run(parallel)) == (way not in IN_PLACE), "the same again, not a second fault"
    run(parallelize(load(files["other"]), client, holds_ui_device=True))


@pytest.mark.parametrize("during", [False, True], ids=["before", "during"])
@pytest.mark.parametrize("way", WAYS)
def test_auto_mode_makes_stocks_image_or_says_one_sentence(file, served, auto, way, during):
    stock, _parallel, truth = served
    if not during:
        file.change(way)
    made = image_or_sentence(truth, lambda: run(stock, callback=lambda step, *_: file.change(way) if during and step == 0 else None))
    assert made or during
    assert image_or_sentence(truth, lambda: run(stock)), "the next run"
