"""Small VAEs of ComfyUI's own classes, with random weights."""

import json

import torch

KL = {
    "double_z": True,
    "z_channels": 4,
    "resolution": 256,
    "in_channels": 3,
    "out_ch": 3,
    "ch": 32,
    "ch_mult": [1, 2, 2],
    "num_res_blocks": 1,
    "attn_resolutions": [],
}
FACTORS = ("adaLN", "cond_embed", "t_embedder", "x_embedder", "s_embedder", ".q.")
VIDEO = {
    "dim": 8,
    "z_dim": 4,
    "dim_mult": [1, 2, 4, 4],
    "num_res_blocks": 1,
    "temperal_downsample": [False, True, True],
}


def random(model):
    """Weights that keep what goes through at one size."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, one in model.named_parameters():
            if one.dim() > 1 and not name.endswith("gamma"):
                one.normal_(std=(2 / one[0].numel()) ** 0.5, generator=generator)
            elif name.endswith("bias"):
                one.normal_(std=0.1, generator=generator)
            else:
                one.fill_(1.0)
    return model.eval().requires_grad_(False)


def image(fill=random, **options):
    from comfy.ldm.models.autoencoder import AutoencoderKL

    return fill(AutoencoderKL(ddconfig={**KL, **options}, embed_dim=4))


def video(fill=random, **options):
    from comfy.ldm.wan.vae import WanVAE

    return fill(WanVAE(**{**VIDEO, **options}))


def video_2_2():
    from comfy.ldm.wan.vae2_2 import WanVAE

    return random(WanVAE(dec_dim=8, **VIDEO))


def engine(module, **options):
    """Of an encoder and a decoder in one of ComfyUI's modules."""
    from comfy.ldm.models.autoencoder import AutoencodingEngine

    form = {"in_channels": 3, "out_channels": 3, "z_channels": 4, "num_res_blocks": 1, **options}
    form |= {"block_out_channels": [32, 64], "ffactor_spatial": 4, "ffactor_temporal": 2}
    parts = {
        f"{part}_config": {"target": f"{module}.{part.title()}", "params": form}
        for part in ("encoder", "decoder")
    }
    regularizer = {"target": "comfy.ldm.models.autoencoder.EmptyRegularizer"}
    return random(AutoencodingEngine(regularizer_config=regularizer, **parts))


def video_by_norms():
    from comfy.ldm.cogvideo.vae import AutoencoderKLCogVideoX

    return random(
        AutoencoderKLCogVideoX(latent_channels=4, layers_per_block=1, block_out_channels=(32, 32, 32, 64))
    )


def video_by_pixels(version, **changes):
    """Of a version's form, whose widths and depths are made small."""
    from comfy.ldm.lightricks.vae.causal_video_autoencoder import VideoVAE

    form = VideoVAE.get_default_config(None, version) | changes
    for name in ("blocks", "encoder_blocks", "decoder_blocks"):
        for block in form.get(name, ()):
            if block[0] == "res_x":
                block[1] = {**(block[1] if isinstance(block[1], dict) else {}), "num_layers": 1}
    model = random(VideoVAE(config={**form, "encoder_base_channels": 8, "decoder_base_channels": 8}))
    for name, one in model.per_channel_statistics.named_buffers():
        one.fill_(float(name.startswith("std")))
    return model


def image_in_windows(side=4):
    """Of small widths, and few blocks; windows are smaller than ComfyUI's."""
    from comfy.ldm.mage_flow import vae

    model = vae.MageVAE.__new__(vae.MageVAE)
    torch.nn.Module.__init__(model)
    encoder = {"hidden_size": 32, "num_blocks": 2, "head_size": 32, "num_head_blocks": 1}
    model.dconv_encoder = vae.DConvEncoder(**encoder)
    model.decoder_model = vae.DConvDenoiser(
        hidden_size=64, hidden_size_x=16, num_blocks=3, num_cond_blocks=2, bottleneck_dim=128
    )
    for one in model.modules():
        if isinstance(one, vae.AttnBlock):
            one.patch_size = side
    with torch.no_grad():
        for name, one in random(model).named_parameters():
            if any(part in name for part in FACTORS):  # which would make much of a rounding
                one.mul_(0.1)
    return model


def video_weights():
    """Of a form that ComfyUI detects in a file, as the next."""
    return video(z_dim=16, num_res_blocks=2).state_dict()


def image_weights(channels=16):
    """A decoder alone."""
    from comfy.ldm.modules.diffusionmodules.model import Decoder
    from torch import nn

    form = {**KL, "z_channels": channels, "ch_mult": [1, 2, 4, 4], "num_res_blocks": 2}
    parts = {"decoder": Decoder(**form), "post_quant_conv": nn.Conv2d(channels, channels, 1)}
    return {key: value.contiguous() for key, value in random(nn.ModuleDict(parts)).state_dict().items()}


def loaded(weights, config=None):
    from comfy.sd import VAE

    metadata = config and {"config": json.dumps({"vae": config})}
    return VAE(sd=dict(weights), dtype=torch.float32, metadata=metadata)


def noise(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(5))


def in_pool(vae, client):
    from pipemesh.parallel_runtime.client.remote_vae import parallelize_vae

    return parallelize_vae(vae, lambda: client, holds_ui_device=False)
