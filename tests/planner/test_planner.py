"""The planner's arithmetic: messages, time, memory, the choice and its reasons. Nothing runs."""

import dataclasses
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pipemesh.lab.boxes import published_box
from pipemesh.lab.dry_run.expected import even_bytes
from pipemesh.parallel_runtime.attention.merge_operation import in_one
from pipemesh.parallel_runtime.attention.merging import Partial
from pipemesh.parallel_runtime.branches import Batch, plan_branches
from pipemesh.parallel_runtime.errors import LayoutError
from pipemesh.parallel_runtime.layout import Layout
from pipemesh.parallel_runtime.planner.box import Cache, Level, SentBytes
from pipemesh.parallel_runtime.planner.choice import legal_layouts, plan, sizes_of, with_running
from pipemesh.parallel_runtime.planner.cost import (
    MERGE_BYTES,
    MERGED_BYTES,
    NOWHERE,
    OF_EXCHANGES,
    OF_GRAPH,
    OF_INPUTS,
    OF_PATCH,
    OF_RING,
    OF_RING_STEP,
    OF_UNLIKE,
    Costs,
    costs_of,
    launches_of,
    replay_launches_of,
)
from pipemesh.parallel_runtime.planner.evaluation_count import ITEM_BYTES, Activations
from pipemesh.parallel_runtime.planner.job import Job
from pipemesh.parallel_runtime.planner.messages import SharedAttention
from pipemesh.parallel_runtime.planner.prediction import predict, sharded_bytes
from pipemesh.parallel_runtime.planner.published_boxes import figures

from ..kit.planned import attention_alone, box, counts

FLUX = counts("flux 1024")
JOB = Job(whole=FLUX)
GIB = 1 << 30
DOCUMENT = Path(__file__).resolve().parents[2] / "lab" / "docs" / "PLANNER.md"


def of(layout: Layout, a_box, job: Job = JOB):
    return min(predict(job, layout, a_box), key=lambda one: one.seconds)


# -- links


def test_all_messages_between_two_groups_share_the_way_between_them():
    levels = (Level(ranks=2, bytes_per_s=5, latency_s=3),)
    two = box(4, port=10, latency=1, levels=levels)
    assert two.seconds([SentBytes(0, 1, 20)]) == pytest.approx(1 + 2)
    # Each way has its own bandwidth
    assert two.seconds([SentBytes(0, 1, 20), SentBytes(1, 0, 20)]) == pytest.approx(1 + 2)
    assert two.seconds([SentBytes(0, 2, 20)]) == pytest.approx(3 + 4)
    assert two.seconds([SentBytes(0, 2, 20), SentBytes(1, 3, 20)]) == pytest.approx(3 + 8)
    assert two.seconds([SentBytes(0, 2, 20), SentBytes(2, 0, 20)]) == pytest.approx(3 + 4)
    assert two.seconds([SentBytes(1, 1, 20)]) == two.seconds([]) == 0


@settings(deadline=None)
@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 40), st.integers(1, 9))
def test_ranks_send_the_bytes_that_the_papers_say_where_all_is_even(ulysses, ring, tokens, heads):
    layout = Layout(ulysses=ulysses, ring=ring)
    whole = attention_alone(tokens * ulysses * ring, heads * ulysses, 8)
    costs = Costs(job=Job(whole=whole), layout=layout, box=NOWHERE)
    due = even_bytes(layout, tokens * ulysses * ring, 8 * heads * ulysses, 1, ITEM_BYTES)
    for rank in range(layout.world_size):
        assert sum(costs.sent_by(rank).values()) == pytest.approx(due)
    passed = sum(message.nbytes for message in SharedAttention(layout, whole.attended[0]).ring_step())
    assert (ring - 1) * passed == sum(costs.sent_by(rank)["ring"] for rank in range(layout.world_size))


# -- time


