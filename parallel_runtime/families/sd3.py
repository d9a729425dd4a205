"""SD3 and SD3.5 (comfy/ldm/modules/diffusionmodules/mmdit.py@0.30.0): context and image joined at
attention in every block.

SD3.5 medium attends over the image tokens a second time, alone. The last block returns no context.
"""

from .plan import Blocks, Leave, TokenPlan

SD3 = TokenPlan(
    family="sd3",
    models=("comfy.ldm.modules.diffusionmodules.mmdit:OpenAISignatureMMDITWrapper",),
    streams=("context", "x"),
    blocks=(
        Blocks(
            path="joint_blocks",
            tokens={"context": ("context",), "x": ("x",)},
            positional=("context", "x"),
            self_attention_2="x_block.attn2",
            control="output",
        ),
    ),
    leave=Leave(path="final_layer", stream="x"),
    also_attend_alone=("x",),
)
