"""Models whose weights are quantised: in the pool they are as far from the fp32 truth as stock's
are, in every format that ComfyUI loads, with and without a LoRA.
"""

import itertools
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import comfy.model_management as mm
import comfy.sd
import comfy.utils
import pytest
import torch
from comfy.ops import pick_operations
from comfy_kitchen.exceptions import NoCapableBackendError
from pipemesh.lab.commands.parity import Case, rms, sample
from pipemesh.lab.quantised_files import FORMATS, taken_by, write_quantised
from pipemesh.lab.random_files import write_lora, write_model
from pipemesh.parallel_runtime.client.remote_patcher import Patching, parallelize
from pipemesh.parallel_runtime.crossing.prepared_text import METHOD
from pipemesh.parallel_runtime.crossing.source import describe_source
from pipemesh.parallel_runtime.errors import Refused
from pipemesh.parallel_runtime.families.catalogue import FAMILIES, PLAIN, SAMPLES, classes_of
from pipemesh.parallel_runtime.families.sample import Size
from pipemesh.parallel_runtime.weights.background_check import BackgroundCheck
from pipemesh.parallel_runtime.worker.preparation import PRODUCTS, answer_alike
from pipemesh.pool.trial.comparisons import model_of
from safetensors.torch import load_file, save_file
from torch.distributed import HashStore

from ..fixtures import ALL, ROOT, running_clients
from ..kit.models import run
from ..kit.models import with_lora as with_model_lora
from ..kit.pipelines import ALL_WARM

# Our distance from the fp32 truth over stock's; far below 1, the ranks would not quantise
BOUNDS = (0.8, 1.2)
SHARED = "weights shared out"
LAYOUTS = {"ulysses": (2,), "ring": (1, 2), "pipefusion": (1, 1, 2), SHARED: (2,)}
SAMPLE_OF = {family.samples[0].name: family.samples[0] for family in FAMILIES}
# Its loader names no dtype to compute in, so that quantised weights leave theirs open
WITHOUT_FILE = "ltxv"
HEADS = 8  # of models without a file: their layers are as wide then as those that are quantised


def size_of(family):
    """Two small blocks: one for each stage."""
    sample = SAMPLE_OF[family]
    file, containers = sample.form.file, len(sample.tiny.size(2).blocks)
    blocks = (2,) if containers == 1 else (1,) * containers
    if file is None:
        return replace(sample.tiny.size(HEADS), blocks=blocks)
    return Size(heads=2, head_dim=file.head_dim, blocks=blocks, text_dim=file.text_dim or 64)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """(family, format) -> the path of a file; no format: in fp32; "lora": a LoRA of all its
    layers.
    """
    folder = tmp_path_factory.mktemp("quantised")

    @cache
    def file(family, form=""):
        path, sample = folder / f"{family}-{form}.safetensors", SAMPLE_OF[family]
        has_loader, size = sample.form.file is not None, size_of(family)
        if form == "lora":
            layers = [name for name, tensor in load_file(file(family)).items() if tensor.dim() == 2]
            write_lora(path, file(family), tuple(name.removesuffix(".weight") for name in layers), size=0.2)
        elif form and has_loader:
            write_quantised(path, file(family), form)
        elif has_loader:
            write_model(path, sample.form, size)
        else:
            transformer = sample.form.random_model(size).model.diffusion_model
            if form:
                write_quantised(path, file(family), form, taken_by(transformer, form))
            else:
                save_file(transformer.state_dict(), path)
        return str(path)

    return file


def text(seed, tokens, dim, **extras):
    random = torch.Generator().manual_seed(seed)
    tensor, pooled = (torch.randn(size, generator=random) for size in ((1, tokens, dim), (1, 32)))
    return [[tensor, {"pooled_output": pooled, **extras}]]