@pytest.mark.parametrize(
    "layout", [Layout(ulysses=4), Layout(ring=4), Layout(ulysses=2, ring=2)], ids=Layout.equation
)
def test_ranks_of_a_sequence_on_perfect_links_share_the_time_of_one(layout):
    alone, shared = of(Layout(), box(1)).seconds, of(layout, box(4)).seconds
    assert alone == pytest.approx(FLUX.flops / 1e12)
    assert shared == pytest.approx(alone / 4, rel=2e-3)  # each computes what is around the blocks


@pytest.mark.parametrize(("evaluations", "warm_up", "ideal"), [(28, 1, 6.4), (28, 4, 4.0)])
def test_a_pipeline_on_perfect_links_takes_what_the_paper_says(evaluations, warm_up, ideal):
    """S / (W + (S - W) / N), but for stages of unequal cost, the fill, and what every patch
    computes anew.
    """
    job = Job(whole=FLUX, evaluations=evaluations, warm_up=warm_up)
    speedup = of(Layout(), box(1), job).seconds / of(Layout(pipefusion=8), box(8), job).seconds
    assert 0.88 * ideal < speedup < ideal


def test_heads_that_do_not_divide_are_imbalance_and_even_ones_are_not():
    lost = [of(Layout(ulysses=ranks), box(ranks)).parts["imbalance"] for ranks in (5, 4)]
    assert lost[0] > 0 == lost[1]


def test_a_ring_waits_for_all_that_its_own_cores_move_and_for_its_merges():
    job, layout = Job(whole=attention_alone(4096)), Layout(ring=2)
    attended = SharedAttention(layout, job.whole.attended[0])

    def waits(**there):
        return of(layout, box(2, **there), job).parts["ring"]

    assert waits(port=1e9, flops=1e10) == pytest.approx(0, abs=1e-5)  # covered
    travels = waits(port=1e9, flops=1e10, overlaps=False)
    assert travels == pytest.approx(attended.passed_bytes(0) / 1e9, rel=1e-3)
    once, twice = (waits(device={"merge_bytes_per_s": speed}) for speed in (1e9, 2e9))
    assert once == pytest.approx(2 * twice)
    assert once == pytest.approx((MERGE_BYTES + MERGED_BYTES) * attended.output_elements / 1e9, rel=1e-3)


def test_a_ring_is_charged_what_its_merges_read_and_write():
    shape = (1, 2, 3, 64)
    whole, *parts = (Partial(torch.ones(shape, dtype=torch.bfloat16), torch.zeros(shape[:3])) for _ in "abcd")
    moved = 0
    for part in parts:
        before, whole = whole, in_one(whole, part)
        moved += sum(one.out.nbytes for one in (before, part, whole))
    moved += whole.out.nbytes + whole.out.bfloat16().nbytes  # RingAttention.attend's last line
    assert moved == whole.out.numel() * (len(parts) * MERGE_BYTES + MERGED_BYTES)


def test_where_ranks_own_cores_move_messages_weights_and_patches_wait_for_them_too():
    overlapping, cores = (box(2, port=1e9, flops=1e12, overlaps=overlaps) for overlaps in (True, False))
    sharded = dataclasses.replace(JOB, keeps=("sharded",))
    covered, waits = (
        of(Layout(ulysses=2), there, sharded).parts["weights"] for there in (overlapping, cores)
    )
    assert covered == 0 and waits == pytest.approx(sum(FLUX.block_weight_bytes) / 2 / 1e9, rel=0.05)

    def lost(overlaps):
        slow, fast = (
            of(Layout(pipefusion=2), box(2, port=port, overlaps=overlaps)).seconds for port in (1e9, 1e15)
        )
        return slow - fast

    onwards = of(Layout(pipefusion=2), cores).sent_bytes["pipefusion"] / 1e9
    assert lost(False) - lost(True) > 0.5 * onwards


