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
from ..kit.models import conditioning, run
from .test_auto import auto, notices, plain, said, settings, switched_on

__all__ = ["auto", "notices", "plain", "settings", "switched_on"]  # fixtures


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


def with_look(model, look):
    """The MODEL, whose steps give ``look`` their arguments."""

    def looks(args):
        look(args)
        return args["denoised"]

    clone = model.clone()
    clone.set_model_sampler_post_cfg_function(looks)
    return clone


def drawn_anew(model):
    """Sampled from torch's own random numbers, as without a seed."""
    torch.manual_seed(1)
    latent, text = torch.zeros(1, 16, 8, 10), conditioning(1, 13)
    asked = (torch.randn(latent.shape), 3, 2.0, "euler_ancestral", "simple", text, conditioning(2, 7), latent)
    with torch.inference_mode():
        return comfy.sample.sample(model, *asked, disable_pbar=True, seed=None)


def test_what_is_refused_in_the_first_step_begins_anew_with_the_same_random_numbers(
    auto, switched_on, requests, notices, plain
):
    model = patched_by_a_wrapper(plain, lambda options: options["cond_or_uncond"] == [1])
    assert torch.equal(drawn_anew(model), drawn_anew(model))
    truth, image = switched_on(lambda: drawn_anew(model))
    assert relative_error(image, truth) <= BOUND and requests["Forward"] == 1
    (notice,) = said(notices)
    assert "halved_keys" in notice


def test_what_is_refused_after_a_step_is_raised_and_the_next_of_its_kind_alone_is_on_one_gpu(
    auto, settings, requests, notices, plain
):
    """What ranks hold of the MODEL is freed for it."""
    model = patched_by_a_wrapper(plain, lambda options: float(options["timestep"].flatten()[0]) < 0.99)
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


@pytest.mark.cover(2)
@pytest.mark.parametrize("error", ERRORS, ids=repr)
def test_what_fails_after_a_step_is_raised_as_it_is_and_the_next_prompt_samples_without_the_pool(
    auto, settings, requests, notices, plain, error
):
    """Each sampling of that prompt, as a node may make many. The one after it is in the pool."""
    steps, in_pool = [], []

    def fails(args):
        steps.append(args)
        if len(steps) == 2:
            raise error

    model = with_look(plain, fails)
    settings(True)
    with CurrentNodeContext("first", "3"), pytest.raises(type(error)) as raised:
        run(model)
    assert raised.value is error and len(steps) == 2 and not said(notices)
    for prompt in ("second", "second", "third"):
        requests.clear()
        with CurrentNodeContext(prompt, "3"):
            run(model)
        in_pool.append(bool(requests["Forward"]))
    assert in_pool == [False, False, True]
    assert said(notices) == [FAILED_LATE.format(reason_of(error))]


def test_the_wait_ends_at_the_first_step_also_without_a_progress_bar(auto, settings, plain):
    lasts = []
    settings(True)
    run(with_look(plain, lambda _: lasts.append(auto._runtime().wait.lasts)))
    assert lasts[0] and not any(lasts[1:]) and len(lasts) > 1


class StepClock:
    """Tells that a step took so long, each time that it is asked."""

    now = 0.0
    step_s = 1.0

    def __call__(self):
        self.now += self.step_s
        return self.now


def test_after_two_runs_that_were_slower_than_one_gpu_the_next_of_their_kind_is_there_and_says_so(
    auto, settings, requests, notices, plain
):
    def is_in_pool(**size):
        requests.clear()
        run(plain, steps=JUDGED + 1, cfg=2.0, **size)
        return bool(requests["Forward"])

    auto._times._clock = clock = StepClock()
    assert not is_in_pool()
    settings(True)
    for step_s, expected in ((1.5, True), (1.5, True), (1.0, False), (1.0, False)):
        clock.step_s = step_s
        assert is_in_pool() is expected
    took = "The last 2 runs of this kind took 1.50 s a step in ulysses 2 = 2 ranks, but one GPU takes 1.00 s."
    assert said(notices)[0] == f"On one GPU: {took}"
    assert is_in_pool(size=(8, 8)), "another size is of another kind"
