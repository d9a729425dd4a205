"""The peculiarities of single families, such as reference latents or a second timestep. That every
family is exact under every method is in test_parity.py.
"""

from dataclasses import replace
from functools import partial

import pytest
import torch
from pipemesh.lab.commands.parity import BOUND, Bench, Case, relative_error, sample
from pipemesh.parallel_runtime.families import FILES, file_of, plan_for, plan_named
from pipemesh.parallel_runtime.families.catalogue import FAMILIES, NOT_HERE, PLAIN, REGISTERED, SAMPLES
from pipemesh.parallel_runtime.watch.attributes import Attributes
from pipemesh.parallel_runtime.watch.model_changes import require_unchanged

from ..fixtures import ALL, ROOT
from ..kit.bounds import assert_honoured, assert_same
from ..kit.models import with_references
from ..kit.patched import wrapped
from ..kit.pipelines import ALL_WARM
from ..methods.test_patches import Model
from ..project.test_architecture import VOCABULARY


@pytest.fixture(scope="module")
def bench(clients):
    return Bench(clients)


def case_of(name, heads=5, layout="ulysses1", tokens="odd", cfg=1.0):
    return Case(name, layout, tokens, heads, cfg, False, "euler")


def test_every_plan_is_tried_by_a_sample_of_its_family(bench):
    for family in FAMILIES:
        models = (bench.stock(one.heads[0], one.name).model.diffusion_model for one in family.samples)
        tried = [plan_for(type(model)) for model in models]
        assert all(plan in tried for plan in family.plans) and all(plan in family.plans for plan in tried)
    assert len(SAMPLES) == sum(len(family.samples) for family in FAMILIES), "two samples have the same name"


def test_the_registry_names_the_file_of_every_class_that_has_a_plan():
    files = {file.stem for file in (ROOT / "parallel_runtime" / "families").glob("*.py")} - VOCABULARY
    assert {file_of(kind) for kind in FILES} == files
    assert all(map(plan_named, FILES))


def test_a_sample_of_a_newer_comfyui_is_left_out_and_says_so():
    newer = {one.name for family in REGISTERED for one in family.samples if not one.is_here}
    assert set(NOT_HERE) == newer and not newer & set(SAMPLES)
    family = FAMILIES[0]
    later = replace(family.samples[0], since="999.1.0")
    assert not later.is_here and replace(later, since="0.9.7").is_here
    assert replace(family, samples=(later,)).here() is None
    assert replace(family, samples=(*family.samples, later)).here() == family


@pytest.mark.parametrize("name", SAMPLES)
def test_a_model_that_nobody_changed_is_not_taken_for_a_changed_one(bench, name):
    base = bench.stock(SAMPLES[name].heads[0], name).model
    assert Attributes().changed(base) == {}
    require_unchanged(base.diffusion_model, tuple(vars(base.diffusion_model).values()))


@pytest.mark.parametrize("name", SAMPLES if ALL else ("hidream-o1", PLAIN, "wan2.1-t2v"))
def test_what_a_model_notes_as_stock_samples_it_is_not_taken_for_changed(bench, name):
    model = bench.stock(SAMPLES[name].heads[0], name)
    attributes = Attributes()
    assert attributes.changed(model.model) == {}
    watched = attributes.watched(model.model.diffusion_model)
    sample(model, case_of(name, SAMPLES[name].heads[0]), steps=1)
    assert attributes.changed(model.model) == {}
    assert all(one.get(one.own) == one.before for one in watched)
    require_unchanged(model.model.diffusion_model, operations=model.model.model_config.custom_operations)


def test_a_subclass_of_a_model_with_a_plan_has_none_of_its_own():
    from comfy.ldm.wan.ar_model import CausalWanModel
    from comfy.ldm.wan.model import WanModel

    assert plan_for(WanModel) is not None
    assert plan_for(CausalWanModel) is None


def test_sd3_control_residuals_are_sharded_with_their_tokens(bench):
    residual = torch.randn(1, 63, 5 * 64, generator=torch.Generator().manual_seed(3))
    case, as_given = case_of("sd3", layout="2x2", cfg=4.0), residual.clone()

    def controlled(apply_model, options):
        given = {**options["c"], "control": {"output": [residual, None]}}
        return apply_model(options["input"], options["timestep"], **given)

    stock, parallel = bench.stock(5, "sd3"), bench.parallel(5, (2, 2), "sd3")
    assert_honoured(lambda model: wrapped(model, controlled), partial(sample, case=case), parallel, stock)
    assert torch.equal(residual, as_given), "the host writes to residuals: ranks read them in place"


