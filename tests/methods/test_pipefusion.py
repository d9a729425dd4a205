"""PipeFusion through real pools: what the stages compute is what one process computes, whatever
their number.
"""

from collections import Counter
from functools import partial
from math import prod

import pytest
import torch
from pipemesh.lab.commands.parity import (
    BF16_BOUNDS,
    BOUND,
    conditioning,
    relative_error,
    rms,
    sample,
    stock_model,
)
from pipemesh.lab.in_process import reference
from pipemesh.parallel_runtime.client.conditioning import ConditioningCache
from pipemesh.parallel_runtime.client.remote_patcher import Patching, parallelize
from pipemesh.parallel_runtime.errors import ModelError, PoolFailed, Refused
from pipemesh.parallel_runtime.families import plan_for
from pipemesh.parallel_runtime.families.catalogue import FAMILIES as REGISTRY
from pipemesh.parallel_runtime.families.catalogue import PLAIN, REPRESENTATIVES, SAMPLES
from pipemesh.parallel_runtime.forward import forward_name
from pipemesh.parallel_runtime.layout import layouts_of
from pipemesh.parallel_runtime.methods.pipefusion.clock import TIMED, BlockClock, block_seconds
from pipemesh.parallel_runtime.methods.pipefusion.kv_buffer import KVBuffers
from pipemesh.parallel_runtime.patches import Part

from ..fixtures import ALL, running_clients
from ..kit.bounds import ADAPTIVE, assert_replayed, bound
from ..kit.models import ATTENDS_TWICE, VIDEO, run
from ..kit.patched import SAMPLERS, TILED, tiling, together
from ..kit.pipelines import ALL_WARM, HEADS, case, with_callback

BREAKS = ("rows_of_the_buffer", "anchors_are_kept", "text_is_dropped", "stale_message", "mask_of_all_queries")
STAGES = 4  # no tiny model has fewer blocks
LAYOUTS = sorted(  # degrees of pipefusion, ulysses and ring: fewer ranks first
    (
        (one.pipefusion, one.ulysses, one.ring)
        for ranks in (2, 3, 4, 6)
        for one in layouts_of(ranks)
        if one.groups == 1 < one.pipefusion <= STAGES
    ),
    key=lambda degrees: (prod(degrees), degrees),
)
REFUSED = {
    sample.name
    for family in REGISTRY
    for sample in family.samples
    if any(plan.why_no_stages for plan in family.plans)
}
# Without ALL: test_patches.py
OTHERS = [name for name in SAMPLES if ALL and name not in {*REPRESENTATIVES, *REFUSED}]
FAMILIES = [*REPRESENTATIVES, *OTHERS]
# Every family in two stages, those of up to four ranks in turn; all of them where the environment
# asks for it
PIPELINES = [
    pytest.param(family, layout, id="{}-pipefusion{}-ulysses{}-ring{}".format(family, *layout))
    for place, layout in enumerate(LAYOUTS)
    for number, family in enumerate(FAMILIES)
    if ALL or place == 0 or number % 3 == place - 1
]


@pytest.fixture(scope="module")
def clients(setup):
    """Pools of this module: a dozen ranks, which would take the room of others."""
    with running_clients(setup) as client:
        yield client


def patches_of(layout):
    return (layout[0], layout[0] + 1, 2 * layout[0])


def inputs_of(pipeline, truths, of, layout=(2, 1)):
    """A call of the transformer by the sampler, and what the serial forward makes of it."""
    asked = []
    model = pipeline(of.family, layout, 1, ALL_WARM)
    sampling = model.remote.sampling
    real = sampling.output_of
    sampling.output_of = lambda call: asked.append(call) or real(call)
    sample(model, of, steps=1)
    call = asked[0]
    serial = truths.stock_model(of.family).model.diffusion_model
    with torch.inference_mode():
        return call, getattr(serial, forward_name(serial))(**call.arguments)


