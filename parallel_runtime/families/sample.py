"""The vocabulary of samples: small random models of a family, and the inputs they are tried with in
place of a checkpoint and prompts.

Every tensor of a random model has its own generator, seeded by (seed, name): a model is the same in
whatever order its tensors are made, and more blocks leave the others as they were.
``lab/random_files.py`` writes the same model to a file, and the parity command samples it.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from .plan import BranchCache

Config = dict[str, Any]  # a ``unet_config``: the arguments that ComfyUI builds a transformer with
Shapes = Mapping[str, tuple[int, ...]]
Extras = dict[str, Any]  # of a prompt, beside its text
Extent = tuple[int, int, int]  # width and height in pixels, and frames

# Usual latents: of 16 channels, also with an axis of frames, and with a token for each pixel
IMAGE = {"even": (1, 16, 16, 12), "odd": (1, 16, 13, 18)}
ONE_FRAME = {"even": (1, 16, 1, 16, 12), "odd": (1, 16, 1, 13, 18)}
VIDEO = {"even": (1, 16, 3, 8, 6), "odd": (1, 16, 3, 5, 6)}
PIXELS = {"even": (1, 128, 8, 6), "odd": (1, 128, 7, 9)}


def random_tensor(name: str, shape: tuple[int, ...], seed: int, dtype: torch.dtype) -> torch.Tensor:
    """Draw weights from N(0, 1 / fan_in), norm scales from N(1, 0.1) and biases from N(0, 0.02):
    activations, modulation and the differences that attention sees stay of order 1.
    """
    generator = torch.Generator().manual_seed(zlib.crc32(f"{seed}/{name}".encode()))
    noise = torch.randn(shape, generator=generator)
    if name.endswith(".scale") or (name.endswith(".weight") and len(shape) == 1):
        return noise.mul_(0.1).add_(1.0).to(dtype)
    return noise.mul_(shape[1] ** -0.5 if len(shape) == 2 else 0.02).to(dtype)


def random_extras(**arguments: Any) -> Callable[[Any], Extras]:
    """Returns the ``prompt_extras`` of a Sample: for each shape, a tuple, a tensor drawn from
    N(0, 1), in lists, dicts and namespaces too; anything else as it is. ``...`` stands for the
    latent's lengths from its third axis.
    """

    def made(latent: Any) -> Extras:
        generator = torch.Generator().manual_seed(4)

        def draw(value: Any) -> Any:
            if isinstance(value, list):
                return [draw(one) for one in value]
            if isinstance(value, dict):
                return {name: draw(one) for name, one in value.items()}
            if isinstance(value, SimpleNamespace):
                return SimpleNamespace(**draw(vars(value)))
            if not isinstance(value, tuple):
                return value
            return torch.randn(
                [length for part in value for length in (latent.shape[2:] if part is ... else (part,))],
                generator=generator,
            )

        return draw(arguments)

    return made


def host_version() -> str:
    """Returns the version of the ComfyUI at hand; without one, a version that has everything."""
    try:
        import comfyui_version
    except ImportError:
        return "1000"
    return comfyui_version.__version__


def numbers_in(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".") if part.isdecimal())


def keep_first_frame(latent: torch.Tensor) -> torch.Tensor:
    """Returns a noise mask that keeps the first frame, which so gets a timestep of its own."""
    mask = torch.ones(1, 1, *latent.shape[2:])
    mask[:, :, 0] = 0
    return mask


def keeping(model: Any, kept: BranchCache, **options: Any) -> Any:
    """Returns a MODEL as the node of ``kept`` does, whose cache has these ``options``."""
    from comfy.patcher_extension import CallbacksMP

    module, name = kept.cache.split(":")
    cache, made = getattr(import_module(module), name)(**options), model.clone()
    made.model_options["transformer_options"][kept.option] = cache
    made.add_callback(CallbacksMP.ON_CLEANUP, lambda _: cache.free())
    return made


@dataclass(frozen=True, kw_only=True)
class Size:
    """The size of a random model. ``blocks`` counts the blocks of each container of the plan;
    ``text_dim`` and ``pooled_dim`` are the widths of a prompt's tokens and of its pooled vector.
    """

    heads: int
    head_dim: int
    blocks: tuple[int, ...]
    text_dim: int = 64
    pooled_dim: int = 32

    @property
    def hidden(self) -> int:
        return self.heads * self.head_dim


@dataclass(frozen=True, kw_only=True)
class Tiny:
    """The sizes that a sample is tried at. ``heads``: the head counts; of the usual 5 no world size
    that is tried is a divisor. ``blocks``: with none as many as heads.
    """

    heads: tuple[int, ...] = (5,)
    head_dim: int = 16
    blocks: tuple[int, ...] = (5,)

    def size(self, heads: int) -> Size:
        return Size(heads=heads, head_dim=self.head_dim, blocks=self.blocks or (heads,))


@dataclass(frozen=True, kw_only=True)
class FileForm:
    """The differences between a checkpoint file and the transformer that ComfyUI makes from it.
    ``named`` maps a name in the transformer's state dict to the name in a file. ``head_dim`` is the
    only head size that ComfyUI reads from files. ``text_dim`` is the only width of a prompt's
    tokens; 0 if ComfyUI reads that too. ``lora_targets`` are the name endings of the layers that a
    LoRA changes.
    """

    head_dim: int
    lora_targets: tuple[str, ...]
    text_dim: int = 0
    named: Callable[[str], str] = str


class TokenParts(NamedTuple):
    """How layers cut their tokens, to compute with some of them at a time: among so many
    ``experts``, of which each token goes to ``chosen``; long sequences into so many ``chunks``, in
    turn.
    """

    experts: int = 1
    chosen: int = 1
    chunks: tuple[int, ...] = ()


WHOLE_SEQUENCES = TokenParts()


@dataclass(frozen=True, kw_only=True)
class Released:
    """A released model of a sample's form, and a usual request, for shape-only runs: no weights are
    drawn or downloaded.

    ``changes`` are the entries of its config that differ from the form's. ``text`` counts the
    tokens of a prompt. ``extent`` is width and height in pixels, and frames. ``extras`` are a
    prompt's extras from nodes; they replace the sample's, which may have the sample's widths.
    ``latents`` returns, for an extent, the shapes of latents that are sampled together. ``cut``
    says how its layers cut tokens. With ``reads_prompt`` ComfyUI looks at the prompt's numbers
    before it calls the transformer, so they need content. ``title`` is its name in the documents'
    table; empty if it is not there.
    """

    name: str
    size: Size
    text: int
    extent: Extent = (1024, 1024, 1)
    changes: Config = field(default_factory=dict)
    extras: Callable[[torch.Tensor], Extras] | None = None
    latents: Callable[[Extent], Sequence[tuple[int, ...]]] | None = None
    cut: TokenParts = WHOLE_SEQUENCES
    reads_prompt: bool = False
    title: str = ""


@dataclass(frozen=True, kw_only=True)
class Form:
    """The shape of a random model. ``config_class`` names a class of ``comfy.supported_models``.

    ``offset_scales``: norm scales are offsets from 1. ``keeps``: the node
    that is attached to the MODEL.

    With a ``file`` the weights are drawn under the names that they have there, so that a model is
    the same with and without one; else under those of the transformer's own state dict.
    ``released``: the models of this form that the dry run knows.
    """

    config_class: str
    config: Callable[[Size], Config]
    file: FileForm | None = None
    released: tuple[Released, ...] = ()
    offset_scales: bool = False
    keeps: BranchCache | None = None

    def base_model(self, config: Config, dtype: torch.dtype, device: torch.device | None = None) -> Any:
        """Build a BaseModel of ``config`` that computes in ``dtype``. Its weights hold nothing
        yet.
        """
        import comfy.supported_models

        made = getattr(comfy.supported_models, self.config_class)(config)
        made.unet_config.update(config)  # some classes put values of their own over those given
        # No cast: ComfyUI computes in fp32 on CPUs, whatever the weights are
        made.set_inference_dtype(dtype, None)
        return made.get_model({}, "", device=device)

    def shapes(self, model: Any) -> Shapes:
        """Return the shape of every tensor of a BaseModel, under its name in a file if there is a
        form of files.
        """
        named = str if self.file is None else self.file.named
        state = model.diffusion_model.state_dict()
        return {named(name): tuple(tensor.shape) for name, tensor in state.items()}

    def random_model(self, size: Size, seed: int = 0, dtype: torch.dtype = torch.float32) -> Any:
        """Build a stock MODEL (a ModelPatcher) that computes in ``dtype``; its
        ``cached_patcher_init`` is None.
        """
        import comfy.model_management
        from comfy.model_patcher import ModelPatcher

        device, offload_device = (
            comfy.model_management.get_torch_device(),
            comfy.model_management.unet_offload_device(),
        )
        model = self.base_model(self.config(size), dtype).to(offload_device)
        shapes = self.shapes(model)
        weights = {name: random_tensor(name, shape, seed, dtype) for name, shape in shapes.items()}
        if self.offset_scales:
            weights |= {name: weight - 1 for name, weight in weights.items() if name.endswith(".scale")}
        model.load_model_weights(weights, "")
        made = ModelPatcher(model, load_device=device, offload_device=offload_device)
        return made if self.keeps is None else keeping(made, self.keeps)


@dataclass(frozen=True, kw_only=True)
class Masks:
    """How ComfyUI lays out an attention mask over text and image tokens. ``side``: latent pixels
    along a token's edge. ``text``: the tokens that ComfyUI pads shorter texts to, 0 for none.
    ``text_only``: the mask has a number per token of the text, 0 where it is closed, as text
    encoders return it. ``open``: such a mask, of ones, comes with every prompt, and says how many
    tokens it has.
    """

    side: int = 2
    text: int = 0
    text_only: bool = False
    open: bool = False


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One random model of a family, and its inputs.

    ``stands_for`` names what this sample alone stands for, words of the plan vocabulary as a rule:
    the tests try every method on it. A sample that brings nothing new leaves it empty; the tests
    then try only the faults that its own plan can have, and a command runs the rest. ``bf16``:
    tried in bf16 too.

    ``larger``: sizes by the name of their use: ``demo``, and of the benches ``bench`` (24 blocks),
    ``deep`` (as many as released models), ``large`` (a file of gigabytes) and ``equal`` (blocks
    that all take as long). ``latents``: a latent with an ``even`` and one with an ``odd`` number of
    tokens, or several that are sampled together, such as video and audio; without, images of 16
    channels. ``masks`` is None where
    ComfyUI takes no attention mask. ``prompt_extras``: an empty latent -> what the family's nodes
    add to a prompt; of two, what to the positive and what to the negative one. ``noise_mask``: an
    empty latent -> the mask to sample it under. ``since``: the version of ComfyUI that brought such
    a model, where older ones are supported too.
    """

    name: str
    form: Form
    latents: Mapping[str, Any] = field(default_factory=lambda: IMAGE)
    since: str = ""
    tiny: Tiny = Tiny()
    larger: Mapping[str, Size] = field(default_factory=dict)
    masks: Masks | None = None
    prompt_extras: Callable[[torch.Tensor], Extras | tuple[Extras, Extras]] | None = None
    noise_mask: Callable[[torch.Tensor], torch.Tensor] | None = None
    stands_for: tuple[str, ...] = ()

    @property
    def heads(self) -> tuple[int, ...]:
        return self.tiny.heads

    def extras(self, latent: Any, side: int = 0) -> Extras:
        """Returns the extras that nodes add to the positive prompt, or to the negative one
        (``side`` 1).
        """
        made = {} if self.prompt_extras is None else self.prompt_extras(latent)
        return made[side] if isinstance(made, tuple) else made

    @property
    def is_here(self) -> bool:
        return numbers_in(self.since) <= numbers_in(host_version())

    @property
    def bf16(self) -> bool:
        return "bf16" in self.stands_for


def sample(
    name: str, config_class: str, config: Callable[[Size], Config], *released: Released, **inputs: Any
) -> Sample:
    """Returns a Sample of a plain Form, of which these models were released."""
    return Sample(name=name, form=Form(config_class=config_class, config=config, released=released), **inputs)