def test_what_blocks_take_beside_computing_comes_with_every_patch_and_is_shared_by_stages_alone():
    there, blocks = box(2, flops=1e30, device={"beside_s": 1.0}), len(FLUX.block_flops)
    seconds = [of(layout, there).seconds for layout in (Layout(), Layout(ulysses=2))]
    assert seconds == pytest.approx([blocks, blocks], rel=1e-6)
    job = Job(whole=FLUX, warm_up=1, evaluations=1001, patches=3)
    assert of(Layout(pipefusion=2), there, job).parts["compute"] == pytest.approx(3 * blocks / 2, rel=1e-2)


def test_a_rank_takes_no_less_than_the_starts_of_its_kernels_which_messages_and_patches_add_to():
    """Its own blocks', with what exchanges and steps of a ring start; whatever it computes."""
    job = Job(whole=FLUX, warm_up=1, evaluations=10001, patches=4)
    alone, attentions = FLUX.launches, len(FLUX.attended)

    def started(layout):
        return of(layout, box(layout.world_size, flops=1e20, device={"launch_s": 1.0}), job)

    assert started(Layout()).seconds == pytest.approx(alone)
    both = started(Layout(ulysses=2)).seconds
    assert both == pytest.approx(started(Layout(ulysses=8)).seconds) == alone + OF_EXCHANGES * attentions
    for ring in (2, 4):
        steps = OF_RING + OF_RING_STEP * (ring - 1)
        assert started(Layout(ring=ring)).seconds == pytest.approx(alone + steps * attentions)
    patched = started(Layout(pipefusion=2))
    assert patched.seconds > 4 * 0.5 * (alone + OF_PATCH * attentions)
    assert patched.parts["launches"] > 0.9 * patched.seconds
    assert started(Layout(ulysses=2)).parts["launches"] == pytest.approx(both)


def test_a_rank_that_replays_starts_graphs_and_messages_of_whole_weights_without_stages():
    there = box(4, flops=1e20, device={"launch_s": 1.0})
    plain, replaying = (Job(whole=FLUX, patches=4, replays=replays) for replays in (False, True))
    count = len(FLUX.attended)
    for layout, messages, more in (
        (Layout(ulysses=4), 2 * count + 1, count),
        (Layout(ring=4), 3 * count + 1, 4 * count),
    ):
        made = {one.kept: one.seconds for one in predict(replaying, layout, there)}
        graphs = messages + count * (layout.ring > 1) + 1
        assert made["whole"] == pytest.approx(messages + more + OF_INPUTS + OF_GRAPH * graphs)
        assert made["sharded"] == {one.kept: one.seconds for one in predict(plain, layout, there)}["sharded"]
    staged = Layout(pipefusion=4)
    assert of(staged, there, replaying) == of(staged, there, plain)


def test_the_document_has_the_launches_of_the_formula():
    four = Layout(ulysses=4)
    costs, there = costs_of(JOB, four, box(4)), published_box("8xH100-NVLink")
    text = " ".join(DOCUMENT.read_text(encoding="utf-8").split())
    two, eight, ring = (
        launches_of(costs_of(JOB, layout, box(layout.world_size)), 0)
        for layout in (Layout(ulysses=2), Layout(ulysses=8), Layout(ring=8))
    )
    assert two == eight
    assert (
        f"{OF_EXCHANGES} for both exchanges of an attention, {OF_EXCHANGES + OF_UNLIKE} if ranks have"
        f" unlike parts, {OF_RING} for its ring and {OF_RING_STEP} for each step of the ring, {OF_PATCH}"
        " for the keys and values that a patch keeps. An evaluation of FLUX starts"
        f" {FLUX.launches:,} on one GPU, {two:,} under `ulysses` of 2 or 8, {ring:,} in a ring of 8"
    ) in text
    assert (
        f"FLUX under `ulysses 4` starts {replay_launches_of(costs, 0)} in place of {launches_of(costs, 0):,}"
        in text
    )
    replays, computes = (
        [
            1e3 * of(layout, there, Job(whole=FLUX, replays=one)).seconds
            for layout in (four, Layout(ulysses=8))
        ]
        for one in (True, False)
    )
    assert f"to take {replays[0]:.0f} ms on four and {replays[1]:.0f} on eight, {computes[0]:.0f} on" in text
    assert computes[0] == pytest.approx(computes[1])