@pytest.mark.cover(4)
@pytest.mark.parametrize("layout", [(2, 1), (3, 1), (1, 3)], ids=["ulysses2", "ulysses3", "ring3"])
@pytest.mark.parametrize("method", ["offset", "index", "uxo"])
def test_reference_latents_are_sharded_exactly(bench, layout, method):
    sampled = partial(with_references, method=method, channels=16)
    assert_same(sampled, bench.parallel(5, layout), bench.stock(5))


edited = partial(with_references, method="index_timestep_zero", channels=128, size=(5, 7))


@pytest.mark.parametrize("layout", [(3, 1), (2, 2)] if ALL else [(2, 2)], ids=str)
def test_flux_2_is_exact_with_a_second_timestep_for_its_references(bench, layout):
    assert_same(edited, bench.parallel(5, layout, "flux2"), bench.stock(5, "flux2"))


def test_reference_latents_with_a_timestep_of_their_own_go_with_the_last_patch(pipeline, truths):
    stock, patched = edited(truths.stock_model("flux2")), edited(truths.own_model("flux2", 3))
    assert relative_error(edited(pipeline("flux2", (2, 1), 3, ALL_WARM)), stock) <= BOUND
    assert relative_error(edited(pipeline("flux2", (2, 1), 3)), patched) <= BOUND


def with_patched_text(model, strength=2.0):
    """Patch a weight that a model reads as it prepares its text, in ComfyUI's process."""
    key = "diffusion_model.video_embeddings_connector.transformer_1d_blocks.0.attn1.to_v.weight"
    clone = model.clone()
    delta = torch.randn(model.model.state_dict()[key].shape, generator=torch.Generator().manual_seed(8))
    assert clone.add_patches({key: ("diff", (delta,))}, strength)
    return clone


def test_text_that_a_model_prepares_itself_is_prepared_with_its_weight_patches(bench):
    stock, sampled = bench.stock(5, "ltx2"), partial(sample, case=case_of("ltx2", tokens="even"))
    assert_honoured(with_patched_text, sampled, bench.parallel(5, (2, 1), "ltx2"), stock, 1e-3)
    modules = stock.model.diffusion_model.modules()
    assert not any(getattr(one, "weight_function", None) for one in modules), "the call left its patches"


GIVEN = {"wan-s2v": "audio_embed", "wan-humo": "audio_embed", "wan-dancer": "audio_embed", "pid": "lq_latent"}


@pytest.mark.parametrize("name", GIVEN)
def test_what_tokens_move_to_matters_so_that_dropping_it_would_show(name):
    model, given = Model(case_of(name)), GIVEN[name]
    asked = model.asked[0]
    truth, other = model.serial(asked), model.serial({**asked, given: asked[given].roll(1, 1)})
    assert relative_error(other, truth) > 100 * BOUND


def with_faces(plan=None):
    """A model that looks at faces, by pictures that cost nothing to look at, and what it is asked
    without them and with them.
    """
    model, pad = Model(case_of("wan-animate"), plan), torch.nn.functional.pad
    model.module.motion_encoder.get_motion = lambda pictures: pad(pictures.flatten(1), (0, 464))
    faces = torch.randn(1, 3, 5, 4, 4, generator=torch.Generator().manual_seed(3))
    return model, model.asked[0], {**model.asked[0], "face_pixel_values": faces}


def test_a_face_moves_the_tokens_of_its_own_frames_whichever_patch_they_are_in():
    """In one process."""
    model, without, asked = with_faces()
    truth = model.serial(asked)
    assert relative_error(truth, model.serial(without)) > 100 * BOUND, "the face does nothing"
    model.warm(asked)
    assert relative_error(model.round(asked, 5), truth) <= BOUND
    less, _, asked = with_faces(replace(model.plan, blocks=(replace(model.plan.blocks[0], inserts=()),)))
    less.warm(asked)
    assert relative_error(less.round(asked, 5), truth) > 100 * BOUND