@pytest.mark.cover(5)
@pytest.mark.parametrize("family, layout", PIPELINES)
def test_a_pipeline_computes_what_one_process_does_whatever_its_number_of_stages(
    pipeline, truths, family, layout
):
    """Asynchronously, and then with the same inputs for every evaluation, where stale keys and
    values are fresh ones: each must equal the serial forward.
    """
    patches = patches_of(layout)[FAMILIES.index(family) % 3]
    of = case(family, sampler="dpmpp_2m_sde", tokens="even" if patches % 2 or patches > 7 else "odd")
    model = pipeline(family, layout, patches)
    assert relative_error(sample(model, of), truths.patched(of, patches)) <= truths.bound(of)
    together = plan_for(type(model.model.diffusion_model)).together
    if any(evaluation.part.patch for evaluation in model.remote.pool.runs.last.evaluations):
        # It is asynchronous
        assert relative_error(truths.patched(of, patches), truths.stock(of)) > 100 * BOUND
    else:
        assert together.always or together.arguments, "whole without a reason"
    # Even: as many lines as the most patches
    of = case(family, cfg=1.0, tokens="odd" if layout[0] == 2 else "even")
    call, truth = inputs_of(pipeline, truths, of, layout)
    constant = pipeline(family, layout, patches).remote.sampling
    assert together.always or len(constant._cut(next(iter(call.arguments.values())).shape)[1]) == patches
    with torch.inference_mode():
        constant.begin_run()
        for _ in range(2):
            assert relative_error(joined(constant.output_of(call)), joined(truth)) <= BOUND


def joined(output):
    """Of a model with several outputs, such as video and audio, all in one."""
    return torch.cat([one.flatten() for one in output]) if isinstance(output, list) else output


@pytest.mark.parametrize("layout", [(2, 1), (4, 1), (2, 1, 2)] if ALL else [(4, 1)], ids=str)
def test_control_residuals_reach_the_blocks_of_every_stage(pipeline, truths, layout):
    """Those of the last stages too, whose first own block may be a double or a single one."""

    def with_control(model):
        generator = torch.Generator().manual_seed(9)
        flux = model.model.diffusion_model
        shape = (1, 9 * 7, flux.hidden_size)  # the image is 18 x 13
        control = {
            place: [torch.randn(shape, generator=generator) * 0.3 for _ in blocks]
            for place, blocks in (("input", flux.double_blocks), ("output", flux.single_blocks))
        }
        clone = model.clone()
        clone.set_model_unet_function_wrapper(
            lambda apply_model, options: apply_model(
                options["input"], options["timestep"], **{**options["c"], "control": control}
            )
        )
        return clone

    of = case()
    stock = sample(with_control(truths.stock_model(PLAIN)), of)
    assert relative_error(stock, truths.stock(of)) > 100 * BOUND
    assert relative_error(
        sample(with_control(pipeline(PLAIN, layout, 4, ALL_WARM)), of), stock
    ) <= truths.bound(of)
    patched = sample(with_control(truths.own_model(PLAIN, 4)), of)
    assert relative_error(sample(with_control(pipeline(PLAIN, layout, 4)), of), patched) <= truths.bound(of)


@pytest.mark.cover(2)
@pytest.mark.parametrize("sampler", SAMPLERS if ALL else ["heun", "dpm_fast", "sa_solver_pece", "ddim"])
def test_every_sampler_through_two_stages_is_the_reference_and_stock_when_warm(pipeline, truths, sampler):
    warm, stale = (pipeline(PLAIN, (2, 1), 3, warm_up) for warm_up in (ALL_WARM, 1))
    if sampler in ADAPTIVE:
        runs = partial(sample, case=case(sampler=sampler, cfg=1.0))  # it takes many steps
        assert_replayed(runs, warm, truths.stock_model(PLAIN))
        assert_replayed(runs, stale, truths.own_model(PLAIN, 3))
        return
    of = case(sampler=sampler)
    assert relative_error(sample(warm, of), truths.stock(of)) <= truths.bound(of)
    assert relative_error(sample(stale, of), truths.patched(of, 3)) <= truths.bound(of)


def test_warm_up_counts_evaluations_not_steps(pipeline, clients, truths):
    """heun evaluates twice in a step: three whole ones are a step and a half, for each of the two
    prompts.
    """
    of = case(sampler="heun")
    ours = sample(pipeline(PLAIN, (2, 1), 3, warm_up=3), of)
    parts = [one.part for one in clients(1, 1, 2).runs.last.evaluations]
    assert sum(part.patch is None for part in parts) == 2 * 3
    assert relative_error(ours, sample(reference(stock_model(HEADS), 3, 3), of)) <= truths.bound(of)


