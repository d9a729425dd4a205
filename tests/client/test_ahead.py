"""Prompts that differ in their seeds are sampled at once, and each one's image is stock's own."""

import copy
import functools
import gc
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
from pipemesh.parallel_runtime.client.alike_prompts import Moment, Pending
from pipemesh.parallel_runtime.client.queue_lookahead import QueueLookahead
from pipemesh.parallel_runtime.client.remote_patcher import parallelize
from pipemesh.parallel_runtime.client.sampler_arguments import takes_seed
from pipemesh.parallel_runtime.client.seeds import Seed
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
    node,
    seeds_of,
    stock_model,
    tensors_of,
)

TWO = Layout(data=2)
SEEDS = (11, 12, 13, 14, 15)
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


def alone(*prompts):
    """How many evaluations groups compute without looking ahead."""
    model, pool = in_groups(TWO, stock_model(5))
    in_line(model, Line(), *prompts)
    return len(pool.asked)


def assert_alike(ours, stock):
    ours, stock = tensors_of(ours), tensors_of(stock)
    assert len(ours) == len(stock)
    for one, other in zip(ours, stock, strict=True):
        assert one.shape == other.shape and one.dtype == other.dtype
        assert relative_error(one, other) <= BOUND


def at_once(ours):
    """Images of the last run."""
    return ours.model.remote.pool.runs.last.queued.at_once


def assert_one_by_one(workflow, change=lambda model: model):
    """Two prompts are stock's own, and neither was sampled ahead."""
    ours, prompts = Ahead(), seeds_of(workflow, 11, 12)
    assert_alike(
        in_line(change(ours.model), ours.line, *prompts), in_line(change(stock_model(5)), Line(), *prompts)
    )
    assert ours.images == (0, 0) and at_once(ours) == 1


def suspended():
    return [thing for thing in gc.get_objects() if isinstance(thing, Seed) and thing]


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
    prompts = seeds_of(Workflow(), *SEEDS[:4])
    ours, counted = Ahead(), []
    ours.line.put(*prompts)
    for _ in prompts:
        ours.line.run(ours.model)
        counted.append(ours.evaluations())
    assert counted == [12, 0, 12, 0], "two seeds, three steps, two prompts of conditioning"
    assert sum(counted) == alone(*prompts) * 1


def test_each_image_is_computed_by_one_group_and_all_groups_compute():
    ours = Ahead()
    in_line(ours.model, ours.line, *seeds_of(Workflow(cfg=1.0), 11, 12))
    assert [group for group, *_ in ours.pool.asked] == [(0,), (1,)] * 3


def test_prompts_and_images_share_out_all_groups_where_there_are_both():
    ours = Ahead(Layout(cfg=2, data=2))
    in_line(ours.model, ours.line, *seeds_of(Workflow(), 11, 12))
    assert {group for group, *_ in ours.pool.asked} == {(0,), (1,), (2,), (3,)}
    assert ours.images == (1, 0)


def test_groups_for_prompts_alone_look_not_ahead():
    ours = Ahead(Layout(cfg=2))
    in_line(ours.model, ours.line, *seeds_of(Workflow(), 11, 12))
    assert ours.images == (0, 0) and at_once(ours) == 1


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


def test_a_model_that_is_parallelized_anew_for_each_sampling_is_the_same_one():
    """As in auto mode."""
    ours, prompts = Ahead(), seeds_of(Workflow(), 11, 12)
    ours.line.put(*prompts)
    for _ in prompts:
        anew = parallelize(ours.stock, ours.model.remote.pool, 0.0, ahead=ours.ahead)
        assert anew.remote is not ours.model.remote
        ours.line.run(anew)
    assert ours.images == (1, 0)


# -- what is not looked ahead, or not used


