"""Branches and images of a batch in groups of ranks of their own: the same image as on one GPU."""

from collections import Counter
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from comfy.patcher_extension import WrappersMP
from hypothesis import given, settings
from hypothesis import strategies as st
from pipemesh.lab.commands.parity import Case, conditioning, empty_latent, mask_values, sample, stock_model
from pipemesh.parallel_runtime.branches import Batch, plan_branches
from pipemesh.parallel_runtime.client.run import PooledModel
from pipemesh.parallel_runtime.client.runs import Runs
from pipemesh.parallel_runtime.crossing.rows import Constants, batch_of, joined_outputs, take
from pipemesh.parallel_runtime.errors import Refused
from pipemesh.parallel_runtime.families.catalogue import PLAIN, REPRESENTATIVES, SAMPLES
from pipemesh.parallel_runtime.layout import Layout

import nodes

from ..fixtures import ALL
from ..kit.bounds import assert_same
from ..kit.foreign_pack import unet
from ..kit.in_groups import beside_stock, in_groups
from ..kit.models import VIDEO, run
from ..kit.patched import advanced, cloned, custom, execute, in_windows, pass_through


@settings(deadline=None)
@given(st.integers(1, 6), st.integers(1, 3))
def test_as_many_equal_branches_as_groups_have_a_group_each_and_one_alone_has_all(groups, items):
    plan = plan_branches([Batch(1, items, 5.0)] * groups, groups, (1, groups) if groups > 1 else (1,))
    assert (plan.width, [share.group for share in plan.shares]) == (1, list(range(groups)))
    if groups > 1:
        alone = plan_branches([Batch(1, 1, 5.0)], groups, (1, groups))
        assert (alone.width, alone.shares) == (groups, ((0, 0, 1, 0),))
    cut = plan_branches([Batch(1, 4, 1.0)], 2, (1, 2))
    assert (cut.width, cut.shares) == (1, ((0, 0, 2, 0), (0, 2, 4, 1)))


def test_a_pipelines_branch_stays_in_its_group_and_new_ones_go_where_least_is_to_do():
    runs = Runs(SimpleNamespace(live=None, at_close=[]))
    run = runs.begin(PooledModel("m", "m"))
    asked = (("a", 3), ("b", 1), ("c", 1), ("d", 2), ("a", 3))
    assert [run.names.group_of(*one, 2) for one in asked] == [0, 1, 1, 1, 0]
    run.names.part("a")
    runs.restart(run)
    assert run.names.group_of("b", 1, 2) == 0


# -- rows of a batch


def evaluation(branches=2, items=3):
    rows = branches * items
    return {
        "x": torch.arange(rows * 2.0).view(rows, 2, 1, 1),
        "timestep": torch.arange(float(rows)),
        "context": torch.randn(rows, 5, 8),
        "y": torch.randn(1, 8),
        "ref_latents": [torch.randn(rows, 2, 3), torch.randn(rows, 1)],
        "table": torch.randn(rows, 4),
        "control": {"input": [torch.randn(rows, 4), None]},
        "transformer_options": {
            "cond_or_uncond": [1, 0],
            "sigmas": torch.arange(float(items)),
            "sample_sigmas": torch.zeros(rows),
        },
    }


