"""MiniMax H3 (comfy/ldm/minimax/model.py@0.30.0): text, references, audio and video are one
sequence without a batch, whose parts, or under a noise mask each token, have modulations of their
own.

Audio and video leave behind the blocks by ranges of all tokens, so that all leave there.
"""

from typing import Any

import torch

from .plan import Along, Blocks, Leave, Ranges, Together, TokenPlan
from .sample import Config, Extent, Released, Size, random_extras, sample

ALL = ("tokens",)

PLAN = TokenPlan(
    streams=ALL,
    blocks=(
        Blocks(
            path="blocks",
            tokens={"x": ALL},
            along=(Along(arg="rope_freqs", dim=1, streams=ALL),),
            ranges=(Ranges(arg="mod_segments", streams=ALL, rows=True),),
        ),
    ),
    leave=Leave(path="blocks", stream="tokens"),
    together=Together(always="its audio, which attends to the whole video"),
    rebuilt=("minimax_payload.layout",),
)


def config(size: Size) -> Config:
    return {
        "hidden_size": size.hidden,
        "num_layers": size.blocks[0],
        "token_refiner_num_layers": 1,
        "num_attention_heads": size.heads,
        "attention_head_dim": size.head_dim,
        "ffn_hidden_size": 128,
        "text_dim": size.text_dim,
        "timestep_input_dim": 32,
        "time_embed_hidden_size": 48,
        "time_embed_dim": 40,
        "rope_inv_freq_len": 2,
    }


PICTURE = {"kind": "image", "latent": (1, 24, 1, 4, 6), "latent_h": 4, "latent_w": 6}
SHOT = {"kind": "video_audio", "latent": (1, 24, 2, 4, 4), "latent_t": 2, "latent_h": 4, "latent_w": 4}
SOUND = {"audio_latent": (1, 32, 2, 3), "ref_audio_t": 3}
# A picture, a video with its sound, and the tokens of the text that show them
references = random_extras(
    minimax_refs=[PICTURE, SHOT | SOUND], minimax_token_tags=torch.tensor([1, 1, 0, 0, 0] + [1] * 27)
)


def partly_given(latent: Any) -> Any:
    """A noise mask that keeps the first frame as it is, half of another's left side, and the
    beginning of the sound: from ComfyUI 0.33 on each of their tokens has a timestep of its own.
    """
    from comfy.nested_tensor import NestedTensor

    video, sound = (torch.ones(1, 1, *one.shape[2:]) for one in latent.unbind())
    video[:, :, 0] = 0
    video[:, :, 1, :, :2] = 0.5
    sound[..., :2] = 0
    return NestedTensor([video, sound])


def latents_and_sound(extent: Extent) -> tuple[tuple[int, ...], ...]:
    """Two latents of the first five frames and five of each seventeen behind them; 40 of a second
    of sound.
    """
    width, height, frames = extent
    return (1, 24, (frames - 5) // 17 * 5 + 2, height // 16, width // 16), (1, 32, 2, round(frames / 24 * 40))


RELEASED = Released(
    name="minimax-h3-33b",
    size=Size(heads=56, head_dim=128, blocks=(50,), text_dim=5120),
    text=512,
    extent=(1344, 768, 124),
    changes={
        "hidden_size": 5376,
        "token_refiner_num_layers": 2,
        "ffn_hidden_size": 14336,
        "timestep_input_dim": 256,
        "time_embed_hidden_size": 5376,
        "time_embed_dim": 2688,
        "rope_inv_freq_len": 16,
    },
    latents=latents_and_sound,
)
LATENTS = {"even": ((1, 24, 3, 8, 6), (1, 32, 2, 5)), "odd": ((1, 24, 3, 5, 4), (1, 32, 2, 3))}

SAMPLES = (
    sample("minimax-h3", "MiniMaxH3", config, RELEASED, latents=LATENTS),
    sample("minimax-h3-referring", "MiniMaxH3", config, latents=LATENTS, prompt_extras=references),
    sample("minimax-h3-masked", "MiniMaxH3", config, latents=LATENTS, noise_mask=partly_given),
)