class Otherwise(Workflow):
    """Alike in its graph; ``change`` makes something of it another in the second prompt."""

    def __init__(self, change, **options):
        super().__init__(**options)
        self.change, self.ran = change, 0

    def run(self, model, seed, at):
        self.ran += 1
        return self.change(self, model, seed, at) if self.ran > 1 else super().run(model, seed, at)

    def sampled(self, model, seed, at, **changed):
        given = {
            "model": model, "seed": seed, "steps": self.steps, "cfg": self.cfg, "sampler_name": self.sampler,
            "scheduler": "simple", "positive": conditioning(1, 13), "negative": conditioning(2, 7),
            "latent_image": self.latent,
        }  # fmt: skip
        with at("1"):
            return nodes.KSampler().sample(**given | changed)


def changing(**changed):
    return lambda workflow, model, seed, at: workflow.sampled(model, seed, at, **changed)


def with_lora(workflow, model, seed, at):
    key = next(key for key in model.model.state_dict() if key.endswith("img_in.weight"))
    patches = {key: (torch.full_like(model.model.state_dict()[key], 0.01),)}
    return workflow.sampled(cloned(model, "add_patches", patches, 1.0, 1.0), seed, at)


def with_other_sampling(workflow, model, seed, at):
    return workflow.sampled(
        execute("nodes_model_advanced", "ModelSamplingFlux", model, 1.0, 0.2, 512, 512), seed, at
    )


def with_sampling_of_the_same_sigmas(workflow, model, seed, at):
    sampling = copy.copy(model.get_model_object("model_sampling"))
    sampling.calculate_denoised = lambda sigma, output, x: x - 0.9 * sigma.reshape(-1, 1, 1, 1) * output
    return workflow.sampled(cloned(model, "add_object_patch", "model_sampling", sampling), seed, at)


def after_random_numbers(workflow, model, seed, at):
    """A node that draws random numbers between the noise and the sampler, as a callback may."""

    def drawing(executor, *args, **kwargs):
        torch.randn(5)
        return executor(*args, **kwargs)

    return workflow.sampled(cloned(model, "add_wrapper", WrappersMP.OUTER_SAMPLE, drawing), seed, at)


CHANGES = {
    "text": changing(positive=conditioning(5, 13)),
    "text of another length": changing(positive=conditioning(1, 14)),
    "negative text": changing(negative=conditioning(6, 7)),
    "cfg": changing(cfg=3.0),
    "steps": changing(steps=4),
    "scheduler": changing(scheduler="karras"),
    "sampler": changing(sampler_name="heun"),
    "strength": changing(denoise=0.7),
    "latent": changing(latent_image={"samples": torch.full((1, 16, 8, 10), 0.3)}),
    "size": changing(latent_image={"samples": torch.zeros(1, 16, 10, 8)}),
    "mask": changing(
        latent_image={"samples": torch.zeros(1, 16, 8, 10), "noise_mask": torch.ones(1, 1, 64, 80) / 2}
    ),
    "noise of other images of a batch": changing(
        latent_image={"samples": torch.zeros(1, 16, 8, 10), "batch_index": [3]}
    ),
    "LoRA": with_lora,
    "model sampling": with_other_sampling,
    "model sampling of the same sigmas": with_sampling_of_the_same_sigmas,
    "random numbers": after_random_numbers,
}


class Written(Otherwise):
    """Its text is the same object in every prompt, and another from the second on."""

    def __init__(self):
        super().__init__(lambda *_: None)
        self.text = conditioning(1, 13)

    def run(self, model, seed, at):
        self.ran += 1
        if self.ran > 1:
            self.text[0][0].add_(0.1)
        return self.sampled(model, seed, at, positive=self.text)


@pytest.mark.parametrize("name", [*CHANGES, "text that was written into"])
def test_what_is_no_more_as_it_was_sampled_ahead_is_thrown_away_and_sampled_as_ever(name):
    ours, (first, second) = (
        Ahead(),
        (Otherwise(CHANGES[name]) if name in CHANGES else Written() for _ in "12"),
    )
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


def with_cfg_function(model):
    return cloned(model, "set_model_sampler_post_cfg_function", lambda args: args["denoised"] * 0.9)


