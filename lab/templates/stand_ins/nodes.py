"""The nodes that read files, with stand-ins behind them: same inputs and outputs, so that the rest
of a graph stays. And nodes of the command's own: sizes are cut on their way, evaluations rounded,
latents recorded.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import folder_paths
from comfy_api.latest import io
from safetensors.torch import save_file

import nodes

from ....pool.trial.rounding import rounded
from ..cut import CUT_NODE, FRAMES, HELD_NODE, KINDS, RECORD_NODE, ROUNDED_NODE
from .attached import make_control_net, make_latent_upscaler, make_model_patch, make_style_model
from .classes import alike, require_reader
from .foreign import FOREIGN, add_schedulers
from .looked import LOOKED, OF_SERVICES, answer, nothing
from .loras import with_lora
from .media import Hearing, Sight, picture, sound, video
from .models import make_model
from .names import HEARINGS, SIGHTS, SOUNDS, TEXTS, VAES, TextShape, known, known_whole
from .text import make_clip
from .vae import make_sound_vae, make_vae

Outputs = tuple[Any, ...]


def checkpoint(ckpt_name: str) -> Outputs:
    if "sam3" in ckpt_name:
        return (*nothing(), make_clip(TextShape()), None)
    return make_model(ckpt_name), make_clip(known(TEXTS, ckpt_name, "text encoder")), vae(ckpt_name)[0]


def clip(**names: str) -> Outputs:
    return (make_clip(known(TEXTS, " ".join(names.values()), "text encoder")),)


def vae(vae_name: str, **_: Any) -> Outputs:
    try:
        return (make_vae(known_whole(VAES, vae_name, "VAE")),)
    except ValueError:
        return sound_vae(vae_name)


def sound_vae(ckpt_name: str) -> Outputs:
    return (make_sound_vae(known_whole(SOUNDS, ckpt_name, "audio VAE")),)


def lora(model: Any, lora_name: str, strength_model: float, clip: Any = None, **_: Any) -> Outputs:
    return with_lora(model, clip, lora_name, strength_model)


STAND_INS: Mapping[str, Callable[..., Outputs]] = {
    "UNETLoader": lambda unet_name, weight_dtype="default": (make_model(unet_name, weight_dtype),),
    "CheckpointLoaderSimple": checkpoint,
    "CLIPLoader": clip,
    "DualCLIPLoader": clip,
    "TripleCLIPLoader": clip,
    "QuadrupleCLIPLoader": lambda **names: clip(type="hidream", **names),
    "LTXAVTextEncoderLoader": lambda **names: clip(type="ltxav", **names),
    "VAELoader": vae,
    "LTXVAudioVAELoader": sound_vae,
    "LoraLoader": lora,
    "LoraLoaderModelOnly": lambda **given: lora(**given)[:1],
    "CLIPVisionLoader": lambda clip_name: (Sight(known(SIGHTS, clip_name, "CLIP vision model")),),
    "AudioEncoderLoader": lambda audio_encoder_name: (
        Hearing(*known(HEARINGS, audio_encoder_name, "audio encoder")),
    ),
    "StyleModelLoader": lambda style_model_name: (make_style_model(style_model_name),),
    "ModelPatchLoader": lambda name: (make_model_patch(name),),
    "ControlNetLoader": lambda control_net_name: (make_control_net(control_net_name),),
    "LatentUpscaleModelLoader": lambda model_name: (make_latent_upscaler(model_name),),
    "LoadImage": lambda image: picture(image),
    "LoadImageMask": lambda image, channel="alpha": picture(image)[1:],
    "LoadVideo": lambda file: (video(file),),
    "LoadAudio": lambda audio: (sound(audio),),
}


def stand_in_for_loaders() -> None:
    """Puts every stand-in in the place of its loader, in this process."""
    add_schedulers()
    known_nodes = nodes.NODE_CLASS_MAPPINGS  # pyright: ignore[reportAttributeAccessIssue]  # not of this project's nodes
    for name, original in known_nodes.items():
        make = {**STAND_INS, **LOOKED}.get(name) or (
            answer(original) if OF_SERVICES in original.__module__ else None
        )
        if make is not None:
            known_nodes[name] = stand_in(original, make)


def stand_in(original: Any, make: Callable[..., Outputs]) -> type:
    """A node class with the inputs and outputs of ``original`` that takes any file name. A file
    that is there it loads as ever.
    """

    def unchanged(cls: type, **_: Any) -> str:
        return ""

    def takes_any(cls: type, **_: Any) -> bool:
        return True

    own: Any = original
    if inspect.isclass(original) and issubclass(original, io.ComfyNode):

        def execute(cls: type, **given: Any) -> io.NodeOutput:
            return own.execute(**given) if is_there(given) else io.NodeOutput(*make(**given))

        methods = {"execute": execute, "validate_inputs": takes_any, "fingerprint_inputs": unchanged}
        return type(
            original.__name__, (original,), {name: classmethod(method) for name, method in methods.items()}
        )

    def load(self: Any, **given: Any) -> Outputs:
        return getattr(own, own.FUNCTION)(self, **given) if is_there(given) else make(**given)

    replaced = {
        own.FUNCTION: load,
        "VALIDATE_INPUTS": classmethod(takes_any),
        "IS_CHANGED": classmethod(unchanged),
    }
    return type(original.__name__, (original,), replaced)


def is_there(given: Mapping[str, Any]) -> bool:
    """Whether a node is given the name of a file that is in one of ComfyUI's folders of models."""
    names = [value for value in given.values() if isinstance(value, str) and value]
    return any(
        folder_paths.get_full_path(folder, name)
        for folder in folder_paths.folder_names_and_paths
        for name in names
    )


