"""Measure a VAE by bands of rows: two ranks that decode one picture, or one video, beside stock's
decode.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from .capacity import capacity, speedup
from .figures import CaseFigures, Figure, Goal, Options, Round
from .lockstep import Phase, Ranks, merge, run, timed
from .sp import efficiency, patch_tax

# Latents of each VAE, whose decode takes two seconds or more
CASES = {"AutoencoderKL": (1, 16, 64, 64), "Wan 2.1": (1, 16, 3, 48, 4)}
EFFICIENCY, OF_CAPACITY = 0.90, 0.85  # goals


def of_capacity(rounds: Sequence[Round]) -> float:
    return speedup(rounds) / capacity(rounds)


def model_of(case: str) -> Any:
    """Make a VAE of ComfyUI's with random weights."""
    from comfy.ldm.models.autoencoder import AutoencoderKL
    from comfy.ldm.wan.vae import WanVAE

    form = {"num_res_blocks": 2, "dim_mult": [1, 2, 4, 4], "temperal_downsample": [False, True, True]}
    image = {"double_z": True, "z_channels": 16, "resolution": 256, "in_channels": 3, "out_ch": 3, "ch": 32}
    image |= {"ch_mult": [1, 2, 4, 4], "num_res_blocks": 2, "attn_resolutions": []}
    made = (
        AutoencoderKL(ddconfig=image, embed_dim=16)
        if case == "AutoencoderKL"
        else WanVAE(dim=96, z_dim=16, **form)
    )
    return random_weights(made)


def random_weights(model: Any) -> Any:
    """Weights that keep what goes through at one size."""
    import torch

    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, one in model.named_parameters():
            if one.dim() > 1 and not name.endswith("gamma"):
                one.normal_(std=(2 / one[0].numel()) ** 0.5, generator=generator)
            else:
                one.fill_(float(not name.endswith("bias")))
    return model.eval().requires_grad_(False)


def by_bands(model: Any, latent: Any, comm: Any) -> float:
    """Seconds of this rank's part of a decoding by bands."""
    import torch

    from ...parallel_runtime.methods.vae_bands import BandsOfRows
    from ...parallel_runtime.patches import Part

    method, arguments = (
        BandsOfRows(model, comm, torch.device("cpu")),
        {"samples": latent, "unit": 1, "options": {}},
    )
    method.attach()
    try:
        method.begin(Part(1, 0))
        with torch.inference_mode():
            return timed(lambda: method.forward(model.decode, arguments, 1))
    finally:
        method.detach()


def measure(ranks: Ranks, case: str, rounds: int) -> list[Round]:
    import torch

    from ...parallel_runtime.layout import Layout
    from .forwards import standin

    layout = Layout(ulysses=ranks.size)
    mesh = ranks.connect(layout)
    model, latent = model_of(case), torch.randn(CASES[case], generator=torch.Generator().manual_seed(5))

    def whole() -> float:
        with torch.inference_mode():
            return timed(lambda: model.decode(latent))

    standins = [standin(layout, rank) for rank in range(ranks.size)]
    return ranks.measure(
        {
            "alone": Phase(whole, alone=True),
            "parallel": Phase(lambda: by_bands(model, latent, mesh.sequence)),
            "both": Phase(whole),
            "shards": Phase(lambda: sum(by_bands(model, latent, one) for one in standins), alone=True),
        },
        rounds,
    )


def bench(options: Options) -> Iterator[Figure]:
    for case in options.only or CASES:
        rounds = merge(run(options.host, 2, "vae:measure", case=case, rounds=options.rounds))
        made = CaseFigures("vae", case, rounds)
        yield made.estimated("efficiency", efficiency, "ratio", Goal(at_least=EFFICIENCY))
        yield made.estimated("speedup", speedup, "x")
        yield made.estimated("of_capacity", of_capacity, "ratio", Goal(at_least=OF_CAPACITY))
        yield made.estimated("band_tax", patch_tax, "ratio")
        yield made.estimated("capacity", capacity, "x")
