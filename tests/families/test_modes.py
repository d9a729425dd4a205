"""Stock samplers and nodes under patches, in one process: what may run free does, the rest is
named, and warm both are stock's own.
"""

import re
from functools import cache, partial
from itertools import cycle
from types import SimpleNamespace

import comfy.samplers
import comfy.supported_models
import pytest
import torch
from pipemesh.lab.commands import parity
from pipemesh.lab.commands.parity import BOUND, Case, conditioning, relative_error, sample, stock_model
from pipemesh.parallel_runtime.client import separability
from pipemesh.parallel_runtime.errors import ModelError
from pipemesh.parallel_runtime.families import plan_for
from pipemesh.parallel_runtime.families.catalogue import PLAIN, REPRESENTATIVES, SAMPLES
from pipemesh.parallel_runtime.families.flux import guided_config
from pipemesh.parallel_runtime.families.sample import random_tensor

from ..kit.models import VIDEO, run
from ..kit.patched import (  # noqa: F401
    ALL_WARM,
    FREE,
    SAMPLERS,
    SIZE,
    SMALL,
    Patched,
    advanced,
    custom,
    execute,
    in_windows,
    latent,
    models_let_go,
    one_cond_at_a_time,
    patched,
    stock,
    suspended_coroutines,
    together,
)

pytestmark = pytest.mark.usefixtures("one_cond_at_a_time")


def assert_free_where_stale(stale, sampled, truth, least=100 * BOUND):
    """Where something is stale a run is free, and computes what one in step does, and not stock's
    own: ``least`` it is off. ``sampled``: model -> latent.
    """
    free, in_step = sampled(stale.model), sampled(together(stale.model))
    assert stale.modes.pop(0) == FREE and stale.mode.startswith("single-timeline")
    assert relative_error(free, in_step) <= BOUND
    assert relative_error(free, truth) > least, "nothing was stale"


# -- samplers


@pytest.mark.cover(8)
@pytest.mark.parametrize("name", SAMPLERS)
def test_every_sampler_is_stock_when_warm_and_runs_free_if_it_acts_on_each_pixel(name):
    options = {"sampler": name, "steps": 4, "cfg": 2.0, "size": SIZE, "negative": conditioning(2, 13)}
    truth = run(stock(), **options)
    state = torch.get_rng_state()
    torch.manual_seed(0)
    assert torch.equal(run(patched().model, **options), truth)
    assert torch.equal(torch.get_rng_state(), state)
    if name == "dpm_adaptive":
        assert patched().modes.pop() == "single-timeline, because of the sampler dpm_adaptive"
        return
    assert patched().mode == FREE
    assert_free_where_stale(patched(warm_up=1), lambda model: run(model, **options), truth)


def test_samplers_that_draw_from_torchs_own_generator_draw_as_stock_does():
    sampler = comfy.samplers.ksampler("heun", {"s_churn": 2.0, "s_noise": 1.1})
    truth = advanced(stock(), sampler=sampler)[0]["samples"]
    state = torch.get_rng_state()
    assert torch.equal(advanced(patched().model, sampler=sampler)[0]["samples"], truth)
    assert torch.equal(torch.get_rng_state(), state)
    assert patched().mode == FREE


# -- what runs free

MASK = {
    "latent": latent(),
    "noise_mask": torch.rand(1, *SIZE, generator=torch.Generator().manual_seed(2)).round(),
}
RANGES = [
    [tensor, {**extras, "start_percent": n / 2, "end_percent": (n + 1) / 2}]
    for n in (0, 1)
    for tensor, extras in conditioning(n, 9)
]
COMBINED = [
    [tensor, {**extras, "strength": 0.3 + n}] for n in (0, 1) for tensor, extras in conditioning(n, 9)
]


PLAIN_WORKFLOWS = {
    "cfg, two calls": {"cfg": 3.0},
    "cfg, one call": {"cfg": 3.0, "negative": conditioning(2, 13)},
    "denoise": {"latent": latent(), "denoise": 0.6},
    "start and end step": {"latent": latent(), "start_step": 1, "last_step": 3, "disable_noise": True},
    "end step": {"start_step": 0, "last_step": 2, "force_full_denoise": True},
    "inpaint": MASK,
    "inpaint, ddim": {**MASK, "sampler": "ddim"},
    "inpaint, sde": {**MASK, "sampler": "dpmpp_2m_sde", "cfg": 2.0, "denoise": 0.7},
    "batch, cfg": {"batch": 2, "cfg": 2.0},
    "batch": {"batch": 2, "sampler": "euler_ancestral"},
    "timestep ranges": {"positive": RANGES},
    "combined": {"positive": COMBINED, "cfg": 2.0},
    "guidance": {"positive": [[text, {**extras, "guidance": 9.0}] for text, extras in conditioning(1, 9)]},
}


