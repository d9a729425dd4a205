"""Krea 2 (comfy/ldm/krea2/model.py@0.30.0): text, image and the images it refers to in one
sequence. References may have a timestep of their own.

The model's own text transformer runs whole.
"""

from dataclasses import replace

from .plan import Along, Blocks, Boundary, Leave, TokenPlan
from .sample import ONE_FRAME, Config, Form, Released, Sample, Size, random_extras

JOINT = ("txt", "img")

PLAN = TokenPlan(
    streams=JOINT,
    blocks=(
        Blocks(
            path="blocks",
            tokens={"x": JOINT},
            lengths={"img": "first"},
            along=(Along(arg="freqs", dim=2, streams=JOINT),),
            ranges=(Boundary(arg="timestep_zero_index", streams=JOINT),),
        ),
    ),
    leave=Leave(path="last", stream="img", streams=JOINT),
    patch_size="patch",
)
TEXT_LAYERS = 4  # of the text encoder, side by side in a prompt's tokens


def config(size: Size) -> Config:
    return {
        "features": size.hidden,
        "tdim": 32,
        "txtdim": size.text_dim // TEXT_LAYERS,
        "heads": size.heads,
        "kvheads": 1,
        "multiplier": 1,
        "layers": size.blocks[0],
        "txtlayers": TEXT_LAYERS,
        "txtheads": 2,
        "txtkvheads": 1,
    }


REFERENCES = random_extras(
    reference_latents=[(1, 16, 1, 6, 8), (1, 16, 1, 6, 4)], reference_latents_method="index_timestep_zero"
)
FORM = Form(config_class="Krea2", config=config, offset_scales=True)
RELEASED = Released(
    name="krea2-12b",
    size=Size(heads=48, head_dim=128, blocks=(28,), text_dim=12 * 2560),
    text=256,
    changes={
        "tdim": 256,
        "txtdim": 2560,
        "kvheads": 12,
        "multiplier": 4,
        "txtlayers": 12,
        "txtheads": 20,
        "txtkvheads": 20,
    },
)
SAMPLES = (
    Sample(
        name="krea2",
        form=replace(FORM, released=(RELEASED,)),
        latents=ONE_FRAME,
        stands_for=("lengths", "Leave.streams"),
    ),
    Sample(name="krea2-edit", form=FORM, latents=ONE_FRAME, prompt_extras=REFERENCES),
)