class TwoModels(Advanced):
    guider = staticmethod(lambda model: custom("DualModelGuider", model, PROMPTS[0], 2.0, model, PROMPTS[1]))


REFUSED = {
    "a foreign wrapper": (together, Workflow()),
    "a function after cfg": (with_cfg_function, Workflow()),
    "context windows": (lambda model: in_windows(model, context_length=6, context_overlap=2), Workflow()),
    "EasyCache": (
        lambda model: execute("nodes_easycache", "EasyCache", model, 0.2, 0.1, 0.9, False),
        Workflow(),
    ),
    "APG": (lambda model: execute("nodes_apg", "APG", model, 0.0, 15.0, 0.5), Workflow()),
    "two models in one guider": (lambda model: model, TwoModels()),
    "uni_pc": (lambda model: model, Workflow("uni_pc")),
    "dpm_adaptive": (lambda model: model, Workflow("dpm_adaptive", steps=2, cfg=1.0)),  # it takes many steps
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_may_keep_a_state_is_sampled_one_after_the_other(name):
    change, workflow = REFUSED[name]
    assert_one_by_one(workflow, change)


def around(function):
    """As a pack wraps what it finds: what it keeps is not to be seen."""
    return functools.wraps(function)(lambda *args, **options: function(*args, **options))


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (comfy.samplers, "cfg_function"),
        (comfy.samplers.CFGGuider, "predict_noise"),
        (comfy.samplers.k_diffusion_sampling, "sample_euler"),
    ],
    ids=lambda one: one if isinstance(one, str) else "",
)
def test_code_that_a_pack_has_put_into_a_step_is_run_for_one_prompt_after_the_other(owner, name, monkeypatch):
    monkeypatch.setattr(owner, name, around(getattr(owner, name)))
    assert_one_by_one(Workflow())


def test_one_seed_that_waits_twice_is_sampled_ahead_once():
    ours = Ahead(Layout(data=3))
    ours.line.put(*seeds_of(Workflow(), 11, 12, 12))
    ours.line.run(ours.model)
    assert at_once(ours) == 2 and len(ours.ahead._kept) == 1


def test_noise_that_stock_makes_otherwise_is_left_and_so_are_the_random_numbers_after_it():
    workflow = Workflow()
    workflow.latent["batch_index"] = [3]
    assert_one_by_one(workflow)


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


@pytest.mark.parametrize(
    "make",
    [
        lambda: {"control": Control(), "control_apply_to_uncond": False},
        lambda: {"area": (4, 4, 2, 2)},
        lambda: {"mask": torch.ones(1, 64, 80) / 2},
        lambda: {"hooks": comfy.hooks.create_hook_model_as_lora({}, {}, 1.0, 1.0)},
    ],
    ids=["a ControlNet", "an area", "a mask of the text", "hooks of weights"],
)
def test_text_with_more_than_its_tokens_is_sampled_one_after_the_other(make):
    assert_one_by_one(WithText(make))


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


def test_of_a_queue_that_shares_nothing_as_many_graphs_are_looked_at_as_there_are_groups_and_nothing_is_copied(
    monkeypatch,
):
    compared, copied = [], []
    own = queue_lookahead.differences

    def counted(mine, other, node):
        compared.append(node)
        return own(mine, other, node)

    monkeypatch.setattr(queue_lookahead, "differences", counted)
    monkeypatch.setattr(queue_lookahead, "cpu_copy", copied.append)
    ours = Ahead(Layout(data=3))
    for number in range(6):
        workflow = Workflow()
        workflow.steps = 2 + number
        ours.line.put((str(number), 11 + number, workflow))
    for number in range(6):
        compared.clear()
        ours.line.run(ours.model)
        assert len(compared) == min(2, 5 - number)
    assert not copied and ours.images == (0, 0)