@pytest.mark.parametrize("name", PLAIN_WORKFLOWS)
def test_a_plain_workflow_runs_free_and_is_stock_when_warm(name):
    options = {"size": SIZE, "steps": 4, **PLAIN_WORKFLOWS[name]}
    truth = run(stock(), **options)
    assert relative_error(run(stock(), size=SIZE, steps=4), truth) > 0.001, "the options do nothing"
    assert torch.equal(run(patched().model, **options), truth)
    assert patched().mode == FREE
    assert_free_where_stale(patched(warm_up=1), lambda model: run(model, **options), truth)


@pytest.mark.parametrize("size, patches", [((9, 6), 4), ((8, 11), 3), ((6, 6), 9), ((1, 8), 2)], ids=str)
def test_heights_need_not_divide_by_the_number_of_patches(size, patches):
    options = {"size": size, "steps": 4, "cfg": 2.0}
    ours = patched(patches)
    assert torch.equal(run(ours.model, **options), run(stock(), **options))
    assert ours.mode == FREE
    stale = patched(patches, warm_up=1)
    assert relative_error(run(stale.model, **options), run(together(stale.model), **options)) <= BOUND
    stale.modes.clear()


OTHERS = [  # each family and form with another sampler
    Case(one.name, "ulysses1", "odd", one.heads[0], 4.0, False, sampler)
    for one, sampler in zip(REPRESENTATIVES.values(), cycle(parity.SAMPLERS), strict=False)
    if one.name != PLAIN
]


@pytest.mark.cover(3)
@pytest.mark.parametrize("case", OTHERS, ids=lambda case: case.family)
def test_every_family_runs_free(case):
    truth = sample(stock_model(case.heads, family=case.family), case)
    warm = Patched(stock_model(case.heads, family=case.family))
    assert torch.equal(sample(warm.model, case), truth)
    assert warm.mode == FREE
    stale = Patched(stock_model(case.heads, family=case.family), warm_up=1)
    assert_free_where_stale(stale, lambda model: sample(model, case), truth, BOUND)


@pytest.mark.cover(8)
@pytest.mark.parametrize("name", [name for name in SAMPLES if name not in REPRESENTATIVES])
def test_every_other_sample_runs_free_and_is_stock_when_warm(name):
    """What its nodes add to a prompt is known to leave each pixel to itself, or named. A plan that
    cannot be cut says why.
    """
    case = Case(name, "ulysses1", "odd", SAMPLES[name].heads[0], 4.0, False, "euler")
    warm = Patched(stock_model(case.heads, family=name))
    assert torch.equal(
        sample(warm.model, case, steps=2), sample(stock_model(case.heads, family=name), case, steps=2)
    )
    together, facts = plan_for(type(warm.model.model.diffusion_model)).together, SAMPLES[name]
    extras = facts.extras(parity.empty_latent(case))
    refers = {"reference_latents", "concat_latent_image"} & extras.keys()
    if together.always:
        assert warm.mode == f"all of them at once, because of {together.always}"
    elif refers and together.arguments:
        assert warm.mode == f"all of them at once, because of {both_sides(together.arguments[0])}"
    elif together.refiners:
        assert (
            warm.mode
            == f"single-timeline, because of the model's {together.refiners[0]}, which looks at the whole"
            " image"
        )
    else:
        before = [
            f"single-timeline, because of {both_sides(name)}" for name in ("reference_latent", "ref_latent")
        ]
        assert warm.mode in (FREE, *before)


def both_sides(name):
    return " and ".join(f"{name} in the {side} conditioning" for side in ("positive", "negative"))


@pytest.mark.parametrize("key", ["time_dim_concat", "context_latents"])
def test_frames_that_stand_behind_a_videos_own_run_free(key):
    frame = latent(size=(1, 5, 6))
    prompts = [
        [
            [text, {**extras, key: [frame] if key == "context_latents" else frame}]
            for text, extras in conditioning(n, 9)
        ]
        for n in (1, 2)
    ]
    options = {"latent": torch.zeros(1, 16, 3, 5, 6), "cfg": 2.0, "steps": 4}
    options |= {"positive": prompts[0], "negative": prompts[1]}
    plain = stock_model(5, family=VIDEO)
    truth = run(plain, **options)
    assert relative_error(run(plain, **{**options, "positive": conditioning(1, 9)}), truth) > 0.001, (
        "the frame does nothing"
    )
    warm, stale = (Patched(stock_model(5, family=VIDEO), warm_up=warm_up) for warm_up in (ALL_WARM, 1))
    assert torch.equal(run(warm.model, **options), truth)
    assert warm.mode == FREE
    assert_free_where_stale(stale, lambda model: run(model, **options), truth, BOUND)


