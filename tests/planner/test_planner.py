"""The planner's arithmetic: messages, time, memory, the choice and its reasons. Nothing runs."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pipemesh.lab.boxes import published_box
from pipemesh.lab.dry_run.expected import even_bytes
from pipemesh.parallel_runtime.attention.merge_operation import in_one
from pipemesh.parallel_runtime.attention.merging import Partial
from pipemesh.parallel_runtime.branches import Batch, plan_branches
from pipemesh.parallel_runtime.errors import LayoutError
from pipemesh.parallel_runtime.layout import Layout
from pipemesh.parallel_runtime.planner import cost
from pipemesh.parallel_runtime.planner.box import Cache, Level, SentBytes
from pipemesh.parallel_runtime.planner.choice import legal_layouts, plan, sizes_of, with_running
from pipemesh.parallel_runtime.planner.evaluation_count import ITEM_BYTES, Activations
from pipemesh.parallel_runtime.planner.job import Job
from pipemesh.parallel_runtime.planner.messages import SharedAttention
from pipemesh.parallel_runtime.planner.prediction import predict, sharded_bytes
from pipemesh.parallel_runtime.planner.published_boxes import figures

from ..kit.planned import attention_alone, box, counts

FLUX = counts("flux 1024")
JOB = Job(whole=FLUX)
ALONE, ULYSSES_4, RING_4 = Layout(), Layout(ulysses=4), Layout(ring=4)
LAUNCHES_ALONE = {"flops": 1e20, "device": {"launch_s": 1.0}}  # nothing else takes time
GIB = 1 << 30
DOCUMENT = Path(__file__).resolve().parents[2] / "lab" / "docs" / "PLANNER.md"


def of(layout: Layout, job: Job = JOB, there=None, **of_box):
    """What is predicted on this box, or on one of as many devices as the layout has ranks."""
    return min(predict(job, layout, there or box(layout.world_size, **of_box)), key=lambda one: one.seconds)


def seconds(layout: Layout, job: Job = JOB, there=None, **of_box) -> float:
    return of(layout, job, there, **of_box).seconds


# -- links


@pytest.mark.parametrize(
    ("messages", "seconds"),
    [
        ([(0, 1, 20)], 1 + 2),
        ([(0, 1, 20), (1, 0, 20)], 1 + 2),  # each way has its own bandwidth
        ([(0, 2, 20)], 3 + 4),
        ([(0, 2, 20), (1, 3, 20)], 3 + 8),
        ([(0, 2, 20), (2, 0, 20)], 3 + 4),
        ([(1, 1, 20)], 0),
        ([], 0),
    ],
)
def test_all_messages_between_two_groups_share_the_way_between_them(messages, seconds):
    two = box(4, port=10, latency=1, levels=(Level(ranks=2, bytes_per_s=5, latency_s=3),))
    assert two.seconds([SentBytes(*one) for one in messages]) == pytest.approx(seconds)


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 40), st.integers(1, 9))
def test_ranks_send_the_bytes_that_the_papers_say_where_all_is_even(ulysses, ring, tokens, heads):
    layout = Layout(ulysses=ulysses, ring=ring)
    tokens, heads = tokens * layout.world_size, heads * ulysses
    whole = attention_alone(tokens, heads, 8)
    costs = cost.Costs(job=Job(whole=whole), layout=layout, box=cost.NOWHERE)
    due = even_bytes(layout, tokens, 8 * heads, 1, ITEM_BYTES)
    sent = [costs.sent_by(rank) for rank in range(layout.world_size)]
    assert [sum(one.values()) for one in sent] == pytest.approx([due] * len(sent))
    passed = sum(message.nbytes for message in SharedAttention(layout, whole.attended[0]).ring_step())
    assert (ring - 1) * passed == sum(one["ring"] for one in sent)


# -- time


@pytest.mark.parametrize("layout", [ULYSSES_4, RING_4, Layout(ulysses=2, ring=2)], ids=Layout.equation)
def test_ranks_of_a_sequence_on_perfect_links_share_the_time_of_one(layout):
    alone, shared = seconds(ALONE), seconds(layout)
    assert alone == pytest.approx(FLUX.flops / 1e12)
    assert shared == pytest.approx(alone / 4, rel=2e-3)  # each computes what is around the blocks


@pytest.mark.parametrize(("evaluations", "warm_up", "ideal"), [(28, 1, 6.4), (28, 4, 4.0)])
def test_a_pipeline_on_perfect_links_takes_what_the_paper_says(evaluations, warm_up, ideal):
    """S / (W + (S - W) / N), but for stages of unequal cost, the fill, and what every patch
    computes anew.
    """
    job = Job(whole=FLUX, evaluations=evaluations, warm_up=warm_up)
    assert 0.88 * ideal < seconds(ALONE, job) / seconds(Layout(pipefusion=8), job) < ideal


def test_heads_that_do_not_divide_are_imbalance_and_even_ones_are_not():
    lost = [of(Layout(ulysses=ranks)).parts["imbalance"] for ranks in (5, 4)]
    assert lost[0] > 0 == lost[1]


def test_a_ring_waits_for_all_that_its_own_cores_move_and_for_its_merges():
    job, layout = Job(whole=attention_alone(4096)), Layout(ring=2)
    attended = SharedAttention(layout, job.whole.attended[0])

    def waits(**there):
        return of(layout, job, **there).parts["ring"]

    assert waits(port=1e9, flops=1e10) == pytest.approx(0, abs=1e-5)  # covered
    travels = waits(port=1e9, flops=1e10, overlaps=False)
    assert travels == pytest.approx(attended.passed_bytes(0) / 1e9, rel=1e-3)
    once, twice = (waits(device={"merge_bytes_per_s": speed}) for speed in (1e9, 2e9))
    assert once == pytest.approx(2 * twice)
    merged = (cost.MERGE_BYTES + cost.MERGED_BYTES) * attended.output_elements
    assert once == pytest.approx(merged / 1e9, rel=1e-3)


def test_a_ring_is_charged_what_its_merges_read_and_write():
    shape = (1, 2, 3, 64)
    whole, *parts = (Partial(torch.ones(shape, dtype=torch.bfloat16), torch.zeros(shape[:3])) for _ in "abcd")
    moved = 0
    for part in parts:
        before, whole = whole, in_one(whole, part)
        moved += sum(one.out.nbytes for one in (before, part, whole))
    moved += whole.out.nbytes + whole.out.bfloat16().nbytes  # RingAttention.attend's last line
    assert moved == whole.out.numel() * (len(parts) * cost.MERGE_BYTES + cost.MERGED_BYTES)


def test_where_ranks_own_cores_move_messages_weights_and_patches_wait_for_them_too():
    sharded, staged = replace(JOB, keeps=("sharded",)), Layout(pipefusion=2)
    covered, waits = (
        of(Layout(ulysses=2), sharded, port=1e9, overlaps=one).parts["weights"] for one in (True, False)
    )
    assert covered == 0 and waits == pytest.approx(sum(FLUX.block_weight_bytes) / 2 / 1e9, rel=0.05)

    def lost(overlaps):
        return seconds(staged, port=1e9, overlaps=overlaps) - seconds(staged, overlaps=overlaps)

    onwards = of(staged, port=1e9, overlaps=False).sent_bytes["pipefusion"] / 1e9
    assert lost(False) - lost(True) > 0.5 * onwards


def test_what_blocks_take_beside_computing_comes_with_every_patch_and_is_shared_by_stages_alone():
    there, blocks = box(2, flops=1e30, device={"beside_s": 1.0}), len(FLUX.block_flops)
    for layout in (ALONE, Layout(ulysses=2)):
        assert seconds(layout, there=there) == pytest.approx(blocks, rel=1e-6)
    job = Job(whole=FLUX, warm_up=1, evaluations=1001, patches=3)
    computed = of(Layout(pipefusion=2), job, there).parts["compute"]
    assert computed == pytest.approx(3 * blocks / 2, rel=1e-2)


def test_a_rank_takes_no_less_than_the_starts_of_its_kernels_which_messages_and_patches_add_to():
    """Its own blocks', with what exchanges and steps of a ring start; whatever it computes."""
    job = Job(whole=FLUX, warm_up=1, evaluations=10001, patches=4)
    alone, attentions = FLUX.launches, len(FLUX.attended)

    def started(**degrees):
        return of(Layout(**degrees), job, **LAUNCHES_ALONE)

    assert started().seconds == pytest.approx(alone)
    both = started(ulysses=2).seconds
    assert both == pytest.approx(started(ulysses=8).seconds) == alone + cost.OF_EXCHANGES * attentions
    for ring in (2, 4):
        steps = cost.OF_RING + cost.OF_RING_STEP * (ring - 1)
        assert started(ring=ring).seconds == pytest.approx(alone + steps * attentions)
    patched = started(pipefusion=2)
    assert patched.seconds > 4 * 0.5 * (alone + cost.OF_PATCH * attentions)
    assert patched.parts["launches"] > 0.9 * patched.seconds
    assert started(ulysses=2).parts["launches"] == pytest.approx(both)


