"""Wan 2.1 and 2.2 (comfy/ldm/wan/model.py@0.30.0): video tokens alone in the blocks, text through
cross-attention.

The 5B model may modulate per frame: ``e`` has one row per frame then, else one.
"""

from .plan import Along, Blocks, Leave, TokenPlan

IMG = ("img",)

WAN = TokenPlan(
    family="wan",
    models=("comfy.ldm.wan.model:WanModel",),
    streams=IMG,
    blocks=(
        Blocks(
            path="blocks",
            tokens={"x": IMG},
            along=(Along(arg="freqs", dim=1, streams=IMG), Along(arg="e", dim=1, streams=IMG, repeated=True)),
            local=("cross_attn",),
        ),
    ),
    leave=Leave(path="head", stream="img", along=(Along(arg="e", dim=1, streams=IMG, repeated=True),)),
    positions=("rope_embedder",),
)