def test_prompts_are_split_into_groups_before_ranks_start_more_than_they_compute():
    """8 ranks of one sequence start both prompts' kernels in turn, two groups of 4 each one's."""
    both, fast = Job(whole=FLUX, branches=2), published_box("8xH100-NVLink")
    made = plan(both, fast, sizes=(8,))
    assert made.best is not None and made.best.layout == Layout(cfg=2, ulysses=4)
    wide = next(row for row in made.rows if row.layout == Layout(ulysses=8))
    assert made.best.prediction is not None and wide.prediction is not None
    assert wide.prediction.seconds == pytest.approx(2 * made.best.prediction.seconds, rel=0.05)
    assert wide.loss is not None and wide.loss.name == "lost_launches"


def test_an_exchange_takes_longer_the_more_ranks_take_part():
    known = box(8, exchanges=((4, 1.0), (8, 3.0)))
    assert [known.exchange_s(ranks) for ranks in (1, 2, 3, 4, 6, 8, 16)] == [0, 0, 0.5, 1, 2, 3, 3]
    exchanges = 2 * len(FLUX.attended)
    for ranks in (4, 8):
        taken = of(Layout(ulysses=ranks), known).parts["ulysses"]
        assert taken == pytest.approx(exchanges * known.exchange_s(ranks))


def test_a_pipeline_takes_no_less_than_the_patches_that_comfyui_samples():
    job = Job(whole=FLUX, warm_up=1, evaluations=10001, patches=4)
    there = box(2, flops=1e20, patch_s=1.0)
    assert of(Layout(pipefusion=2), there, job).seconds == pytest.approx(4, rel=1e-3)
    assert of(Layout(ulysses=2), there, job).seconds < 1e-3


def test_a_device_computes_as_fast_as_its_products_where_these_are_published():
    """L20's reach 95 % of its peak, where large models were trained with 54 % of another's."""
    known = figures()
    for kind, figure in known["devices"].items():
        found = published_box(f"1x{kind}-PCIe").devices[0].matmul_flops_per_s / 1e12
        assert found == pytest.approx(
            known["matmul"].get(kind, known["achieved"]["fraction"] * figure["bf16_tflops"])
        )
        assert found < 1.15 * figure["bf16_tflops"]
    assert {*known["matmul"]} - {"why", "source"} < {*known["devices"]}


def test_processors_idle_where_there_is_little_for_them_and_only_then():
    """Half of the last wave: a patch or shard of few rows takes longer than its part."""

    def having(processors, ranks=1):
        return box(ranks, device={"processors": processors})

    device = having(100).devices[0]
    assert (device.busy(50), device.busy(5000)) == (0.5, pytest.approx(0.99, abs=1e-3))
    assert having(0).devices[0].busy(50) == device.busy(0) == 1

    def gain(layout, whole, processors):
        alone, shared = (
            of(one, having(processors, one.world_size), Job(whole=whole)).seconds
            for one in (Layout(), layout)
        )
        return alone / shared

    for layout in (Layout(ulysses=8), Layout(ring=8), Layout(pipefusion=8)):
        small, large = (
            gain(layout, counts(model), 132) / gain(layout, counts(model), 0)
            for model in ("flux 1024", "flux 2048")
        )
        assert small < large < 1, "larger images leave fewer idle"


