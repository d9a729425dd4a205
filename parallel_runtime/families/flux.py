"""Flux 1 and Flux 2 (comfy/ldm/flux/model.py@0.30.0): text and image apart in the double blocks,
joined in the single ones.
"""

from .plan import Along, Blocks, Leave, Ranges, TokenPlan

JOINT = ("txt", "img")

FLUX = TokenPlan(
    family="flux",
    models=("comfy.ldm.flux.model:Flux",),
    streams=JOINT,
    blocks=(
        Blocks(
            path="double_blocks",
            tokens={"txt": ("txt",), "img": ("img",)},
            returns=("img", "txt"),
            control="input",
            along=(Along(arg="pe", dim=2, streams=JOINT),),
            ranges=(Ranges(arg="modulation_dims_img", stream="img"), Ranges(arg="modulation_dims_txt", stream="txt")),
        ),
        Blocks(
            path="single_blocks",
            tokens={"x": JOINT},
            control="output",
            along=(Along(arg="pe", dim=2, streams=JOINT),),
            ranges=(Ranges(arg="modulation_dims", stream="img", after="txt"),),
        ),
    ),
    leave=Leave(path="final_layer", stream="img", ranges=(Ranges(arg="modulation_dims", stream="img"),)),
    positions=("pe_embedder",),
)
