"""Prompts that differ in their seeds are sampled at once, and each one's image is stock's own."""

import copy
import functools
import inspect

import comfy.controlnet
import comfy.hooks
import comfy.model_base
import comfy.model_management
import comfy.samplers
import pytest
import torch
from comfy.patcher_extension import WrappersMP
from pipemesh.lab.commands.parity import BOUND, conditioning, relative_error
from pipemesh.parallel_runtime.client import queue_lookahead, sampler_arguments, separability
from pipemesh.parallel_runtime.client.queue_lookahead import QueueLookahead
from pipemesh.parallel_runtime.client.remote_patcher import parallelize
from pipemesh.parallel_runtime.client.sampler_arguments import takes_seed
from pipemesh.parallel_runtime.errors import ModelError, OutOfMemory, PoolFailed
from pipemesh.parallel_runtime.layout import Layout

import nodes

from ..kit.in_groups import GroupsHere, in_groups
from ..kit.patched import cloned, custom, execute, in_windows, together
from ..kit.queues import (
    PROMPTS,
    Advanced,
    Custom,
    InTwo,
    Line,
    Workflow,
    at_each_step,
    in_line,
    seeds_of,
    stock_model,
    suspended,
    tensors_of,
)

TWO = Layout(data=2)
SEEDS = (11, 12, 13, 14)
WORKFLOWS = {
    "KSampler": Workflow(),
    "a batch of two": Workflow(batch=2),
    "a noise mask": Workflow(mask=True, content=True),
    "no cfg": Workflow(cfg=1.0),
    "two in a row": InTwo(),
    "two in a row, with noise of their own": InTwo("euler_ancestral"),
    "SamplerCustom": Custom("dpmpp_2m"),
    "SamplerCustomAdvanced": Advanced(),
    **{
        sampler: Workflow(sampler)
        for sampler in ("euler_ancestral", "dpmpp_2m_sde", "dpmpp_sde", "ddpm", "lcm", "er_sde", "dpm_fast")
    },
}


class Ahead:
    """A MODEL on groups in this process that looks ahead."""

    def __init__(self, layout=TWO, made=GroupsHere, **options):
        self.line = Line()
        self.ahead = QueueLookahead(self.line, **options)
        self.stock = stock_model(5)
        self.model, self.pool = in_groups(layout, self.stock, made=made, ahead=self.ahead)

    def evaluations(self):
        """Images that groups have computed for each row of a prompt's tokens."""
        count = len(self.pool.asked)
        self.pool.asked.clear()
        return count

    @property
    def images(self):
        return self.ahead.images.used, self.ahead.images.dropped


def stocks(*prompts):
    return in_line(stock_model(5), Line(), *prompts)


def assert_alike(ours, stock):
    ours, stock = tensors_of(ours), tensors_of(stock)
    assert len(ours) == len(stock)
    for one, other in zip(ours, stock, strict=True):
        assert one.shape == other.shape and one.dtype == other.dtype
        assert relative_error(one, other) <= BOUND


def at_once(ours):
    """Images of the last run."""
    return ours.model.remote.pool.runs.last.queued.at_once