def test_a_prompts_graph_is_compared_with_anothers_once_however_often_its_sampler_is_asked_for(monkeypatch):
    own, compared = queue_lookahead.differences, []
    monkeypatch.setattr(queue_lookahead, "differences", lambda *given: compared.append(1) or own(*given))
    line = [
        Pending(str(number), {"1": node("KSampler", seed=number, steps=number)}, ("1",))
        for number in range(6)
    ]
    ahead = QueueLookahead(lambda: Moment(line[0][0], "1", None, line[0][1], tuple(line[1:])))
    while len(line) > 1:
        compared.clear()
        for _ in range(2):  # as the plan asks, and the sampler after it
            ahead.forget()
            assert ahead.at_once(3, NotImplemented) == (1, 1)
        assert len(compared) == min(2, len(line) - 1)
        line.pop(0)


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
def test_where_images_at_once_fail_the_first_goes_on_alone_and_the_rest_is_sampled_as_ever(error, at):
    prompts, ours = seeds_of(Workflow(), 11, 12, 13), Ahead(made=Failing)
    ours.pool.error, ours.pool.at = error, at
    assert_alike(in_line(ours.model, ours.line, *prompts), stocks(*prompts))
    assert ours.images == (0, 0) and not suspended()
    ours.evaluations()
    in_line(ours.model, ours.line, *prompts[:2])
    assert ours.images == (1, 0), "another queue"


def test_no_other_model_makes_room_for_what_can_wait(monkeypatch):
    ours, asked_for = Ahead(made=Failing), []
    monkeypatch.setattr(
        ours.model.remote.pool.residency, "make_room", lambda *args, **_: asked_for.append(args)
    )
    ours.pool.error = OutOfMemory("No room.")
    in_line(ours.model, ours.line, *seeds_of(Workflow(), 11, 12))
    assert not asked_for


def test_a_rank_that_dies_ends_the_prompt_that_runs_and_the_next_one_is_stocks_own():
    prompts, ours = seeds_of(Workflow(), 11, 12), Ahead(made=Failing)
    ours.pool.error, ours.pool.at = PoolFailed("A worker died."), 5
    ours.line.put(*prompts)
    with pytest.raises(PoolFailed, match="A worker died"):
        ours.line.run(ours.model)
    assert not suspended() and not ours.ahead._kept
    assert_alike(ours.line.run(ours.model), stocks(prompts[1]))


def stopping(steps, error):
    """As ``QueuedSampler.told``, which raises this at the step with that number."""

    def told(waiting, step, denoised, noisy, total):
        if step == steps:
            raise error
        waiting.steps.append((step, denoised.clone(), noisy.clone(), total))

    return told


def test_an_error_of_what_is_sampled_ahead_is_raised_nowhere(monkeypatch):
    monkeypatch.setattr(queue_lookahead.QueuedSampler, "told", stopping(1, ZeroDivisionError()))
    prompts, ours = seeds_of(Workflow(), 11, 12), Ahead()
    assert_alike(in_line(ours.model, ours.line, *prompts), stocks(*prompts))
    assert ours.images == (0, 0) and not suspended()


def test_a_cancel_that_meets_what_is_sampled_ahead_ends_the_prompt_that_runs(monkeypatch):
    interrupt = comfy.model_management.InterruptProcessingException()
    monkeypatch.setattr(queue_lookahead.QueuedSampler, "told", stopping(1, interrupt))
    ours = Ahead()
    ours.line.put(*seeds_of(Workflow(), 11, 12))
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


def test_a_cancelled_prompt_takes_what_was_sampled_beside_it_along_and_the_next_is_stocks_own():
    prompts, ours = seeds_of(Workflow(), 11, 12, 13), Ahead()
    ours.line.put(*prompts)
    cancelled(ours.line, ours.model, 2)
    assert not suspended() and not ours.ahead._kept
    assert ours.evaluations() == 8
    assert_alike([ours.line.run(ours.model), ours.line.run(ours.model)], stocks(*prompts[1:]))
    assert ours.images == (1, 0)
