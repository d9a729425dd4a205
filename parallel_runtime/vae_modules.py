"""Lists the modules of VAEs that can be computed in bands of rows (spatial shards). A VAE can be
computed so if all its modules are listed.

Each module does the same to every row, or is hooked by ``methods/vae_bands.py``. Read:
comfy/ldm/models/autoencoder.py, comfy/ldm/modules/diffusionmodules/model.py, comfy/ldm/wan/vae.py
and vae2_2.py, comfy/ldm/hunyuan_video/vae.py and vae_refiner.py, comfy/ldm/cogvideo/vae.py,
comfy/ldm/lightricks/vae/*.py, comfy/ldm/mage_flow/vae.py, comfy/ops.py @ ComfyUI 0.30.0.
"""

from __future__ import annotations

from torch import nn

KNOWN = {
    "comfy.ldm.models.autoencoder": (
        "AutoencoderKL AutoencodingEngine DiagonalGaussianRegularizer EmptyRegularizer"
    ),
    "comfy.ldm.modules.diffusionmodules.model": (
        "Encoder Decoder ResnetBlock AttnBlock Downsample Upsample CarriedConv3d"
    ),
    "comfy.ldm.wan.vae": (
        "WanVAE Encoder3d Decoder3d ResidualBlock Resample AttentionBlock RMS_norm CausalConv3d"
    ),
    "comfy.ldm.wan.vae2_2": (
        "WanVAE Encoder3d Decoder3d ResidualBlock Resample Down_ResidualBlock Up_ResidualBlock AvgDown3D"
        " DupUp3D"
    ),
    "comfy.ldm.hunyuan_video.vae": "Encoder Decoder PixelShuffle2D PixelUnshuffle2D",
    "comfy.ldm.hunyuan_video.vae_refiner": "Encoder Decoder RMS_norm DnSmpl UpSmpl",
    "comfy.ldm.cogvideo.vae": (
        "AutoencoderKLCogVideoX Encoder3D Decoder3D CausalConv3d SpatialNorm3D ResnetBlock3D Downsample3D"
        " Upsample3D DownBlock3D MidBlock3D UpBlock3D"
    ),
    "comfy.ldm.lightricks.vae.causal_video_autoencoder": (
        "VideoVAE Encoder Decoder UNetMidBlock3D ResnetBlock3D SpaceToDepthDownsample DepthToSpaceUpsample"
        " LayerNorm processor"
    ),
    "comfy.ldm.lightricks.vae.causal_conv3d": "CausalConv3d",
    "comfy.ldm.lightricks.vae.pixel_norm": "PixelNorm",
    "comfy.ldm.lightricks.model": (
        "PixArtAlphaCombinedTimestepSizeEmbeddings Timesteps TimestepEmbedding"  # of no rows
    ),
    "comfy.ldm.mage_flow.vae": (
        "MageVAE DConvEncoder EncoderDiCoBlock DiCoBlock TimestepEmbedder LayerNorm2d DConvDenoiser"
        " BottleneckPatchEmbed NerfEmbedder SimpleMLPAdaLN MLPResBlock NerfFinalLayer YEmbedder CoDDecoder"
        " ResnetBlock AttnBlock"
    ),
    "comfy.ops": "Conv2d Conv3d GroupNorm LayerNorm RMSNorm Linear",
    "torch.nn": (
        "Module ModuleList Sequential Identity Dropout SiLU Sigmoid Upsample ZeroPad2d BatchNorm2d"
        " AdaptiveAvgPool2d"
    ),
}
BY_STOCK = {
    "CausalDiffusionVAE": "its decoder attends to neighbours in rows, columns and frames at once",
    "MiniMaxH3VideoVAE": "it computes tiles of a picture itself, each by a transformer",
    "PixelspaceConversionVAE": "it computes nothing",
    "VideoAutoencoderKLWrapper": "it cuts pictures into tiles itself, and convolutions by their memory",
}
NAMES = {(module, name) for module, names in KNOWN.items() for name in names.split()}
RANDOM = ("sample", "inject_noise")
IN_CHUNKS, CHUNK_SIZE = "forward_orig", "get_max_chunk_size"  # a method, and what it asks for their bytes
PUT_IN_PLACE = ("forward", IN_CHUNKS, "_conv_forward", "encode", "decode")  # of a module's own class


def why_not_in_bands(model: nn.Module) -> str:
    """Return why ``model`` cannot be computed in bands of rows; empty if it can."""
    name = type(model).__name__
    if name in BY_STOCK or "Audio" in name:
        return BY_STOCK.get(name, "sound has no rows")
    for path, module in model.named_modules():
        kind = type(module)
        place = "torch.nn" if kind.__module__.startswith("torch.nn.modules.") else kind.__module__
        if (place, kind.__qualname__.removeprefix("disable_weight_init.")) not in NAMES:
            return f"nobody has tried to cut its {kind.__name__} ({path or 'itself'}) into bands of rows"
        named = [name for name in PUT_IN_PLACE if name in vars(module)]
        if named or module._forward_pre_hooks or module._forward_hooks:
            what = named[0] if named else "hooks"
            return f"a node has put code of its own into it ({path}.{what})"
        if isinstance(module, (nn.Conv2d, nn.Conv3d)) and (
            isinstance(module.padding, str)
            or module.padding_mode not in ("zeros", "reflect")
            or (module.padding_mode == "reflect" and module.stride[-2] > 1)
        ):
            return f"its edges are {module.padding_mode} ({path})"
        if hasattr(module, IN_CHUNKS) and CHUNK_SIZE not in getattr(kind, IN_CHUNKS).__code__.co_names:
            return f"its {kind.__name__} ({path}) cuts frames into chunks in a new way"
        if (
            any(getattr(module, name, False) is True for name in RANDOM)
            or getattr(module, "pad_mode", "") == "replicate"
        ):
            return f"its {kind.__name__} ({path}) draws random numbers, or repeats rows"
    return ""