def sampled(model, family, cfg=1.0):
    if SAMPLE_OF[family].form.file is None:
        return sample(model, Case(family, "ulysses1", "odd", HEADS, cfg, False, "euler"), steps=3)
    latent = torch.zeros(SAMPLE_OF[family].latents["odd"])
    dim = size_of(family).text_dim
    return run(model, cfg=cfg, latent=latent, positive=text(1, 13, dim), negative=text(2, 7, dim))


@pytest.fixture(scope="module")
def stock(written):
    """(family, format, whether under a LoRA) -> what stock computes."""

    @cache
    def computed(family, form, lora):
        return sampled(with_lora(loaded(written(family, form)), written(family, "lora"), lora), family)

    return computed


@torch.inference_mode()
def loaded(path):
    """As a server does it: in inference mode, outside of which ComfyUI could not move such weights
    in it. A file without scales in the dtype that it has, as the loader's input asks.
    """
    family, _, form = Path(path).stem.rpartition("-")
    plain = form in FORMATS and not FORMATS[form].algorithm
    if SAMPLE_OF[family].form.file is not None:
        return comfy.sd.load_diffusion_model(path, {"dtype": FORMATS[form].dtype} if plain else {})
    state, _ = comfy.utils.convert_old_quants(comfy.utils.load_torch_file(path), "")
    return model_of(SAMPLE_OF[family].form, size_of(family), state, FORMATS[form].dtype if plain else None)


def with_lora(model, file, lora):
    return with_model_lora(model, {"lora": file}, 1.0) if lora else model


def in_pool(model, clients, layout):
    patching = Patching(2, ALL_WARM) if layout == "pipefusion" else None
    weights = "sharded" if layout == SHARED else "auto"
    return parallelize(model, clients(*LAYOUTS[layout]), 0, patching, weights=weights)


WITHOUT_STAGES = {
    family.samples[0].name for family in FAMILIES if any(plan.why_no_stages for plan in family.plans)
}
PRODUCT = [
    (form, family, lora, layout)
    for form, family, lora, layout in itertools.product(FORMATS, SAMPLE_OF, (False, True), LAYOUTS)
    if not (layout == "pipefusion" and family in WITHOUT_STAGES)
]


def prepares_text(plan):
    """Whether ComfyUI calls the transformer for it, in its own process."""
    module, name = classes_of(plan)[0].split(":")
    return hasattr(getattr(import_module(module), name), METHOD)


def every_format():
    """Every format under a LoRA of all layers, and each layout without one too, over families that
    have files, and one that has none, in turn. And one whose text ComfyUI prepares with quantised
    weights.
    """
    families = [name for name, sample in SAMPLE_OF.items() if sample.form.file is not None]
    families, layouts = [families[0], WITHOUT_FILE, *families[1:]], list(LAYOUTS)
    preparing = next(family.samples[0].name for family in FAMILIES if prepares_text(family.plans[0]))
    return [
        (form, families[(number + lora) % len(families)], lora, layouts[(number + 2 * lora) % len(layouts)])
        for number, form in enumerate(FORMATS)
        for lora in (False, True)
        if lora or number < len(layouts)
    ] + [("fp8_scaled", preparing, False, "ulysses")]


@pytest.mark.parametrize(("form", "family", "lora", "layout"), PRODUCT if ALL else every_format())
def test_quantised_weights_are_as_far_from_the_truth_as_stocks(
    written, stock, clients, form, family, lora, layout
):
    truth = stock(family, "", lora)
    try:
        rounded = stock(family, form, lora)
    except NoCapableBackendError as error:
        pytest.skip(f"by stock neither: {error}")
    parallel = in_pool(loaded(written(family, form)), clients, layout)
    ours = sampled(with_lora(parallel, written(family, "lora"), lora), family)
    distance = rms(rounded - truth)
    assert distance > 1e-3 * rms(truth), "nothing is quantised"  # fp32 rounds a thousand times finer
    assert BOUNDS[0] <= rms(ours - truth) / distance <= BOUNDS[1]


