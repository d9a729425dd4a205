"""Small VAEs of ComfyUI's own classes, with random weights."""

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


def loaded(weights):
    from comfy.sd import VAE

    return VAE(sd=dict(weights), dtype=torch.float32)


def noise(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(5))
