"""The peer has our weights and none of its own, its figures are ratios of the right phases, and it
computes what ComfyUI does.
"""

import importlib.metadata
import os
from pathlib import Path

import pytest
import torch
from pipemesh.lab.bench import peers
from pipemesh.lab.bench.diffusers_peer import DiffusersPeer, diffusers_weights
from pipemesh.lab.bench.figures import Options
from pipemesh.lab.bench.forwards import SAMPLE
from pipemesh.parallel_runtime.errors import PipeMeshError
from pipemesh.parallel_runtime.families.sample import Size
from pipemesh.pool.trial.rounding import relative_error

ROOT = Path(__file__).resolve().parents[2]
FORM, SIZE = SAMPLE.form, Size(heads=3, head_dim=16, blocks=(2, 3), text_dim=20, pooled_dim=12)


@pytest.fixture(scope="module")
def model():
    return FORM.random_model(SIZE).model.diffusion_model


@pytest.fixture(scope="module")
def numbered(model):
    """The model's state with a number of its own in every place."""
    weights, total = {}, 0
    for key, tensor in model.state_dict().items():
        weights[key] = torch.arange(total, total + tensor.numel()).view(tensor.shape)
        total += tensor.numel()
    return weights


def test_every_number_of_the_weights_is_used_exactly_once(model, numbered):
    converted = diffusers_weights(numbered, model.hidden_size)
    used = torch.cat([tensor.flatten() for tensor in converted.values()]).sort().values
    assert torch.equal(used, torch.arange(sum(tensor.numel() for tensor in numbered.values())))


def test_every_name_and_place_is_that_of_comfyui_s_own_map(model, numbered):
    import comfy.utils

    sources = comfy.utils.flux_to_diffusers(FORM.config(SIZE))
    for name, tensor in diffusers_weights(numbered, model.hidden_size).items():
        key, place, change, *_ = (
            (*sources[name], None) if isinstance(sources[name], tuple) else (sources[name], None, None)
        )
        expected = numbered[key].narrow(*place) if place else numbered[key]
        assert torch.equal(tensor, change(expected) if change else expected), name


def test_the_peer_shares_the_memory_of_the_weights(model):
    weights = model.state_dict()
    converted = diffusers_weights(weights, model.hidden_size)
    ours = weights["single_blocks.1.linear1.weight"].untyped_storage().data_ptr()
    assert converted["single_transformer_blocks.1.proj_mlp.weight"].untyped_storage().data_ptr() == ours


@pytest.mark.parametrize("installed", [None, "0.36.0"])
def test_a_missing_or_other_diffusers_is_one_sentence_with_the_command(monkeypatch, installed):
    def version(name):
        if installed is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return installed

    monkeypatch.setattr(importlib.metadata, "version", version)
    with pytest.raises(PipeMeshError) as error:
        next(peers.bench(Options(host=None)))
    assert str(error.value).endswith("-m pip install 'diffusers>=0.42,<0.43'")
    assert (installed or "none") in str(error.value) and "\n" not in str(error.value)


def test_the_extra_is_what_the_sentence_installs():
    assert f'peers = ["{peers.DIFFUSERS}"]' in (ROOT / "pyproject.toml").read_text()


def test_the_figures_are_those_of_the_definition(monkeypatch):
    rounds = [
        {"ours": 0.5, "theirs": 0.625, "theirs_placed": 0.5, "ours_alone": 0.8, "theirs_alone": 1.0}
    ] * 3
    answer = {"rounds": rounds, "max_difference": 1e-6, "serial_difference": 3e-5}
    monkeypatch.setattr(peers, "require_diffusers", lambda: None)
    monkeypatch.setattr(peers, "run", lambda *_, **__: [answer, {**answer, "max_difference": 1e6}])
    figures = {
        figure.metric: figure for figure in peers.bench(Options(host=None)) if figure.case == "ulysses2_1024"
    }
    assert {metric: figure.estimate.value for metric, figure in figures.items()} == {
        "time_ratio": pytest.approx(0.8),
        "placed_time_ratio": pytest.approx(1.0),
        "serial_time_ratio": pytest.approx(0.8),
        "speedup": pytest.approx(1.6),
        "their_speedup": pytest.approx(1.6),
        "max_difference": 1e-6,
        "serial_difference": 3e-5,
    }
    assert [metric for metric, figure in figures.items() if not figure.is_met] == ["serial_difference"]


# -- with diffusers


def test_the_peer_computes_what_comfyui_does(model):
    pytest.importorskip("diffusers")
    generator = torch.Generator().manual_seed(0)
    arguments = {
        "x": torch.randn(2, 16, 10, 14, generator=generator),
        "timestep": torch.tensor([0.5, 0.125]),
        "context": torch.randn(2, 7, 20, generator=generator),
        "y": torch.randn(2, 12, generator=generator),
        "transformer_options": {},
    }
    with torch.inference_mode():
        ours, _ = model.process_img(model._forward(**arguments))
        theirs = DiffusersPeer(model, arguments).evaluate()
    assert relative_error(ours, theirs) < 2e-5


def test_two_ranks_of_either_give_the_same():
    pytest.importorskip("diffusers")
    from pipemesh.lab.bench.lockstep import run
    from pipemesh.launcher.comfyui.host_record import ComfyInstall

    host = ComfyInstall.from_json(os.environ["PIPEMESH_HOST"])
    first, _ = run(Options(host=host), 2, "peers:measure", tokens=128, rounds=1)
    assert set(first["rounds"][0]) == {"ours", "theirs", "theirs_placed", "ours_alone", "theirs_alone"}
    assert first["max_difference"] < 2e-5 and first["serial_difference"] < 2e-5