def test_attention_has_the_speed_of_its_kernels_where_that_is_known():
    long, short = (counts("hunyuan 720p"), counts("flux 1024"))
    fast, slow = (box(1, device={"attention_flops_per_s": speed}) for speed in (1e12, 0.5e12))
    longer = [
        of(Layout(), slow, Job(whole=whole)).seconds / of(Layout(), fast, Job(whole=whole)).seconds
        for whole in (long, short)
    ]
    assert 1.1 < longer[1] < 1.3 < 1.8 < longer[0] < 2, "a long video is nearly all attention"
    h100, l40 = (published_box(f"1x{name}-PCIe").devices[0] for name in ("H100", "L40"))
    assert (
        h100.attention_flops_per_s < h100.matmul_flops_per_s
        and l40.attention_flops_per_s == l40.matmul_flops_per_s
    )


def test_what_kernels_move_between_products_takes_time_through_the_cache_where_it_has_room():
    of_device = {"memory_bytes_per_s": 1.0, "cache": Cache(100, 10.0)}
    device = box(1, device=of_device).devices[0]
    assert (device.moving_s(100), device.moving_s(101)) == (10, 101)
    assert box(1).devices[0].moving_s(101) == 0, "measured speeds have it"
    little = attention_alone(1024)
    whole = dataclasses.replace(little, activations=Activations(0, [(150, 3), (400, 1)]))

    def seconds(layout, whole=whole):
        return of(layout, box(layout.world_size, device=of_device), Job(whole=whole)).parts["compute"]

    computed = seconds(Layout(), little)
    assert seconds(Layout()) == pytest.approx(computed + 3 * 150 + 400)
    half = computed / 2 + 3 * 7.5 + 200
    assert seconds(Layout(ulysses=2)) == pytest.approx(half), "half of the rows have room"


# -- memory


def test_weights_that_fit_no_device_are_shared_out_or_left_in_main_memory():
    alone = of(Layout(), box(1, memory=20 * GIB))
    assert alone.kept == "offloaded" and alone.memory_bytes <= 20 * GIB
    assert alone.parts["weights"] == pytest.approx((FLUX.weight_bytes - alone.weight_bytes) / 1e9)
    shared = of(Layout(ulysses=4), box(4, memory=20 * GIB))
    assert shared.kept == "sharded" and shared.weight_bytes == sharded_bytes(
        FLUX, Layout(ulysses=4), (0, len(FLUX.block_flops))
    )
    for layout, gib in ((Layout(), 40), (Layout(ulysses=4), 40), (Layout(pipefusion=2), 20)):
        assert of(layout, box(layout.world_size, memory=gib * GIB)).kept == "whole"


def test_a_pipeline_keeps_keys_and_values_of_its_own_blocks_for_each_branch():
    """FLUX.1 at 1024 x 1024 keeps 2.67 GiB of image tokens per branch, before it is divided by
    stages (arXiv 2405.14430); here the text's are kept too.
    """
    sizes = [
        of(Layout(pipefusion=2), box(2), Job(whole=FLUX, branches=branches)).memory_bytes
        for branches in (1, 2)
    ]
    assert 1.3 * GIB < sizes[1] - sizes[0] < 1.3 * 2.67 * GIB * 4608 / 4096


def test_what_fits_nowhere_says_what_it_needs():
    row = plan(JOB, box(1, memory=1 * GIB)).rows[0]
    assert row.prediction is None
    assert row.why == "Too little memory: each worker needs 23.6 GiB and has 1.0 GiB."


# -- the choice


def test_one_gpu_is_chosen_where_messages_take_longer_than_they_save():
    made = plan(JOB, box(4, port=1e6, flops=1e15))
    assert made.best is made.rows[0] and made.best.layout == Layout()
    assert all(row.why for row in made.rows[1:])


def test_an_approximate_layout_is_chosen_where_that_is_allowed_alone():
    links = {"port": 2e9, "flops": 1e14}
    exact, any_ = (plan(JOB, box(4, **links), allows_approximate=allowed).best for allowed in (False, True))
    assert exact is not None and not exact.layout.is_approximate
    assert any_ is not None and any_.layout.is_approximate
    refused = {row.why for row in plan(JOB, box(4, **links)).rows if row.layout.is_approximate}
    assert refused == {"The image would differ a little from that of one GPU, which was not allowed."}