def test_rows_are_taken_of_everything_along_the_batch_and_put_together_bit_for_bit():
    arguments = evaluation()
    batch = batch_of(arguments, {"table"})
    assert batch[:2] == (2, 3)
    pieces = [take(arguments, start, end, batch, {"table"}) for start, end in batch.pieces(2)]
    assert [list(piece) for piece in pieces] == [list(arguments)] * 4, "the first two always change"
    for name in ("x", "timestep", "context"):
        assert torch.equal(joined_outputs([piece[name] for piece in pieces]), arguments[name])
    for both, whole in (
        ([piece["ref_latents"] for piece in pieces], arguments["ref_latents"]),
        ([(piece["x"], piece["context"]) for piece in pieces], (arguments["x"], arguments["context"])),
    ):  # video and sound in a tuple
        assert all(map(torch.equal, joined_outputs(both), whole))
    controls = torch.cat([piece["control"]["input"][0] for piece in pieces])
    assert torch.equal(controls, arguments["control"]["input"][0])
    options = [piece["transformer_options"] for piece in pieces]
    for piece, own in zip(pieces, options, strict=True):
        assert piece["table"] is arguments["table"] and piece["y"] is arguments["y"]
        assert piece["control"]["input"][1] is None
        assert own["sample_sigmas"] is arguments["transformer_options"]["sample_sigmas"]
    assert [own["cond_or_uncond"] for own in options] == [[1], [1], [0], [0]]
    assert [own["sigmas"].tolist() for own in options] == [[0, 1], [2], [0, 1], [2]]


@pytest.mark.parametrize(
    ("rows", "unbatched", "found"), [(12, (), (1, 1)), (12, ("frames",), (2, 3)), (7, (), (2, 3))]
)
def test_an_evaluation_with_several_rows_of_a_tensor_for_each_image_stays_whole(rows, unbatched, found):
    """But of one that ComfyUI does not batch, or with no number for each image."""
    assert batch_of({**evaluation(), "frames": torch.zeros(rows, 3)}, {*unbatched})[:2] == found


# -- guiders


def region(number, tokens, *area):
    return [
        [tensor, {**extras, "area": area, "strength": 0.7}] for tensor, extras in conditioning(number, tokens)
    ]


def skipping(model):
    options = {"double_layers": "1", "single_layers": "0", "rescaling_scale": 0.5}
    return execute("nodes_slg", "SkipLayerGuidanceDiT", model, 2.0, 0.0, 0.9, **options)


def with_guider(make, *args):
    return lambda model: advanced(model, make(model, *args), steps=3)[0]["samples"]


THREE = [conditioning(number, 13) for number in (1, 2, 3)]
EQUAL = {"positive": conditioning(1, 16), "negative": conditioning(2, 16)}
REGION = conditioning(1, 13) + region(3, 9, 6, 5, 2, 3)
CASES = {  # sampling, and how often the groups compute how many rows of so many tokens in three evaluations
    "unequal prompts": (partial(run, cfg=4.0), {((0,), 1, 13): 3, ((1,), 1, 7): 3}),
    "equal prompts": (partial(run, cfg=4.0, **EQUAL), {((0,), 1, 16): 3, ((1,), 1, 16): 3}),
    "no cfg": (run, {((0, 1), 1, 13): 3}),
    "batch of three": (partial(run, cfg=4.0, batch=3, **EQUAL), {((0,), 3, 16): 3, ((1,), 3, 16): 3}),
    "batch without cfg": (partial(run, batch=4), {((0,), 2, 13): 3, ((1,), 2, 13): 3}),
    "areas": (
        partial(run, cfg=2.0, positive=REGION, negative=conditioning(2, 13)),
        {((0,), 1, 13): 3, ((1,), 1, 13): 3, ((0, 1), 1, 9): 3},
    ),
    "DualCFG": (
        with_guider(
            lambda model: custom("DualCFGGuider", model, *THREE[:2], conditioning(4, 50), 3.0, 2.0, "regular")
        ),
        {((0,), 1, 50): 3, ((1,), 1, 13): 6},
    ),
    "PerpNeg": (
        with_guider(lambda model: execute("nodes_perpneg", "PerpNegGuider", model, *THREE, 4.0, 1.0)),
        {((0, 1), 1, 13): 9},
    ),
    "skipped layers": (
        lambda model: run(skipping(model), cfg=4.0, **EQUAL),
        {((0,), 1, 16): 3, ((1,), 1, 16): 3, ((0, 1), 1, 16): 3},
    ),
}


