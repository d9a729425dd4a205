"""Cosmos-Predict 2 and Anima (comfy/ldm/cosmos/predict2.py@0.30.0, comfy/ldm/anima/model.py): image
tokens alone in the blocks, in the shape of the video, text through cross-attention.

Modulation has one row, or one for each frame. Anima is the same forward behind text that it
prepares itself; its adapter has one size, too large for a sample.
"""

from functools import partial

from .plan import Along, BlockPatch, Blocks, Leave, TokenPlan
from .sample import VIDEO, Config, Released, Size, keep_first_frame, sample

IMG = ("img",)
LLLITE = tuple(
    BlockPatch(code=f"comfy.ldm.anima.lllite:AnimaLLLite{part}Patch", options=("model_patch_data",))
    for part in ("Attention", "MLP")
)

PLAN = TokenPlan(
    streams=IMG,
    blocks=(
        Blocks(
            path="blocks",
            tokens={"x_B_T_H_W_D": IMG},
            along=(
                Along(arg="rope_emb_L_1_1_D", dim=1, streams=IMG),
                Along(arg="emb_B_T_D", dim=1, streams=IMG, repeated=True),
                Along(arg="adaln_lora_B_T_3D", dim=1, streams=IMG, repeated=True),
            ),
            local=("cross_attn",),
            patches=LLLITE,
        ),
    ),
    leave=Leave(path="blocks", stream="img"),
    patch_size="patch_spatial",
)


def config(size: Size, channels: int = 16) -> Config:
    return {
        "max_img_h": 240,
        "max_img_w": 240,
        "max_frames": 128,
        "in_channels": channels,
        "out_channels": 16,
        "patch_spatial": 2,
        "patch_temporal": 1,
        "model_channels": size.hidden,
        "num_blocks": size.blocks[0],
        "num_heads": size.heads,
        "crossattn_emb_channels": size.text_dim,
        "pos_emb_cls": "rope3d",
        "use_adaln_lora": True,
        "adaln_lora_dim": 16,
    }


TEXT_TO_IMAGE = Released(
    name="cosmos-predict2-2b",
    size=Size(heads=16, head_dim=128, blocks=(28,), text_dim=1024),
    text=512,
    extent=(1024, 1024, 1),
    changes={"adaln_lora_dim": 256},
)
TO_VIDEO = Released(
    name="cosmos-predict2-14b-i2v",
    size=Size(heads=40, head_dim=128, blocks=(36,), text_dim=1024),
    text=512,
    extent=(1280, 704, 93),
    changes={"adaln_lora_dim": 256},
)

SAMPLES = (
    sample(
        "cosmos-predict2",
        "CosmosT2IPredict2",
        config,
        TEXT_TO_IMAGE,
        latents={"even": (1, 16, 1, 16, 6), "odd": (1, 16, 1, 9, 6)},
    ),
    sample(
        "cosmos-predict2-i2v",
        "CosmosI2VPredict2",
        partial(config, channels=17),
        TO_VIDEO,
        latents=VIDEO,
        noise_mask=keep_first_frame,
    ),
)
UNRELEASED = {"comfy.ldm.anima.model:Anima": "Cosmos-Predict 2 behind a text adapter, which stays in ComfyUI"}