def test_ranks_on_unlike_gpus_multiply_in_the_precision_that_all_of_them_have(written, setup, clients):
    argv = (sys.executable, str(ROOT / "tests/kit/unlike_worker.py"), "{fd}", "{parent}")
    with running_clients(replace(setup, argv=argv)) as unlike:
        ours, truth = (
            sampled(in_pool(loaded(written(PLAIN, "fp8_scaled")), pools, "ulysses"), PLAIN)
            for pools in (unlike, clients)
        )
    assert torch.equal(ours, truth)


@pytest.mark.host
def test_every_question_that_comfyui_asks_a_device_about_products_is_known():
    asked = {name for name in pick_operations.__code__.co_names if name.startswith("supports_")}
    assert len(asked) >= 3 and all(map(PRODUCTS.fullmatch, asked))


@pytest.mark.parametrize("able", [(), (0,), (0, 1)])
def test_a_product_of_small_numbers_is_computed_if_every_rank_can(able, caplog):
    def host(rank):
        return SimpleNamespace(
            get_torch_device=lambda: rank,
            supports_fp8_compute=lambda device=None: device in able,
            supports_nvfp4_compute=lambda device=None: device == 1,
            supports_fp64=None,
        )

    store, hosts = HashStore(), [host(0), host(1)]
    with ThreadPoolExecutor(2) as ranks:
        list(ranks.map(lambda rank: answer_alike(hosts[rank], store, rank, 2), range(2)))
    assert {one.supports_fp8_compute() for one in hosts} == {able == (0, 1)}
    assert not any(one.supports_nvfp4_compute() for one in hosts)
    assert caplog.text.count("multiplies in fp8 and nvfp4" if able == (0,) else "multiplies in nvfp4") == 1


@pytest.fixture
def near(stock):
    """What the pool computes of a format, near what stock does: far nearer than to fp32."""

    def is_near(ours, form, lora, truth=None):
        expected = stock(PLAIN, form, lora) if truth is None else truth
        return rms(ours - expected) <= 0.5 * rms(stock(PLAIN, form, lora) - stock(PLAIN, "", lora))

    return is_near


def test_a_lora_goes_on_and_off_without_a_load(written, client, requests, near):
    model = in_pool(loaded(written(PLAIN, "nvfp4")), lambda *_: client, "ulysses")
    assert near(sampled(model, PLAIN), "nvfp4", False)
    requests.clear()
    assert near(sampled(with_lora(model, written(PLAIN, "lora"), True), PLAIN), "nvfp4", True)
    assert near(sampled(model, PLAIN), "nvfp4", False)
    assert requests["SetWeightPatches"] and not requests["Load"]


@pytest.mark.parametrize(
    ("form", "place"),
    [
        ("fp8_scaled_old", None),
        ("int8_convrot", None),
        ("nvfp4", None),
        ("int8_rowwise", 3),
        ("mxfp8", (37, 5)),
    ],
)
def test_the_uis_quantised_weights_are_those_of_the_checkpoint_until_one_scale_is_written(
    written, form, place
):
    model = loaded(written(PLAIN, form))
    source = describe_source(model)
    weights = source.weights
    weights.compare(model.model)
    assert not weights.changed
    assert source.attributes.changed(model.model) == {}, "what the loader notes counts as a change"
    if place is None:
        return
    name, layer = "double_blocks.0.img_attn.qkv", model.model.diffusion_model.double_blocks[0].img_attn.qkv
    layer.weight._params.scale.view(torch.uint8).numpy()[place] ^= 1
    with pytest.raises(Refused, match=rf"to the weight {name}.weight_scale of {form}"):
        BackgroundCheck(weights, form).require_unchanged(60.0)
    weights.compare(model.model)
    assert weights.changed == {f"{name}.weight_scale"}