class Cut:
    """Cuts a number as the command cuts those that stand in the graph."""

    RETURN_TYPES, FUNCTION, CATEGORY = ("*",), "run", "PipeMesh/templates"

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {
            "required": {"value": ("*",), "kind": ("STRING", {"default": "side"})},
            "optional": {"frames": ("INT", {"default": FRAMES})},
        }

    def run(self, value: float, kind: str, frames: int = FRAMES) -> Outputs:
        return (KINDS[kind](value, frames),)


class Held:
    """Hands conditioning on that the class of a stand-in reads, and says which classes of ComfyUI's
    would read all that nodes gave: where there are several, the class is the file's name's word
    alone. Raises WrongClass.
    """

    RETURN_TYPES, FUNCTION, CATEGORY, OUTPUT_NODE = ("CONDITIONING",), "run", "PipeMesh/templates", True

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {"required": {"model": ("MODEL",), "conditioning": ("CONDITIONING",)}}

    def run(self, model: Any, conditioning: Any) -> dict[str, Any]:
        given, stand_in = {key for _tokens, extras in conditioning for key in extras}, type(model.model)
        require_reader(stand_in, given)
        return {
            "ui": {"text": [stand_in.__name__, *sorted(one.__name__ for one in alike(given))]},
            "result": (conditioning,),
        }


class Rounded:
    """Makes every evaluation of a MODEL off by one rounding: how far that moves the end."""

    RETURN_TYPES, FUNCTION, CATEGORY = ("MODEL",), "run", "PipeMesh/templates"

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {"required": {"model": ("MODEL",)}}

    def run(self, model: Any) -> Outputs:
        return (rounded(model),)


class Record:
    """Writes what a sampler gives, bit for bit, into ComfyUI's output folder."""

    RETURN_TYPES, FUNCTION, CATEGORY, OUTPUT_NODE = (), "run", "PipeMesh/templates", True

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {"required": {"samples": ("LATENT",), "name": ("STRING", {"default": ""})}}

    def run(self, samples: dict[str, Any], name: str) -> dict[str, Any]:
        latent = samples["samples"]
        parts = latent.unbind() if latent.is_nested else [latent]
        file = Path(folder_paths.get_output_directory()) / name
        save_file({str(number): part.float().cpu().contiguous() for number, part in enumerate(parts)}, file)
        return {"ui": {"text": [name]}}


OWN_NODES = {CUT_NODE: Cut, HELD_NODE: Held, RECORD_NODE: Record, ROUNDED_NODE: Rounded, **FOREIGN}
