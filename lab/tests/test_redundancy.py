"""How much blocks change from evaluation to evaluation, and the warm-up that follows from it."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from pipemesh.lab.commands import redundancy
from pipemesh.lab.commands.redundancy import Redundancy
from pipemesh.lab.pictures.files import ASSETS, MODEL
from pipemesh.launcher.errors import LaunchError
from pipemesh.parallel_runtime.planner.warm_up import MeasuredWarmUp, file_digest, read_warm_ups, warm_up_of
from safetensors.torch import save_file


@pytest.mark.parametrize(
    ("changes", "warm_up"),
    [
        ([0.1, 0.1, 0.1, 0.1], 1),
        ([0.9, 0.4, 0.1, 0.1, 0.1, 0.1], 3),
        ([0.14, 0.1, 0.1, 0.1], 1),
        ([0.1, 0.1, 0.1, 0.9], 1),  # what changes late is no reason to wait
        ([0.2], 1),
        ([0.0, 0.0], 1),
    ],
)
def test_the_warm_up_lasts_until_blocks_change_as_little_as_they_usually_do(changes, warm_up):
    found = Redundancy({"one": changes, "other": [value / 2 for value in changes]})
    assert found.warm_up == warm_up


@pytest.mark.parametrize(
    ("evaluations", "warm_up"),
    [(20, 4), (28, 6), (5, 3), (4, 2), (1, 1), (200, 40)],
)
def test_a_run_gets_the_share_that_was_measured_over_the_nearest_number_of_evaluations(evaluations, warm_up):
    found = [MeasuredWarmUp(*one) for one in ((2, 20), (4, 20), (2, 4))]
    chosen = warm_up_of(found, evaluations)
    assert chosen.evaluations == warm_up and "measured over " in chosen.why
    assert [warm_up_of([], many).evaluations for many in (1, 20, 28, 40)] == [1, 1, 1, 2]


def test_what_was_stored_of_a_model_is_found_by_its_content_wherever_its_file_lies(tmp_path, monkeypatch):
    monkeypatch.setenv("PIPEMESH_CACHE", str(tmp_path / "cache"))
    file, moved, other = (tmp_path / f"{name}.safetensors" for name in ("model", "moved", "model2"))
    file.write_bytes(bytes(3 << 20))
    other.write_bytes(bytes((3 << 20) - 1) + b"1")
    stored = redundancy.store(
        Redundancy({"one": [0.4, 0.1]}), file, redundancy.parse([str(file), "--steps", "3"])
    )
    file.rename(moved)
    assert read_warm_ups(stored.parent, str(moved)) == [MeasuredWarmUp(2, 3)]
    assert (
        read_warm_ups(stored.parent, str(other))
        == read_warm_ups(stored.parent, "")
        == read_warm_ups(tmp_path / "nowhere", str(moved))
        == []
    )
    stored.write_text("{}")
    assert read_warm_ups(stored.parent, str(moved)) == []
    assert file_digest(other) != file_digest(moved)


def test_each_block_of_the_trained_model_has_a_change_for_every_evaluation_but_the_first():
    import comfy.sd

    model = comfy.sd.load_diffusion_model(str(ASSETS / MODEL))
    positive, negative = redundancy.conds_of(model, True)
    few = [
        [[each[0][0][:1], {"pooled_output": each[0][1]["pooled_output"][:1]}]]
        for each in (positive, negative)
    ]
    found = redundancy.measured(model, (few[0], few[1]), 4, "euler", 64)
    assert len(found.changes) == 6 and found.evaluations == 4
    assert all(0 < value < 2 for values in found.changes.values() for value in values)
    assert not any(module._forward_hooks for module in model.model.diffusion_model.modules())
    assert len(redundancy.table(found).splitlines()) == 8
    assert redundancy.heat_map(found).width > 3 * redundancy.CELL


def test_a_block_that_gives_the_same_again_has_no_change_and_one_that_doubles_has_all_of_it(monkeypatch):
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = torch.nn.ModuleList([torch.nn.Identity(), torch.nn.Identity()])

    model, group = Model(), type("Group", (), {"path": "blocks"})
    monkeypatch.setattr(
        "pipemesh.parallel_runtime.refusals.require_plan",
        lambda model: type("Plan", (), {"blocks": (group,)}),
    )
    with redundancy.changes_of(model) as changes:
        for factor in (1.0, 2.0):
            model.blocks[0](torch.ones(1, 4, 8))
            model.blocks[1](torch.ones(1, 4, 8) * factor)
    assert changes == {"blocks.0": [0.0], "blocks.1": [1.0]}


@pytest.fixture
def wrong_file(tmp_path):
    save_file({"weight": torch.zeros(2)}, tmp_path / "wrong.safetensors")
    (tmp_path / "cut.safetensors").write_bytes(b"half")
    return lambda name: str(tmp_path / f"{name}.safetensors")


@pytest.mark.parametrize(
    ("name", "options", "says"),
    [
        ("none", (), "There is no file .*none.safetensors: name a diffusion model"),
        ("wrong", (), "ComfyUI reads no diffusion model from .*wrong.safetensors: "),
        ("cut", (), "ComfyUI reads no diffusion model from .*cut.safetensors: "),
        ("wrong", ("--sampler", "oiler"), "ComfyUI has no sampler oiler: choose euler, "),
    ],
)
def test_what_cannot_be_measured_is_named_in_a_sentence(wrong_file, name, options, says):
    with pytest.raises(LaunchError, match=says):
        redundancy.main([wrong_file(name), *options], None)


def test_a_model_whose_text_is_of_another_form_and_a_run_of_one_step_are_refused(capsys):
    def of(**config):
        return SimpleNamespace(model=SimpleNamespace(model_config=SimpleNamespace(unet_config=config)))

    for config in ({}, {"context_in_dim": 8}, {"context_in_dim": 8, "vec_in_dim": None}):
        with pytest.raises(LaunchError, match="SimpleNamespace takes other text than this command makes"):
            redundancy.conds_of(of(**config), False)
    with pytest.raises(SystemExit):
        redundancy.parse(["demo", "--side", "8"])
    assert "--side 8: choose 16 or more" in capsys.readouterr().err


def test_noise_has_the_form_of_the_models_latents(monkeypatch):
    import comfy.latent_formats
    import comfy.sample

    shapes = []
    monkeypatch.setattr(redundancy, "changes_of", lambda model: nullcontext({"one": [0.1]}))
    monkeypatch.setattr(
        comfy.sample,
        "sample",
        lambda model, noise, *how, **options: shapes.append((noise.shape, how[-1].shape)),
    )
    for form in (comfy.latent_formats.Flux, comfy.latent_formats.HunyuanVideo, comfy.latent_formats.SDXL):
        model = SimpleNamespace(
            model=SimpleNamespace(diffusion_model=None), get_model_object=lambda name, form=form: form()
        )
        redundancy.measured(model, ([[torch.zeros(2, 3, 8), {}]], []), 2, "euler", 64)
    assert shapes == [(shape, shape) for shape in ((2, 16, 8, 8), (2, 16, 1, 8, 8), (2, 4, 8, 8))]
