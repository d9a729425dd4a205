"""Stock ComfyUI against the pool on the same seed, through ``comfy.sample.sample``. Shown able to fail by broken ranks."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from pipemesh.launcher.devices import place
from pipemesh.launcher.parity import (
    BOUND,
    Bench,
    Case,
    attention_mask,
    conditioning,
    full_product,
    pairwise_cover,
    relative_error,
    sample,
    stock_model,
)
from pipemesh.launcher.pool import PoolHandle
from pipemesh.parallel_runtime.client.remote_model import Client
from pipemesh.parallel_runtime.client.remote_patcher import parallelize
from pipemesh.parallel_runtime.layout import Layout

from .random_models import flux2_patcher


@pytest.fixture(scope="module")
def bench(clients):
    return Bench(clients)


@pytest.mark.parametrize("case", sorted(pairwise_cover(full_product()), key=lambda case: case.ranks), ids=str)
def test_the_pool_computes_what_stock_computes(bench, case):
    assert bench.error(case) <= BOUND


def test_the_cover_holds_every_pair_of_values_of_two_axes():
    cover = pairwise_cover(full_product())
    for case in full_product():
        assert any(c.ranks == case.ranks and c.sampler == case.sampler for c in cover)
        assert any(c.heads == case.heads and c.mask == case.mask for c in cover)
        assert any(c.tokens == case.tokens and c.cfg == case.cfg for c in cover)
    assert len(cover) < len(full_product()) / 8


def test_a_mask_changes_the_picture_so_that_dropping_it_would_show(bench):
    case = Case(1, "odd", 5, 1.0, True, "euler")
    with_mask, without = (sample(bench.stock(5), replace(case, mask=mask)) for mask in (True, False))
    assert relative_error(with_mask, without) > 1e-2


@pytest.mark.parametrize(
    "mutation, case",
    [
        ("gather_order", Case(2, "odd", 5, 1.0, False, "euler")),
        ("token_order", Case(2, "even", 12, 1.0, False, "euler")),
        ("mask_permutation", Case(2, "odd", 12, 1.0, True, "euler")),
        ("mask_dropped", Case(2, "odd", 12, 1.0, True, "euler")),
        ("pe_slice", Case(2, "even", 12, 1.0, False, "euler")),
        ("uneven_split", Case(2, "odd", 5, 1.0, False, "euler")),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_parity_goes_red_when_a_rank_breaks(setup, bench, mutation, case):
    argv = (sys.executable, str(Path(__file__).with_name("mutant_worker.py")), mutation, "{fd}", "{parent}")
    handle = PoolHandle(place(Layout(ulysses=case.ranks), "cpu", "gloo", ()), replace(setup, argv=argv))
    try:
        broken = parallelize(bench.stock(case.heads), Client(handle, shares_weights=True), holds_ui_device=False)
        assert relative_error(sample(broken, case), sample(bench.stock(case.heads), case)) > 100 * BOUND
    finally:
        handle.close()


@pytest.mark.parametrize("ranks", [2, 4])
def test_bf16_is_no_further_from_the_truth_than_stock_bf16(clients, ranks):
    case = Case(ranks, "odd", 5, 1.0, False, "euler")
    truth = sample(stock_model(5), case)
    stock = stock_model(5, torch.bfloat16)
    rounded = sample(stock, case)
    ours = sample(parallelize(stock, clients(ranks), holds_ui_device=False), case)
    distance, stock_distance = (float((latent - truth).square().mean().sqrt()) for latent in (ours, rounded))
    assert stock_distance > 1e-3 * float(truth.std()), "the model was not run in bf16"
    assert distance <= 1.2 * stock_distance


@pytest.mark.parametrize("text_tokens", [1, 2, 3])
def test_fewer_text_tokens_than_ranks_are_exact_too(clients, bench, text_tokens):
    import comfy.sample

    def run(model):
        latent = torch.zeros(2, 16, 6, 2)
        noise = comfy.sample.prepare_noise(latent, 3)
        mask = attention_mask(5, text_tokens + 3)
        positive, negative = conditioning(1, text_tokens, mask, (3, 1)), conditioning(2, 1)
        with torch.inference_mode():
            return comfy.sample.sample(model, noise, 3, 2.0, "euler", "simple", positive, negative, latent, disable_pbar=True, seed=3)

    stock = bench.stock(5)
    assert relative_error(run(bench.parallel(5, 4)), run(stock)) <= BOUND


def with_references(model, method, channels, size=(10, 14)):
    """Samples with two reference latents, as Kontext-like workflows do."""
    import comfy.sample

    reference = torch.randn(1, channels, 9, 8, generator=torch.Generator().manual_seed(4))
    extras = {"reference_latents": [reference, reference[:, :, :4]], "reference_latents_method": method}
    text = [[tensor, {**options, **extras}] for tensor, options in conditioning(1, 13)]
    latent = torch.zeros(1, channels, *size)
    with torch.inference_mode():
        return comfy.sample.sample(
            model, comfy.sample.prepare_noise(latent, 3), 3, 1.0, "euler", "simple", text, text, latent, disable_pbar=True, seed=3
        )


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("method", ["offset", "index", "uxo"])
def test_reference_latents_are_sharded_exactly(clients, bench, ranks, method):
    truth = with_references(bench.stock(5), method, 16)
    assert relative_error(with_references(bench.parallel(5, ranks), method, 16), truth) <= BOUND


@pytest.fixture(scope="module")
def flux2():
    return flux2_patcher(heads=5)


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("method", ["index", "index_timestep_zero"])
def test_flux_2_is_exact_with_a_second_timestep_for_its_references(clients, flux2, ranks, method):
    truth = with_references(flux2, method, 128, size=(5, 7))
    ours = with_references(parallelize(flux2, clients(ranks), holds_ui_device=False), method, 128, size=(5, 7))
    assert relative_error(ours, truth) <= BOUND
