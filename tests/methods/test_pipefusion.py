"""PipeFusion through real pools: what the stages compute is what one process computes, whatever
their number; and where something goes wrong, what is told, whether the pool goes on, and that the
next run is right.
"""

from collections import Counter
from functools import partial
from math import prod

import comfy.model_management as mm
import comfy.samplers
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
from pipemesh.parallel_runtime.errors import ModelError, Refused
from pipemesh.parallel_runtime.families import plan_for
from pipemesh.parallel_runtime.families.catalogue import FAMILIES as REGISTRY
from pipemesh.parallel_runtime.families.catalogue import PLAIN, REPRESENTATIVES, SAMPLES
from pipemesh.parallel_runtime.forward import forward_name
from pipemesh.parallel_runtime.layout import layouts_of
from pipemesh.parallel_runtime.methods.pipefusion.clock import TIMED, BlockClock, block_seconds
from pipemesh.parallel_runtime.methods.pipefusion.kv_buffer import KVBuffers
from pipemesh.parallel_runtime.patches import Part

from ..fixtures import ALL, running_clients
from ..kit.bounds import bound
from ..kit.models import ATTENDS_TWICE, VIDEO, in_one, run
from ..kit.patched import advanced, together
from ..kit.pipelines import ALL_WARM, HEADS, case, with_callback

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
    stages = layout[0]
    patches = (stages, stages + 1, 2 * stages)[FAMILIES.index(family) % 3]
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
            assert relative_error(in_one(constant.output_of(call)), in_one(truth)) <= BOUND


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
    ours = sample(parallelize(rounded, clients(ulysses, 1, stages), 0.0, Patching(4)), of)
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
def test_what_samplers_nodes_can_ask_for_goes_through_the_stages(pipeline, truths, options):
    image = torch.randn(options.get("batch", 1), 16, 8, 10, generator=torch.Generator().manual_seed(2))
    options = {"cfg": 3.0, "steps": 4, "latent": image, **options}
    ours, own = (run(model, **options) for model in (pipeline(PLAIN, (2, 1), 3), truths.own_model(PLAIN, 3)))
    assert relative_error(ours, own) <= bound(partial(run, **options), truths.stock_model(PLAIN))


def test_single_timeline_through_a_pipeline_is_the_reference_too(pipeline, truths):
    modes, of = [], case(sampler="dpmpp_2m_sde")
    ours = sample(together(pipeline(PLAIN, (2, 1), 3, notice=modes.append)), of)
    assert "pass_through" in modes[0] and modes[0].startswith("single-timeline")
    assert relative_error(ours, truths.patched(of, 3)) <= truths.bound(of)


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
    live, pooled = client.sessions.live, model.remote.model
    held, costs = live.pool.memory, pooled.balance.costs()
    assert min(costs[:2]) > sum(costs[2:])
    again = sample(model, of, steps=3)
    assert live.loads == 2 and live.models[pooled].stages == (1, len(costs) - 1)
    assert live.pool.memory[0].model < held[0].model and live.pool.memory[1].model > held[1].model
    truth = sample(truths.own_model(PLAIN, 3), of, steps=3)
    assert relative_error(again, truth) <= truths.bound(of) and torch.equal(first, again)
    sample(model, of, steps=2)
    assert client.sessions.live is live and live.loads == 2


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


def test_stages_may_be_cut_as_the_user_says_and_such_as_are_not_the_models_are_refused(clients, truths):
    client, of, held = clients(1, 1, 2), case(), []

    def cut(*stages):
        return parallelize(truths.stock_model(PLAIN), client, 0.0, Patching(3, stages=stages))

    for stages in ((1, 3), (3, 1)):
        model, loads = cut(*stages), []
        for _ in range(2):
            assert relative_error(sample(model, of), truths.patched(of, 3)) <= truths.bound(of)
            loads.append(client.sessions.live.loads)
        assert client.sessions.live.models[model.remote.model].stages == stages and loads[0] == loads[1]
        held.append([memory.model for memory in client.sessions.live.pool.memory])
    assert held[0][0] < held[1][0] and held[0][1] > held[1][1]
    sentence = r"^stages 4,9 share out 13 blocks, and the model has 4: make the numbers add up to 4, or leave"
    with pytest.raises(Refused, match=sentence):
        sample(cut(4, 9), of)
    assert client.sessions.live.pool.idle


# -- what goes wrong


def test_a_cancel_with_patches_of_both_prompts_in_flight_leaves_a_warm_pool_that_is_right(
    pipeline, truths, clients, monkeypatch
):
    model, of = pipeline(PLAIN, (2, 1), 3), case()
    sample(model, of)
    client = clients(1, 1, 2)
    pool, pids = client.sessions.live.pool, client.sessions.live.pool.ranks.pids
    flying, abandon = [], client.evaluations.abandon
    monkeypatch.setattr(
        client.evaluations, "abandon", lambda: (flying.append(len(client.sessions.live.tickets)), abandon())
    )
    with pytest.raises(mm.InterruptProcessingException):
        with_callback(model, of, mm.interrupt_current_processing)
    mm.interrupt_current_processing(False)
    assert max(flying) > 3, "of both prompts, of which each has three; a quick rank may have answered one"
    assert client.sessions.live.pool is pool and pool.ranks.pids == pids
    assert pool.idle and not client.sessions.live.tickets
    assert relative_error(sample(model, of), truths.patched(of, 3)) <= truths.bound(of)


