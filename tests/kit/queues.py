"""A queue of prompts, sampled by stock nodes one after the other in this process: what a prompt's
graph is, and what ComfyUI would execute of it.
"""

import gc
from collections.abc import Iterable
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial

import comfy.model_management
import comfy.sample
import comfy.samplers
import comfy.utils
import pytest
import torch
from pipemesh.lab.commands.parity import conditioning
from pipemesh.parallel_runtime.client.alike_prompts import Moment, Pending
from pipemesh.parallel_runtime.client.sampler_arguments import Asked
from pipemesh.parallel_runtime.client.seeds import Seed
from pipemesh.parallel_runtime.families.catalogue import PLAIN, SAMPLES

import nodes

from .patched import custom

SIZE = (8, 10)
PROMPTS = conditioning(1, 13), conditioning(2, 7)


def stock_model(heads):
    """Parity's plain model, of one block of each kind: to a queue its depth is the same."""
    plain = SAMPLES[PLAIN]
    return plain.form.random_model(replace(plain.tiny.size(heads), blocks=(1, 1)))


def node(kind, **inputs):
    return {"class_type": kind, "inputs": inputs}


def latent_of(batch=1, mask=False, content=False):
    made = torch.randn(batch, 16, *SIZE, generator=torch.Generator().manual_seed(5)) * content
    latent = {"samples": made}
    if mask:
        latent["noise_mask"] = torch.zeros(1, 1, SIZE[0] * 8, SIZE[1] * 8)
        latent["noise_mask"][..., 20:50, 30:60] = 1
    return latent


class Workflow:
    """``graph`` of a seed, and ``run``, which executes its samplers for a seed on a MODEL, inputs
    ``changed``; ``at`` tells which node comes next.
    """

    def __init__(self, sampler="euler", steps=3, cfg=2.0, **latent):
        self.sampler, self.steps, self.cfg = sampler, steps, cfg
        self.latent = latent_of(**latent)

    def common(self, **more):
        return {"model": ["model", 0], "positive": ["text", 0], "cfg": self.cfg, "steps": self.steps, **more}

    def graph(self, seed):
        sampler = node("KSampler", seed=seed, latent_image=["latent", 0], **self.common())
        return {"model": node("Loader"), "text": node("Text"), "latent": node("Empty"), "1": sampler}

    def run(self, model, seed, at, /, **changed):
        given = {
            "model": model, "seed": seed, "steps": self.steps, "cfg": self.cfg, "sampler_name": self.sampler,
            "scheduler": "simple", "positive": PROMPTS[0], "negative": PROMPTS[1],
            "latent_image": self.latent, "denoise": 0.8 if self.latent["samples"].any() else 1.0,
        }  # fmt: skip
        with at("1"):
            return nodes.KSampler().sample(**given | changed)


class InTwo(Workflow):
    """KSamplerAdvanced, and another that goes on with what noise is left."""

    def graph(self, seed):
        first = node("KSamplerAdvanced", noise_seed=seed, latent_image=["latent", 0], **self.common(end=2))
        second = node("KSamplerAdvanced", noise_seed=seed, latent_image=["1", 0], **self.common(start=2))
        return super().graph(seed) | {"1": first, "2": second}

    def run(self, model, seed, at):
        def sampled(add_noise, latent, start, end, left):
            return nodes.KSamplerAdvanced().sample(
                *(model, add_noise, seed, 4, self.cfg, self.sampler, "simple", *PROMPTS),
                *(latent, start, end, left),
            )[0]

        with at("1"):
            middle = sampled("enable", self.latent, 0, 2, "enable")
        with at("2"):
            return middle, sampled("disable", middle, 2, 10000, "disable")


class Custom(Workflow):
    """SamplerCustom."""

    def graph(self, seed):
        sampler = node("SamplerCustom", noise_seed=seed, latent_image=["latent", 0], **self.common())
        return super().graph(seed) | {"1": sampler}

    def solver(self, model):
        sampling = model.get_model_object("model_sampling")
        sigmas = comfy.samplers.calculate_sigmas(sampling, "simple", self.steps)
        return custom("KSamplerSelect", self.sampler), sigmas

    def run(self, model, seed, at):
        with at("1"):
            return custom(
                "SamplerCustom", model, True, seed, self.cfg, *PROMPTS, *self.solver(model), self.latent
            )


