"""Random models and their files: ComfyUI's own loaders take them, and everything in them
matters.
"""

import pytest
import torch
from pipemesh.lab import random_files
from pipemesh.parallel_runtime.families.catalogue import SAMPLES
from pipemesh.parallel_runtime.families.flux import guided_config
from pipemesh.parallel_runtime.families.sample import Form, Size
from pipemesh.tests.kit.models import FORM, write_lora, write_model
from safetensors.torch import load_file

SEED = 5
SIZE = Size(heads=2, head_dim=128, blocks=(2, 3))
GUIDED = Form(config_class="Flux", config=guided_config, file=FORM.file)


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("models") / "model.safetensors", blocks=(2, 3), seed=SEED)


@pytest.fixture(scope="module")
def patcher(file):
    import comfy.sd

    return comfy.sd.load_diffusion_model(str(file))


@pytest.fixture(scope="module")
def forward():
    """model -> its output on fixed inputs."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(1, 16, 16, 12, generator=generator)
    context, pooled = torch.randn(1, 13, 64, generator=generator), torch.randn(1, 32, generator=generator)

    @torch.inference_mode()
    def run(model, context=context, pooled=pooled, timestep=0.6):
        return model.diffusion_model(x, torch.tensor([timestep]), context, pooled, torch.tensor([3.5]))

    run.context, run.pooled = context, pooled
    return run


def test_comfyui_detects_the_file(patcher, file):
    config = patcher.model.model_config.unet_config
    expected = FORM.config(SIZE)
    assert {name: config[name] for name in expected} == expected
    assert patcher.cached_patcher_init[1][0] == str(file)
    named = patcher.model.model_config.process_unet_state_dict(FORM.shapes(patcher.model))
    weights = patcher.model.diffusion_model.state_dict()
    assert {name: tuple(tensor.shape) for name, tensor in weights.items()} == named


def test_everything_in_it_matters_to_an_output_of_scale_one(patcher, forward, monkeypatch):
    model, output = patcher.model.diffusion_model, forward(patcher.model)
    assert output.isfinite().all()
    assert 0.5 < output.std() < 2 and output.abs().max() < 10

    def moved(**inputs):
        return (forward(patcher.model, **inputs) - output).std()

    others = {"context": -forward.context, "pooled": -forward.pooled, "timestep": 0.3}
    for name, other in others.items():
        assert moved(**{name: other}) > 0.02, f"{name} could be left out"
    skips = [lambda img, txt, **_: (img, txt)] * 2 + [lambda x, **_: x] * 3
    for block, skip in zip([*model.double_blocks, *model.single_blocks], skips, strict=True):
        with monkeypatch.context() as patch:
            patch.setattr(block, "forward", skip)
            assert moved() > 0.05, f"{type(block).__name__} could be left out"
    embed = model.pe_embedder.forward
    with monkeypatch.context() as patch:  # one place off: what a wrong slice of the positions does
        patch.setattr(model.pe_embedder, "forward", lambda ids: embed(ids.roll(1, dims=1)))
        assert moved() > 0.005


def test_the_seed_decides_the_file_and_more_blocks_leave_the_others_as_they_were(file, tmp_path):
    def written(name, blocks=(2, 3), seed=SEED):
        return write_model(tmp_path / f"{name}.safetensors", blocks=blocks, seed=seed)

    assert written("again").read_bytes() == file.read_bytes()
    tensors, others, longer = map(
        load_file, (file, written("other", seed=SEED + 1), written("longer", (2, 4)))
    )
    assert not any(torch.equal(tensor, others[name]) for name, tensor in tensors.items())
    assert all(torch.equal(tensor, longer[name]) for name, tensor in tensors.items())


def test_guidance_makes_it_the_guided_form(tmp_path, forward):
    import comfy.sd
    import comfy.supported_models

    path = write_model(tmp_path / "dev.safetensors", heads=1, blocks=(1, 1), form=GUIDED)
    patcher = comfy.sd.load_diffusion_model(str(path))
    assert type(patcher.model.model_config) is comfy.supported_models.Flux
    assert forward(patcher.model).isfinite().all()


def test_a_form_or_a_head_size_that_no_file_can_have_is_refused(tmp_path):
    form = next(sample.form for sample in SAMPLES.values() if sample.form.file is None)
    for refused, size, says in (
        (FORM, Size(heads=2, head_dim=16, blocks=(1, 1)), "heads of 16, but ComfyUI reads .* as 128 wide"),
        (form, SIZE, "no file form is known"),
    ):
        with pytest.raises(ValueError, match=says):
            random_files.write_model(tmp_path / "none.safetensors", refused, size)


def test_the_lora_reaches_every_block_and_changes_the_output(patcher, forward, file, tmp_path):
    import comfy.sd

    lora = load_file(write_lora(tmp_path / "lora.safetensors", file))
    patched, _ = comfy.sd.load_lora_for_models(patcher, None, lora, 1.0, 0.0)
    assert len(patched.patches) == len(lora) // 3 == 2 * 8 + 3 * 2
    before = forward(patcher.model)
    patched.patch_model()
    after = forward(patched.model)
    patched.unpatch_model()
    assert 0.1 < (after - before).std() < 2
    assert torch.equal(forward(patcher.model), before)


def test_a_patcher_without_a_file_holds_the_same_weights_and_has_any_number_of_heads(patcher, forward):
    built = FORM.random_model(SIZE, SEED)
    assert built.cached_patcher_init is None
    assert torch.equal(forward(built.model), forward(patcher.model))
    for heads, head_dim in ((5, 16), (3, 32)):
        other = GUIDED.random_model(Size(heads=heads, head_dim=head_dim, blocks=(2, 2))).model
        assert other.diffusion_model.num_heads == heads
        assert 0.5 < forward(other).std() < 2