def test_a_rank_that_replays_starts_graphs_and_messages_of_whole_weights_without_stages():
    count, staged = len(FLUX.attended), Layout(pipefusion=4)
    plain, replaying = (Job(whole=FLUX, patches=4, replays=replays) for replays in (False, True))

    def kept(job, layout):
        made = predict(job, layout, box(4, **LAUNCHES_ALONE))
        return {one.kept: one.seconds for one in made}

    for layout, messages, more in ((ULYSSES_4, 2 * count + 1, count), (RING_4, 3 * count + 1, 4 * count)):
        graphs = messages + count * (layout.ring > 1) + 1
        due = messages + more + cost.OF_INPUTS + cost.OF_GRAPH * graphs
        assert kept(replaying, layout)["whole"] == pytest.approx(due)
        assert kept(replaying, layout)["sharded"] == kept(plain, layout)["sharded"]
    assert kept(replaying, staged) == kept(plain, staged)


def test_the_document_has_the_launches_of_the_formula():
    there, eight = published_box("8xH100-NVLink"), Layout(ulysses=8)
    text = " ".join(DOCUMENT.read_text(encoding="utf-8").split())

    def costs(layout):
        return cost.costs_of(JOB, layout, box(layout.world_size))

    def takes_ms(layout, replays):
        return 1e3 * seconds(layout, Job(whole=FLUX, replays=replays), there)

    two, wide, ring, four = (
        cost.launches_of(costs(one), 0) for one in (Layout(ulysses=2), eight, Layout(ring=8), ULYSSES_4)
    )
    computes = takes_ms(ULYSSES_4, False)
    assert two == wide and computes == pytest.approx(takes_ms(eight, False))
    for said in (
        f"{cost.OF_EXCHANGES} for both exchanges of an attention, {cost.OF_EXCHANGES + cost.OF_UNLIKE} if ranks"
        f" have unlike parts, {cost.OF_RING} for its ring and {cost.OF_RING_STEP} for each step of the ring,"
        f" {cost.OF_PATCH} for the keys and values that a patch keeps. An evaluation of FLUX starts"
        f" {FLUX.launches:,} on one GPU, {two:,} under `ulysses` of 2 or 8, {ring:,} in a ring of 8",
        f"FLUX under `ulysses 4` starts {cost.replay_launches_of(costs(ULYSSES_4), 0)} in place of {four:,}",
        f"to take {takes_ms(ULYSSES_4, True):.0f} ms on four and {takes_ms(eight, True):.0f} on eight,"
        f" {computes:.0f} on",
    ):
        assert said in text


