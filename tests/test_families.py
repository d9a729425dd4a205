"""Every family x method against stock ComfyUI on the same seed: odd sizes, unequal prompts, uneven heads."""

import pytest
import torch
from pipemesh.launcher.parity import BOUND, relative_error, stock_model
from pipemesh.parallel_runtime.client.remote_patcher import parallelize
from pipemesh.parallel_runtime.families import PLANS

from .random_models import flux2_patcher, sd3_patcher, wan_patcher

METHODS = {"ulysses2": (2, 1), "ulysses3": (3, 1), "ring2": (1, 2), "ring3": (1, 3), "ring4": (1, 4), "2x2": (2, 2)}
MAKERS = {
    "flux": lambda: stock_model(5),
    "flux2": lambda: flux2_patcher(5),
    "sd3": lambda: sd3_patcher(depth=5),
    "sd3.5-medium": lambda: sd3_patcher(medium=True, depth=3),
    "wan2.1-t2v": lambda: wan_patcher(),
    "wan2.1-i2v": lambda: wan_patcher(model_type="i2v"),
    "wan2.2-5b": lambda: wan_patcher(per_frame=True),
}
SHAPES = {"flux2": (1, 128, 5, 7), "wan2.1-t2v": (1, 16, 3, 5, 6), "wan2.1-i2v": (1, 16, 3, 5, 6), "wan2.2-5b": (1, 48, 3, 5, 6)}


@pytest.fixture(scope="module")
def stock():
    made = {}

    def get(family):
        if family not in made:
            made[family] = MAKERS[family]()
        return made[family]

    return get


def prompt(seed, tokens, **extras):
    generator = torch.Generator().manual_seed(seed)
    return [[torch.randn(1, tokens, 64, generator=generator), {"pooled_output": torch.randn(1, 32, generator=generator), **extras}]]


def sample(model, family, cfg=3.0, steps=2, **kwargs):
    import comfy.sample

    latent = torch.zeros(SHAPES.get(family, (1, 16, 13, 18)))
    extras = {}
    if family.endswith("i2v"):
        frames = torch.randn(latent.shape, generator=torch.Generator().manual_seed(4))
        extras = {"concat_latent_image": frames, "concat_mask": torch.ones(1, 1, *latent.shape[2:])}
        extras["clip_vision_output"] = ClipVision(torch.randn(1, 9, 1280, generator=torch.Generator().manual_seed(5)))
    if family == "wan2.2-5b":
        kwargs["noise_mask"] = torch.tensor([0.0, 1.0, 1.0]).view(1, 1, 3, 1, 1).expand(1, 1, *latent.shape[2:])
    with torch.inference_mode():
        return comfy.sample.sample(
            model,
            comfy.sample.prepare_noise(latent, 7),
            steps,
            cfg,
            "euler",
            "simple",
            prompt(1, 13, **extras),
            prompt(2, 7, **extras),
            latent,
            disable_pbar=True,
            seed=7,
            **kwargs,
        )


class ClipVision:
    def __init__(self, hidden):
        self.penultimate_hidden_states = hidden


@pytest.fixture(scope="module")
def truth(stock):
    made = {}

    def get(family):
        if family not in made:
            made[family] = sample(stock(family), family)
        return made[family]

    return get


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("family", MAKERS)
def test_every_family_is_exact_under_every_method(clients, stock, truth, family, method):
    parallel = parallelize(stock(family), clients(*METHODS[method]), holds_ui_device=False)
    assert relative_error(sample(parallel, family), truth(family)) <= BOUND


def test_the_second_timestep_of_a_frame_matters(stock, truth):
    """Else dropping the per-frame modulation would not show."""
    import comfy.sample

    latent = torch.zeros(SHAPES["wan2.2-5b"])
    with torch.inference_mode():
        plain = comfy.sample.sample(
            stock("wan2.2-5b"), comfy.sample.prepare_noise(latent, 7), 2, 3.0, "euler", "simple", prompt(1, 13), prompt(2, 7), latent,
            disable_pbar=True, seed=7,
        )  # fmt: skip
    assert relative_error(plain[:, :, 1:], truth("wan2.2-5b")[:, :, 1:]) > 1e-3


def test_every_plan_has_a_family_here():
    assert {plan.family for plan in PLANS} <= {name.rstrip("2").split(".")[0].rstrip("0123456789") if "wan" in name else name for name in MAKERS}


def test_sd3_control_residuals_are_sharded_with_their_tokens(clients, stock):
    residual = torch.randn(1, 63, 5 * 64, generator=torch.Generator().manual_seed(3))

    def with_control(model):
        def wrapper(apply_model, options):
            return apply_model(options["input"], options["timestep"], **{**options["c"], "control": {"output": [residual, None]}})

        clone = model.clone()
        clone.set_model_unet_function_wrapper(wrapper)
        return clone

    parallel = parallelize(stock("sd3"), clients(2, 2), holds_ui_device=False)
    truth = sample(with_control(stock("sd3")), "sd3")
    assert relative_error(truth, sample(stock("sd3"), "sd3")) > 1e-2
    assert relative_error(sample(with_control(parallel), "sd3"), truth) <= BOUND