@pytest.mark.parametrize("layout", [(2, 1), (4, 1), (2, 2)] if ALL else [(4, 1), (2, 2)], ids=str)
def test_a_stage_holds_its_own_blocks_and_the_ends_and_nothing_else(pipeline, clients, truths, layout):
    stages, ulysses = layout
    pool_of = clients(ulysses, 1, stages)
    for name in list(pool_of.sessions.live.models if pool_of.sessions.live else ()):
        pool_of.residency.release(name)
    sample(pipeline(VIDEO, layout, 4), case(VIDEO))
    model = truths.stock_model(VIDEO).model.diffusion_model
    blocks = [sum(tensor.nbytes for tensor in block.parameters()) for block in model.blocks]
    ends = sum(tensor.nbytes for tensor in model.parameters()) - sum(blocks)
    held = [memory.model for memory in pool_of.sessions.live.pool.memory]
    cut = [len(blocks) * (stage + 1) // stages - len(blocks) * stage // stages for stage in range(stages)]
    assert sorted(held) == sorted(ends + size * blocks[0] for size in cut for _ in range(ulysses))


@pytest.mark.parametrize("layout", [(2, 1), (2, 2), (3, 1)] if ALL else [(2, 2)], ids=str)
def test_in_bf16_a_pipeline_is_as_far_from_the_truth_as_one_process(clients, truths, layout):
    of, (stages, ulysses) = case(), layout
    rounded = stock_model(HEADS, torch.bfloat16)
    assert rounded.model.get_dtype_inference() == torch.bfloat16
    ours = sample(
        parallelize(rounded, clients(ulysses, 1, stages), holds_ui_device=False, patching=Patching(4)), of
    )
    truth = truths.patched(of, 4)
    least, most = BF16_BOUNDS
    assert least <= rms(ours - truth) / rms(truths.rounded(of, 4) - truth) <= most


def with_patched_weights(model, strength=1.0):
    """As LoRAs do: of every matrix, those of the ends included."""
    generator = torch.Generator().manual_seed(3)
    weights = model.model.diffusion_model.named_parameters()
    differences = {
        f"diffusion_model.{name}": ("diff", (0.02 * torch.randn(tensor.shape, generator=generator),))
        for name, tensor in weights
        if tensor.ndim == 2
    }
    clone = model.clone()
    assert set(clone.add_patches(differences, strength)) == set(differences)
    return clone


@pytest.mark.parametrize("layout", [(2, 1), (2, 2), (3, 1)] if ALL else [(2, 2)], ids=str)
def test_weight_patches_reach_every_stage_and_a_change_of_strength_reloads_nothing(
    pipeline, clients, truths, layout
):
    of, warm = case(), pipeline(PLAIN, layout, 4, ALL_WARM)
    sample(warm, of)
    client = clients(layout[1], 1, layout[0])
    loads = client.sessions.live.loads
    for strength in (1.0, -0.5):
        stock = sample(with_patched_weights(truths.stock_model(PLAIN), strength), of)
        assert relative_error(stock, truths.stock(of)) > 100 * BOUND
        assert relative_error(sample(with_patched_weights(warm, strength), of), stock) <= truths.bound(of)
    assert client.sessions.live.loads == loads


def test_a_stage_patches_the_weights_it_has_and_no_others(broken_pipeline, truths):
    """Either rank holds it against its own blocks."""
    of = case()
    patched = sample(with_patched_weights(reference(stock_model(HEADS), 3, 1)), of)
    model, _client = broken_pipeline("patches_its_own_weights")
    assert relative_error(sample(with_patched_weights(model), of), patched) <= truths.bound(of)


def test_the_next_patch_comes_in_while_one_is_computed(broken_pipeline, truths):
    """The second stage holds it against what it could have posted."""
    (model, _client), of = broken_pipeline("must_receive_ahead"), case(cfg=1.0)
    truth = sample(truths.own_model(PLAIN, 3), of, steps=3)
    assert relative_error(sample(model, of, steps=3), truth) <= truths.bound(of)
    model, _client = broken_pipeline("receives_late")
    with pytest.raises(PoolFailed, match="received late"):
        sample(model, of, steps=3)


@pytest.mark.parametrize("layout", [(2, 1), (2, 2), (2, 1, 2)] if ALL else [(2, 1, 2)], ids=str)
def test_a_mask_reaches_every_stage_and_more_patches_than_lines_change_nothing(pipeline, truths, layout):
    of = case(mask=True)
    warm, stale = (sample(pipeline(PLAIN, layout, 50, warm_up), of) for warm_up in (ALL_WARM, 1))
    assert relative_error(warm, truths.stock(of)) <= truths.bound(of)
    assert relative_error(stale, truths.patched(of, 50)) <= truths.bound(of)


@pytest.mark.parametrize("family", [ATTENDS_TWICE, VIDEO])
def test_what_is_kept_is_what_was_reserved_for_it_and_of_this_run_alone(broken_pipeline, truths, family):
    """The ranks hold it against each other after every patch."""
    for of in (case(family), case(family, tokens="even")):
        model, _client = broken_pipeline("counts_what_it_keeps", family)
        truth = sample(truths.own_model(family, 3), of, steps=2)
        assert relative_error(sample(model, of, steps=2), truth) <= truths.bound(of)


def test_what_a_run_kept_is_given_back_when_it_ends_however_it_ends(broken_pipeline, truths, monkeypatch):
    """The ranks hold it against what they still have when the next one begins."""
    import comfy.model_management as mm

    (model, client), of = broken_pipeline("counts_what_it_keeps"), case()
    sample(model, of)
    with pytest.raises(mm.InterruptProcessingException):
        with_callback(model, of, mm.interrupt_current_processing)
    mm.interrupt_current_processing(False)
    assert relative_error(sample(model, of), truths.patched(of, 3)) <= truths.bound(of)
    monkeypatch.setattr(client.runs, "end", lambda run: None)
    sample(model, of)
    with pytest.raises(ModelError, match="kept beyond its run"):
        sample(model, of)


MASK = torch.zeros(1, 1, 8, 10)
MASK[..., 3:] = 1.0


@pytest.mark.cover(2)
@pytest.mark.parametrize(
    "options",
    [
        {"batch": 2},
        {"batch": 2, "negative": conditioning(2, 13)},
        {"denoise": 0.5},
        {"start_step": 1, "last_step": 3},
        {"start_step": 1, "last_step": 4, "disable_noise": True, "force_full_denoise": True},
        {"noise_mask": MASK},
    ],
    ids=["batch", "batch of equal prompts", "denoise", "to step 3", "from step 1", "noise mask"],
)
def test_what_samplers_nodes_can_ask_for_goes_through_the_stages(broken_pipeline, truths, options):
    image = torch.randn(options.get("batch", 1), 16, 8, 10, generator=torch.Generator().manual_seed(2))
    options = {"cfg": 3.0, "steps": 4, "latent": image, **options}
    model, _client = broken_pipeline("counts_what_it_keeps")
    within = bound(partial(run, **options), truths.stock_model(PLAIN))
    assert relative_error(run(model, **options), run(truths.own_model(PLAIN, 3), **options)) <= within


def test_single_timeline_through_a_pipeline_is_the_reference_too(pipeline, truths):
    modes, of = [], case(sampler="dpmpp_2m_sde")
    ours = sample(together(pipeline(PLAIN, (2, 1), 3, notice=modes.append)), of)
    assert "pass_through" in modes[0] and modes[0].startswith("single-timeline")
    assert relative_error(ours, truths.patched(of, 3)) <= truths.bound(of)


def test_a_nodes_tiles_through_a_pipeline_see_what_is_their_own(pipeline, truths):
    ours, own = (
        run(tiling(model), **TILED) for model in (pipeline(PLAIN, (2, 1), 3), truths.own_model(PLAIN, 3))
    )
    truth = run(tiling(truths.stock_model(PLAIN)), **TILED)
    assert relative_error(ours, own) <= bound(
        lambda model: run(tiling(model), **TILED), truths.stock_model(PLAIN), truth
    )


@pytest.mark.parametrize(
    ("wrap", "looks"), [(lambda model: model, 0), (together, 4)], ids=["free", "a node's code"]
)
def test_conditioning_is_looked_at_once_at_most_for_all_patches_of_an_evaluation(
    pipeline, monkeypatch, wrap, looks
):
    seen, compared = Counter(), []
    put, same = ConditioningCache.put, ConditioningCache._is_content
    monkeypatch.setattr(
        ConditioningCache, "put", lambda self, *args: seen.update([args[:2]]) or put(self, *args)
    )
    monkeypatch.setattr(ConditioningCache, "_is_content", lambda *args: compared.append(args) or same(*args))
    run(wrap(pipeline(PLAIN, (2, 1), 4)), steps=5, cfg=3.0, size=(13, 10))
    assert len({branch for branch, _ in seen}) == 2 and set(seen.values()) == {5}
    assert len(compared) == looks * len(seen), "the first evaluation of a run has nothing to compare with"


def test_blocks_are_shared_out_anew_by_what_they_were_measured_to_cost(broken_pipeline, truths):
    (model, client), of = broken_pipeline("dear_first_blocks"), case(cfg=1.0)
    first = sample(model, of, steps=3)
    held, pooled = client.sessions.live.pool.memory, model.remote.model
    costs = pooled.balance.costs()
    assert min(costs[:2]) > sum(costs[2:])
    again = sample(model, of, steps=3)
    assert (
        client.sessions.live.loads == 2
        and sum(client.sessions.live.models[pooled].stages) == len(costs)
        and client.sessions.live.models[pooled].stages[0] == 1
    )
    assert (
        client.sessions.live.pool.memory[0].model < held[0].model
        and client.sessions.live.pool.memory[1].model > held[1].model
    )
    truth = sample(truths.own_model(PLAIN, 3), of, steps=3)
    assert relative_error(again, truth) <= truths.bound(of) and torch.equal(first, again)
    sample(model, of, steps=2)
    assert client.sessions.live.loads == 2


def test_blocks_are_timed_in_the_first_evaluations_of_each_patch_and_never_of_all_rows():
    clock = BlockClock()

    def timed(part):
        times = clock.start(part)
        clock.note(0, torch.device("cpu"))
        clock.note(0, torch.device("cpu"))
        return list(block_seconds(times))

    patch = Part(1, 0, (0, 4, False))
    assert [timed(Part(1, 0)), *(timed(patch) for _ in range(TIMED + 1))] == [[], *[[0]] * TIMED, []]


def test_what_a_model_does_in_place_behind_its_blocks_leaves_the_rows_that_are_kept_alone():
    kept = KVBuffers()
    kept.start(Part(1, 0))
    kept.leave(torch.ones(1, 4, 2), 0, 4).zero_()
    kept.start(Part(1, 0, (0, 2, False)))
    assert kept.leave(torch.full((1, 2, 2), 2.0), 0, 4)[0, :, 0].tolist() == [2, 2, 1, 1]


def test_stages_may_be_cut_as_the_user_says(clients, truths):
    client, of, held = clients(1, 1, 2), case(), []
    for number, stages in enumerate([(1, 3), (3, 1)]):
        model = parallelize(
            truths.stock_model(PLAIN), client, holds_ui_device=False, patching=Patching(3, stages=stages)
        )
        for _ in range(2):
            loads = client.sessions.live.loads if client.sessions.live else 0
            assert relative_error(sample(model, of), truths.patched(of, 3)) <= truths.bound(of)
        assert (
            client.sessions.live.models[model.remote.model].stages == stages
            and client.sessions.live.loads == loads
        ), number
        held.append([memory.model for memory in client.sessions.live.pool.memory])
    assert held[0][0] < held[1][0] and held[0][1] > held[1][1]


def test_stages_that_are_not_the_models_blocks_are_refused_with_the_sum_and_the_pool_goes_on(clients, truths):
    client = clients(1, 1, 2)
    model = parallelize(
        truths.stock_model(PLAIN), client, holds_ui_device=False, patching=Patching(3, stages=(4, 9))
    )
    with pytest.raises(
        Refused,
        match=r"^stages 4,9 share out 13 blocks, and the model has 4: make the numbers add up to 4, or leave",
    ):
        sample(model, case())
    assert client.sessions.live.pool.idle


@pytest.mark.cover(2)
@pytest.mark.parametrize(
    ("mutation", "family", "ulysses"),
    [
        *((mutation, PLAIN, 1) for mutation in BREAKS),
        *((mutation, PLAIN, 2) for mutation in (BREAKS if ALL else BREAKS[:1])),
        ("rows_of_the_buffer", VIDEO, 1),
        ("stale_message", VIDEO, 2),
        ("rows_of_the_buffer", ATTENDS_TWICE, 2),
        ("text_is_dropped", ATTENDS_TWICE, 1),
    ],
)
def test_parity_goes_red_when_a_stage_breaks(broken_pipeline, truths, mutation, family, ulysses):
    model, _client = broken_pipeline(mutation, family, ulysses)
    of = case(family, mask=mutation.startswith("mask"))
    assert relative_error(sample(model, of), truths.patched(of, 3)) > 100 * BOUND