def test_prompts_are_split_into_groups_before_ranks_start_more_than_they_compute():
    """8 ranks of one sequence start both prompts' kernels in turn, two groups of 4 each one's."""
    made = plan(Job(whole=FLUX, branches=2), published_box("8xH100-NVLink"), sizes=(8,))
    assert made.best.layout == Layout(cfg=2, ulysses=4)
    wide = next(row for row in made.rows if row.layout == Layout(ulysses=8))
    assert wide.prediction.seconds == pytest.approx(2 * made.best.prediction.seconds, rel=0.05)
    assert wide.loss.name == "lost_launches"


def test_an_exchange_takes_longer_the_more_ranks_take_part():
    known = box(8, exchanges=((4, 1.0), (8, 3.0)))
    assert [known.exchange_s(ranks) for ranks in (1, 2, 3, 4, 6, 8, 16)] == [0, 0, 0.5, 1, 2, 3, 3]
    for ranks in (4, 8):
        taken = of(Layout(ulysses=ranks), there=known).parts["ulysses"]
        assert taken == pytest.approx(2 * len(FLUX.attended) * known.exchange_s(ranks))


def test_a_pipeline_takes_no_less_than_the_patches_that_comfyui_samples():
    job = Job(whole=FLUX, warm_up=1, evaluations=10001, patches=4)
    there = box(2, flops=1e20, patch_s=1.0)
    assert seconds(Layout(pipefusion=2), job, there) == pytest.approx(4, rel=1e-3)
    assert seconds(Layout(ulysses=2), job, there) < 1e-3


