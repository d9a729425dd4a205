"""HiDream-O1 (comfy/ldm/hidream_o1/model.py@0.30.0): a language model whose last tokens are pixels.

The tokens of the prompt see themselves alone and not the step, so the model keeps their keys and
values. Behind the blocks it looks for the image's tokens among all.
"""

from typing import Any

import torch

from .plan import Along, Blocks, Leave, Prefix, Together, TokenPlan
from .sample import Config, Released, Size, Tiny, sample

IMG = ("img",)  # and the token of the step before them, and references behind them
BOTH = ("prompt", *IMG)
STEP = 151673  # the token that becomes the step

PLAN = TokenPlan(
    streams=IMG,
    blocks=(
        Blocks(
            path="language_model.layers",
            tokens={"x": BOTH},
            returns=("x", "past_key_value"),
            along=(Along(arg="freqs_cis", dim=-2, streams=BOTH),),
            prefix=Prefix(
                stream="prompt", counted_by="ar_len", kept_in="past_key_value", forget="clear_kv_cache"
            ),
        ),
    ),
    leave=Leave(path="language_model.layers", stream="img"),
    together=Together(always="the keys and values of the prompt, which it keeps"),
)


def config(size: Size) -> Config:
    """The language model's own vocabulary, since tokens have numbers; queries that share keys."""
    text = {
        "hidden_size": size.hidden,
        "intermediate_size": 96,
        "num_hidden_layers": size.blocks[0],
        "num_attention_heads": size.heads,
        "num_key_value_heads": 1,
        "head_dim": size.head_dim,
        "rope_dims": [4, 2, 2],
    }
    vision = {
        "hidden_size": 32,
        "num_heads": 2,
        "intermediate_size": 48,
        "depth": 1,
        "num_position_embeddings": 16,
    }
    return {"text_config_overrides": text, "vision_config_overrides": vision}


def prompts(_latent: torch.Tensor, **more: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Numbers of tokens, of unequal prompts."""
    positive, negative = ([*range(start, start + tokens), STEP] for start, tokens in ((5, 11), (30, 6)))
    made = [{"text_input_ids": torch.tensor([tokens]), **more} for tokens in (positive, negative)]
    return made[0], made[1]


def edit(latent: torch.Tensor) -> tuple[dict[str, Any], dict[str, Any]]:
    picture = torch.rand(1, 64, 96, 3, generator=torch.Generator().manual_seed(4))
    return prompts(latent, reference_latents=[picture])


RELEASED = Released(
    name="hidream-o1-8b",
    size=Size(heads=32, head_dim=128, blocks=(36,)),
    text=0,  # it has numbers of tokens in place of a text encoder's
    extent=(2048, 2048, 1),
    changes={"text_config_overrides": {}, "vision_config_overrides": {}},  # ComfyUI knows one size
    extras=lambda latent: {"text_input_ids": torch.tensor([[*range(5, 132), STEP]])},
    reads_prompt=True,
)
INPUTS = {"tiny": Tiny(blocks=(4,)), "latents": {"even": (1, 3, 96, 160), "odd": (1, 3, 96, 128)}}

SAMPLES = (
    sample("hidream-o1", "HiDreamO1", config, RELEASED, prompt_extras=prompts, **INPUTS),
    sample("hidream-o1-edit", "HiDreamO1", config, prompt_extras=edit, **INPUTS),
)
