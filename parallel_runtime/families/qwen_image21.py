"""Qwen-Image 2.1 (comfy/ldm/qwen_image21/model.py@0.38.1): a text with the images that it refers
to, then the image, one token per latent pixel.

What stands before the image sees neither it nor the step, so the model keeps its keys and values.
"""

from .plan import Along, Blocks, Leave, Prefix, TokenPlan
from .sample import Config, Released, Size, random_extras, sample

BOTH = ("prompt", "img")
PLAN = TokenPlan(
    streams=("img",),
    blocks=(
        Blocks(
            path="transformer_blocks",
            tokens={"x": BOTH},
            along=(Along(arg="pe", dim=1, streams=BOTH),),
            prefix=Prefix(stream="prompt", counted_by="prefix_len"),
        ),
    ),
    leave=Leave(path="proj_out", stream="img"),
    patch_size=1,
)


def config(size: Size) -> Config:
    return {
        "image_model": "qwen_image21",
        "num_layers": size.blocks[0],
        "attention_head_dim": size.head_dim,
        "num_attention_heads": size.heads,
        "context_in_dim": size.text_dim,
        "axes_dims_rope": (4, 6, 6),
    }


RELEASED = Released(
    name="qwen-image-2.1-7b",
    size=Size(heads=32, head_dim=128, blocks=(32,), text_dim=4096),
    text=256,
    extent=(2048, 2048, 1),
    changes={"axes_dims_rope": (16, 56, 56)},
)
REFERENCES = random_extras(reference_latents=[(1, 64, 5, 4), (1, 64, 4, 4)], image_slots=[4])
INPUTS = {"latents": {"even": (1, 64, 8, 6), "odd": (1, 64, 7, 9)}, "since": "0.37.0"}

SAMPLES = (
    sample("qwen-image-2.1", "QwenImage21", config, RELEASED, **INPUTS),
    sample("qwen-image-2.1-edit", "QwenImage21", config, prompt_extras=REFERENCES, **INPUTS),
)
AHEAD = "ComfyUI's 08f68f09 over 0.33.0"
