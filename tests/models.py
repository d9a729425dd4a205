"""Stock MODELs from tiny files, and how tests sample them."""

import torch
from pipemesh.launcher.parity import conditioning


def run(model, seed=7, steps=3, cfg=1.0, sampler="euler", positive=None, negative=None, size=(8, 10), batch=1, **kwargs):
    import comfy.sample

    latent = kwargs.pop("latent", torch.zeros(batch, 16, *size))
    with torch.inference_mode():
        return comfy.sample.sample(
            model,
            comfy.sample.prepare_noise(latent, seed),
            steps,
            cfg,
            sampler,
            "simple",
            positive or conditioning(1, 13),
            negative or conditioning(2, 7),
            latent,
            disable_pbar=True,
            seed=seed,
            **kwargs,
        )


def load(path):
    import comfy.sd

    return comfy.sd.load_diffusion_model(path)


def with_lora(model, files, strength):
    import comfy.sd
    import comfy.utils

    return comfy.sd.load_lora_for_models(model, None, comfy.utils.load_torch_file(files["lora"]), strength, 0)[0]
