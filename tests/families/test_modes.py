"""Stock samplers and nodes under patches, in one process: what may run free does, the rest is
named, and warm both are stock's own.
"""

import re
from functools import partial
from itertools import cycle
from types import SimpleNamespace

import comfy.samplers
import pytest
import torch
from comfy.patcher_extension import CallbacksMP
from pipemesh.lab.commands import parity
from pipemesh.lab.commands.parity import BOUND, Case, conditioning, relative_error, sample, stock_model
from pipemesh.parallel_runtime.client import patch_sampling, separability
from pipemesh.parallel_runtime.errors import ModelError
from pipemesh.parallel_runtime.families import plan_for
from pipemesh.parallel_runtime.families.catalogue import PLAIN, REPRESENTATIVES, SAMPLES
from pipemesh.parallel_runtime.families.flux import guided_config

from ..kit.models import VIDEO, run
from ..kit.patched import (  # noqa: F401
    ALL_WARM,
    FREE,
    SAMPLERS,
    SIZE,
    SMALL,
    Patched,
    advanced,
    cloned,
    control_net,
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
    with_object,
)

pytestmark = pytest.mark.usefixtures("one_cond_at_a_time")


def assert_free(sampled, warm, stale, truth, least=100 * BOUND):
    """Hold a run to stock's own where it is warm. Where something is stale it is free too, and
    computes what one in step does, and not stock's own: ``least`` it is off. ``sampled``: model ->
    latent.
    """
    assert torch.equal(sampled(warm.model), truth)
    assert warm.mode == FREE
    free, in_step = sampled(stale.model), sampled(together(stale.model))
    assert stale.modes.pop(0) == FREE and stale.mode.startswith("single-timeline")
    assert relative_error(free, in_step) <= BOUND
    assert relative_error(free, truth) > least, "nothing was stale"


def odd_case(name, sampler="euler"):
    return Case(name, "ulysses1", "odd", SAMPLES[name].heads[0], 4.0, False, sampler)


def ours(case, warm_up=ALL_WARM):
    return Patched(stock_model(case.heads, family=case.family), warm_up=warm_up)


# -- samplers


@pytest.mark.cover(8)
@pytest.mark.parametrize("name", SAMPLERS)
def test_every_sampler_is_stock_when_warm_and_runs_free_if_it_acts_on_each_pixel(name):
    options = {"sampler": name, "steps": 4, "cfg": 2.0, "size": SIZE, "negative": conditioning(2, 13)}
    sampled = partial(run, **options)
    truth, state = sampled(stock()), torch.get_rng_state()
    torch.manual_seed(0)
    if name == "dpm_adaptive":
        assert torch.equal(sampled(patched().model), truth)
        assert patched().modes.pop() == "single-timeline, because of the sampler dpm_adaptive"
    else:
        assert_free(sampled, patched(), patched(warm_up=1), truth)
    assert torch.equal(torch.get_rng_state(), state)


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


def adding(extras, *, tokens=9, seeds=(0, 1)):
    """A prompt of texts to each of which is added what ``extras`` makes of its number."""
    return [[text, {**own, **extras(n)}] for n in seeds for text, own in conditioning(n, tokens)]


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
    "timestep ranges": {"positive": adding(lambda n: {"start_percent": n / 2, "end_percent": (n + 1) / 2})},
    "combined": {"positive": adding(lambda n: {"strength": 0.3 + n}), "cfg": 2.0},
    "guidance": {"positive": adding(lambda _: {"guidance": 9.0}, seeds=(1,))},
}


@pytest.fixture(scope="module")
def plain():
    return run(stock(), size=SIZE, steps=4)


@pytest.mark.parametrize("name", PLAIN_WORKFLOWS)
def test_a_plain_workflow_runs_free_and_is_stock_when_warm(plain, name):
    options = {"size": SIZE, "steps": 4, **PLAIN_WORKFLOWS[name]}
    truth = run(stock(), **options)
    assert relative_error(plain, truth) > 0.001, "the options do nothing"
    assert_free(partial(run, **options), patched(), patched(warm_up=1), truth)


