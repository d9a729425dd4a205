"""What ComfyUI changed in a model's forward since the oldest version that PipeMesh runs on."""

import pytest
from pipemesh.lab.commands.parity import BOUND, Case, relative_error, sample, stock_model
from pipemesh.parallel_runtime.client.remote_patcher import parallelize
from pipemesh.parallel_runtime.families.every import SAMPLES

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
    assert (
        relative_error(sample(parallelize(stock, clients(*degrees), holds_ui_device=False), MASKED), truth)
        <= BOUND
    )
