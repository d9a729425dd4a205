"""Holds the arguments of a sampler, makes those of the same sampler with another seed, and tells
whether that is possible.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import comfy.model_management
import comfy.model_patcher
import comfy.sample
import comfy.samplers
import torch

from ..watch.python_file import LIBRARIES, attribute_of, compiled_elsewhere, is_code
from .alike_prompts import LATENT
from .coroutines import RandomState
from .description import cpu_copy, described
from .separability import WRAPPER_KEY, conds_of, is_hosts_own, why_single_timeline
from .timelines import Callback

IMPURE = "comfy.extra_samplers.uni_pc"  # it writes into the sigmas that the caller goes on using
NOISE_DTYPES = (torch.float32, torch.float16, torch.bfloat16)  # of latents
OF_A_STEP = (
    *("sampling_function", "calc_cond_batch", "cfg_function"),
    *("CFGGuider.__call__", "CFGGuider.predict_noise", "KSAMPLER.sample", "KSamplerX0Inpaint.__call__"),
)  # of comfy.samplers
WORKING = 16  # times its latent's size that a sampler takes on its device, at most
# Of a guider, what is described by itself
APART = {"model_patcher", "inner_model", "loaded_models", "conds", "original_conds", "model_options"}


@dataclass(frozen=True, eq=False)
class Asked:
    """The arguments of ComfyUI's ``Sampler.sample``, and the random state that it starts from."""

    sampler: Any
    guider: Any
    sigmas: torch.Tensor
    extra_args: dict[str, Any]
    noise: torch.Tensor
    latent: torch.Tensor | None
    mask: torch.Tensor | None
    random: RandomState

    @classmethod
    def to_come(cls, guider: Any, given: Mapping[str, Any]) -> Asked:
        """Returns the arguments that the sampler will get, from the arguments of
        ``CFGGuider.sample``, as far as they are known before ComfyUI has loaded the model.
        """
        noise = given["noise"].to(torch.float32)
        latent = given[LATENT].to(noise)
        if latent.any():
            latent = guider.model_patcher.model.process_latent_in(latent)
        return cls(
            given["sampler"],
            guider,
            given["sigmas"],
            {"model_options": guider.model_options, "seed": given.get("seed")},
            noise,
            latent,
            given.get("denoise_mask"),
            RandomState(guider.model_patcher.load_device),
        )

    @property
    def seed(self) -> Any:
        return self.extra_args.get("seed")

    def described(self, keep: Callable[[torch.Tensor], torch.Tensor]) -> dict[str, Any]:
        """Describes all that the samples depend on."""
        patcher, options = self.guider.model_patcher, self.extra_args["model_options"]
        shared = {
            "sampler": [type(self.sampler), vars(self.sampler)],
            "guider": [
                type(self.guider),
                {name: value for name, value in vars(self.guider).items() if name not in APART},
            ],
            "conds": conds_of(self.guider),
            "model": [patcher.model, patcher.patches_uuid.hex, patcher.patches_id, patcher.objects[0]],
            "object patches": patcher.object_patches,
            "options": {name: without_ours(value) for name, value in options.items()},
            "sigmas": self.sigmas,
            "mask": self.mask,
        }
        return described(shared, keep) | self.of_one(keep)

    def of_one(self, keep: Callable[[torch.Tensor], torch.Tensor]) -> dict[str, Any]:
        """Describes the arguments that differ from seed to seed."""
        own = {"seed": self.seed, "noise": self.noise, LATENT: self.latent, "random": self.random.tensors}
        return described(own, keep)

    def of_seed(
        self, seed: int, noise: torch.Tensor, latent: torch.Tensor | None, random: RandomState
    ) -> Asked:
        """Returns the arguments of another seed's sampler. The two share nothing that one of them
        may write to.
        """
        options = comfy.model_patcher.create_model_options_clone(self.extra_args["model_options"])
        sigmas, device = self.sigmas.clone(), self.noise.device
        options["transformer_options"]["sample_sigmas"] = sigmas
        return replace(
            self,
            sigmas=sigmas,
            extra_args={**self.extra_args, "model_options": options, "seed": seed},
            noise=noise.to(device, copy=True),
            latent=None if latent is None else latent.to(device, copy=True),
            mask=None if self.mask is None else self.mask.clone(),
            random=random,
        )

    def run(self, executor: Any, callback: Callback | None, quiet: bool) -> torch.Tensor:
        return executor(
            self.guider, self.sigmas, self.extra_args, callback, self.noise, self.latent, self.mask, quiet
        )

    def output_of(self, samples: torch.Tensor) -> torch.Tensor:
        """Returns the latent that a sampler node outputs for these samples."""
        return cpu_copy(self.guider.model_patcher.model.process_latent_out(samples.to(torch.float32)))

    def latent_of(self, output: torch.Tensor) -> torch.Tensor:
        """Returns the latent that this sampler starts from if a node gives it that output."""
        return self.guider.model_patcher.model.process_latent_in(output.to(self.noise.device))

    def keeps_bytes(self) -> int:
        """Returns the bytes that one result takes until it is handed over."""
        return self.noise.nbytes * (2 * len(self.sigmas) + 4)

    def have_room(self) -> int:
        """Returns how many more samplers have room on the device that this one is on."""
        device = self.guider.model_patcher.load_device
        if device.type == "cpu":
            return 1 << 10
        return int(comfy.model_management.get_free_memory(device) // (WORKING * self.noise.nbytes))

    def why_alone(self) -> str:
        """Says why another seed must not be sampled together with this one; empty if it may."""
        options = self.extra_args["model_options"]
        model = self.guider.model_patcher.model
        if reason := why_single_timeline(self.sampler, self.guider, options, self.noise):
            return reason
        if self.sampler.sampler_function.__module__ == IMPURE:
            return "the sampler, which writes into its sigmas"
        if not is_hosts_own(model):
            return "code of other packs in the model"
        if any(compiled_elsewhere(one, LIBRARIES) for one in self._of_a_step() if is_code(one)):
            return "code of other packs in the sampler or the guider"
        return "conditioning that takes the seed" if takes_seed(type(model)) else ""

    def _of_a_step(self) -> Iterator[Any]:
        """Yields the objects that run at every step: state that one seed left in them could reach
        another seed.
        """
        yield from vars(self.guider).values()
        yield from vars(self.sampler).values()
        yield from (attribute_of(comfy.samplers, name) for name in OF_A_STEP)

    def noises(self, seeds: list[int]) -> Iterator[tuple[torch.Tensor, RandomState]]:
        """Yields the noise of each seed as stock makes it, with the random state that this leaves.
        Yields nothing if the present noise is not the one that stock makes of its own seed. The
        random state is restored; setting a seed changes it on every GPU.
        """
        before = RandomState()
        try:
            for dtype in NOISE_DTYPES:
                like = torch.zeros(self.noise.shape, dtype=dtype)
                own, left = self._made(like, self.seed)
                if torch.equal(own, self.noise) and left.is_same(self.random):
                    yield from (self._made(like, seed) for seed in seeds)
                    return
        finally:
            before.restore()

    def _made(self, like: torch.Tensor, seed: int) -> tuple[torch.Tensor, RandomState]:
        noise = comfy.sample.prepare_noise(like, seed).to(self.noise)
        return noise, RandomState(self.noise.device)


def without_ours(options: Any) -> Any:
    """Returns options without the wrappers of PipeMesh, which auto mode makes anew for each run."""
    if not isinstance(options, dict) or "wrappers" not in options:
        return options
    wrappers = {
        kind: {key: of_key for key, of_key in by_key.items() if key != WRAPPER_KEY and of_key}
        for kind, by_key in options["wrappers"].items()
    }
    return {**options, "wrappers": {kind: by_key for kind, by_key in wrappers.items() if by_key}}


def takes_seed(model_class: type) -> bool:
    """True if a model may make conditioning of a sampler's seed: a method of its classes has the
    word.
    """
    return any(
        "seed" in getattr(getattr(value, "__code__", None), "co_consts", ())
        for kind in model_class.__mro__
        for value in vars(kind).values()
    )