@pytest.mark.parametrize("size, patches", [((9, 6), 4), ((8, 11), 3), ((6, 6), 9), ((1, 8), 2)], ids=str)
def test_heights_need_not_divide_by_the_number_of_patches(size, patches):
    sampled = partial(run, size=size, steps=4, cfg=2.0)
    assert_free(sampled, patched(patches), patched(patches, warm_up=1), sampled(stock()), least=-1.0)


OTHERS = zip((name for name in REPRESENTATIVES if name != PLAIN), cycle(parity.SAMPLERS), strict=False)


@pytest.mark.cover(3)
@pytest.mark.parametrize(("name", "sampler"), OTHERS)
def test_every_family_runs_free(name, sampler):
    """Each with another sampler."""
    case = odd_case(REPRESENTATIVES[name].name, sampler)
    truth = sample(stock_model(case.heads, family=case.family), case)
    assert_free(partial(sample, case=case), ours(case), ours(case, 1), truth, BOUND)


@pytest.mark.cover(8)
@pytest.mark.parametrize("name", [name for name in SAMPLES if name not in REPRESENTATIVES])
def test_every_other_sample_runs_free_and_is_stock_when_warm(name):
    """What its nodes add to a prompt is known to leave each pixel to itself, or named. A plan that
    cannot be cut says why.
    """
    case, sampled = odd_case(name), partial(sample, case=odd_case(name), steps=2)
    warm = ours(case)
    assert torch.equal(sampled(warm.model), sampled(stock_model(case.heads, family=name)))
    together = plan_for(type(warm.model.model.diffusion_model)).together
    extras = SAMPLES[name].extras(parity.empty_latent(case))
    refers = {"reference_latents", "concat_latent_image"} & extras.keys()
    if together.always:
        says = [f"all of them at once, because of {together.always}"]
    elif refers and together.arguments:
        says = [f"all of them at once, because of {both_sides(together.arguments[0])}"]
    elif together.refiners:
        looks = f"the model's {together.refiners[0]}, which looks at the whole image"
        says = [f"single-timeline, because of {looks}"]
    else:
        names = ("reference_latent", "ref_latent")
        says = [FREE, *(f"single-timeline, because of {both_sides(name)}" for name in names)]
    assert warm.mode in says


def both_sides(name):
    return " and ".join(f"{name} in the {side} conditioning" for side in ("positive", "negative"))


@pytest.mark.parametrize("key", ["time_dim_concat", "context_latents"])
def test_frames_that_stand_behind_a_videos_own_run_free(key):
    frame, case = latent(size=(1, 5, 6)), odd_case(VIDEO)
    extras = {key: [frame] if key == "context_latents" else frame}
    options = {"latent": torch.zeros(1, 16, 3, 5, 6), "cfg": 2.0, "steps": 4}
    options["positive"], options["negative"] = (adding(lambda _: extras, seeds=(n,)) for n in (1, 2))
    plain = stock_model(case.heads, family=VIDEO)
    truth = run(plain, **options)
    without = run(plain, **options | {"positive": conditioning(1, 9)})
    assert relative_error(without, truth) > 0.001, "the frame does nothing"
    assert_free(partial(run, **options), ours(case), ours(case, 1), truth, BOUND)


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


def outputs_of_advanced(*args, **given):
    return torch.stack([one["samples"] for one in advanced(*args, **given)])


@pytest.fixture(scope="module")
def as_it_is():
    return outputs_of_advanced(stock())


