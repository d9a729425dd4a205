"""What ComfyUI changed in a model's forward since the oldest version that PipeMesh runs on."""

from functools import partial

import pytest
from pipemesh.lab.commands.parity import BOUND, Case, relative_error, sample, stock_model
from pipemesh.parallel_runtime.client.remote_patcher import parallelize
from pipemesh.parallel_runtime.families.catalogue import NOT_HERE, SAMPLES

from ..kit.patched import with_option

pytestmark = pytest.mark.host
NAME = next(
    name
    for name, one in SAMPLES.items()
    if one.form.config_class == "MiniMaxH3" and one.noise_mask is not None
)
MASKED = Case(NAME, "ulysses1", "odd", 5, 4.0, False, "euler")


@pytest.fixture(scope="module")
def masked():
    """The stock MODEL, and what it samples."""
    stock = stock_model(MASKED.heads, family=MASKED.family)
    return stock, sample(stock, MASKED)


@pytest.mark.parametrize("degrees", [(2, 1), (1, 2), (1, 1, 1, 2)], ids=["ulysses", "ring", "cfg"])
def test_tokens_under_a_noise_mask_have_timesteps_of_their_own(clients, masked, degrees):
    stock, truth = masked
    ours = parallelize(stock, clients(*degrees), holds_ui_device=False)
    assert relative_error(sample(ours, MASKED), truth) <= BOUND


KEEPING = "qwen-image-2.1-edit"  # a model that keeps the keys and values of a prompt and its images
OFF, INT8 = {"device": "off"}, {"device": "cpu", "dtype": "int8"}


def with_setting(model, setting):
    """As its node sets it."""
    return with_option(model, qwen_image21_cache=setting)


@pytest.mark.skipif(KEEPING in NOT_HERE, reason=NOT_HERE.get(KEEPING, ""))
@pytest.mark.parametrize("degrees", [(2, 1), (1, 2), (1, 1, 1, 2), (1, 1, 1, 1, 2)], ids=str)
@pytest.mark.parametrize("setting", [OFF, INT8], ids=["not kept", "kept in int8"])
def test_ranks_keep_of_a_prompt_what_the_nodes_setting_says(clients, setting, degrees):
    """What is kept in int8 is seen: so the ranks keep it."""
    stock = with_setting(stock_model(5, family=KEEPING), setting)
    once = partial(sample, case=Case(KEEPING, "ulysses1", "odd", 5, 4.0, False, "euler"), batch=2)
    truth = once(stock)
    assert (relative_error(truth, once(with_setting(stock, {}))) > 10 * BOUND) is (setting is INT8)
    assert relative_error(once(parallelize(stock, clients(*degrees), holds_ui_device=False)), truth) <= BOUND
