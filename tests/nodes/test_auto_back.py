"""Auto mode goes back to one GPU: before the first step is done, after runs of the pool that were
slower, and never in the middle of a run.
"""

import comfy.sample
import pytest
import torch
from comfy_execution.utils import CurrentNodeContext
from pipemesh.lab.commands.parity import BOUND, relative_error
from pipemesh.nodes.auto.sampling import FAILED_LATE, reason_of
from pipemesh.nodes.speed_verdict import JUDGED
from pipemesh.parallel_runtime.errors import OutOfMemory, PoolFailed, Refused

from ..kit.foreign_pack import halved_keys
from ..kit.models import conditioning, load, run
from .test_auto import auto, notices, said, settings

__all__ = ["auto", "notices", "settings"]  # fixtures


def patched_by_a_wrapper(model, is_patched):
    """A node whose wrapper draws a random number, and sets an attention patch amid the run where
    ``is_patched`` says so of what it is called with.
    """

    def wrapper(apply_model, options):
        c = dict(options["c"])
        if is_patched(options):
            c["transformer_options"] = {**c["transformer_options"], "patches": {"attn1_patch": [halved_keys]}}
        return apply_model(options["input"], options["timestep"], **c) + 0.1 * torch.randn(1)

    clone = model.clone()
    clone.set_model_unet_function_wrapper(wrapper)
    return clone


def drawn_anew(model):
    """Sampled from torch's own random numbers, as without a seed."""
    torch.manual_seed(1)
    latent, text = torch.zeros(1, 16, 8, 10), conditioning(1, 13)
    noise, other = torch.randn(latent.shape), conditioning(2, 7)
    with torch.inference_mode():
        return comfy.sample.sample(
            model,
            noise,
            3,
            2.0,
            "euler_ancestral",
            "simple",
            text,
            other,
            latent,
            disable_pbar=True,
            seed=None,
        )


def test_what_is_refused_in_the_first_step_begins_anew_with_the_same_random_numbers(
    auto, settings, requests, notices, files
):
    model = patched_by_a_wrapper(load(files["model"]), lambda options: options["cond_or_uncond"] == [1])
    truth = drawn_anew(model)
    assert torch.equal(drawn_anew(model), truth)
    settings(True)
    requests.clear()
    assert relative_error(drawn_anew(model), truth) <= BOUND
    assert requests["Forward"] == 1
    (notice,) = said(notices)
    assert "halved_keys" in notice


def test_what_is_refused_after_a_step_is_raised_and_the_next_of_its_kind_alone_is_on_one_gpu(
    auto, settings, requests, notices, files
):
    """What ranks hold of the MODEL is freed for it."""
    model = patched_by_a_wrapper(
        load(files["model"]), lambda options: float(options["timestep"].flatten()[0]) < 0.99
    )
    truth = drawn_anew(model)
    settings(True)
    requests.clear()
    with pytest.raises(Refused, match=r"halved_keys .*remove the node"):
        drawn_anew(model)
    assert requests["Forward"] == 2 and not requests["Release"] and not said(notices)
    assert relative_error(drawn_anew(model), truth) <= BOUND
    assert requests["Forward"] == 2 and requests["Release"] == 1
    (notice,) = said(notices)
    assert notice.startswith(FAILED_LATE.format("")) and "halved_keys" in notice
    with pytest.raises(Refused, match="halved_keys"):
        drawn_anew(model)


ERRORS = (
    ValueError("of a node"),
    PoolFailed("Rank 1 on cpu was killed: run again."),
    OutOfMemory("Rank 1 ran out of memory: run again."),
    Refused("The checkpoint has changed: load it again."),
)


@pytest.mark.parametrize("error", ERRORS, ids=repr)
def test_what_fails_after_a_step_is_raised_as_it_is_and_the_next_prompt_samples_without_the_pool(
    auto, settings, requests, notices, files, error
):
    """Each sampling of that prompt, as a node may make many. The one after it is in the pool."""
    steps, model = [], load(files["model"]).clone()

    def fails(args):
        steps.append(args)
        if len(steps) == 2:
            raise error
        return args["denoised"]

    model.set_model_sampler_post_cfg_function(fails)
    settings(True)
    with CurrentNodeContext("first", "3"), pytest.raises(type(error)) as raised:
        run(model)
    assert raised.value is error
    assert len(steps) == 2 and not said(notices)
    in_pool = []
    for prompt in ("second", "second", "third"):
        requests.clear()
        with CurrentNodeContext(prompt, "3"):
            run(model)
        in_pool.append(bool(requests["Forward"]))
    assert in_pool == [False, False, True]
    assert said(notices) == [FAILED_LATE.format(reason_of(error))]


def test_the_wait_ends_at_the_first_step_also_without_a_progress_bar(auto, settings, files):
    lasts, model = [], load(files["model"]).clone()

    def looks(args):
        lasts.append(auto._runtime().wait.lasts)
        return args["denoised"]

    model.set_model_sampler_post_cfg_function(looks)
    settings(True)
    run(model)
    assert lasts[0] and not any(lasts[1:]) and len(lasts) > 1


class Clock:
    """Tells that a step took so long, each time that it is asked."""

    def __init__(self):
        self.now, self.step_s = 0.0, 1.0

    def __call__(self):
        self.now += self.step_s
        return self.now


@pytest.fixture
def clock(auto):
    made = Clock()
    auto._times._clock = made
    return made


def test_after_two_runs_that_were_slower_than_one_gpu_the_next_of_their_kind_is_there_and_says_so(
    auto, settings, requests, notices, files, clock
):
    model = load(files["model"])
    clock.step_s = 1.0
    run(model, steps=JUDGED + 1, cfg=2.0)
    settings(True)
    in_pool = []
    for _ in range(4):
        requests.clear()
        clock.step_s = 1.5 if len(in_pool) < 2 else 1.0
        run(model, steps=JUDGED + 1, cfg=2.0)
        in_pool.append(bool(requests["Forward"]))
    assert in_pool == [True, True, False, False]
    assert (
        said(notices)[0]
        == "On one GPU: The last 2 runs of this kind took 1.50 s a step in ulysses 2 = 2 ranks, but one GPU"
        " takes 1.00 s."
    )
    requests.clear()
    run(model, size=(8, 8), steps=JUDGED + 1, cfg=2.0)
    assert requests["Forward"], "another size is of another kind"