@pytest.mark.parametrize("name", NODES)
def test_stock_guiders_model_sampling_and_samplers_run_free_as_a_server_loads_them(as_it_is, name):
    place, node = NODES[name]

    def sampled(of):
        if place == "model":
            return outputs_of_advanced(node(of))
        return outputs_of_advanced(of, **{place: node(of)})

    truth = sampled(stock())
    assert relative_error(as_it_is[0], truth[0]) > 0.001, "the node does nothing"
    assert_free(sampled, patched(), patched(warm_up=1), truth, least=-1.0)


def test_an_inpainting_model_with_its_conditioning_runs_free():
    random, mask = torch.Generator().manual_seed(4), torch.zeros(1, *(8 * side for side in SIZE))
    mask[:, 30:80, 20:60] = 1.0
    vae = SimpleNamespace(encode=lambda pixels: pixels[:, ::8, ::8].movedim(-1, 1).repeat(1, 6, 1, 1)[:, :16])
    prompts, pixels = (conditioning(1, 13), conditioning(2, 7)), torch.rand(*mask.shape, 3, generator=random)
    *prompts, image = execute("", "InpaintModelConditioning", *prompts, pixels, vae, mask)

    def sampled(model):
        return advanced(model, custom("CFGGuider", model, *prompts, 3.0), image=image)[0]["samples"]

    warm, stale = patched(fill=True), patched(warm_up=1, fill=True)
    assert_free(sampled, warm, stale, sampled(stock(fill=True)), BOUND)


# -- what is kept together


def with_cache(name, model):
    return execute("nodes_easycache", name, model, 0.5, 0.1, 0.95, False)


@pytest.mark.parametrize("name", ["EasyCache", "LazyCache"])
def test_a_step_cache_skips_as_many_evaluations_of_stale_patches_as_stock_skips(name):
    counted = []

    def sampled(model, forward):
        own = "diffusion_model._forward"
        model = with_object(model, own, lambda *args, **more: counted.append(1) or forward(*args, **more))
        return run(model, size=SIZE, steps=8)

    plain, stale = stock(), patched(warm_up=1)
    truth = sampled(with_cache(name, plain), plain.model.diffusion_model._forward)
    kept = len(counted)
    found = sampled(with_cache(name, stale.model), stale.model.object_patches["diffusion_model._forward"])
    assert 0 < kept < 8 and len(counted) == 2 * kept
    assert stale.mode.startswith("single-timeline")
    assert relative_error(found, truth) > 100 * BOUND, "nothing was stale"


def test_patches_without_a_whole_evaluation_before_them_are_refused():
    with pytest.raises(ModelError, match=r"warm_up 0: .* choose 1 or more"):
        patched(warm_up=0)


def foreign_post_cfg(args):
    return args["denoised"] / args["denoised"].std()


def with_post_cfg(model):
    return cloned(model, "set_model_sampler_post_cfg_function", foreign_post_cfg)


def with_prepare_state(model):
    return cloned(model, "add_callback", CallbacksMP.ON_PREPARE_STATE, foreign_prepare_state)


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
    return with_object(model, "model_sampling", ForeignSampling(model.get_model_object("model_sampling")))


REGION = adding(lambda _: {"area": (6, 5, 2, 3), "strength": 0.7}, seeds=(3,))
rescaled = partial(execute, "nodes_model_advanced", "RescaleCFG", multiplier=0.7)
LOOK = {  # at more than a pixel: what nodes do, the options of the run, and what is said
    "RescaleCFG": (rescaled, {}, "sampler_cfg_function .*rescale_cfg"),
    "CFGZeroStar": (
        partial(execute, "nodes_cfg", "CFGZeroStar"),
        {},
        "sampler_post_cfg_function .*cfg_zero_star",
    ),
    "EasyCache": (partial(with_cache, "EasyCache"), {"steps": 8}, "easycache"),
    "post-CFG": (with_post_cfg, {}, "sampler_post_cfg_function .*test_modes.foreign_post_cfg"),
    "area": (lambda m: m, {"positive": conditioning(1, 13) + REGION}, "area on the positive conditioning"),
    "callback": (with_prepare_state, {}, "on_prepare_state callback .*foreign_prepare_state"),
    "model sampling": (
        with_foreign_sampling,
        {},
        "object patch model_sampling .*comfyui_foreign.sampling.ForeignSampling",
    ),
}