def basic_guider(model):
    return custom("BasicGuider", model, conditioning(1, 13))


def dual_guider(style, model):
    return custom(
        "DualCFGGuider", model, conditioning(1, 13), conditioning(3, 9), conditioning(2, 7), 3.0, 2.0, style
    )


def referenced(method, model):
    prompts = (
        execute("nodes_edit_model", "ReferenceLatent", conditioning(n, 9 + n), {"samples": latent(n, (6, 8))})
        for n in (1, 2)
    )
    if method is not None:
        prompts = (
            execute("nodes_flux", "FluxKontextMultiReferenceLatentMethod", prompt, method)
            for prompt in prompts
        )
    return custom("CFGGuider", model, *prompts, 3.0)


def model_sampling(name, *values):
    return lambda model: execute("nodes_model_advanced", f"ModelSampling{name}", model, *values)


NODES = {  # what a node takes the place of, and the node
    "BasicGuider": ("guider", basic_guider),
    "DualCFG": ("guider", partial(dual_guider, "regular")),
    "nested DualCFG": ("guider", partial(dual_guider, "nested")),
    "references": ("guider", partial(referenced, None)),
    "references, index": ("guider", partial(referenced, "index")),
    "references, uno": ("guider", partial(referenced, "uxo/uno")),
    "ModelSamplingFlux": ("model", model_sampling("Flux", 1.3, 0.7, 1024, 1024)),
    "ModelSamplingDiscrete": ("model", model_sampling("Discrete", "img_to_img_flow", False)),
    "ER-SDE": ("sampler", lambda _: custom("SamplerER_SDE", "Reverse-time SDE", 3, 0.7, 1.0)),
    "SA-Solver": ("sampler", lambda m: custom("SamplerSASolver", m, 1.0, 0.1, 0.9, 1.0, 2, 2, False, False)),
    "LMS": ("sampler", lambda _: custom("SamplerLMS", 2)),
}


@pytest.mark.parametrize("name", NODES)
def test_stock_guiders_model_sampling_and_samplers_run_free_as_a_server_loads_them(name):
    place, node = NODES[name]

    def sampled(of, wrap=lambda model: model):
        model = wrap(node(of) if place == "model" else of)
        return advanced(model, **({} if place == "model" else {place: node(model)}))

    truths = sampled(stock())
    assert relative_error(advanced(stock())[0]["samples"], truths[0]["samples"]) > 0.001, (
        "the node does nothing"
    )
    for ours, truth in zip(sampled(patched().model), truths, strict=True):
        assert torch.equal(ours["samples"], truth["samples"])
    assert patched().mode == FREE
    stale = patched(warm_up=1)
    for free, in_step in zip(sampled(stale.model), sampled(stale.model, together), strict=True):
        assert relative_error(free["samples"], in_step["samples"]) <= BOUND
    assert stale.modes.pop(0) == FREE and stale.mode.startswith("single-timeline")


class StandInVae:
    """Pixels (B, H, W, 3) to 16 channels of an eighth."""

    def encode(self, pixels):
        small = torch.nn.functional.avg_pool2d(pixels.movedim(-1, 1), 8)
        return small.repeat(1, 6, 1, 1)[:, :16]


def test_an_inpainting_model_with_its_conditioning_runs_free():
    height, width = SIZE[0] * 8, SIZE[1] * 8
    pixels = torch.rand(1, height, width, 3, generator=torch.Generator().manual_seed(4))
    mask = torch.zeros(1, height, width)
    mask[:, 30:80, 20:60] = 1.0
    positive, negative, image = execute(
        "", "InpaintModelConditioning", conditioning(1, 13), conditioning(2, 7), pixels, StandInVae(), mask
    )

    def sampled(model):
        return advanced(model, custom("CFGGuider", model, positive, negative, 3.0), image=image)

    truths = sampled(stock(fill=True))
    for ours, truth in zip(sampled(patched(fill=True).model), truths, strict=True):
        assert torch.equal(ours["samples"], truth["samples"])
    assert patched(fill=True).mode == FREE
    stale, truth = patched(warm_up=1, fill=True), truths[0]["samples"]
    assert_free_where_stale(stale, lambda model: sampled(model)[0]["samples"], truth, BOUND)


# -- what is kept together


def foreign_post_cfg(args):
    return args["denoised"] / args["denoised"].std()


