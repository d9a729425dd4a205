"""JoyImage (comfy/ldm/joyimage/model.py@0.30.0): image and text apart in every block, in this
order; only the image has positions.

References stand behind the image, and are cut off behind the blocks by the image's own length: the
rows leave there.
"""

from .plan import Along, Blocks, Leave, TokenPlan
from .sample import ONE_FRAME, Config, Released, Size, Tiny, random_extras, sample

IMG = ("img",)

PLAN = TokenPlan(
    streams=("img", "txt"),
    blocks=(
        Blocks(
            path="double_blocks",
            tokens={"hidden_states": IMG, "encoder_hidden_states": ("txt",)},
            along=(Along(arg="image_rotary_emb", dim=1, streams=IMG),),
        ),
    ),
    leave=Leave(path="double_blocks", stream="img"),
)


def config(size: Size) -> Config:
    return {
        "hidden_size": size.hidden,
        "num_attention_heads": size.heads,
        "text_dim": size.text_dim,
        "num_layers": size.blocks[0],
        "rope_dim_list": [4, 6, 6],
    }


RELEASED = Released(
    name="joyai-image-edit-16b",
    size=Size(heads=32, head_dim=128, blocks=(40,), text_dim=4096),
    text=256,
    changes={"rope_dim_list": [16, 56, 56], "theta": 10000},
    extras=random_extras(reference_latents=[(1, 16, 1, 128, 128)]),
)

REFERENCES = random_extras(reference_latents=[(1, 16, 1, 9, 8), (1, 16, 1, 4, 8)])
INPUTS = {"tiny": Tiny(blocks=(4,)), "latents": ONE_FRAME, "prompt_extras": REFERENCES}
SAMPLES = (sample("joyimage-edit", "JoyImage", config, RELEASED, **INPUTS),)
