"""Stock MODELs from small files, and helpers that sample them."""

import inspect
from functools import partial

import torch
from pipemesh.lab import random_files
from pipemesh.lab.commands.parity import Case, conditioning, sample
from pipemesh.parallel_runtime.families.catalogue import FAMILIES, SAMPLES, sample_with
from pipemesh.parallel_runtime.families.sample import Size
from pipemesh.parallel_runtime.forward import forward_name

VIDEO = next(name for name, one in SAMPLES.items() if len(one.latents["even"]) == 5)
ATTENDS_TWICE = next(family.samples[-1].name for family in FAMILIES if family.plans[0].also_attend_alone)
FORM = sample_with("demo")[0].form  # of a model that ComfyUI's loaders detect in a file
write_lora = partial(random_files.write_lora, targets=FORM.file.lora_targets)


def write_model(path, *, heads=2, blocks=(2, 2), form=FORM, **options):
    """Write a file for ComfyUI's loaders, with its only head size."""
    return random_files.write_model(
        path, form, Size(heads=heads, head_dim=form.file.head_dim, blocks=blocks), **options
    )


def run(
    model,
    seed=7,
    steps=3,
    cfg=1.0,
    sampler="euler",
    positive=None,
    negative=None,
    size=(8, 10),
    batch=1,
    **more,
):
    import comfy.sample

    latent = more.pop("latent", torch.zeros(batch, 16, *size))
    noise = comfy.sample.prepare_noise(latent, seed)
    prompts = positive or conditioning(1, 13), negative or conditioning(2, 7)
    given = steps, cfg, sampler, "simple", *prompts, latent
    with torch.inference_mode():
        return comfy.sample.sample(model, noise, *given, disable_pbar=True, seed=seed, **more)


def load(path):
    import comfy.sd

    return comfy.sd.load_diffusion_model(str(path))


def with_lora(model, files, strength):
    import comfy.sd
    import comfy.utils

    return comfy.sd.load_lora_for_models(
        model, None, comfy.utils.load_torch_file(files["lora"]), strength, 0
    )[0]


def with_references(model, method, channels, size=(10, 14)):
    """Sample with two reference latents, as Kontext-like workflows do."""
    reference = torch.randn(1, channels, 9, 8, generator=torch.Generator().manual_seed(4))
    extras = {"reference_latents": [reference, reference[:, :, :4]], "reference_latents_method": method}
    text = [[tensor, {**options, **extras}] for tensor, options in conditioning(1, 13)]
    return run(model, 3, positive=text, negative=text, latent=torch.zeros(1, channels, *size))


class IdleRank:
    """Stand in for the rank around a stage: one with no other work and enough memory."""

    tick = note = count = next_part = reserve = staticmethod(lambda *_, **__: None)


def calls_within(patcher, work):
    """Return a stock transformer's forward, and the arguments of its calls while ``work`` runs."""
    module = patcher.model.diffusion_model
    name = forward_name(module)
    forward = getattr(module, name)
    signature = inspect.signature(forward)
    calls = []

    def spy(*args, **kwargs):
        arguments = dict(signature.bind(*args, **kwargs).arguments)
        arguments.update(arguments.pop("kwargs", {}))
        calls.append(arguments)
        return forward(*args, **kwargs)

    setattr(module, name, spy)
    work()
    delattr(module, name)
    return forward, calls


def asked_of(patcher, case):
    """Those in the first steps of a case."""
    return calls_within(patcher, partial(sample, patcher, case, steps=2))


def asked_first(patcher, of, heads=None, mask=False):
    """Return a stock transformer's forward, and what it is asked for first in a run of a sample."""
    case = Case(of.name, "ulysses1", "odd", heads or of.heads[-1], 1.0, mask, "euler")
    forward, (asked, *_) = asked_of(patcher, case)
    return forward, asked


def evaluate(model, comm, size=(13, 12)):
    """Evaluate parity's plain model once as this rank of a mesh."""
    from pipemesh.parallel_runtime.families import plan_for
    from pipemesh.parallel_runtime.methods.usp import SequenceParallel

    method = SequenceParallel(model, plan_for(type(model)), comm)
    arguments = {
        "x": torch.randn(1, 16, *size),
        "timestep": torch.tensor([0.5]),
        "context": torch.randn(1, 7, 64),
        "y": torch.randn(1, 32),
        "transformer_options": {},
    }
    method.attach()
    try:
        with torch.inference_mode():
            return method.forward(model._forward, arguments, 1)
    finally:
        method.detach()


def in_one(output):
    """One tensor of an output that may be a list, such as video and audio."""
    return output if isinstance(output, torch.Tensor) else torch.cat([one.flatten() for one in output])