def test_a_device_computes_as_fast_as_its_products_where_these_are_published():
    """L20's reach 95 % of its peak, where large models were trained with 54 % of another's."""
    known = figures()
    for kind, figure in known["devices"].items():
        found, peak = (
            published_box(f"1x{kind}-PCIe").devices[0].matmul_flops_per_s / 1e12,
            figure["bf16_tflops"],
        )
        assert found == pytest.approx(known["matmul"].get(kind, known["achieved"]["fraction"] * peak))
        assert found < 1.15 * peak
    assert {*known["matmul"]} - {"why", "source"} < {*known["devices"]}


def test_processors_idle_where_there_is_little_for_them_and_only_then():
    """Half of the last wave: a patch or shard of few rows takes longer than its part."""
    device, plain = (box(1, device={"processors": one}).devices[0] for one in (100, 0))
    assert (device.busy(50), device.busy(5000)) == (0.5, pytest.approx(0.99, abs=1e-3))
    assert plain.busy(50) == device.busy(0) == 1

    def gain(layout, model, processors):
        job, having = Job(whole=counts(model)), {"device": {"processors": processors}}
        return seconds(ALONE, job, **having) / seconds(layout, job, **having)

    for layout in (Layout(ulysses=8), Layout(ring=8), Layout(pipefusion=8)):
        small, large = (
            gain(layout, model, 132) / gain(layout, model, 0) for model in ("flux 1024", "flux 2048")
        )
        assert small < large < 1, "larger images leave fewer idle"


def test_attention_has_the_speed_of_its_kernels_where_that_is_known():
    def longer(model):
        fast, slow = (
            seconds(ALONE, Job(whole=counts(model)), device={"attention_flops_per_s": speed})
            for speed in (1e12, 0.5e12)
        )
        return slow / fast

    assert 1.1 < longer("flux 1024") < 1.3
    assert 1.8 < longer("hunyuan 720p") < 2, "a long video is nearly all attention"
    h100, l40 = (published_box(f"1x{name}-PCIe").devices[0] for name in ("H100", "L40"))
    assert h100.attention_flops_per_s < h100.matmul_flops_per_s
    assert l40.attention_flops_per_s == l40.matmul_flops_per_s