def test_stages_leave_the_patches_that_were_cancelled_before_they_came_to_them(
    broken_pipeline, truths, monkeypatch
):
    (model, client), of = broken_pipeline("slow_stage"), case()
    client.sessions.open(lambda: False)
    pool, left = client.sessions.live.pool, []
    listen = pool.ranks.listen

    def noted(wait_s):
        said = listen(wait_s)
        left.extend(rank for rank, message in said if getattr(message, "cancelled", False))
        return said

    monkeypatch.setattr(pool.ranks, "listen", noted)
    with pytest.raises(mm.InterruptProcessingException):
        with_callback(model, of, mm.interrupt_current_processing)
    mm.interrupt_current_processing(False)
    assert left.count(1) >= 3, "of six on their way to it, one of them at work"
    assert client.sessions.live.pool is pool and pool.idle
    of = case(cfg=1.0)
    truth = sample(truths.own_model(PLAIN, 3), of, steps=2)
    assert relative_error(sample(model, of, steps=2), truth) <= truths.bound(of)


def test_a_stage_that_fails_before_its_message_came_takes_it_all_the_same(broken_pipeline):
    """Else the next patch would find the message of this one."""
    model, client = broken_pipeline("falls_over")
    client.sessions.open(lambda: False)
    pool = client.sessions.live.pool
    sentence = (
        r"^Rank 1 on cpu failed while computing: ZeroDivisionError: made\. .*; the workers are ready for"
    )
    with pytest.raises(ModelError, match=sentence):
        sample(model, case())
    assert client.sessions.live.pool is pool and pool.idle


def test_the_host_may_unload_the_model_in_mid_run(pipeline, truths, clients):
    """As it does for a VAE or a ControlNet that needs the room."""
    of, client = case(), clients(1, 1, 2)
    for wrap, whole in ((lambda model: model, 2), (together, 4)):
        model = wrap(pipeline(PLAIN, (2, 1), 3))
        name = model.remote.model
        sample(model, of)
        loads = client.sessions.live.loads
        ours = with_callback(model, of, lambda name=name: client.residency.release(name))
        parts = [one.part for one in client.runs.last.evaluations]
        assert sum(part.patch is None for part in parts) == whole
        if whole == 2:  # patches were in flight: it stays until the last of them is back
            assert relative_error(ours, truths.patched(of, 3)) <= truths.bound(of)
            assert client.sessions.live.loads == loads and not client.residency.held(name)
        else:
            assert client.sessions.live.loads == loads + 1 and bool(ours.isfinite().all())


def test_a_stage_without_room_ends_the_others_at_once_and_the_pool_goes_on_however_slow_they_are(
    broken_pipeline, monkeypatch
):
    monkeypatch.setattr("pipemesh.pool.verdict.OTHERS_WAIT_S", 0.0)
    model, client = broken_pipeline("no_memory_before_a_slow_stage")
    for _ in range(2):
        sentence = (
            r"^Rank 0 needs [\d.]+ MiB for the keys and values of its blocks and 0\.0 MiB are free: add"
        )
        with pytest.raises(Refused, match=sentence):
            sample(model, case())
        pool = client.sessions.live.pool
        assert pool.idle and pool.arena.board.cancelled_request == pool.next_request() - 2, (
            "the last one was to forget the run"
        )
    assert client.sessions.live.pool is pool


@pytest.mark.parametrize("wrap", [lambda model: model, together], ids=["free", "single"])
def test_another_model_makes_room_for_keys_and_values_and_the_run_begins_again(broken_pipeline, truths, wrap):
    """From random numbers as they were: this sampler draws from torch's own before its first
    evaluation.
    """

    def churned(model):
        return advanced(model, sampler=comfy.samplers.ksampler("heun", {"s_churn": 2.0}))[0]["samples"]

    other, client = broken_pipeline("no_memory_beside_another_model", ATTENDS_TWICE)
    sample(other, case(ATTENDS_TWICE))
    pool, run = client.sessions.live.pool, client.runs.last.evaluations[-1].part.run
    model = parallelize(truths.stock_model(PLAIN), client, 0.0, Patching(3))
    assert relative_error(churned(wrap(model)), churned(truths.own_model(PLAIN, 3))) <= BOUND
    assert {one.part.run for one in client.runs.last.evaluations} == {run + 2}, (
        "what was kept of the first attempt is void"
    )
    assert client.sessions.live.pool is pool and not client.residency.held(other.remote.model)