def test_images_stay_together_where_a_nodes_code_in_the_blocks_may_look_at_the_batch():
    constants = Constants(groups=2)
    arguments = {"x": torch.zeros(4, 16, 8, 8), "transformer_options": {"cond_or_uncond": [0, 1]}}
    for objects, rows in (({}, 4), ({"patch": 1}, 1), ({}, 4)):
        constants.look(SimpleNamespace(in_block=SimpleNamespace(objects=objects)), [])
        assert constants.batch_of(arguments).rows == rows


@pytest.mark.cover(3)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("axis", ["cfg", "data"])
def test_branches_and_images_go_to_groups_and_the_image_is_stocks_own(name, axis):
    sampled, due = CASES[name]
    stock, ours, pool = beside_stock(partial(stock_model, 5), Layout(**{axis: 2}))
    assert_same(sampled, ours, stock)
    asked = {what: pool.asked.count(what) for what in dict.fromkeys(pool.asked)}
    assert due.items() <= asked.items()


def from_latent(model, latent, family):
    """Sample as the KSampler node does."""
    extras = [SAMPLES[family].extras(latent["samples"], side) for side in (0, 1)]
    prompts = [[[text, more | extras[side]] for text, more in conditioning(side + 1, 13)] for side in (0, 1)]
    with torch.inference_mode():
        return nodes.common_ksampler(model, 7, 3, 4.0, "euler", "simple", *prompts, latent)[0]["samples"]


@pytest.mark.cover(3)
@pytest.mark.parametrize("family", [PLAIN, "ltxv"])
@pytest.mark.parametrize("degrees", [{"data": 2}, {"cfg": 2, "data": 2}], ids=str)
def test_every_image_of_a_batch_has_its_own_noise_and_mask_in_whatever_group_it_is(family, degrees):
    """As Latent From Batch makes them. Of LTX the mask reaches the transformer, as a timestep of
    each token.
    """
    heads, layout = SAMPLES[family].heads[-1], Layout(**degrees)
    one = empty_latent(Case(family, "ulysses1", "even", heads, 4.0, False, "euler"))
    generator = torch.Generator().manual_seed(3)
    shapes = one.shape[1:], (1, *one.shape[2:])
    samples, mask = (torch.randn(4, *shape, generator=generator) for shape in shapes)
    mask = (mask > 0).float()
    samples[2], mask[2] = samples[1], mask[1]
    latent = {"samples": samples, "noise_mask": mask, "batch_index": [5, 1, 1, 2]}
    stock, ours, pool = beside_stock(partial(stock_model, heads, family=family), layout)
    assert_same(partial(from_latent, latent=latent, family=family), ours, stock)
    assert len({ranks for ranks, _, _ in pool.asked}) == layout.groups, "some group had nothing to do"
    images = from_latent(ours, latent, family)
    assert torch.equal(images[1], images[2]) and not torch.equal(images[0], images[1])
    kept = (mask == 0).expand_as(samples)
    assert torch.allclose(images[kept], samples[kept], atol=1e-5)


def test_what_comfyui_batches_itself_is_split_and_put_together():
    """A wrapper of another pack sees the evaluations one after the other, as ComfyUI made them."""
    stock, ours, pool = beside_stock(partial(stock_model, 5), Layout(cfg=2))
    assert_same(partial(run, cfg=4.0, batch=2, **EQUAL), with_a_wrapper(ours), stock)
    assert pool.asked == [((rank,), 2, 16) for _ in range(3) for rank in (0, 1)]


def with_a_wrapper(model):
    return cloned(model, "add_wrapper", WrappersMP.APPLY_MODEL, pass_through)


def images_at_once(stock, case):
    """Two, but of a model of which ComfyUI itself makes one."""
    try:
        sample(stock, case, steps=1, batch=2)
    except (RuntimeError, ValueError):
        return 1
    return 2