def test_what_kernels_move_between_products_takes_time_through_the_cache_where_it_has_room():
    of_device = {"memory_bytes_per_s": 1.0, "cache": Cache(100, 10.0)}
    device = box(1, device=of_device).devices[0]
    assert (device.moving_s(100), device.moving_s(101)) == (10, 101)
    assert box(1).devices[0].moving_s(101) == 0, "measured speeds have it"
    little = attention_alone(1024)
    whole = replace(little, activations=Activations(0, [(150, 3), (400, 1)]))

    def computed(layout, whole):
        return of(layout, Job(whole=whole), device=of_device).parts["compute"]

    alone = computed(ALONE, little)
    assert computed(ALONE, whole) == pytest.approx(alone + 3 * 150 + 400)
    half = alone / 2 + 3 * 7.5 + 200
    assert computed(Layout(ulysses=2), whole) == pytest.approx(half), "half of the rows have room"


# -- memory


def test_weights_that_fit_no_device_are_shared_out_or_left_in_main_memory():
    alone, shared = of(ALONE, memory=20 * GIB), of(ULYSSES_4, memory=20 * GIB)
    assert (alone.kept, shared.kept) == ("offloaded", "sharded") and alone.memory_bytes <= 20 * GIB
    assert alone.parts["weights"] == pytest.approx((FLUX.weight_bytes - alone.weight_bytes) / 1e9)
    assert shared.weight_bytes == sharded_bytes(FLUX, ULYSSES_4, (0, len(FLUX.block_flops)))
    for layout, gib in ((ALONE, 40), (ULYSSES_4, 40), (Layout(pipefusion=2), 20)):
        assert of(layout, memory=gib * GIB).kept == "whole"


def test_a_pipeline_keeps_keys_and_values_of_its_own_blocks_for_each_branch():
    """FLUX.1 at 1024 x 1024 keeps 2.67 GiB of image tokens per branch, before it is divided by
    stages (arXiv 2405.14430); here the text's are kept too.
    """
    one, two = (of(Layout(pipefusion=2), Job(whole=FLUX, branches=many)).memory_bytes for many in (1, 2))
    assert 1.3 * GIB < two - one < 1.3 * 2.67 * GIB * 4608 / 4096


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
    """Also if it is up already."""
    slow = box(4, port=2e9, flops=1e14)
    exact, any_ = (plan(JOB, slow, allows_approximate=allowed).best for allowed in (False, True))
    assert not exact.layout.is_approximate and any_.layout.is_approximate
    refused = {row.why for row in plan(JOB, slow).rows if row.layout.is_approximate}
    assert refused == {"The image would differ a little from that of one GPU, which was not allowed."}
    job, fast, up = replace(JOB, evaluations=1), box(2, flops=1e14), Layout(pipefusion=2)
    made = plan(job, fast, sizes=(2,))
    exact, any_ = (with_running(job, fast, made, up, allows_approximate=one).best for one in (False, True))
    assert not exact.layout.is_approximate and any_.layout == up


def test_every_loser_says_how_much_it_loses_and_to_what():
    made = plan(JOB, published_box("8xL40-PCIe"))
    assert [row.why for row in made.rows].count("") == 1
    assert all(row.loss.name == "lost_approximate" or " ms more " in row.why for row in made.rows if row.why)
    ring = next(row for row in made.rows if row.layout == Layout(ring=8))
    assert ring.why.endswith("more for ring messages and merges.")
    taken = [row.prediction.seconds for row in made.rows[1:] if row.prediction]
    assert taken == sorted(taken)


@pytest.mark.parametrize(
    ("axis", "most", "changes"),
    [
        ("ring", 64, {}),
        ("ring", 1, {"merges": False}),
        ("cfg", 1, {}),
        ("data", 1, {}),
        ("cfg", 2, {"branches": 2}),
        ("data", 4, {"batch": 4}),
        ("ulysses", 16, {}),
        ("pipefusion", 32, {}),  # 64 stages have no block each
        ("pipefusion", 2, {"patches": 2}),
    ],
)
def test_a_layout_of_more_groups_than_branches_images_heads_blocks_or_patches_is_not_tried(
    axis, most, changes
):
    tried = (layout for size in (4, 25, 64) for layout in legal_layouts(replace(JOB, **changes), size))
    assert max(layout.degrees()[axis] for layout in tried) == most


