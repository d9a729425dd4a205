"""LTXV (comfy/ldm/lightricks/model.py@0.30.0) and LTX-2, with audio (av_model.py): video tokens in
the blocks, text through cross-attention; each token may have a timestep of its own.

Every rank has all audio tokens, and computes them whole; they attend to video tokens that are cut.
"""

from collections.abc import Callable, Mapping
from copy import copy
from typing import Any

import torch

from .plan import Along, BlockPatch, Blocks, Leave, Together, TokenPlan
from .sample import Config, Extent, Released, Size, random_extras, sample

VIDEO = ("video",)


def dense(guide: Any, _cut: Callable) -> torch.Tensor:
    """Make one mask (1, 1, L, L) of a GuideAttentionMask, which blocks split by their own rows."""
    noisy, first, count = guide.noisy_mask, guide.guide_start, guide.tracked_count
    mask = noisy.new_zeros(1, 1, noisy.shape[-1], noisy.shape[-1])
    mask[:, :, :first] = noisy
    mask[:, :, first : first + count] = guide.tracked_mask
    return mask


def of_tokens(timestep: Any, cut: Callable) -> Any:
    """Expand a CompressedTimestep, which has a row per frame, and cut it."""
    local = copy(timestep)
    local.data, local.patches_per_frame = cut(timestep.expand()), 1
    local.num_frames = local.data.shape[1]
    return local


KJNODES = (BlockPatch(code="comfyui-kjnodes:LTXVffnChunkPatch.__get__.<locals>.wrapped_forward"),)


def along_video(*arguments: str) -> tuple[Along, ...]:
    return tuple(
        Along(arg=arg, dim=1, streams=VIDEO, within=of_tokens if "timestep" in arg else None)
        for arg in arguments
    )


GUIDE = Along(arg="self_attention_mask", dim=-1, streams=VIDEO, within=dense)
LEAVE = Leave(path="transformer_blocks", stream="video")
PLAN = TokenPlan(
    streams=VIDEO,
    blocks=(
        Blocks(
            path="transformer_blocks",
            tokens={"x": VIDEO},
            along=(*along_video("pe", "timestep"), GUIDE),
            local=("attn2",),
            patches=KJNODES,
        ),
    ),
    leave=LEAVE,
    together=Together(always="its guides, whose tokens may be fewer than their pixels"),
    patch_size=1,
)
AV_PLAN = TokenPlan(
    streams=VIDEO,
    blocks=(
        Blocks(
            path="transformer_blocks",
            tokens={"x.0": VIDEO},
            returns=("x.0", "x.1"),
            along=(
                *along_video(
                    "v_pe",
                    "v_cross_pe",
                    "v_timestep",
                    "v_cross_scale_shift_timestep",
                    "v_cross_gate_timestep",
                ),
                GUIDE,
            ),
            local=("attn2", "audio_attn1", "audio_attn2", "audio_to_video_attn"),
            whole_queries=("video_to_audio_attn",),
            patches=KJNODES,
        ),
    ),
    leave=LEAVE,
    together=Together(always="its audio, which attends to the whole video"),
    patch_size=1,
)


def config(size: Size) -> Config:
    widths = {"cross_attention_dim": size.hidden, "caption_channels": size.text_dim}
    heads = {"num_attention_heads": size.heads, "attention_head_dim": size.head_dim}
    return {**widths, **heads, "num_layers": size.blocks[0]}


def av_config(size: Size) -> Config:
    """The form of 2.3: gated attention, text modulated by the timestep."""
    heads = {"audio_num_attention_heads": size.heads, "audio_attention_head_dim": size.head_dim // 2}
    connectors = {"connector_num_attention_heads": 4, "connector_attention_head_dim": size.text_dim // 4}
    positions = {"rope_type": "split", "frequencies_precision": "float64"}
    positions |= {"use_middle_indices_grid": True, "causal_temporal_positioning": True}
    gates = {"apply_gated_attention": True, "cross_attention_adaln": True}
    audio = {"audio_cross_attention_dim": size.hidden // 2, **heads, **connectors, **positions, **gates}
    return {**config(size), **audio}


# Of 2.5: no biases in the feed-forward layers, plain text, and a mark on frames that stand alone
KEYED = {"ff_bias": False, "audio_ff_bias": False, "use_prompt_adaln_single": False}
KEYED |= {"cross_attention_adaln": False, "use_keyframes_abs_pos_embedding": True}
# All of the text is of the prompt
text_mask = random_extras(attention_mask=torch.ones(1, 1, dtype=torch.int64))


def guides(latent: torch.Tensor) -> dict[str, Any]:
    """The extras of the guide nodes: the last frame of the latent stands elsewhere in time, and is
    looked at half as much.
    """
    height, width = latent.shape[3:]
    rows, columns = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    starts = 32 * torch.stack((rows * 0, rows, columns)).reshape(1, 3, -1, 1)
    entry = {
        "pre_filter_count": height * width,
        "strength": 0.5,
        "pixel_mask": None,
        "latent_shape": [1, height, width],
    }
    return {
        **text_mask(latent),
        "keyframe_idxs": torch.cat((starts, starts + 32), -1).float(),
        "guide_attention_entries": [entry],
    }


def given_guide(latent: torch.Tensor) -> torch.Tensor:
    """A noise mask that keeps the guide's frame and half of the first as they are."""
    mask = torch.ones(1, 1, *latent.shape[2:])
    mask[:, :, -1] = 0
    mask[:, :, 0, 0] = 0
    return mask


LATENTS: Mapping[str, tuple] = {"even": (1, 128, 3, 4, 2), "odd": (1, 128, 3, 3, 3)}
AUDIO = {name: (shape, (1, 8, 5, 16)) for name, shape in LATENTS.items()}


def with_sound(extent: Extent) -> tuple[tuple[int, ...], ...]:
    """25 latents of a second of sound, as many as it has frames."""
    width, height, frames = extent
    return (1, 128, (frames - 1) // 8 + 1, height // 32, width // 32), (1, 8, frames, 16)


LARGE, LARGE_AV = (Size(heads=32, head_dim=128, blocks=(48,), text_dim=width) for width in (4096, 3840))
BEFORE_2_3 = {"apply_gated_attention": False, "cross_attention_adaln": False}
CONNECTORS = {"connector_num_attention_heads": 30, "connector_attention_head_dim": 128}
LTXV_13B = Released(name="ltxv-13b", size=LARGE, text=256, extent=(768, 512, 97))
LTX_2 = Released(
    name="ltx2-19b",
    size=LARGE_AV,
    text=1024,
    extent=(1280, 704, 121),
    changes={**BEFORE_2_3, **CONNECTORS},
    latents=with_sound,
)


SAMPLES = (
    sample("ltxv", "LTXV", config, LTXV_13B, latents=LATENTS, prompt_extras=text_mask),
    sample("ltxv-guided", "LTXV", config, latents=LATENTS, prompt_extras=guides, noise_mask=given_guide),
    sample("ltx2", "LTXAV", av_config, LTX_2, latents=AUDIO),
    sample("ltx2.5", "LTXAV", lambda size: {**av_config(size), **KEYED}, latents=AUDIO, since="0.33.0"),
)
