"""What the files that templates name stand for, by patterns of their names: a sample of the
registry, a weight format, the shape of a VAE, what a text encoder returns beside its tokens.

The one file outside the registry that names families. A name that no pattern knows is an error
that says so; models and VAEs are known by their whole names.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath
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


# How a model is stored
FORM = (
    r"_(bf16|fp16|fp32|fp8|fp8mixed|e4m3fn|e5m2|scaled|int8|convrot|nvfp4|mxfp8|pruned|transformer|kj)(?=_|$)"
)


def known(table: Table[Found], name: str, what: str) -> Found:
    """The first entry whose pattern occurs in the name. Raises UnknownName."""
    return _first(table, name, what, lambda pattern: re.search(pattern, name, re.I))


def known_whole(table: Table[Found], name: str, what: str) -> Found:
    """The first entry whose pattern is the whole name of a file, but for how the model is stored.
    Raises UnknownName: with one more word it may be another model, of another class.
    """
    words = re.sub(r"[-. ]", "_", re.sub(r"\.safetensors$", "", PurePosixPath(name).name)).lower()
    identity = re.sub(FORM, "", words)
    return _first(table, name, what, lambda pattern: re.fullmatch(pattern, identity))


def _first(table: Table[Found], name: str, what: str, fits: Callable[[str], object]) -> Found:
    for pattern, found in table:
        if fits(pattern):
            return found
    raise UnknownName(f"{name} is no {what} that lab/templates/stand_ins/names.py knows")


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
LTX_2 = r"ltx_2_(19b|3_22b)_(dev|distilled)"
LTX_2_5 = {  # ComfyUI before 0.33 takes no notice of the last four
    "cross_attention_adaln": False,
    "ff_bias": False,
    "audio_ff_bias": False,
    "use_prompt_adaln_single": False,
    "use_keyframes_abs_pos_embedding": True,
}
NOISE = r"(high|low)_noise"
MODELS: Table[ModelShape] = (  # by whole names, in small letters and without what FORM says
    (r"z_image(_turbo)?", ModelShape(sample="z-image")),
    (r"netayumev35_pretrained_all_in_one", ModelShape(sample="lumina2")),
    (r"newbie_image_exp0_1", ModelShape(sample="newbie")),
    (r"qwen_image_layered(_control)?", ModelShape(sample="qwen-image-layered")),
    (r"qwen_image_edit_2511|firered_image_edit_1_1", ModelShape(sample="qwen-image-edit")),
    (r"qwen_image(_2512)?|qwen_image_edit(_2509)?", ModelShape(sample="qwen-image")),
    (r"longcat_image(_edit)?", ModelShape(sample="flux", config_class="LongCatImage", changes=LONGCAT)),
    (r"ovis_image", ModelShape(sample="flux", changes=OVIS)),
    (r"flux_2_klein(_base)?_(4b|9b)(_kv)?", ModelShape(sample="flux2")),
    (r"flux2_dev", ModelShape(sample="flux2", changes={"guidance_embed": True})),
    (r"flux1_schnell", ModelShape(sample="flux")),
    (
        r"flux1_fill_dev|flux_1_fill_dev_onereward",
        ModelShape(
            sample="flux", config_class="FluxInpaint", changes={"guidance_embed": True, "in_channels": 96}
        ),
    ),
    (r"flux1_canny_dev", guided(in_channels=32)),
    (r"flux1_dev(_kontext)?|flux1_krea_dev", guided()),
    (r"sd3_5_large", ModelShape(sample="sd3", heads=4)),
    (r"chroma_radiance_x0", ModelShape(sample="chroma-radiance")),
    (r"chroma1_hd", ModelShape(sample="chroma")),
    (r"wan2_1_14b_scail_2", ModelShape(sample="wan-scail2")),
    (r"wan21_14b_scail_preview", ModelShape(sample="wan-scail")),
    (r"wan2_1_vace_(1_3b|14b)", ModelShape(sample="wan-vace")),
    (
        rf"wan2_2_fun_camera_{NOISE}_14b",
        ModelShape(
            sample="wan-camera",
            config_class="WAN22_Camera",
            changes={"in_dim": 36, "model_type": "camera_2.2"},
        ),
    ),
    (r"wan2_1_fun_camera_v1_1_(1_3b|14b)", ModelShape(sample="wan-camera")),
    (r"wan2_2_s2v_14b", ModelShape(sample="wan-s2v", changes={"audio_dim": 1024})),
    (r"humo_17b", ModelShape(sample="wan-humo")),
    (r"wan2_2_dancer_14b_(global|local)", ModelShape(sample="wan-dancer")),
    (r"wan2_2_animate_14b", ModelShape(sample="wan-animate")),
    (r"wan_animate_2(_distill)?", ModelShape(sample="wan-animate2")),
    (r"causal_forcing_framewise", ModelShape(sample="wan2.1-t2v", config_class="WAN21_CausalAR_T2V")),
    (r"wan2_2_fun_inpaint_5b", wan("wan2.2-5b", 48 + 48 + 4)),
    (r"wan2_2_fun_control_5b", wan("wan2.2-5b", 48 + 96 + 4, config_class="WAN22_T2V")),
    (r"wan2_2_ti2v_5b", ModelShape(sample="wan2.2-5b")),
    (rf"wan2_2_fun_control_{NOISE}_14b", wan("wan2.1-t2v", 16 + 32 + 4)),
    (rf"wan2_2_(i2v|fun_inpaint)_{NOISE}_14b", wan("wan2.1-t2v", 16 + 16 + 4)),
    (r"wan2_1_fun_control_(1_3b|14b)", wan("wan2.1-i2v", 48, config_class="WAN21_FunControl2V")),
    (r"wan2_1_flf2v_720p_14b", ModelShape(sample="wan2.1-i2v", changes={"flf_pos_embed_token_number": 18})),
    # What it is given to attend to has 40 heads
    (r"wan2_1_i2v_14b_480p", ModelShape(sample="wan2.1-i2v", heads=40)),
    (
        r"wan2_1_i2v_(480p|720p)_14b|wan2_1_fun_inp_(1_3b|14b)|wan21_wanmove|chrono_edit_14b|wan2_1_i2v_ati_14b",
        ModelShape(sample="wan2.1-i2v"),
    ),
    (
        rf"wan2_1_t2v_(1_3b|14b)|wan2_2_t2v_{NOISE}_14b|wan2_2_bernini_r_{NOISE}",
        ModelShape(sample="wan2.1-t2v"),
    ),
    (
        r"hunyuanvideo1_5_1080p_sr_distilled",
        ModelShape(
            sample="hunyuan-video-1.5",
            config_class="HunyuanVideo15_SR_Distilled",
            changes={"in_channels": 98},
        ),
    ),
    (r"hunyuanvideo1_5_720p_(i2v|t2v)|capybara_v0_1", ModelShape(sample="hunyuan-video-1.5")),
    (r"hunyuan_video_t2v_720p", ModelShape(sample="hunyuan-video")),
    (LTX_2, ModelShape(sample="ltx2")),
    (r"ltx_2_5_22b_(dev|distilled)(_comfy)?", ModelShape(sample="ltx2", changes=LTX_2_5)),
    (r"ltx_video_2b_v0_9(_5)?", ModelShape(sample="ltxv")),
    (
        r"anima_base_v1_0|anima_preview3_base",
        ModelShape(
            sample="cosmos-predict2",
            config_class="Anima",
            changes={"image_model": "anima", "crossattn_emb_channels": 1024},
        ),
    ),
    (r"hidream_o1_image(_dev)?", ModelShape(sample="hidream-o1")),
    (r"hidream_i1_(dev|fast|full)|hidream_e1_(1|full)", ModelShape(sample="hidream-i1")),
    (r"mage_flow(_edit)?(_turbo)?", ModelShape(sample="mage_flow")),
    (r"krea2_turbo", ModelShape(sample="krea2")),
    (r"boogu_image_(edit|turbo)", ModelShape(sample="boogu")),
    (r"omnigen2", ModelShape(sample="omnigen2")),
    (r"ideogram4(_unconditional)?", ModelShape(sample="ideogram4")),
    (r"ernie_image(_turbo)?", ModelShape(sample="ernie")),
    (r"lens(_turbo)?", ModelShape(sample="lens")),
    (r"kandinsky5lite_(i2v_5s|t2i|t2v_sft_5s)", ModelShape(sample="kandinsky5")),
    (r"joyai_image_edit", ModelShape(sample="joyimage-edit")),
    (r"minimax_h3_(fl2va|ref2va)", ModelShape(sample="minimax-h3")),
    (r"seedvr2_(3b|7b)", ModelShape(sample="seedvr2")),
    (r"void_pass[12]", ModelShape(sample="cogvideox-1.5-inpaint")),
    (r"pixeldit_1300m_1024px", ModelShape(sample="pixeldit")),
    (r"pid_flux1_1024_to_4096_4step", ModelShape(sample="pid")),
    (r"lotus_depth_d_v1_1", ModelShape(sample="", form=DEPTH_UNET)),
)
UNPLANNED = {  # what no sample stands for: the transformer, which says why
    "seedvr2": "comfy.ldm.seedvr.model:NaDiT",
}
FORMATS: Table[str] = (
    (r"int8[_-]convrot", "int8_convrot"),
    (r"int8", "int8"),
    (r"nvfp4", "nvfp4"),
    (r"mxfp8", "mxfp8"),
    (r"fp8.*scaled|scaled.*fp8|fp8_?mixed|klein.*fp8|ltx.*fp8", "fp8_scaled"),
    (r"fp8|(hidream_o1.*|ltx-2-19b-dev)fp8", "fp8"),
    (r"", ""),
)
LORAS: Table[LoraStyle] = (
    (
        r"flux1-(depth|canny)",
        LoraStyle(prefix="", down="lora_A", up="lora_B", biases="lora_B.bias", widens="img_in"),
    ),
    (r"lightx2v|CausVid|chronoedit", LoraStyle(biases="diff_b")),
    (r"diffsynth", LoraStyle(prefix="", down="lora_A.default", up="lora_B.default")),
    (r"qwen|FireRed", LoraStyle(prefix="")),
    (r"ltx|LTX", LoraStyle(down="lora_A", up="lora_B")),
    (r"", LoraStyle()),
)
DTYPES: Table[str] = ((r"fp8_e4m3fn", "fp8"), (r"fp8_e5m2", "fp8_e5m2"), (r"", ""))

PICTURE, PICTURE_2 = VaeShape(channels=16), VaeShape(channels=128, side=16)
VIDEO = VaeShape(channels=16, frames=4, is_video=True)
VAES: Table[VaeShape] = (  # by whole names, as MODELS
    (r"wan2_2_vae", VaeShape(channels=48, side=16, frames=4, is_video=True)),
    (
        r"wan_?2_1_vae|wan_alpha_2_1_vae_(alpha|rgb)_channel|qwen_image(_layered)?_vae|hunyuan_video_vae|cogvideox_vae|seedvr2_ema_vae",
        VIDEO,
    ),
    (r"hunyuanvideo15_vae", VaeShape(channels=32, side=16, frames=4, is_video=True)),
    (r"flux2_vae|full_encoder_small_decoder|mage_flow_vae", PICTURE_2),
    (
        rf"{LTX_2}|ltx_2_5_video_vae|ltx_video_2b_v0_9(_5)?",
        VaeShape(channels=128, side=32, frames=8, is_video=True),
    ),
    (r"minimax_h3_video_vae", ChunkedShape(channels=24, side=16, frames=4, is_video=True)),
    (r"vae_ft_mse_840000_ema", VaeShape(channels=4)),
    (r"pixel_space|hidream_o1_image(_dev)?", VaeShape(channels=3, side=1)),
    (r"ae|flux1_(dev|schnell)|sd3_5_large|netayumev35_pretrained_all_in_one", PICTURE),
)
SOUNDS: Table[SoundShape] = (
    (rf"{LTX_2}|ltx_2_5_audio_vae", SoundShape(channels=8, rate=16000, per_second=25, bins=16)),
    (r"minimax_h3_audio_vae", SoundShape(channels=32, rate=32000, per_second=40)),
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
    return {
        "text_input_ids": torch.cat((draw(1, count).abs() * 1000, torch.tensor([[STEP_TOKEN]])), 1).long()
    }


def tags(count: int, draw: Callable[..., torch.Tensor]) -> dict[str, Any]:
    """All of a prompt is text."""
    return {"minimax_token_tags": torch.ones(count, dtype=torch.long)}


def unprocessed(count: int, draw: Callable[..., torch.Tensor]) -> dict[str, Any]:
    return {"unprocessed_ltxav_embeds": True}


TEXTS: Table[TextShape] = (  # by a CLIP loader's type and file names
    (r"ltxav|gemma_3_12B|gemma4-12b-with-proj-ltx", TextShape(extras=unprocessed)),
    (r"hunyuan_video_15|hunyuan_image", TextShape(extras=glyphs)),
    (r"hidream_o1", TextShape(width=1, extras=numbers)),
    (r"minimax", TextShape(extras=tags)),
    (r"hidream", TextShape(extras=layers)),
    (r"qwen_3_06b", TextShape(width=1024, extras=words)),
    (
        r"omnigen2|boogu|lumina2|NetaYume|ideogram4|lens|joyimage|newbie|pixeldit|ltxv|ltx-video",
        TextShape(extras=open_mask),
    ),
    (r"", TextShape()),
)
SIGHTS: Table[int] = ((r"siglip|sigclip", 1152), (r"", 1280))  # widths of what CLIP vision models see
# Layers and widths
HEARINGS: Table[tuple[int, int]] = ((r"whisper", (33, 1280)), (r"chinese-base", (13, 768)), (r"", (25, 1024)))