class Advanced(Custom):
    """SamplerCustomAdvanced, with a noise and a guider of their own."""

    guider = staticmethod(lambda model: custom("CFGGuider", model, *PROMPTS, 2.0))

    def graph(self, seed):
        links = {"noise": ["noise", 0], "latent_image": ["latent", 0], "guider": ["guider", 0]}
        made = {"noise": node("RandomNoise", noise_seed=seed), "guider": node("Guider", model=["model", 0])}
        return super().graph(seed) | made | {"1": node("SamplerCustomAdvanced", **links)}

    def run(self, model, seed, at):
        guider = self.guider(model)
        with at("1"):
            noise = custom("RandomNoise", seed)
            return custom("SamplerCustomAdvanced", noise, guider, *self.solver(model), self.latent)


def to_come(seed, sampler="euler", drawn=0):
    """The sampler of a Workflow with this seed, as it is known before it begins; ``drawn``: images
    of a batch whose noise was drawn before.
    """
    guider = comfy.samplers.CFGGuider(stock_model(5))
    guider.set_conds(*PROMPTS)
    latent = torch.zeros(1, 16, *SIZE)
    given = {
        "noise": comfy.sample.prepare_noise(latent, seed, [drawn]),
        "latent_image": latent,
        "sampler": comfy.samplers.sampler_object(sampler),
        "sigmas": torch.linspace(1, 0, 4),
        "seed": seed,
    }
    return lambda: Asked.to_come(guider, given)


class Line:
    """Prompts in a queue. As the ``moment`` of a look-ahead it tells of the one that runs."""

    def __init__(self):
        self.now = None
        self.waiting = []  # (id, seed, workflow)
        self.targets = {}  # by id, the nodes that ComfyUI is to execute of a prompt; else all
        self.graph = cache(lambda prompt, seed, workflow: workflow.graph(seed))

    def __call__(self):
        return self.now

    def put(self, *prompts):
        self.waiting += prompts

    @contextmanager
    def _at(self, prompt, graph, node):
        graphs = ((waiting[0], self.graph(*waiting)) for waiting in self.waiting)
        others = tuple(Pending(other, made, self.targets.get(other, tuple(made))) for other, made in graphs)
        self.now = Moment(prompt, node, None, graph, others)
        try:
            yield
        finally:
            self.now = None

    def run(self, model):
        """Executes the next prompt, and a node behind its samplers that draws random numbers."""
        prompt, seed, workflow = self.waiting.pop(0)
        with torch.inference_mode():
            at = partial(self._at, prompt, self.graph(prompt, seed, workflow))
            return workflow.run(model, seed, at), torch.randn(3)


def tensors_of(sampled):
    """The latents and random numbers of prompts, flat."""
    if isinstance(sampled, torch.Tensor):
        return [sampled]
    parts = sampled.values() if isinstance(sampled, dict) else sampled
    parts = parts if isinstance(parts, Iterable) and not isinstance(parts, str) else ()
    return [tensor for part in parts for tensor in tensors_of(part)]


def unload_all_models():
    """As ComfyUI, which is not prepared for a model of another test that goes just then."""
    gc.collect()
    comfy.model_management.unload_all_models()


@contextmanager
def at_each_step(call):
    """Calls ``call`` with what each step tells the bar of its node, which shows some of them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            comfy.utils.ProgressBar,
            "update_absolute",
            lambda bar, done, total=None, preview=None: call(done, total),
        )
        yield


def suspended():
    """Samplers that wait for an evaluation."""
    return [thing for thing in gc.get_objects() if isinstance(thing, Seed) and thing]


def in_line(model, line, *prompts):
    """What comes of these prompts, put into a line together."""
    line.put(*prompts)
    torch.manual_seed(0)
    return [line.run(model) for _ in prompts]


def seeds_of(workflow, *seeds):
    return [(f"prompt {number}", seed, workflow) for number, seed in enumerate(seeds)]