def with_post_cfg(model):
    clone = model.clone()
    clone.set_model_sampler_post_cfg_function(foreign_post_cfg)
    return clone


def with_prepare_state(model):
    from comfy.patcher_extension import CallbacksMP

    clone = model.clone()
    clone.add_callback(CallbacksMP.ON_PREPARE_STATE, foreign_prepare_state)
    return clone


def foreign_prepare_state(patcher, timestep, model_options, *_):
    pass


class ForeignSampling(torch.nn.Module):
    """Named as a pack might be that is importable as ``comfyui_...``."""

    __module__ = "comfyui_foreign.sampling"

    def __init__(self, own):
        super().__init__()
        self.own = own

    def __getattr__(self, name):
        return super().__getattr__(name) if name == "own" else getattr(self.own, name)


def with_foreign_sampling(model):
    clone = model.clone()
    clone.add_object_patch("model_sampling", ForeignSampling(model.get_model_object("model_sampling")))
    return clone


REGION = [
    [tensor, {**extras, "area": (6, 5, 2, 3), "strength": 0.7}] for tensor, extras in conditioning(3, 9)
]


@pytest.mark.parametrize(
    "patch, options, words",
    [
        (
            lambda m: execute("nodes_model_advanced", "RescaleCFG", m, 0.7),
            {},
            "sampler_cfg_function .*rescale_cfg",
        ),
        (lambda m: execute("nodes_cfg", "CFGZeroStar", m), {}, "sampler_post_cfg_function .*cfg_zero_star"),
        (
            lambda m: execute("nodes_easycache", "EasyCache", m, 0.5, 0.1, 0.95, False),
            {"steps": 8},
            "easycache",
        ),
        (with_post_cfg, {}, "sampler_post_cfg_function .*test_modes.foreign_post_cfg"),
        (lambda m: m, {"positive": conditioning(1, 13) + REGION}, "area on the positive conditioning"),
        (with_prepare_state, {}, "on_prepare_state callback .*foreign_prepare_state"),
        (with_foreign_sampling, {}, "object patch model_sampling .*comfyui_foreign.sampling.ForeignSampling"),
    ],
    ids=["RescaleCFG", "CFGZeroStar", "EasyCache", "post-CFG", "area", "callback", "model sampling"],
)
def test_what_looks_at_more_than_a_pixel_is_named_and_stock_when_warm(patch, options, words):
    options = {"size": SIZE, "steps": 4, "cfg": 3.0, **options}
    truth = run(patch(stock()), **options)
    if patch not in (with_prepare_state, with_foreign_sampling):
        plain = {key: value for key, value in options.items() if key != "positive"}
        assert relative_error(run(stock(), **plain), truth) > 0.001, "it does nothing"
    assert torch.equal(run(patch(patched().model), **options), truth)
    named(patched().mode, words)


def named(mode, words):
    assert re.fullmatch(f"single-timeline, because of .*{words}.*", mode), mode


def test_all_that_keeps_patches_together_is_named_at_once():
    run(
        execute("nodes_model_advanced", "RescaleCFG", with_post_cfg(patched().model), 0.7), size=SIZE, cfg=3.0
    )
    named(patched().mode, "foreign_post_cfg.* and .*rescale_cfg")


def test_a_tensor_among_the_models_options_is_named():
    model = patched().model.clone()
    model.model_options["of_a_pack"] = torch.zeros(2)
    run(model, size=SIZE)
    named(patched().mode, "of_a_pack")


def test_code_among_the_samplers_options_is_named():
    def foreign_noise(sigma, sigma_next):
        return torch.zeros(1, 16, *SIZE)

    advanced(
        patched().model,
        sampler=comfy.samplers.ksampler("euler_ancestral", {"noise_sampler": foreign_noise}),
    )
    named(patched().mode, "the sampler's option noise_sampler .*foreign_noise")


@cache
def control_net():
    """A tiny one of the host's own classes."""
    import comfy.controlnet
    import comfy.ldm.flux.controlnet
    import comfy.ops

    net = comfy.ldm.flux.controlnet.ControlNetFlux(
        dtype=torch.float32, operations=comfy.ops.disable_weight_init, **guided_config(SMALL)
    )
    net.load_state_dict(
        {
            name: random_tensor(name, tuple(tensor.shape), 3, torch.float32)
            for name, tensor in net.state_dict().items()
        }
    )
    return comfy.controlnet.ControlNet(net, load_device=torch.device("cpu"), extra_conds=["y", "guidance"])


