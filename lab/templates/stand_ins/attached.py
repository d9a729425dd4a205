"""What attaches to a model, in place of files: ComfyUI's own networks at the width of the random
models, with random weights.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable
from typing import Any

import comfy.cldm.dit_embedder
import comfy.controlnet
import comfy.latent_formats
import comfy.ldm.anima.lllite as lllite
import comfy.ldm.flux.redux
import comfy.ldm.lightricks.latent_upsampler
import comfy.ldm.lumina.controlnet
import comfy.ldm.qwen_image.controlnet
import comfy.model_management
import comfy.model_patcher
import comfy.ops
import comfy.sd
import torch
from comfy_extras import nodes_model_patch

from ....parallel_runtime.families.catalogue import SAMPLES
from ....parallel_runtime.families.sample import Size, random_tensor
from .media import SEEN_TOKENS
from .names import HEADS, SIGHTS, UnknownName, known

OPERATIONS = {"operations": comfy.ops.manual_cast, "dtype": torch.float32, "device": torch.device("cpu")}
SIGLIP = known(SIGHTS, "siglip", "CLIP vision model")


def size_of(sample: str) -> Size:
    return SAMPLES[sample].tiny.size(HEADS)


def filled(module: Any, name: str) -> Any:
    """The module with weights drawn by the file's name."""
    seed = zlib.crc32(name.encode())
    module.load_state_dict(
        {
            key: random_tensor(key, tuple(old.shape), seed, old.dtype)
            for key, old in module.state_dict().items()
        }
    )
    return module.eval()


def patcher_of(module: Any) -> Any:
    cpu = torch.device("cpu")
    return comfy.model_patcher.ModelPatcher(
        module, load_device=comfy.model_management.get_torch_device(), offload_device=cpu
    )


def first_of(table: tuple[tuple[str, Callable[[str], Any]], ...], name: str, what: str) -> Any:
    for pattern, make in table:
        if re.search(pattern, name, re.I):
            return make(name)
    raise UnknownName(f"{name} is no {what} that lab/templates/stand_ins/attached.py knows")


# -- model patches


def blockwise(name: str) -> Any:
    size = size_of("qwen-image")
    return nodes_model_patch.QwenImageBlockWiseControlNet(
        num_layers=size.blocks[0],
        in_dim=64,
        additional_in_dim=4 if "inpaint" in name else 0,
        dim=size.hidden,
        **OPERATIONS,
    )


def style_projector(name: str) -> Any:
    return nodes_model_patch.SigLIPMultiFeatProjModel(
        siglip_token_nums=SEEN_TOKENS,
        style_token_nums=4,
        siglip_token_dims=SIGLIP,
        hidden_size=size_of("flux").hidden,
        **OPERATIONS,
    )


def union_control(name: str) -> Any:
    """Of one layer: ComfyUI lays control layers out over 30 blocks, and keeps what it computed
    until the last of them, which a random model has not.
    """
    size = size_of("z-image")
    newer = {"additional_in_dim": 17, "refiner_control": True} if "2.1" in name else {}
    return comfy.ldm.lumina.controlnet.ZImage_Control(
        dim=size.hidden,
        n_heads=size.heads,
        n_kv_heads=size.heads,
        multiple_of=16,
        ffn_dim_multiplier=1.0,
        n_control_layers=1,
        **newer,
        **OPERATIONS,
    )


def low_rank_control(name: str) -> Any:
    """An AnimaLLLite: it takes its dims from the names and shapes of its file."""
    size, inpaints, emb, rank = size_of("cosmos-predict2"), "inpaint" in name, 8, 4
    conditioning = lllite.AnimaLLLiteConditioning(4 if inpaints else 3, 16, emb, 1, (1, 2), **OPERATIONS)
    module = lllite.AnimaLLLiteModule(size.hidden, emb, rank, **OPERATIONS)
    state = {f"lllite_conditioning1.{key}": tensor for key, tensor in conditioning.state_dict().items()}
    for block in range(size.blocks[0]):
        for part in ("self_attn_q_proj", "self_attn_v_proj", "cross_attn_q_proj", "mlp_layer1"):
            state |= {
                f"lllite_dit_blocks_{block}_{part}.{key}": tensor
                for key, tensor in module.state_dict().items()
            }
    metadata = {
        "lllite.aspp_dilations": "1,2",
        "lllite.inpaint_masked_input": "true" if inpaints else "false",
    }
    return lllite.AnimaLLLite(state, metadata, **OPERATIONS)