FAMILIES = [  # the axes in turn; all families in both where the environment asks for it
    pytest.param(name, axis, id=f"{name}-{axis}2")
    for number, name in enumerate(SAMPLES if ALL else REPRESENTATIVES)
    for axis in (("cfg", "data") if ALL else ("cfg", "data")[number % 2 :][:1])
]


@pytest.mark.cover(3)
@pytest.mark.parametrize(("family", "axis"), FAMILIES)
def test_the_prompts_and_images_of_every_family_go_to_groups(family, axis):
    """Two images, with all that its prompts carry; what ComfyUI batches is cut apart. Of one short
    video both groups may share the sequence.
    """
    facts = SAMPLES[family]
    case = Case(family, "ulysses1", "odd", facts.heads[-1], 4.0, mask_values(facts)[-1], "euler")
    stock, ours, pool = beside_stock(partial(stock_model, case.heads, family=family), Layout(**{axis: 2}))
    batch = images_at_once(stock, case)
    assert_same(partial(sample, case=case, steps=2, batch=batch), ours, stock)
    assert {ranks for ranks, _, _ in pool.asked} == {(0,), (1,)} or batch == 1


# -- context windows

TWO = {"context_length": 2, "context_overlap": 1, "causal_window_fix": False}  # of 3 frames
UNIFORM = {"context_schedule": "standard_uniform", "freenoise": True}
SCHEDULES = [
    pytest.param(TWO, 1.0, {"cfg": 2}, id="static"),
    pytest.param(TWO | UNIFORM, 1.0, {"data": 2}, id="uniform"),
    pytest.param(TWO | {"causal_window_fix": True}, 4.0, {"cfg": 2}, id="of unlike lengths"),
]


def windows_on(degrees, options, cfg, change=lambda model: model):
    """Says how many windows each group computed, of those that have one rank."""
    case = Case(VIDEO, "ulysses1", "odd", 5, cfg, False, "heun")
    stock, ours, pool = beside_stock(partial(stock_model, 5, family=VIDEO), Layout(**degrees))
    assert_same(lambda model: sample(change(in_windows(model, **options)), case, steps=2), ours, stock)
    return Counter(ranks for ranks, _, _ in pool.asked if len(ranks) == 1)


@pytest.mark.parametrize(("options", "cfg", "degrees"), SCHEDULES)
def test_the_windows_of_one_evaluation_go_to_groups_together_and_the_video_is_stocks(options, cfg, degrees):
    windows = windows_on(degrees, options, cfg)
    assert len(windows) == Layout(**degrees).groups and len({*windows.values()}) == 1


def test_windows_that_a_node_may_tell_apart_by_their_order_come_one_after_the_other():
    assert windows_on({"cfg": 2}, TWO, 1.0, with_a_wrapper) == {}, "both groups share each"


# -- a model that cannot be cut


@pytest.mark.cover(3)
@pytest.mark.parametrize(("axis", "kind"), [("cfg", "SDXL"), ("data", "SD15")])
def test_a_unets_prompts_and_images_go_to_groups_and_the_image_is_stocks_own(axis, kind):
    stock, ours, pool = beside_stock(partial(unet, kind), Layout(**{axis: 2}))
    assert_same(partial(run, cfg=4.0, latent=torch.zeros(2, 4, 8, 8)), ours, stock)
    assert {ranks for ranks, _, _ in pool.asked} == {(0,), (1,)}
    pool.asked.clear()
    assert_same(partial(run, latent=torch.zeros(1, 4, 8, 8)), ours, stock)
    assert [ranks for ranks, _, _ in pool.asked] == [(0,)] * 3, "its sequence cannot be shared"


def test_ranks_that_would_share_a_unets_forward_are_refused():
    says = r"^UNetModel has no token plan .*: set ulysses, ring and pipefusion to 1 and share"
    with pytest.raises(Refused, match=says):
        in_groups(Layout(ulysses=2, cfg=2), unet())
