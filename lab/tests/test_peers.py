"""The peer has our weights and none of its own, its figures are ratios of the right phases, and it
computes what ComfyUI does.
"""

import importlib.metadata

import pytest
import torch
import torch.nn.functional as functional
from pipemesh.lab.bench import peers
from pipemesh.lab.bench.diffusers_peer import DiffusersPeer, diffusers_weights
from pipemesh.lab.bench.figures import Options
from pipemesh.lab.bench.forwards import SAMPLE
from pipemesh.lab.bench.lockstep import run
from pipemesh.lab.tests.test_plan_published import XDIT_LAUNCHES
from pipemesh.parallel_runtime.errors import PipeMeshError
from pipemesh.parallel_runtime.families.sample import Size
from pipemesh.parallel_runtime.planner.dry_device import DEVICE, DeviceCounts, computing_dry
from pipemesh.parallel_runtime.planner.fake_mode import QuickFakeMode
from pipemesh.pool.trial.rounding import relative_error
from pipemesh.tests.fixtures import ROOT

FORM, SIZE = SAMPLE.form, Size(heads=3, head_dim=16, blocks=(2, 3), text_dim=20, pooled_dim=12)


@pytest.fixture(scope="module")
def model():
    return FORM.random_model(SIZE).model.diffusion_model


@pytest.fixture(scope="module")
def weights(model):
    """The model's state with a number of its own in every place."""
    made, total = {}, 0
    for key, tensor in model.state_dict().items():
        made[key] = torch.arange(total, total + tensor.numel()).view(tensor.shape)
        total += tensor.numel()
    return made


def test_every_number_of_the_weights_is_used_exactly_once_and_their_memory_is_shared(model, weights):
    converted = diffusers_weights(weights, model.hidden_size)
    used = torch.cat([tensor.flatten() for tensor in converted.values()]).sort().values
    assert torch.equal(used, torch.arange(sum(tensor.numel() for tensor in weights.values())))
    theirs = diffusers_weights(own := model.state_dict(), model.hidden_size)
    ours = own["single_blocks.1.linear1.weight"].untyped_storage().data_ptr()
    assert theirs["single_transformer_blocks.1.proj_mlp.weight"].untyped_storage().data_ptr() == ours


def test_every_name_and_place_is_that_of_comfyui_s_own_map(model, weights):
    import comfy.utils

    sources = comfy.utils.flux_to_diffusers(FORM.config(SIZE))
    for name, tensor in diffusers_weights(weights, model.hidden_size).items():
        source = sources[name]
        key, place, change, *_ = (*source, None) if isinstance(source, tuple) else (source, None, None)
        expected = weights[key].narrow(*place) if place else weights[key]
        assert torch.equal(tensor, change(expected) if change else expected), name


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
    assert f'peers = ["{peers.DIFFUSERS}"]' in (ROOT / "pyproject.toml").read_text()


def test_the_figures_are_those_of_the_definition(monkeypatch):
    taken = {"ours": 0.5, "theirs": 0.625, "theirs_placed": 0.5, "ours_alone": 0.8, "theirs_alone": 1.0}
    answer = {"rounds": [taken] * 3, "max_difference": 1e-6, "serial_difference": 3e-5}
    monkeypatch.setattr(peers, "require_diffusers", lambda: None)
    monkeypatch.setattr(peers, "run", lambda *_, **__: [answer, {**answer, "max_difference": 1e6}])
    made = [figure for figure in peers.bench(Options(host=None)) if figure.case == "ulysses2_1024"]
    figures = {figure.metric: figure for figure in made}
    ratios = {"time_ratio": 0.8, "placed_time_ratio": 1.0, "serial_time_ratio": 0.8}
    due = ratios | {"speedup": 1.6, "their_speedup": 1.6, "max_difference": 1e-6, "serial_difference": 3e-5}
    values = {metric: figure.estimate.value for metric, figure in figures.items()}
    assert values == pytest.approx(due)
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


def test_two_ranks_of_either_give_the_same(host):
    pytest.importorskip("diffusers")
    first, _ = run(Options(host=host), 2, "peers:measure", tokens=128, rounds=1)
    assert set(first["rounds"][0]) == {"ours", "theirs", "theirs_placed", "ours_alone", "theirs_alone"}
    assert first["max_difference"] < 2e-5 and first["serial_difference"] < 2e-5


TEXT, IMAGE, SDPA = 512, 4096, functional.scaled_dot_product_attention


class Exchanged(DeviceCounts):
    """Counts attentions whose q, k and v are exchanged for the heads of one of ``ranks``, and their
    output back, as by xDiT's usp.py of November 2024: each laid out anew, sent by one message, and
    laid out for what follows.
    """

    def __init__(self, ranks: int):
        super().__init__()
        self.ranks = ranks

    def attend(self, q, k, v, **options):
        heads = [self._moved(tensor, 1, 2) for tensor in (q, k, v)]
        return self._moved(SDPA(*heads, **options), 2, 1)

    def _moved(self, tensor, cut, joined):
        """(B, H, L, D), in parts along ``cut``; those that come lie along ``joined``."""
        parts = torch.stack(tensor.chunk(self.ranks, cut))
        self.launches += 1
        return torch.cat(parts.unbind(), joined)


@pytest.mark.parametrize("ranks", XDIT_LAUNCHES)
def test_diffusers_with_an_exchange_of_three_operations_launches_what_predictions_take(ranks, monkeypatch):
    """What others' code launches for an evaluation of FLUX, by which their published times are
    predicted.
    """
    models = pytest.importorskip("diffusers.models.transformers.transformer_flux")
    mode, counts = QuickFakeMode(), Exchanged(ranks)
    shapes = {
        "hidden_states": (1, IMAGE // ranks, 64),
        "encoder_hidden_states": (1, TEXT // ranks, 4096),
        "pooled_projections": (1, 768),
        "timestep": (1,),
        "guidance": (1,),
        "img_ids": (IMAGE // ranks, 3),
        "txt_ids": (TEXT // ranks, 3),
    }
    with computing_dry(mode, DeviceCounts()):
        torch.set_default_dtype(torch.bfloat16)
        try:
            with DEVICE:
                model = models.FluxTransformer2DModel(guidance_embeds=True)
        finally:
            torch.set_default_dtype(torch.float32)
        made = {n: torch.zeros(*s, dtype=torch.bfloat16, device=DEVICE) for n, s in shapes.items()}
    if ranks > 1:
        monkeypatch.setattr(functional, "scaled_dot_product_attention", counts.attend)
    with computing_dry(mode, counts):
        model(**made, return_dict=False)
    assert counts.launches == XDIT_LAUNCHES[ranks]