def talk(name: str) -> Any:
    size = SAMPLES["wan2.1-i2v"].tiny.size(40)
    return nodes_model_patch.MultiTalkModelPatch(
        in_dim=size.hidden,
        intermediate_dim=32,
        out_dim=64,
        context_tokens=4,
        num_layers=size.blocks[0],
        **OPERATIONS,
    )


MODEL_PATCHES = (
    (r"uso", style_projector),
    (r"lllite", low_rank_control),
    (r"qwen_image.*diffsynth", blockwise),
    (r"Z-Image.*Controlnet", union_control),
    (r"infiniteTalk", talk),
)


def make_model_patch(name: str) -> Any:
    return patcher_of(filled(first_of(MODEL_PATCHES, name, "model patch"), name))


# -- ControlNets


def large_control(name: str) -> Any:
    size = SAMPLES["sd3"].tiny.size(4)
    network = comfy.cldm.dit_embedder.ControlNetEmbedder(
        img_size=None,
        patch_size=2,
        in_chans=16,
        num_layers=size.blocks[0],
        main_model_double=size.blocks[0],
        double_y_emb=False,
        attention_head_dim=size.head_dim,
        num_attention_heads=size.heads,
        adm_in_channels=size.pooled_dim,
        **OPERATIONS,
    )
    return comfy.controlnet.ControlNetSD35(
        filled(network, name), compression_ratio=1, latent_format=comfy.latent_formats.SD3()
    )


def instantx(name: str) -> Any:
    sample, inpaints = SAMPLES["qwen-image"], "inpaint" in name.lower()
    config = {**sample.form.config(size_of("qwen-image")), "num_layers": 2}
    network = comfy.ldm.qwen_image.controlnet.QwenImageControlNetModel(
        extra_condition_channels=4 if inpaints else 0, **{**config, **OPERATIONS}
    )
    network.main_model_double = size_of("qwen-image").blocks[0]
    return comfy.controlnet.ControlNet(
        filled(network, name),
        compression_ratio=1,
        latent_format=comfy.latent_formats.Wan21(),
        concat_mask=inpaints,
        extra_conds=[],
    )


def fun_control(name: str) -> Any:
    size = size_of("qwen-image")
    network = comfy.ldm.qwen_image.controlnet.QwenImageFunControlNetModel(
        inner_dim=size.hidden,
        num_attention_heads=size.heads,
        attention_head_dim=size.head_dim,
        num_control_blocks=2,
        main_model_double=size.blocks[0],
        injection_layers=(0, 2),
        **OPERATIONS,
    )
    return comfy.controlnet.QwenFunControlNet(
        filled(network, name),
        compression_ratio=1,
        latent_format=comfy.latent_formats.Wan21(),
        concat_mask=False,
        extra_conds=[],
    )


CONTROL_NETS = (
    (r"sd3\.5_large_controlnet", large_control),
    (r"InstantX", instantx),
    (r"Fun-Controlnet", fun_control),
)


def make_control_net(name: str) -> Any:
    return first_of(CONTROL_NETS, name, "ControlNet")


# -- others


def make_style_model(name: str) -> Any:
    encoder = comfy.ldm.flux.redux.ReduxImageEncoder(
        redux_dim=SIGLIP, txt_in_features=size_of("flux").text_dim, dtype=torch.float32
    )
    return comfy.sd.StyleModel(filled(encoder, name))


def make_latent_upscaler(name: str) -> Any:
    config = {"in_channels": 128, "mid_channels": 32, "num_blocks_per_stage": 1, "dims": 3}
    network = comfy.ldm.lightricks.latent_upsampler.LatentUpsampler.from_config(
        config, operations=comfy.ops.disable_weight_init
    )
    return patcher_of(filled(network, name))
