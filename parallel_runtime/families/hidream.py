"""HiDream I1 and E1 (comfy/ldm/hidream/model.py@0.30.0): image before text, a mixture of experts in
every block.

Behind the text that the blocks change stand, in every block, other tokens: a layer of the language
model that read the prompt. E1 puts the given picture beside the latent.
"""

import torch

from .plan import Along, Blocks, Leave, Together, TokenPlan
from .sample import Config, Released, Size, Tiny, TokenParts, random_extras, sample

JOINT = ("img", "txt")
ROPE = (Along(arg="rope", dim=1, streams=JOINT),)
TXT = ("txt",)

PLAN = TokenPlan(
    streams=JOINT,
    blocks=(
        Blocks(
            path="double_stream_blocks",
            tokens={"image_tokens": ("img",), "text_tokens": TXT},
            along=ROPE,
            sliced_between=TXT,
        ),
        Blocks(path="single_stream_blocks", tokens={"image_tokens": JOINT}, along=ROPE, sliced_between=TXT),
    ),
    leave=Leave(path="final_layer", stream="img"),
    together=Together(arguments=("image_cond",)),
)


def config(size: Size) -> Config:
    """Every token goes to both experts: a choice between two that are as good would hang on the
    last bit.
    """
    double_blocks, single_blocks = size.blocks
    return {
        "attention_head_dim": size.head_dim,
        "axes_dims_rope": [8, 4, 4],
        "caption_channels": [size.text_dim, size.text_dim],
        "max_resolution": [128, 128],
        "in_channels": 16,
        "out_channels": 16,
        "llama_layers": list(range(double_blocks + single_blocks)),
        "num_attention_heads": size.heads,
        "num_routed_experts": 2,
        "num_layers": double_blocks,
        "num_single_layers": single_blocks,
        "patch_size": 2,
        "text_emb_dim": size.pooled_dim,
    }


# What the language model read, layer by layer; for an edit, the picture too
READ = {"conditioning_llama3": (1, 4, 7, 64)}
prompt, edit = random_extras(**READ), random_extras(**READ, concat_latent_image=(1, 16, ...))
RELEASED = Released(
    name="hidream-i1-17b",
    size=Size(heads=20, head_dim=128, blocks=(16, 32), text_dim=4096, pooled_dim=2048),
    text=128,
    changes={
        "axes_dims_rope": [64, 32, 32],
        "llama_layers": [*range(31), *(31,) * 17],
        "num_routed_experts": 4,
    },
    extras=lambda latent: {"conditioning_llama3": torch.zeros(1, 32, 128, 4096)},
    cut=TokenParts(experts=4, chosen=2),
)
TINY = Tiny(blocks=(2, 2))

SAMPLES = (
    sample("hidream-i1", "HiDream", config, RELEASED, tiny=TINY, prompt_extras=prompt),
    sample("hidream-e1", "HiDream", config, tiny=TINY, prompt_extras=edit),
)
