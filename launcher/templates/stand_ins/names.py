"""What the files that templates name stand for, by patterns of their names: a sample of the
registry, a weight format, the shape of a VAE, what a text encoder returns beside its tokens.

The one file outside the registry that names families. A name that no pattern knows is an error
that says so.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from ....parallel_runtime.families.sample import Form

HEADS = 8  # layers are as wide then as those that files quantise

Found = TypeVar("Found")
Table = Sequence[tuple[str, Found]]


class UnknownName(ValueError):
    """A template names a file that stands for nothing here."""


class NotStoodFor(ValueError):
    """A template names a model that has no plan and no sample: it runs on one GPU."""


def known(table: Table[Found], name: str, what: str) -> Found:
    """The first entry whose pattern occurs in the name. Raises UnknownName."""
    for pattern, found in table:
        if re.search(pattern, name, re.I):
            return found
    raise UnknownName(f"{name} is no {what} that launcher/templates/stand_ins/names.py knows")


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """The sample of the registry that a file stands for. ``config_class`` and ``changes``: the
    class of ComfyUI's, and what of its config, where they are others than the sample's. ``form``:
    of a model that the registry has none of.
    """

    sample: str
    config_class: str = ""
    heads: int = HEADS
    changes: dict[str, Any] = field(default_factory=dict)
    form: Form | None = None


@dataclass(frozen=True, kw_only=True)
class VaeShape:
    """``side`` pixels along an edge make a latent, and ``frames`` of a video, but for the first."""

    channels: int
    side: int = 8
    frames: int = 1
    is_video: bool = False
    takes_pictures: bool = False

    def to_latents(self, frames: int) -> int:
        return max(0, math.floor((frames + self.frames - 1) / self.frames))

    def to_frames(self, latents: int) -> int:
        return max(0, latents * self.frames - self.frames + 1)


@dataclass(frozen=True, kw_only=True)
class ChunkedShape(VaeShape):
    """A VAE of chunks: 17 frames make 5 latents, and 5 more at an end 2."""

    def to_latents(self, frames: int) -> int:
        return max(1, (frames - 5) // 17 * 5 + 2) if frames > 1 else 1

    def to_frames(self, latents: int) -> int:
        return max(1, (latents - 2) // 5 * 17 + 5)


@dataclass(frozen=True, kw_only=True)
class SoundShape:
    """``bins``: of frequency in a latent; 0 where it has one row for each ear instead."""

    channels: int
    rate: int
    per_second: float
    bins: int = 0


@dataclass(frozen=True, kw_only=True)
class TextShape:
    """``extras``: the number of tokens and a function that draws a tensor -> what comes with a
    prompt.
    """

    width: int = 64
    pooled: int = 32
    extras: Callable[[int, Callable[..., torch.Tensor]], dict[str, Any]] = lambda count, draw: {}


@dataclass(frozen=True, kw_only=True)
class LoraStyle:
    """How a LoRA's file names its tensors. ``biases``: of what it adds to biases, where it does.
    ``widens``: a layer that it makes wider.
    """

    prefix: str = "diffusion_model."
    down: str = "lora_down"
    up: str = "lora_up"
    biases: str = ""
    widens: str = ""


def wan(sample: str, in_dim: int, **more: Any) -> ModelShape:
    return ModelShape(sample=sample, changes={"in_dim": in_dim}, **more)


def guided(**more: Any) -> ModelShape:
    return ModelShape(sample="flux", config_class="Flux", changes={"guidance_embed": True, **more})


DEPTH_UNET = Form(  # estimates the depth of a picture for what samples after it
    config_class="LotusD",
    config=lambda size: {
        "image_size": 32,
        "in_channels": 4,
        "out_channels": 4,
        "model_channels": 32,
        "num_res_blocks": [1, 1],
        "channel_mult": [1, 2],
        "transformer_depth": [1, 1],
        "transformer_depth_output": [1, 1, 1, 1],
        "transformer_depth_middle": 1,
        "context_dim": 1024,
        "adm_in_channels": 4,
        "num_classes": "sequential",
        "num_head_channels": 16,
        "num_heads": -1,
        "use_spatial_transformer": True,
        "use_linear_in_transformer": True,
        "use_temporal_attention": False,
        "legacy": False,
    },
)

LONGCAT = {"vec_in_dim": None, "txt_ids_dims": [1, 2]}
OVIS = {"vec_in_dim": None, "txt_ids_dims": [1, 2], "yak_mlp": True, "txt_norm": True}
MODELS: Table[ModelShape] = (
    (r"z_image", ModelShape(sample="z-image")),
    (r"NetaYume", ModelShape(sample="lumina2")),
    (r"NewBie", ModelShape(sample="newbie")),
    (r"qwen_image_layered", ModelShape(sample="qwen-image-layered")),
    (r"qwen_image_edit_2511|FireRed", ModelShape(sample="qwen-image-edit")),
    (r"qwen_image", ModelShape(sample="qwen-image")),
    (r"longcat", ModelShape(sample="flux", config_class="LongCatImage", changes=LONGCAT)),
    (r"ovis", ModelShape(sample="flux", changes=OVIS)),
    (r"flux.?2.*klein|klein", ModelShape(sample="flux2")),
    (r"flux.?2", ModelShape(sample="flux2", changes={"guidance_embed": True})),
    (r"flux.*schnell", ModelShape(sample="flux")),
    (r"flux.*fill", ModelShape(sample="flux", config_class="FluxInpaint", changes={"guidance_embed": True, "in_channels": 96})),
    (r"flux.*canny-dev", guided(in_channels=32)),
    (r"^flux", guided()),
    (r"sd3", ModelShape(sample="sd3", heads=4)),
    (r"chroma-radiance|chroma.*radiance", ModelShape(sample="chroma-radiance")),
    (r"chroma", ModelShape(sample="chroma")),
    (r"scail_2", ModelShape(sample="wan-scail2")),
    (r"scail", ModelShape(sample="wan-scail")),
    (r"wan.*vace", ModelShape(sample="wan-vace")),
    (
        r"fun_camera.*noise",
        ModelShape(sample="wan-camera", config_class="WAN22_Camera", changes={"in_dim": 36, "model_type": "camera_2.2"}),
    ),
    (r"fun_camera", ModelShape(sample="wan-camera")),
    (r"s2v", ModelShape(sample="wan-s2v", changes={"audio_dim": 1024})),
    (r"humo", ModelShape(sample="wan-humo")),
    (r"dancer", ModelShape(sample="wan-dancer")),
    (r"animate", ModelShape(sample="wan-animate")),
    (r"causal_forcing", ModelShape(sample="wan2.1-t2v", config_class="WAN21_CausalAR_T2V")),
    (r"fun_inpaint_5B", wan("wan2.2-5b", 48 + 48 + 4)),
    (r"fun_control_5B", wan("wan2.2-5b", 48 + 96 + 4, config_class="WAN22_T2V")),
    (r"ti2v_5B", ModelShape(sample="wan2.2-5b")),
    (r"wan2\.2_fun_control", wan("wan2.1-t2v", 16 + 32 + 4)),
    (r"wan2\.2_(i2v|fun_inpaint)", wan("wan2.1-t2v", 16 + 16 + 4)),
    (r"wan2\.1_fun_control", wan("wan2.1-i2v", 48, config_class="WAN21_FunControl2V")),
    (r"flf2v", ModelShape(sample="wan2.1-i2v", changes={"flf_pos_embed_token_number": 18})),
    (r"I2V-14B-480p", ModelShape(sample="wan2.1-i2v", heads=40)),  # what it is given to attend to has 40 heads
    (r"i2v-|i2v_480|i2v_720|fun_inp_|WanMove|chrono_edit|ATI", ModelShape(sample="wan2.1-i2v")),
    (r"t2v_|bernini", ModelShape(sample="wan2.1-t2v")),
    (
        r"hunyuanvideo1\.5_1080p_sr",
        ModelShape(sample="hunyuan-video-1.5", config_class="HunyuanVideo15_SR_Distilled", changes={"in_channels": 98}),
    ),
    (r"hunyuanvideo1\.5|capybara", ModelShape(sample="hunyuan-video-1.5")),
    (r"hunyuan_video", ModelShape(sample="hunyuan-video")),
    (r"ltx-2", ModelShape(sample="ltx2")),
    (r"ltx-video", ModelShape(sample="ltxv")),
    (
        r"anima",
        ModelShape(sample="cosmos-predict2", config_class="Anima", changes={"image_model": "anima", "crossattn_emb_channels": 1024}),
    ),
    (r"hidream_o1", ModelShape(sample="hidream-o1")),
    (r"hidream", ModelShape(sample="hidream-i1")),
    (r"mage_flow", ModelShape(sample="mage_flow")),
    (r"krea2", ModelShape(sample="krea2")),
    (r"boogu", ModelShape(sample="boogu")),
    (r"omnigen2", ModelShape(sample="omnigen2")),
    (r"ideogram4", ModelShape(sample="ideogram4")),
    (r"ernie", ModelShape(sample="ernie")),
    (r"lens", ModelShape(sample="lens")),
    (r"kandinsky5", ModelShape(sample="kandinsky5")),
    (r"joyai", ModelShape(sample="joyimage-edit")),
    (r"minimax_h3", ModelShape(sample="minimax-h3")),
    (r"seedvr2", ModelShape(sample="seedvr2")),
    (r"void_pass", ModelShape(sample="cogvideox-1.5-inpaint")),
    (r"pixeldit", ModelShape(sample="pixeldit")),
    (r"pid_", ModelShape(sample="pid")),
    (r"lotus", ModelShape(sample="", form=DEPTH_UNET)),
)
UNPLANNED = {"seedvr2": "comfy.ldm.seedvr.model:NaDiT"}  # what no sample stands for: the transformer, which says why
FORMATS: Table[str] = (
    (r"int8_convrot", "int8_convrot"),
    (r"int8", "int8"),
    (r"nvfp4", "nvfp4"),
    (r"mxfp8", "mxfp8"),
    (r"fp8.*scaled|scaled.*fp8|fp8_?mixed|klein.*fp8|ltx.*fp8", "fp8_scaled"),
    (r"fp8|(hidream_o1.*|ltx-2-19b-dev)fp8", "fp8"),
    (r"", ""),
)
LORAS: Table[LoraStyle] = (
    (r"flux1-(depth|canny)", LoraStyle(prefix="", down="lora_A", up="lora_B", biases="lora_B.bias", widens="img_in")),
    (r"lightx2v|CausVid|chronoedit", LoraStyle(biases="diff_b")),
    (r"diffsynth", LoraStyle(prefix="", down="lora_A.default", up="lora_B.default")),
    (r"qwen|FireRed", LoraStyle(prefix="")),
    (r"ltx|LTX", LoraStyle(down="lora_A", up="lora_B")),
    (r"", LoraStyle()),
)
DTYPES: Table[str] = ((r"fp8_e4m3fn", "fp8"), (r"fp8_e5m2", "fp8_e5m2"), (r"", ""))

PICTURE, PICTURE_2 = VaeShape(channels=16), VaeShape(channels=128, side=16)
VIDEO = VaeShape(channels=16, frames=4, is_video=True)
VAES: Table[VaeShape] = (
    (r"wan2\.2_vae", VaeShape(channels=48, side=16, frames=4, is_video=True)),
    (r"wan|qwen_image|hunyuan_video_vae|cogvideox|seedvr2", VIDEO),
    (r"hunyuanvideo15", VaeShape(channels=32, side=16, frames=4, is_video=True)),
    (r"flux2|full_encoder_small_decoder|mage_flow", PICTURE_2),
    (r"ltx", VaeShape(channels=128, side=32, frames=8, is_video=True)),
    (r"minimax.*video", ChunkedShape(channels=24, side=16, frames=4, is_video=True)),
    (r"vae-ft-mse", VaeShape(channels=4)),
    (r"pixel_space|hidream_o1", VaeShape(channels=3, side=1)),
    (r"^ae\.|flux1|sd3|NetaYume", PICTURE),
)
SOUNDS: Table[SoundShape] = (
    (r"ltx", SoundShape(channels=8, rate=16000, per_second=25, bins=16)),
    (r"minimax.*audio", SoundShape(channels=32, rate=32000, per_second=40)),
)


STEP_TOKEN = 151673


def open_mask(count: int, draw: Callable[..., torch.Tensor]) -> dict[str, Any]:
    return {"attention_mask": torch.ones(1, count, dtype=torch.long)}


def glyphs(count: int, draw: Callable[..., torch.Tensor]) -> dict[str, Any]:
    return {"conditioning_byt5small": draw(1, 5, 1472)}


def layers(count: int, draw: Callable[..., torch.Tensor]) -> dict[str, Any]:
    return {"conditioning_llama3": draw(1, 32, count, 64)}


def words(count: int, draw: Callable[..., torch.Tensor]) -> dict[str, Any]:
    """The prompt again, as the tokens of another encoder."""
    return {"t5xxl_ids": (draw(count).abs() * 1000).int(), "t5xxl_weights": torch.ones(count)}


def numbers(count: int, draw: Callable[..., torch.Tensor]) -> dict[str, Any]:
    """A prompt as the numbers of its tokens; behind the last the one that becomes the step."""
    return {"text_input_ids": torch.cat((draw(1, count).abs() * 1000, torch.tensor([[STEP_TOKEN]])), 1).long()}


def tags(count: int, draw: Callable[..., torch.Tensor]) -> dict[str, Any]:
    """All of a prompt is text."""
    return {"minimax_token_tags": torch.ones(count, dtype=torch.long)}


def unprocessed(count: int, draw: Callable[..., torch.Tensor]) -> dict[str, Any]:
    return {"unprocessed_ltxav_embeds": True}


TEXTS: Table[TextShape] = (  # by a CLIP loader's type and file names
    (r"ltxav|gemma_3_12B", TextShape(extras=unprocessed)),
    (r"hunyuan_video_15|hunyuan_image", TextShape(extras=glyphs)),
    (r"hidream_o1", TextShape(width=1, extras=numbers)),
    (r"minimax", TextShape(extras=tags)),
    (r"hidream", TextShape(extras=layers)),
    (r"qwen_3_06b", TextShape(width=1024, extras=words)),
    (r"omnigen2|boogu|lumina2|NetaYume|ideogram4|lens|joyimage|newbie|pixeldit|ltxv|ltx-video", TextShape(extras=open_mask)),
    (r"", TextShape()),
)
SIGHTS: Table[int] = ((r"siglip|sigclip", 1152), (r"", 1280))  # widths of what CLIP vision models see
HEARINGS: Table[tuple[int, int]] = ((r"whisper", (33, 1280)), (r"chinese-base", (13, 768)), (r"", (25, 1024)))  # layers and widths
