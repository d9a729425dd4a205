"""Sample a family's tiny request on a MODEL as ComfyUI's KSampler does: by these samples the host
trial and the parity command compare the pool with stock.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ...parallel_runtime.families.sample import Masks, Sample

if TYPE_CHECKING:
    from comfy.model_patcher import ModelPatcher

TEXT_DIM, POOLED_DIM = 64, 32  # of the samples' tiny sizes


def empty_latent_of(facts: Sample, tokens: str, batch: int = 1) -> Any:
    """A latent of ``batch`` images, or several in a NestedTensor."""
    shape = facts.latents[tokens]
    if isinstance(shape[0], int):
        return torch.zeros(batch * shape[0], *shape[1:])
    from comfy.nested_tensor import NestedTensor

    return NestedTensor([torch.zeros(batch * one[0], *one[1:]) for one in shape])


def sampled(
    model: ModelPatcher,
    facts: Sample,
    tokens: str,
    cfg: float,
    is_masked: bool,
    sampler: str,
    seed: int,
    steps: int,
    batch: int = 1,
) -> torch.Tensor:
    """Sample an "even" or "odd" number of image and text ``tokens``. Several latents come back in
    one row.
    """
    import comfy.sample

    latent = empty_latent_of(facts, tokens, batch)
    texts = (16, 24) if tokens == "even" else (13, 7)
    masks, grid = (
        attention_masks(facts.masks, texts, latent)
        if facts.masks and (is_masked or facts.masks.open)
        else ([None, None], (0, 0))
    )
    prompts = []
    for side, (length, mask) in enumerate(zip(texts, masks, strict=True)):
        ((text, extras),) = conditioning(side + 1, length, mask, grid)
        prompts.append([[text, {**extras, **facts.extras(latent, side)}]])
    options = {"noise_mask": facts.noise_mask(latent)} if facts.noise_mask is not None else {}
    with torch.inference_mode():
        given = (model, comfy.sample.prepare_noise(latent, seed), steps, cfg, sampler, "simple", *prompts)
        samples = comfy.sample.sample(*given, latent, disable_pbar=True, seed=seed, **options)
    return torch.cat([one.flatten() for one in samples.unbind()]) if samples.is_nested else samples


def attention_masks(
    masks: Masks, texts: tuple[int, int], latent: torch.Tensor
) -> tuple[list[torch.Tensor], tuple[int, int]]:
    """Make a mask for each prompt, over its text and image tokens, and the image's token grid."""
    if masks.open:
        return [torch.ones(1, text, dtype=torch.long) for text in texts], (0, 0)
    if masks.text_only:
        return [text_mask(7 + text, text) for text in texts], (0, 0)
    grid = (-(-latent.shape[-2] // masks.side), -(-latent.shape[-1] // masks.side))
    return [attention_mask(7 + text, (masks.text or text) + grid[0] * grid[1]) for text in texts], grid


def conditioning(
    seed: int, tokens: int, mask: torch.Tensor | None = None, image: tuple[int, int] = (0, 0)
) -> list:
    """Make a random prompt. ``mask`` covers text and image tokens; ComfyUI takes it only together
    with the token grid of the ``image``.
    """
    generator = torch.Generator().manual_seed(seed)
    extras: dict[str, Any] = {"pooled_output": torch.randn(1, POOLED_DIM, generator=generator)}
    if mask is not None:
        extras |= {"attention_mask": mask, "attention_mask_img_shape": image}
    return [[torch.randn(1, tokens, TEXT_DIM, generator=generator), extras]]


def attention_mask(seed: int, tokens: int) -> torch.Tensor:
    """Make an additive mask (1, L, L) that closes a random part of the tokens to each token, never
    the token itself.
    """
    open_ = torch.rand(1, tokens, tokens, generator=torch.Generator().manual_seed(seed)) > 0.4
    open_ |= torch.eye(tokens, dtype=torch.bool)
    return torch.zeros(1, tokens, tokens).masked_fill(~open_, -10000.0)


def text_mask(seed: int, tokens: int) -> torch.Tensor:
    """Make a mask (1, L) of ones and zeros that closes a random part of the tokens, never the first
    one.
    """
    mask = (torch.rand(1, tokens, generator=torch.Generator().manual_seed(seed)) > 0.4).long()
    return mask.index_fill(1, torch.tensor([0]), 1)
