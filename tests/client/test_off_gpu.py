"""Under a pipeline the UI asks nothing of a GPU that a rank computes on, patch by patch: the
sampler's arithmetic is on the CPU, but for samplers that draw their noise on the GPU.
"""

from contextlib import contextmanager

import comfy.samplers
import pytest
import torch
from pipemesh.lab.commands.parity import BOUND, relative_error
from pipemesh.parallel_runtime.client.cpu_sampling import draws_there
from pipemesh.parallel_runtime.client.patch_sampling import FreeRun
from pipemesh.parallel_runtime.client.remote_patcher import Patching, parallelize
from pipemesh.parallel_runtime.client.separability import SAMPLER_FUNCTIONS, _qualified

from ..kit import fake_device
from ..kit.fake_device import DEVICE, ui_on_it
from ..kit.models import load, run
from ..kit.patched import ALL_WARM, latent

STEPS, PATCHES = 3, 3


@contextmanager
def asked_of_the_gpu(patch):
    """What ran on the device while a pipeline's sampler did."""
    asked, inside, computed, of_run = [], [], fake_device.computed, FreeRun.run

    def watched(func, args, kwargs):
        made = computed(func, args, kwargs)
        leaves = torch.utils._pytree.tree_leaves((args, kwargs, made))
        if inside and any(isinstance(leaf, fake_device.Elsewhere) for leaf in leaves):
            asked.append(func)
        return made

    def sampling(*args):
        inside.append(True)
        try:
            return of_run(*args)
        finally:
            inside.clear()

    with patch.context() as own:
        own.setattr(fake_device, "computed", watched)
        own.setattr(FreeRun, "run", sampling)
        with ui_on_it():
            yield asked


def sampled(files, clients, modes, holds=0.5, **options):
    pool = clients(1, 1, 2)
    return run(
        parallelize(load(files["model"]), pool, holds, Patching(PATCHES, ALL_WARM), modes.append),
        steps=STEPS,
        **options,
    )


@pytest.mark.parametrize(
    "options",
    [
        {"cfg": 3.0, "sampler": "dpmpp_2m"},
        {"sampler": "dpmpp_2m_sde", "batch": 2},
        {"latent": latent(size=(8, 10)), "noise_mask": torch.ones(1, 8, 10).triu(), "sampler": "ddim"},
    ],
    ids=["cfg", "noise of the CPU", "mask"],
)
def test_the_ui_asks_nothing_of_a_gpu_that_a_rank_computes_on(files, clients, monkeypatch, options):
    expected, modes = run(load(files["model"]), steps=STEPS, **options), []
    with asked_of_the_gpu(monkeypatch) as asked:
        ours = sampled(files, clients, modes, **options)
    assert relative_error(ours, expected) <= BOUND
    assert (asked, modes) == ([], ["free-running"])


def test_a_callback_gets_its_latents_where_a_previews_decoder_is(files, clients, monkeypatch):
    seen = []
    with asked_of_the_gpu(monkeypatch) as asked:
        sampled(files, clients, [], callback=lambda step, x0, x, total: seen.append((x0.device, x.device)))
    assert seen == [(DEVICE, DEVICE)] * STEPS
    assert len(asked) == 2 * STEPS, "for the callback, and not for each patch"


@pytest.mark.parametrize(
    ("holds", "sampler", "mode"),
    [(0.0, "euler", ""), (0.5, "euler_ancestral", "; on the GPU, where euler_ancestral draws its noise")],
    ids=["no rank on it", "its noise"],
)
def test_what_stays_on_the_gpu_is_named(files, clients, monkeypatch, holds, sampler, mode):
    generator, modes = torch.Generator, []
    monkeypatch.setattr(torch, "Generator", lambda device=None: generator())
    with asked_of_the_gpu(monkeypatch) as asked:
        ours = sampled(files, clients, modes, holds, sampler=sampler)
    assert len(asked) >= STEPS * PATCHES and modes == [f"free-running{mode}"]
    assert mode or relative_error(ours, run(load(files["model"]), steps=STEPS)) <= BOUND


def test_samplers_that_are_taken_off_the_gpu_are_those_that_draw_nothing_there(files, monkeypatch):
    generator, tensor, drawn, computed = torch.Generator, torch.tensor, {}, fake_device.computed
    monkeypatch.setattr(torch, "Generator", lambda device=None: generator())

    def made_there(data, device=None, **kwargs):
        data = list(map(float, data)) if isinstance(data, list) else data
        return tensor(data, **kwargs).to(device or "cpu")

    monkeypatch.setattr(torch, "tensor", made_there)

    def watched(func, args, kwargs):
        made = computed(func, args, kwargs)
        if "rand" in str(func) and isinstance(made, fake_device.Elsewhere):
            drawn[name] = True
        return made

    monkeypatch.setattr(fake_device, "computed", watched)
    samplers = {name: comfy.samplers.sampler_object(name) for name in comfy.samplers.KSampler.SAMPLERS}
    known = {name for name, one in samplers.items() if _qualified(one.sampler_function) in SAMPLER_FUNCTIONS}
    assert len(known) > 30
    with ui_on_it():
        model = load(files["model"])
        # What the model computes has no part in it, and takes most of the time
        model.set_model_unet_function_wrapper(lambda apply, given: given["input"] / 2)
        for name in known:
            run(model, steps=3, sampler=name)
    assert {name for name in known if draws_there(samplers[name])} == drawn.keys()
    assert draws_there(comfy.samplers.ksampler("euler", {"s_churn": 1.0})) == "euler"