def test_stages_that_are_up_stay_only_where_the_image_may_be_approximate():
    job = dataclasses.replace(JOB, evaluations=1)
    fast, up = box(2, flops=1e14), Layout(pipefusion=2)
    made = plan(job, fast, sizes=(2,))
    exact, any_ = (with_running(job, fast, made, up, allows_approximate=one).best for one in (False, True))
    assert not exact.layout.is_approximate and any_.layout == up


def test_every_loser_says_how_much_it_loses_and_to_what():
    made = plan(JOB, published_box("8xL40-PCIe"))
    assert [row.why for row in made.rows].count("") == 1
    assert all(row.loss.name == "lost_approximate" or " ms more " in row.why for row in made.rows if row.why)
    assert next(row for row in made.rows if row.layout == Layout(ring=8)).why.endswith(
        "more for ring messages and merges."
    )
    seconds = [row.prediction.seconds for row in made.rows[1:] if row.prediction]
    assert seconds == sorted(seconds)


def test_a_layout_with_more_groups_than_branches_images_heads_or_blocks_is_not_tried():
    def most(axis: str, job: Job) -> int:
        return max(layout.degrees()[axis] for size in (4, 25, 64) for layout in legal_layouts(job, size))

    assert (most("ring", JOB), most("ring", dataclasses.replace(JOB, merges=False))) == (64, 1)
    both = Job(whole=FLUX, branches=2, batch=4)
    assert (most("cfg", JOB), most("data", JOB), most("ulysses", JOB)) == (1, 1, 16)
    assert (most("cfg", both), most("data", both)) == (2, 4)
    assert most("pipefusion", JOB) == 32  # 64 stages have no block each


def test_branches_and_images_in_groups_of_their_own_need_no_messages():
    job = Job(whole=FLUX, branches=2, batch=2)
    alone = of(Layout(), box(1), job).seconds
    for layout in (Layout(cfg=2), Layout(data=2), Layout(cfg=2, data=2)):
        shared = of(layout, box(layout.world_size, port=1.0), job)
        assert shared.seconds == pytest.approx(alone / layout.world_size)
        assert not shared.sent_bytes
    assert plan(job, published_box("4xRTX4090-PCIe")).best.layout == Layout(cfg=2, data=2)


@pytest.mark.parametrize("devices", [box(4), box(4, port=1e9, flops=1e13)], ids=["fast links", "slow links"])
@pytest.mark.parametrize(
    ("layout", "branches", "batch"),
    [
        (Layout(cfg=2), 3, 1),
        (Layout(cfg=2), 1, 1),
        (Layout(ring=2, cfg=2), 3, 1),
        (Layout(cfg=2, data=2), 3, 2),
        (Layout(data=2), 1, 3),
    ],
    ids=str,
)
def test_groups_of_which_some_would_wait_share_a_sequence_as_they_do_in_a_run(
    layout, branches, batch, devices
):
    """Whatever the links are: a run does not look at them."""
    job = Job(whole=FLUX, branches=branches, batch=batch)
    width = plan_branches([Batch(1, batch, 1.0)] * branches, layout.groups, layout.widths).width
    assert width > 1
    apart, joined = of(layout, devices, job), of(layout.joined(width), devices, job)
    assert (apart.layout, apart.parts, apart.sent_bytes) == (layout, joined.parts, joined.sent_bytes)


def test_groups_stay_apart_where_each_gathers_its_weights_and_where_the_forward_cannot_be_cut():
    unet = dataclasses.replace(FLUX, attended_by_block=[[] for _ in FLUX.block_flops])
    for layout, job in (
        (Layout(ring=2, cfg=2), Job(whole=FLUX, branches=3, keeps=("sharded",))),
        (Layout(cfg=2), Job(whole=unet, branches=3)),
    ):
        (apart,) = predict(job, layout, box(4))
        # Two in turn where there are 1.5 in the mean
        assert apart.parts["imbalance"] == pytest.approx(apart.parts["compute"] / 3)