@pytest.mark.cover(3)
@pytest.mark.parametrize("name", WORKFLOWS)
@pytest.mark.parametrize("groups", [2, 3])
def test_every_prompts_image_and_what_is_drawn_after_it_are_stocks_own(name, groups):
    prompts = seeds_of(WORKFLOWS[name], *SEEDS)
    ours = Ahead(Layout(data=groups))
    assert_alike(in_line(ours.model, ours.line, *prompts), stocks(*prompts))
    samplers = 2 if isinstance(WORKFLOWS[name], InTwo) else 1
    first = -(-len(SEEDS) // groups)  # prompts in which others are sampled too
    assert ours.images == (samplers * (len(SEEDS) - first), 0)
    assert not ours.ahead._kept and not suspended()


def test_nothing_is_evaluated_twice_and_the_first_prompt_waits_for_as_many_steps_as_it_has():
    """Also of a MODEL that is parallelized anew for each sampling, as in auto mode."""
    prompts, ours, counted = seeds_of(Workflow(), *SEEDS), Ahead(), []
    ours.line.put(*prompts)
    for _ in prompts:
        anew = parallelize(ours.stock, ours.model.remote.pool, 0.0, ahead=ours.ahead)
        assert anew.remote is not ours.model.remote
        ours.line.run(anew)
        counted.append(ours.evaluations())
    assert counted == [12, 0, 12, 0], "two seeds, three steps, two prompts of conditioning"
    alone, pool = in_groups(TWO, stock_model(5))
    in_line(alone, Line(), *prompts)
    assert len(pool.asked) == sum(counted) and ours.images == (2, 0)


@pytest.mark.parametrize(
    ("groups", "used"), [({"data": 2}, 1), ({"cfg": 2, "data": 2}, 1), ({"cfg": 2}, 0)], ids=str
)
def test_prompts_and_images_share_out_all_groups_and_those_for_prompts_alone_look_not_ahead(groups, used):
    ours, layout = Ahead(Layout(**groups)), Layout(**groups)
    in_line(ours.model, ours.line, *seeds_of(Workflow(), 11, 12))
    assert {group for group, *_ in ours.pool.asked} == {(rank,) for rank in range(layout.world_size)}
    assert ours.images == (used, 0) and at_once(ours) == 1 - used


def test_every_prompt_is_told_each_of_its_own_steps():
    """By the bar of its node."""

    def told(model, line):
        steps = []
        with at_each_step(lambda done, total: steps.append((done, total))):
            in_line(model, line, *seeds_of(Workflow("heun"), 11, 12, 13))
        return steps

    ours = Ahead()
    assert told(ours.model, ours.line) == told(stock_model(5), Line())
    assert ours.images == (1, 0)


@pytest.mark.parametrize(("targets", "ahead"), [(("latent",), 0), (("1",), 1), (("1", "2"), 2)])
def test_of_a_prompt_that_waits_only_samplers_that_comfyui_will_execute_are_sampled(targets, ahead):
    """A page can queue a part of its graph."""
    ours = Ahead()
    ours.line.targets = {"prompt 1": targets}
    ours.line.put(*seeds_of(InTwo(), 11, 12))
    ours.line.run(ours.model)
    assert len(ours.ahead._kept) == ahead


# -- what is not looked ahead, or not used


class Otherwise(Workflow):
    """Alike in its graph; ``change`` makes something of it another in the second prompt."""

    def __init__(self, change):
        super().__init__(steps=2)
        self.change, self.ran = change, 0

    def run(self, model, seed, at):
        self.ran += 1
        return super().run(model, seed, at, **(self.change(model) if self.ran > 1 else {}))


def changing(**changed):
    return lambda model: changed


def empty(height=8, width=10, **more):
    return changing(latent_image={"samples": torch.zeros(1, 16, height, width), **more})


def with_lora(model):
    key = next(key for key in model.model.state_dict() if key.endswith("img_in.weight"))
    patches = {key: (torch.full_like(model.model.state_dict()[key], 0.01),)}
    return {"model": cloned(model, "add_patches", patches, 1.0, 1.0)}


def with_sampling_of_the_same_sigmas(model):
    sampling = copy.copy(model.get_model_object("model_sampling"))
    sampling.calculate_denoised = lambda sigma, output, x: x - 0.9 * sigma.reshape(-1, 1, 1, 1) * output
    return {"model": cloned(model, "add_object_patch", "model_sampling", sampling)}


def drawing(executor, *args, **kwargs):
    """Draws random numbers between the noise and the sampler, as a node's callback may."""
    torch.randn(5)
    return executor(*args, **kwargs)


CHANGES = {
    "text": changing(positive=conditioning(5, 13)),
    "text of another length": changing(positive=conditioning(1, 14)),
    "negative text": changing(negative=conditioning(6, 7)),
    "cfg": changing(cfg=3.0),
    "steps": changing(steps=4),
    "scheduler": changing(scheduler="karras"),
    "sampler": changing(sampler_name="heun"),
    "strength": changing(denoise=0.5),
    "latent": changing(latent_image={"samples": torch.full((1, 16, 8, 10), 0.3)}),
    "size": empty(10, 8),
    "mask": empty(noise_mask=torch.ones(1, 1, 64, 80) / 2),
    "noise of other images of a batch": empty(batch_index=[3]),
    "LoRA": with_lora,
    "model sampling": lambda model: {
        "model": execute("nodes_model_advanced", "ModelSamplingFlux", model, 1.0, 0.2, 512, 512)
    },
    "model sampling of the same sigmas": with_sampling_of_the_same_sigmas,
    "random numbers": lambda model: {"model": cloned(model, "add_wrapper", WrappersMP.OUTER_SAMPLE, drawing)},
}


class Written(Otherwise):
    """Its text is the same object in every prompt, and another from the second on."""

    def __init__(self):
        super().__init__(None)
        self.text = conditioning(1, 13)

    def run(self, model, seed, at):
        self.text[0][0].add_(0.1 * self.ran)
        self.ran += 1
        return Workflow.run(self, model, seed, at, positive=self.text)


@pytest.mark.parametrize("name", [*CHANGES, "text that was written into"])
def test_what_is_no_more_as_it_was_sampled_ahead_is_thrown_away_and_sampled_as_ever(name):
    first, second = (Otherwise(CHANGES[name]) if name in CHANGES else Written() for _ in "12")
    ours = Ahead()
    sampled = in_line(ours.model, ours.line, *seeds_of(first, 11, 12))
    assert_alike(sampled, stocks(*seeds_of(second, 11, 12)))
    assert ours.images == (0, 1) and ours.ahead._kept == {}


def test_after_a_result_of_no_use_the_queue_is_sampled_one_after_the_other():
    workflow = Otherwise(changing(cfg=3.0))
    ours = Ahead()
    in_line(ours.model, ours.line, *seeds_of(workflow, *SEEDS))
    assert ours.images == (0, 1)
    in_line(ours.model, ours.line, *seeds_of(Workflow(), 11, 12))
    assert ours.images == (1, 1), "another queue"


class TwoModels(Advanced):
    guider = staticmethod(lambda model: custom("DualModelGuider", model, PROMPTS[0], 2.0, model, PROMPTS[1]))


class Control(comfy.controlnet.ControlBase):
    """A ControlNet that adds nothing."""

    def get_control(self, *_):
        return None

    def copy(self):
        return self


class WithText(Workflow):
    """``extras`` of its text."""

    def __init__(self, make):
        super().__init__()
        self.make = make

    def run(self, model, seed, at):
        text = [[tensor, {**extras, **self.make()}] for tensor, extras in conditioning(1, 13)]
        with at("1"):
            return nodes.KSampler().sample(
                model, seed, 3, 2.0, "euler", "simple", text, conditioning(2, 7), self.latent
            )


def of_image(number):
    workflow = Workflow()
    workflow.latent["batch_index"] = [number]
    return workflow


REFUSED = {  # a workflow, or what is done to its MODEL
    "a foreign wrapper": together,
    "a function after cfg": lambda model: cloned(
        model, "set_model_sampler_post_cfg_function", lambda args: args["denoised"] * 0.9
    ),
    "context windows": lambda model: in_windows(model, context_length=6, context_overlap=2),
    "EasyCache": lambda model: execute("nodes_easycache", "EasyCache", model, 0.2, 0.1, 0.9, False),
    "APG": lambda model: execute("nodes_apg", "APG", model, 0.0, 15.0, 0.5),
    "two models in one guider": TwoModels(),
    "uni_pc": Workflow("uni_pc"),
    "dpm_adaptive": Workflow("dpm_adaptive", steps=2, cfg=1.0),  # it takes many steps
    "noise that stock makes otherwise": of_image(3),
    "a ControlNet": WithText(lambda: {"control": Control(), "control_apply_to_uncond": False}),
    "an area": WithText(lambda: {"area": (4, 4, 2, 2)}),
    "a mask of the text": WithText(lambda: {"mask": torch.ones(1, 64, 80) / 2}),
    "hooks of weights": WithText(lambda: {"hooks": comfy.hooks.create_hook_model_as_lora({}, {}, 1.0, 1.0)}),
}
OF_A_STEP = {  # code that a pack may wrap: what it keeps is not to be seen
    "cfg_function": comfy.samplers,
    "predict_noise": comfy.samplers.CFGGuider,
    "sample_euler": comfy.samplers.k_diffusion_sampling,
}


@pytest.mark.parametrize("name", [*REFUSED, *OF_A_STEP])
def test_what_may_keep_a_state_or_is_no_plain_text_is_sampled_one_after_the_other(name, monkeypatch):
    what = REFUSED.get(name, Workflow(steps=2))
    workflow, change = (
        (what, lambda model: model) if isinstance(what, Workflow) else (Workflow(steps=2), what)
    )
    if owner := OF_A_STEP.get(name):
        own = getattr(owner, name)
        monkeypatch.setattr(owner, name, functools.wraps(own)(lambda *args, **more: own(*args, **more)))
    ours, prompts = Ahead(), seeds_of(workflow, 11, 12)
    truth = in_line(change(stock_model(5)), Line(), *prompts)
    assert_alike(in_line(change(ours.model), ours.line, *prompts), truth)
    assert ours.images == (0, 0) and at_once(ours) == 1


def test_one_seed_that_waits_twice_is_sampled_ahead_once():
    ours = Ahead(Layout(data=3))
    ours.line.put(*seeds_of(Workflow(), 11, 12, 12))
    ours.line.run(ours.model)
    assert at_once(ours) == 2 and len(ours.ahead._kept) == 1


def test_models_that_make_conditioning_of_the_seed_are_known():
    """ComfyUI's, by the word in their methods: those that the file's own text shows."""
    made = {
        name for name, kind in vars(comfy.model_base).items() if isinstance(kind, type) and takes_seed(kind)
    }
    text = inspect.getsource(comfy.model_base)
    named = {
        part.partition("(")[0].strip()
        for part in text.split("\nclass ")[1:]
        if '"seed"' in part.partition("\ndef ")[0]
    }
    assert len(named) >= 3 and named <= made
    assert not takes_seed(comfy.model_base.Flux) and not takes_seed(comfy.model_base.BaseModel)


def test_of_a_queue_that_shares_nothing_as_many_graphs_as_groups_are_compared_once_and_nothing_is_copied(
    monkeypatch,
):
    own, compared, copied = queue_lookahead.differences, [], []
    monkeypatch.setattr(queue_lookahead, "differences", lambda *given: compared.append(1) or own(*given))
    monkeypatch.setattr(queue_lookahead, "cpu_copy", copied.append)
    ours = Ahead(Layout(data=3))
    ours.line.put(*((str(number), 11 + number, Workflow(steps=2 + number)) for number in range(6)))
    while ours.line.waiting:
        compared.clear()
        prompt, seed, workflow = ours.line.waiting.pop(0)
        for _ in range(2):  # as the plan asks, and the sampler after it
            with ours.line._at(prompt, ours.line.graph(prompt, seed, workflow), "1"):
                ours.ahead.forget()
                assert ours.ahead.at_once(3, NotImplemented) == (1, 1)
        ours.line.waiting.insert(0, (prompt, seed, workflow))
        ours.line.run(ours.model)
        assert len(compared) == min(2, len(ours.line.waiting))
    assert not copied and ours.images == (0, 0)


def writing(model, x, sigmas, extra_args=None, callback=None, disable=None):
    """A sampler that writes into all it is given, and draws plain random numbers."""
    for i in range(len(sigmas) - 1):
        denoised = model(x, sigmas[i] * x.new_ones([x.shape[0]]), **extra_args)
        callback({"x": x, "i": i, "denoised": denoised})
        sigmas[i + 1] *= 0.97
        options = extra_args["model_options"]["transformer_options"]
        options["sample_sigmas"][i] *= 0.5
        options["steps"] = options.get("steps", 0) + 1
        x = x + (x - denoised) / sigmas[i] * (sigmas[i + 1] - sigmas[i]) * 0.9 ** options["steps"]
        x = x + 0.05 * torch.randn_like(x)
        for tensor in (model.latent_image, model.noise, extra_args["denoise_mask"]):
            tensor *= 0.9
    return x


@pytest.fixture
def writing_sampler(monkeypatch):
    """A name under which stock nodes find it, and that is taken for one without a state."""
    monkeypatch.setattr(comfy.samplers.k_diffusion_sampling, "sample_writing", writing, raising=False)
    known = separability.SAMPLER_FUNCTIONS | {f"{writing.__module__}.writing"}
    monkeypatch.setattr(separability, "SAMPLER_FUNCTIONS", known)
    monkeypatch.setattr(
        sampler_arguments, "LIBRARIES", sampler_arguments.LIBRARIES | {writing.__module__.partition(".")[0]}
    )
    monkeypatch.setattr(comfy.samplers.KSampler, "SAMPLERS", [*comfy.samplers.KSampler.SAMPLERS, "writing"])
    return Workflow("writing", content=True, mask=True)


def test_what_a_sampler_writes_into_is_its_own_and_so_are_its_random_numbers(writing_sampler):
    prompts, ours = seeds_of(writing_sampler, 11, 12, 13, 14), Ahead(Layout(data=3))
    assert_alike(in_line(ours.model, ours.line, *prompts), stocks(*prompts))
    assert ours.images == (2, 0)


# -- what goes wrong


class Failing(GroupsHere):
    """Raises ``error`` at the evaluation with this number."""

    error, at = None, 0

    def submit(self, request, group):
        if self.error is not None and len(self.asked) == self.at:
            error, self.error = self.error, None
            raise error
        super().submit(request, group)


@pytest.mark.cover(3)
@pytest.mark.parametrize(
    "error",
    [OutOfMemory("No room."), ModelError("No."), torch.OutOfMemoryError("No room here.")],
    ids=lambda one: type(one).__name__,
)
@pytest.mark.parametrize("at", [0, 1, 6])
def test_where_images_at_once_fail_the_first_goes_on_alone_and_the_rest_is_sampled_as_ever(
    error, at, monkeypatch
):
    prompts, ours = seeds_of(Workflow(), 11, 12, 13), Ahead(made=Failing)
    ours.pool.error, ours.pool.at = error, at
    residency = ours.model.remote.pool.residency
    monkeypatch.setattr(residency, "make_room", lambda *_, **__: pytest.fail("what can wait gets no room"))
    assert_alike(in_line(ours.model, ours.line, *prompts), stocks(*prompts))
    assert ours.images == (0, 0) and not suspended()
    ours.evaluations()
    in_line(ours.model, ours.line, *prompts[:2])
    assert ours.images == (1, 0), "another queue"


def stopping(steps, error):
    """As ``QueuedSampler.told``, which raises this at the step with that number."""

    def told(waiting, step, denoised, noisy, total):
        if step == steps:
            raise error
        waiting.steps.append((step, denoised.clone(), noisy.clone(), total))

    return told


def test_an_error_of_what_is_sampled_ahead_is_raised_nowhere_and_a_cancel_there_ends_the_prompt_that_runs(
    monkeypatch,
):
    monkeypatch.setattr(queue_lookahead.QueuedSampler, "told", stopping(1, ZeroDivisionError()))
    prompts, ours = seeds_of(Workflow(), 11, 12), Ahead()
    assert_alike(in_line(ours.model, ours.line, *prompts), stocks(*prompts))
    assert ours.images == (0, 0) and not suspended()
    interrupt = comfy.model_management.InterruptProcessingException()
    monkeypatch.setattr(queue_lookahead.QueuedSampler, "told", stopping(1, interrupt))
    ours.line.put(*seeds_of(Workflow(), 13, 14))
    with pytest.raises(comfy.model_management.InterruptProcessingException):
        ours.line.run(ours.model)
    assert not suspended() and not ours.ahead._kept


def cancelled(line, model, step):
    """Runs the next prompt, which is cancelled after a step."""

    def stop(done, _total):
        if done == step:
            raise comfy.model_management.InterruptProcessingException

    with at_each_step(stop), pytest.raises(comfy.model_management.InterruptProcessingException):
        line.run(model)


@pytest.mark.parametrize("end", ["a cancel", "a rank dies"])
def test_a_prompt_that_ends_takes_what_was_sampled_beside_it_along_and_the_next_is_stocks_own(end):
    prompts, ours = seeds_of(Workflow(), 11, 12, 13), Ahead(made=Failing)
    ours.line.put(*prompts)
    if end == "a cancel":
        cancelled(ours.line, ours.model, 2)
        assert ours.evaluations() == 8
    else:
        ours.pool.error, ours.pool.at = PoolFailed("A worker died."), 5
        with pytest.raises(PoolFailed, match="A worker died"):
            ours.line.run(ours.model)
    assert not suspended() and not ours.ahead._kept
    assert_alike([ours.line.run(ours.model), ours.line.run(ours.model)], stocks(*prompts[1:]))
    assert ours.images == (1, 0)