@pytest.mark.parametrize("name", LOOK)
def test_what_looks_at_more_than_a_pixel_is_named_and_stock_when_warm(name):
    patch, options, words = LOOK[name]
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
    run(rescaled(with_post_cfg(patched().model)), size=SIZE, cfg=3.0)
    named(patched().mode, "foreign_post_cfg.* and .*rescale_cfg")


def test_a_tensor_among_the_models_options_is_named():
    model = patched().model.clone()
    model.model_options["of_a_pack"] = torch.zeros(2)
    run(model, size=SIZE)
    named(patched().mode, "of_a_pack")


def test_code_among_the_samplers_options_is_named():
    def foreign_noise(sigma, sigma_next):
        return torch.zeros(1, 16, *SIZE)

    sampler = comfy.samplers.ksampler("euler_ancestral", {"noise_sampler": foreign_noise})
    advanced(patched().model, sampler=sampler)
    named(patched().mode, "the sampler's option noise_sampler .*foreign_noise")


def test_a_controlnet_is_named_and_stock_when_warm():
    image = torch.rand(1, 12 * 8, 10 * 8, 3, generator=torch.Generator().manual_seed(5))
    net = control_net({**guided_config(SMALL), "dtype": torch.float32}, 3)
    both = conditioning(1, 13), conditioning(2, 7)
    prompts = execute("", "ControlNetApplyAdvanced", *both, net, image, 0.8, 0.0, 1.0)
    plain = partial(run, size=(12, 10), steps=4, cfg=3.0)
    sampled = partial(plain, positive=prompts[0], negative=prompts[1])
    truth = sampled(stock())
    assert relative_error(plain(stock()), truth) > 0.01, "the ControlNet does nothing"
    assert torch.equal(sampled(patched().model), truth)
    named(patched().mode, "control on the positive conditioning")


windowed = partial(in_windows, context_length=2, context_overlap=1)


def test_context_windows_are_named_and_stock_when_warm():
    case = odd_case(VIDEO)
    warm, plain = ours(case), stock_model(case.heads, family=VIDEO)
    truth = sample(windowed(plain), case)
    assert relative_error(sample(plain, case), truth) > 0.001, "the windows do nothing"
    assert torch.equal(sample(windowed(warm.model), case), truth)
    named(warm.mode, "context_handler")


def test_what_is_kept_of_one_window_or_region_is_not_seen_by_another(monkeypatch):
    """The first evaluations of two windows, or regions, are exact, each of its own; else the second
    would see the keys of the first. So it is also where calls have no numbers.
    """
    stale = ours(odd_case(VIDEO), 1)
    video = {"steps": 1, "latent": torch.zeros(1, 16, 5, 8, 6)}
    truth = run(windowed(stock_model(5, family=VIDEO)), **video)
    assert torch.equal(run(windowed(stale.model), **video), truth)
    monkeypatch.setattr(patch_sampling, "has_foreign_code", lambda *_: False)
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
        here, truth = (advanced(of, sampler=sampler)[0]["samples"] for of in (patched().model, stock()))
        assert torch.equal(here, truth)
        named(patched().mode, "the sampler foreign")


def test_a_sampler_whose_patches_take_different_numbers_of_evaluations_is_refused(monkeypatch):
    started = []

    def sample_at_whim(model, x, sigmas, extra_args=None, callback=None, disable=None):
        started.append(x)
        for _ in range(1 + len(started) % 2):
            x = model(x, sigmas[0] * x.new_ones(1), **extra_args)
        return x

    monkeypatch.setattr(patch_sampling, "why_single_timeline", lambda *_: None)
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