# -- boxes


def test_every_published_device_and_link_makes_a_box_and_names_its_source():
    for name, figure in figures()["devices"].items():
        assert figure["source"]
        for link in ("PCIe", "SPR", "AMD", *(["NVLink"] if "nvlink_gb_per_s" in figure else [])):
            made = published_box(f"2x8x{name}-{link}-100G")
            assert len(made.devices) == 16
            assert [level.ranks for level in made.levels] == ([1, 8] if link == "NVLink" else [1, 4, 8])
    of_several = ("devices", "network")
    groups = [group for key, group in figures().items() if key not in of_several]
    assert all(
        "source" in group
        for group in [*groups, *(one for key in of_several for one in figures()[key].values())]
    )


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("8", "is no box: write COUNTxDEVICE-LINK"),
        ("8xL41-PCIe", "L41 of the box .* choose from A100"),
        ("8xL40-Wire", "Wire .* choose from NVLink"),
        ("8xL40-NVLink", "no NVLink .* choose PCIe"),
        ("2x8xL40-PCIe", "is no box"),
        ("99xL40-PCIe", "64 devices at most"),
        ("2x8xL40-PCIe-0G", "is no box"),
    ],
)
def test_a_box_that_is_not_known_is_refused_with_what_is(name, said):
    with pytest.raises(LayoutError, match=said):
        published_box(name)


def test_between_machines_a_latent_travels_to_each_group_there_and_its_output_back():
    """ComfyUI is on the first machine. A latent takes 1 s each way, and so does an output."""
    moved = FLUX.activations._replace(out_bytes=100)
    whole = dataclasses.replace(FLUX, activations=moved)
    levels = (Level(ranks=2, bytes_per_s=100, latency_s=0),)
    far, near = (box(4, levels=levels, machine=machine) for machine in (2, 0))

    def hop(layout, there=far):
        job = dataclasses.replace(JOB, whole=whole, branches=layout.cfg, batch=layout.data)
        return of(layout, there, job).parts["hop"]

    assert hop(Layout(ulysses=2, cfg=2)) == hop(Layout(ulysses=2, data=2)) == pytest.approx(2)
    assert hop(Layout(cfg=2)) == hop(Layout(ulysses=2, cfg=2), near) == 0
    assert hop(Layout(cfg=4)) == pytest.approx(4)  # two groups there share the way
    assert hop(Layout(ulysses=4)) == pytest.approx(1)  # its first rank has the output

    slow = dataclasses.replace(far, levels=(Level(ranks=2, bytes_per_s=1, latency_s=0),))
    in_patches = dataclasses.replace(JOB, whole=whole, branches=2, patches=4)
    each = of(Layout(pipefusion=2, cfg=2), slow, in_patches).seconds
    assert each >= 4 * 100 * 27 / 28  # each patch is sent, and comes back, as large as the whole


def test_groups_on_several_machines_never_share_an_image_as_they_do_not_in_a_run():
    far = box(4, machine=2)
    assert of(Layout(ulysses=2, cfg=2), box(4)).parts["imbalance"] == pytest.approx(0, abs=1e-6)
    apart = of(Layout(ulysses=2, cfg=2), far)
    assert apart.seconds == pytest.approx(of(Layout(ulysses=2), box(4)).seconds)


def test_every_number_of_up_to_eight_devices_is_tried_and_three_prompts_may_be_fastest_on_three():
    assert sizes_of(4) == (1, 2, 3, 4) and sizes_of(24) == (*range(1, 9), 16, 24)
    made = plan(Job(whole=FLUX, branches=3), box(4, port=1e7))
    assert made.best is not None and made.best.layout == Layout(cfg=3)


def test_a_layout_of_more_stages_than_there_are_patches_is_none():
    found = {layout.pipefusion for layout in legal_layouts(dataclasses.replace(JOB, patches=2), 4)}
    assert found == {1, 2}