def test_branches_and_images_in_groups_of_their_own_need_no_messages():
    job = Job(whole=FLUX, branches=2, batch=2)
    for layout in (Layout(cfg=2), Layout(data=2), Layout(cfg=2, data=2)):
        shared = of(layout, job, port=1.0)
        assert shared.seconds == pytest.approx(seconds(ALONE, job) / layout.world_size)
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
    apart, joined = of(layout, job, devices), of(layout.joined(width), job, devices)
    assert (apart.layout, apart.parts, apart.sent_bytes) == (layout, joined.parts, joined.sent_bytes)


def test_groups_stay_apart_where_each_gathers_its_weights_and_where_the_forward_cannot_be_cut():
    unet = replace(FLUX, attended_by_block=[[] for _ in FLUX.block_flops])
    for layout, job in (
        (Layout(ring=2, cfg=2), Job(whole=FLUX, branches=3, keeps=("sharded",))),
        (Layout(cfg=2), Job(whole=unet, branches=3)),
    ):
        (apart,) = predict(job, layout, box(4))
        # Two in turn where there are 1.5 in the mean
        assert apart.parts["imbalance"] == pytest.approx(apart.parts["compute"] / 3)


# -- boxes


def test_every_published_device_and_link_makes_a_box_and_names_its_source():
    known = figures()
    for name, figure in known["devices"].items():
        for link in ("PCIe", "SPR", "AMD", *(["NVLink"] if "nvlink_gb_per_s" in figure else [])):
            made = published_box(f"2x8x{name}-{link}-100G")
            assert len(made.devices) == 16
            assert [level.ranks for level in made.levels] == ([1, 8] if link == "NVLink" else [1, 4, 8])
    several = {name: known[name] for name in ("devices", "network")}
    alone = {name: one for name, one in known.items() if name not in several}
    assert all("source" in one for group in (alone, *several.values()) for one in group.values())


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
    """ComfyUI is on the first machine. A latent takes 1 s each way, and so does an output. Groups
    there never share an image, as they do not in a run.
    """
    whole = replace(FLUX, activations=FLUX.activations._replace(out_bytes=100))
    levels = (Level(ranks=2, bytes_per_s=100, latency_s=0),)
    far, near = (box(4, levels=levels, machine=machine) for machine in (2, 0))

    def hop(there=far, **degrees):
        layout = Layout(**degrees)
        return of(layout, Job(whole=whole, branches=layout.cfg, batch=layout.data), there).parts["hop"]

    assert hop(ulysses=2, cfg=2) == hop(ulysses=2, data=2) == pytest.approx(2)
    assert hop(cfg=2) == hop(near, ulysses=2, cfg=2) == 0
    assert hop(cfg=4) == pytest.approx(4)  # two groups there share the way
    assert hop(ulysses=4) == pytest.approx(1)  # its first rank has the output
    slow = replace(far, levels=(Level(ranks=2, bytes_per_s=1, latency_s=0),))
    each = seconds(Layout(pipefusion=2, cfg=2), Job(whole=whole, branches=2, patches=4), slow)
    assert each >= 4 * 100 * 27 / 28  # each patch is sent, and comes back, as large as the whole
    pairs, free = Layout(ulysses=2, cfg=2), box(4, machine=2)
    assert of(pairs).parts["imbalance"] == pytest.approx(0, abs=1e-6)
    assert seconds(pairs, there=free) == pytest.approx(seconds(Layout(ulysses=2), there=box(4)))


def test_every_number_of_up_to_eight_devices_is_tried_and_three_prompts_may_be_fastest_on_three():
    assert sizes_of(4) == (1, 2, 3, 4) and sizes_of(24) == (*range(1, 9), 16, 24)
    assert plan(Job(whole=FLUX, branches=3), box(4, port=1e7)).best.layout == Layout(cfg=3)
