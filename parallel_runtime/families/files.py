"""How checkpoint files are laid out from which ComfyUI detects a model
(comfy/model_detection.py@0.30.0): every tensor, under its name in the file.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from .sample import Config, FileForm, Shapes

# Name -> (fan in, fan out) of a linear layer with a bias, or (size,) of a norm
Layers = Mapping[str, tuple[int, ...]]


def tensors(layers: Layers, norm: str) -> Shapes:
    """``norm``: what files call the tensor of a norm."""
    shapes: dict[str, tuple[int, ...]] = {}
    for name, sizes in layers.items():
        if len(sizes) == 1:
            shapes[f"{name}.{norm}"] = sizes
        else:
            shapes |= {f"{name}.weight": sizes[::-1], f"{name}.bias": sizes[1:]}
    return shapes


def blocks(path: str, count: int, layers: Layers) -> Layers:
    """The same layers in each block of a container."""
    return {f"{path}.{block}.{name}": sizes for block in range(count) for name, sizes in layers.items()}


def flux(config: Config) -> Shapes:
    """Flux 1, as in black-forest-labs' files: heads = hidden / 128."""
    hidden, head_dim = config["hidden_size"], sum(config["axes_dim"])
    mlp, pixels = int(hidden * config["mlp_ratio"]), config["in_channels"] * config["patch_size"] ** 2
    embedders = {"time_in": 256, "vector_in": config["vec_in_dim"]} | (
        {"guidance_in": 256} if config["guidance_embed"] else {}
    )
    norms = {"query_norm": (head_dim,), "key_norm": (head_dim,)}
    stream: Layers = {
        "mod.lin": (hidden, 6 * hidden),
        "attn.qkv": (hidden, 3 * hidden),
        **{f"attn.norm.{name}": size for name, size in norms.items()},
        "attn.proj": (hidden, hidden),
        "mlp.0": (hidden, mlp),
        "mlp.2": (mlp, hidden),
    }
    single: Layers = {
        "modulation.lin": (hidden, 3 * hidden),
        "linear1": (hidden, 3 * hidden + mlp),
        **{f"norm.{name}": size for name, size in norms.items()},
        "linear2": (hidden + mlp, hidden),
    }
    layers: Layers = {
        "img_in": (pixels, hidden),
        "txt_in": (config["context_in_dim"], hidden),
        **{f"{name}.in_layer": (width, hidden) for name, width in embedders.items()},
        **{f"{name}.out_layer": (hidden, hidden) for name in embedders},
        **blocks(
            "double_blocks",
            config["depth"],
            {f"{kind}_{name}": sizes for kind in ("img", "txt") for name, sizes in stream.items()},
        ),
        **blocks("single_blocks", config["depth_single_blocks"], single),
        "final_layer.adaLN_modulation.1": (hidden, 2 * hidden),
        "final_layer.linear": (hidden, pixels),
    }
    return tensors(layers, "scale")


def wan(config: Config) -> Shapes:
    """The text-to-video model of Wan 2.1 and 2.2."""
    hidden, ffn, patch = config["dim"], config["ffn_dim"], config["patch_size"]
    block: Layers = {
        **{
            f"{attention}.{part}": (hidden, hidden)
            for attention in ("self_attn", "cross_attn")
            for part in "qkvo"
        },
        **{
            f"{attention}.norm_{part}": (hidden,)
            for attention in ("self_attn", "cross_attn")
            for part in "qk"
        },
        "ffn.0": (hidden, ffn),
        "ffn.2": (ffn, hidden),
    }
    layers: Layers = {
        "text_embedding.0": (config["text_dim"], hidden),
        "text_embedding.2": (hidden, hidden),
        "time_embedding.0": (config["freq_dim"], hidden),
        "time_embedding.2": (hidden, hidden),
        "time_projection.1": (hidden, 6 * hidden),
        "head.head": (hidden, config["out_dim"] * math.prod(patch)),
        **blocks("blocks", config["num_layers"], block),
    }
    bare: dict[str, tuple[int, ...]] = {
        "modulation": (1, 6, hidden),
        "norm3.weight": (hidden,),
        "norm3.bias": (hidden,),
    }
    return {
        "patch_embedding.weight": (hidden, config["in_dim"], *patch),
        "patch_embedding.bias": (hidden,),
        "head.modulation": (1, 2, hidden),
        **tensors(layers, "weight"),
        **blocks("blocks", config["num_layers"], bare),
    }


FLUX = FileForm(
    shapes=flux, head_dim=128, lora_targets=("attn.qkv", "attn.proj", "mlp.0", "mlp.2", "linear1", "linear2")
)
WAN = FileForm(
    shapes=wan,
    head_dim=128,
    text_dim=4096,
    lora_targets=("attn.q", "attn.k", "attn.v", "attn.o", "ffn.0", "ffn.2"),
)