@pytest.mark.cover(2)
@pytest.mark.parametrize("what", ["data", "scale"])
def test_a_quantised_weight_that_a_node_changed_in_place_reaches_the_ranks(written, clients, what):
    stock, model = loaded(written(PLAIN, "int8")), loaded(written(PLAIN, "int8"))
    unchanged = sampled(stock, PLAIN)
    for one in (stock, model):
        weight = one.model.diffusion_model.double_blocks[0].img_attn.qkv.weight
        with torch.inference_mode():
            (weight._qdata if what == "data" else weight._params.scale).mul_(3 if what == "scale" else 0)
    truth = sampled(stock, PLAIN)
    ours = sampled(in_pool(model, clients, "ulysses"), PLAIN)
    assert rms(ours - truth) <= 0.1 * rms(truth - unchanged)


def test_a_quantised_model_without_a_file_is_sent(written, clients, near):
    with torch.inference_mode():
        model = comfy.sd.load_diffusion_model_state_dict(
            comfy.utils.load_torch_file(written(PLAIN, "int8_convrot"))
        )
    assert model.cached_patcher_init is None
    parallel = in_pool(model, clients, "ulysses")
    assert near(sampled(parallel, PLAIN), "int8_convrot", False)
    assert near(sampled(with_lora(parallel, written(PLAIN, "lora"), True), PLAIN), "int8_convrot", True)


@pytest.mark.cover(2)
@pytest.mark.parametrize("form", ["int8", ""])
def test_a_lora_that_widens_the_first_layer_takes_the_image_that_it_was_made_for(
    written, clients, tmp_path, form
):
    """As the control LoRAs of released models do."""
    down, up = (
        torch.randn(size, generator=torch.Generator().manual_seed(seed)) / by
        for seed, size, by in ((1, (4, 128), 11), (2, (256, 4), 2))
    )
    layer, file = "diffusion_model.img_in", str(tmp_path / "control.safetensors")
    lora = {f"{layer}.lora_down.weight": down, f"{layer}.lora_up.weight": up}
    save_file({**lora, f"{layer}.reshape_weight": torch.tensor([256, 128])}, file)
    image = torch.randn(SAMPLES[PLAIN].latents["odd"], generator=torch.Generator().manual_seed(3))

    def controlled(model, image):
        dim = size_of(PLAIN).text_dim
        positive, negative = (text(seed, 13, dim, concat_latent_image=image) for seed in (1, 2))
        patched, latent = with_lora(model, file, True), torch.zeros_like(image)
        return run(patched, cfg=2.0, latent=latent, positive=positive, negative=negative)

    stock, parallel = loaded(written(PLAIN, form)), in_pool(loaded(written(PLAIN, form)), clients, "ulysses")
    truth = controlled(stock, image)
    assert rms(truth - controlled(stock, -image)) > 0.01 * rms(truth), "the image does nothing"
    assert rms(controlled(parallel, image) - truth) <= 1e-2 * rms(truth)
    assert parallel.model.diffusion_model.img_in.weight.shape == (256, 128)
    sampled(parallel, PLAIN)
    assert parallel.model.diffusion_model.img_in.weight.shape == (256, 64)


def test_ranks_cast_quantised_weights_to_the_dtype_that_the_ui_resolved(written, clients, monkeypatch, stock):
    monkeypatch.setattr(mm, "unet_manual_cast", lambda *args, **kwargs: torch.bfloat16)
    half = loaded(written(PLAIN, "int8"))
    monkeypatch.undo()
    assert half.model.get_dtype_inference() == torch.bfloat16
    ours, truth = sampled(in_pool(half, clients, "ulysses"), PLAIN), stock(PLAIN, "", False)
    in_bf16 = rms(sampled(half, PLAIN) - truth)
    assert 0.8 <= rms(ours - truth) / in_bf16 <= 1.2
    assert rms(ours - stock(PLAIN, "int8", False)) > 1e-3 * rms(truth), "the ranks compute in fp32"