def test_a_controlnet_is_named_and_stock_when_warm():
    image = torch.rand(1, 12 * 8, 10 * 8, 3, generator=torch.Generator().manual_seed(5))
    both = conditioning(1, 13), conditioning(2, 7)
    prompts = execute("", "ControlNetApplyAdvanced", *both, control_net(), image, 0.8, 0.0, 1.0)
    options = {"size": (12, 10), "steps": 4, "cfg": 3.0}
    truth = run(stock(), positive=prompts[0], negative=prompts[1], **options)
    assert relative_error(run(stock(), **options), truth) > 0.01, "the ControlNet does nothing"
    assert torch.equal(run(patched().model, positive=prompts[0], negative=prompts[1], **options), truth)
    named(patched().mode, "control on the positive conditioning")
    control_net.cache_clear()


windowed = partial(in_windows, context_length=2, context_overlap=1)


def test_context_windows_are_named_and_stock_when_warm():
    case = Case(VIDEO, "ulysses1", "odd", 5, 4.0, False, "euler")
    ours = Patched(stock_model(case.heads, family=case.family))

    plain = stock_model(case.heads, family=case.family)
    truth = sample(windowed(plain), case)
    assert relative_error(sample(plain, case), truth) > 0.001, "the windows do nothing"
    assert torch.equal(sample(windowed(ours.model), case), truth)
    named(ours.mode, "context_handler")


def test_what_is_kept_of_one_window_or_region_is_not_seen_by_another(monkeypatch):
    """The first evaluations of two windows, or regions, are exact, each of its own; else the second
    would see the keys of the first. So it is also where calls have no numbers.
    """
    stale = Patched(stock_model(5, family=VIDEO), warm_up=1)
    video = {"steps": 1, "latent": torch.zeros(1, 16, 5, 8, 6)}
    truth = run(windowed(stock_model(5, family=VIDEO)), **video)
    assert torch.equal(run(windowed(stale.model), **video), truth)
    monkeypatch.setattr("pipemesh.parallel_runtime.client.patch_sampling.has_foreign_code", lambda *_: False)
    assert torch.equal(run(windowed(stale.model), **video), truth)
    options = {"size": SIZE, "steps": 1, "cfg": 3.0, "positive": conditioning(1, 13) + REGION}
    assert torch.equal(run(patched(warm_up=1).model, **options), run(stock(), **options))
    patched(warm_up=1).modes.clear()


def test_samplers_of_other_packs_are_named_even_under_a_stock_name(monkeypatch):
    from comfy.k_diffusion import sampling

    def sample_foreign(model, x, sigmas, **kwargs):
        return sampling.sample_heun(model, x / x.std(), sigmas, **kwargs)

    def added():
        monkeypatch.setattr(sampling, "sample_foreign", sample_foreign, raising=False)
        monkeypatch.setattr(comfy.samplers, "KSAMPLER_NAMES", [*comfy.samplers.KSAMPLER_NAMES, "foreign"])
        return comfy.samplers.ksampler("foreign")

    def replaced():
        monkeypatch.setattr(sampling, "sample_euler", sample_foreign)
        return comfy.samplers.ksampler("euler")

    for sampler in (added(), replaced()):
        assert torch.equal(
            advanced(patched().model, sampler=sampler)[0]["samples"],
            advanced(stock(), sampler=sampler)[0]["samples"],
        )
        named(patched().mode, "the sampler foreign")


def test_a_sampler_whose_patches_take_different_numbers_of_evaluations_is_refused(monkeypatch):
    started = []

    def sample_at_whim(model, x, sigmas, extra_args=None, callback=None, disable=None):
        started.append(x)
        for _ in range(1 + len(started) % 2):
            x = model(x, sigmas[0] * x.new_ones(1), **extra_args)
        return x

    monkeypatch.setattr(
        "pipemesh.parallel_runtime.client.patch_sampling.why_single_timeline", lambda *_: None
    )
    with pytest.raises(ModelError, match="set pipefusion to 1 for this sampler"):
        advanced(patched().model, sampler=comfy.samplers.KSAMPLER(sample_at_whim))
    assert patched().mode == FREE and not suspended_coroutines()


def test_packed_latents_are_named():
    """ComfyUI packs the latents of several streams into one tensor of three dimensions."""
    guider = SimpleNamespace(conds={}, model_patcher=SimpleNamespace(object_patches={}))
    sampler = comfy.samplers.sampler_object("euler")

    def objections(*shape):
        return {*separability.why_single_timeline(sampler, guider, {}, torch.zeros(shape)).split(" and ")}

    assert objections(1, 1, 640) - objections(1, 16, 8, 8) == {"packed latents of shape (1, 1, 640)"}
