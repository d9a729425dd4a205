"""Ranks on unlike devices: each takes as much as it is fast, and the result is that of one rank."""

from dataclasses import replace
from itertools import pairwise, product
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pipemesh.lab.boxes import published_box
from pipemesh.lab.commands.parity import BOUND, Case, relative_error, stock_model
from pipemesh.nodes.planning import Planning
from pipemesh.nodes.room import room_on_devices
from pipemesh.nodes.settings import Choice
from pipemesh.nodes.status.reasons import unlike_shares
from pipemesh.nodes.status.sums import times_as_long
from pipemesh.nodes.timing import StepTimes
from pipemesh.parallel_runtime.branches import SEQUENCE_COST, Batch, cost_of, plan_branches
from pipemesh.parallel_runtime.client.remote_patcher import Patching, parallelize
from pipemesh.parallel_runtime.client.remote_pool import RemotePool
from pipemesh.parallel_runtime.client.run import Evaluation, RunNames
from pipemesh.parallel_runtime.comm.shares import EVEN, group_speeds, relative, shares_of, stage_speeds
from pipemesh.parallel_runtime.families.catalogue import PLAIN, SAMPLES
from pipemesh.parallel_runtime.layout import Layout, Split
from pipemesh.parallel_runtime.occupancy import Span
from pipemesh.parallel_runtime.patches import Part
from pipemesh.parallel_runtime.planner.balance import StageBalance
from pipemesh.parallel_runtime.planner.counts import Counts, count_nothing
from pipemesh.parallel_runtime.planner.evaluation_count import ITEM_BYTES, Attended, ModelBytes, Shareable
from pipemesh.parallel_runtime.planner.job import Job
from pipemesh.parallel_runtime.planner.keeping import WeightsWish
from pipemesh.parallel_runtime.planner.machine import RankDevice, machine_box
from pipemesh.parallel_runtime.planner.measurements import keep_devices, read_devices
from pipemesh.parallel_runtime.planner.messages import SharedAttention
from pipemesh.parallel_runtime.planner.prediction import RESERVED, predict
from pipemesh.parallel_runtime.stages import Stage, share_out, slowest
from pipemesh.parallel_runtime.worker.own_speed import flops_per_s
from pipemesh.pool.devices import Device, place
from pipemesh.pool.handle import PoolHandle

from ..fixtures import ALL
from ..kit.bounds import assert_same
from ..kit.in_ranks import evaluated_in_ranks
from ..kit.models import ATTENDS_TWICE, VIDEO, asked_of, load, run
from ..kit.pipelines import ALL_WARM
from ..kit.planned import box, counts

SPEED = st.integers(1, 100)
FLUX = counts("flux 1024")

# -- splits


@settings(deadline=None)
@given(st.integers(0, 200), st.lists(SPEED, min_size=1, max_size=6).map(tuple), st.integers(0, 1))
def test_a_weighted_split_covers_everything_and_leaves_no_part_empty_where_there_is_enough(
    total, weights, least
):
    split = Split.by(weights, total, len(weights), least)
    assert (split.total, len(split.sizes)) == (total, len(weights))
    assert min(split.sizes) >= (least if total >= least * len(weights) else 0)


@settings(deadline=None)
@given(st.integers(0, 9), st.lists(SPEED, min_size=1, max_size=3).map(tuple), st.integers(0, 1))
def test_no_other_split_has_a_smaller_largest_part_for_its_weight(total, weights, least):
    def longest(sizes):
        return max(size / weight for size, weight in zip(sizes, weights, strict=True))

    least = least if total >= least * len(weights) else 0
    ways = (sizes for sizes in product(range(least, total + 1), repeat=len(weights)) if sum(sizes) == total)
    assert longest(Split.by(weights, total, len(weights), least).sizes) == pytest.approx(
        min(map(longest, ways))
    )


@given(st.integers(0, 300), st.integers(1, 9), SPEED, st.integers(0, 1))
def test_equal_weights_split_as_none_do(total, parts, weight, least):
    even = Split.even(total, parts)
    assert Split.by((weight,) * parts, total, parts, least) == Split.by((), total, parts, least) == even


def test_heads_go_to_faster_ranks_as_far_as_whole_ones_can():
    assert Split.by((2, 1), 24, 2).sizes == (16, 8)
    assert Split.by((100, 50), 2, 2).sizes == (1, 1), "none of two ways is faster, and this one is even"
    assert Split.by((100, 10), 2, 2).sizes == (2, 0)


# -- shares


def test_devices_that_are_about_alike_or_not_known_share_evenly():
    assert relative((100.0, 91.0)) == relative(()) == relative((5.0, 5.0)) == relative((10.0, 0.0)) == ()
    assert relative((362.05, 181.025)) == (100, 50)
    assert relative((1.0, 1e6)) == (1, 100)


LAYOUTS = st.builds(
    Layout, ulysses=st.integers(1, 3), ring=st.integers(1, 3), cfg=st.integers(1, 2)
) | st.builds(Layout, ulysses=st.integers(1, 2), pipefusion=st.integers(2, 3), data=st.integers(1, 2))


@given(LAYOUTS, st.data())
def test_ranks_of_a_sequence_agree_on_its_shares_and_equal_ones_share_evenly(layout, data):
    speeds = tuple(data.draw(st.lists(SPEED, min_size=layout.world_size, max_size=layout.world_size)))
    size = layout.sequence_size
    for rank in range(layout.world_size):
        shares = shares_of(layout, rank, speeds)
        assert shares == shares_of(layout, rank - rank % size, speeds), "of another rank of its stage"
        assert shares == shares_of(layout, layout.of_stages(rank)[0], speeds), "of another stage"
        assert (len(shares.tokens) or size, len(shares.heads) or layout.ulysses) == (size, layout.ulysses)
        assert shares_of(layout, rank, ()) == shares_of(layout, rank, (70,) * layout.world_size) == EVEN
    alike = (70,) * layout.world_size
    assert stage_speeds(layout, alike) == group_speeds(alike, layout.groups) == ()


def test_tokens_heads_stages_and_groups_follow_the_speeds():
    assert shares_of(Layout(ulysses=2), 0, (100, 40)) == ((100, 40), (100 / 140, 40 / 140))
    assert shares_of(Layout(ring=2), 1, (100, 40)) == ((100, 40), ())
    square = shares_of(Layout(ulysses=2, ring=2), 0, (100, 50, 50, 25))
    assert square.tokens == (100, 50, 50, 25) and square.heads[0] == pytest.approx(2 * square.heads[1])
    assert stage_speeds(Layout(pipefusion=2), (100, 50)) == pytest.approx((100 / 150, 50 / 150))
    stages = stage_speeds(Layout(ulysses=2, pipefusion=2), (100, 100, 50, 50))
    assert stages[0] == pytest.approx(2 * stages[1])
    assert group_speeds((100, 50, 40, 40), 2) == (150, 80)
    assert shares_of(Layout(cfg=2, ulysses=2), 3, (100, 100, 50, 50)) == EVEN, (
        "the ranks of a group are alike"
    )


COSTS = st.lists(st.integers(1, 9).map(float), min_size=2, max_size=7)


@settings(deadline=None)
@given(COSTS, st.lists(SPEED, min_size=2, max_size=2))
def test_no_other_way_to_share_blocks_out_over_unlike_stages_is_faster(costs, speeds):
    made = share_out(costs, 2, speeds)
    ways = [
        [Stage(*ends, len(costs)) for ends in pairwise((0, way, len(costs)))] for way in range(1, len(costs))
    ]
    assert slowest(costs, made, speeds) == min(slowest(costs, way, speeds) for way in ways)


def test_what_blocks_took_on_a_slower_stage_is_not_taken_for_their_cost():
    """Twelve blocks alike, of which eight ran on a stage twice as fast as the other."""
    balance, speeds = StageBalance(), (2.0, 1.0)
    times = [dict.fromkeys(range(8), 1.0), dict.fromkeys(range(8, 12), 2.0)]
    balance.learn(Part(1, 0, (0, 4, False)), times, speeds)
    assert balance.choose((), 2, speeds) == (), "the stages are as fast as can be"
    other = StageBalance()
    other.learn(Part(1, 0, (0, 4, False)), times)
    assert other.choose((), 2) != ()


# -- groups

BATCHES = st.lists(
    st.builds(Batch, st.integers(1, 3), st.integers(1, 5), st.floats(1, 1000)), min_size=1, max_size=4
)
GROUPS = st.sampled_from([(1, (1,)), (2, (1, 2)), (3, (1,)), (4, (1, 2, 4)), (6, (1, 3, 6))])


@settings(deadline=None)
@given(BATCHES, GROUPS, st.data())
def test_groups_compute_every_row_once_and_finish_together_whether_they_are_alike_or_not(
    batches, groups, data
):
    count, widths = groups
    speeds = data.draw(st.just([]) | st.lists(SPEED, min_size=count, max_size=count))
    plan = plan_branches(batches, count, widths, speeds)
    rows = [(number, row) for number, start, end, _ in plan.shares for row in range(start, end)]
    assert rows == [(number, row) for number, batch in enumerate(batches) for row in range(batch.rows)]
    assert plan.width in widths and {share.group for share in plan.shares} <= set(range(count // plan.width))
    for number, start, end, _ in plan.shares:
        items = batches[number].items
        assert start // items == (end - 1) // items, "a share is of one branch"
    total = sum(batch.rows * batch.weight for batch in batches)
    longest = max(batch.items * batch.weight for batch in batches) * (1 if speeds else 1 - 1 / count)
    cost = cost_of(plan, batches, speeds)
    assert cost <= total / count + longest + 1e-6, (
        "they finish together, as far as the longest piece lets them"
    )
    if count in widths:
        assert cost <= SEQUENCE_COST * total / count + 1e-6, "one sequence of all would be faster"


def test_images_and_prompts_go_to_groups_by_their_speed():
    plan = plan_branches([Batch(1, 3, 1.0)], 2, (1,), (100, 50))
    assert plan.shares == ((0, 0, 2, 0), (0, 2, 3, 1))
    long_prompt_second = plan_branches([Batch(1, 1, 1.0), Batch(1, 1, 2.0)], 2, (1,), (50, 100))
    assert [share.group for share in long_prompt_second.shares] == [0, 1]
    names = RunNames()
    assert [names.group_of(branch, 1.0, 2, (100, 30)) for branch in "abcd"] == [0, 0, 0, 1]


# -- devices

TITLES = {"NVIDIA H100 80GB HBM3": 100, "NVIDIA GeForce RTX 4090": 31, "NVIDIA GeForce RTX 3090": 14}


def gpus(*titles):
    return tuple(Device(f"cuda:{index}", f"GPU-{index}", title=title) for index, title in enumerate(titles))


def on(layout, *titles, devices="auto"):
    return place(layout, devices, "auto", gpus(*titles))


RTX_4090_AND_3090 = "NVIDIA GeForce RTX 4090", "NVIDIA GeForce RTX 3090"


def test_a_placement_knows_how_fast_its_devices_are_by_their_titles():
    assert on(Layout(ulysses=3), *TITLES).speeds == tuple(TITLES.values())
    assert on(Layout(ulysses=2), *TITLES, devices="cuda:2,cuda:1").speeds == (46, 100)
    unknown = on(Layout(ulysses=2), "NVIDIA L40", "Strange GPU")
    assert on(Layout(ulysses=2), "NVIDIA L40", "NVIDIA L40").speeds == unknown.speeds == ()
    assert place(Layout(ulysses=2), "cpu", "gloo", ()).speeds == ()


def test_measured_speeds_count_before_published_ones_where_all_were_measured(tmp_path):
    pair = gpus("NVIDIA L40S", "Strange GPU")
    assert place(Layout(ulysses=2), "auto", "auto", pair).speeds == ()
    ready = [
        SimpleNamespace(device_name="NVIDIA L40S", flops_per_s=2e14),
        SimpleNamespace(device_name="Strange GPU", flops_per_s=1e14),
    ]
    file = tmp_path / "devices.json"
    chooser = Planning(StepTimes(), Counts(count_nothing), file)
    chooser.keep_speeds(SimpleNamespace(ready=ready))
    assert chooser.with_speeds(pair) == pair, "another speed would be another pool"
    later = Planning(StepTimes(), Counts(count_nothing), file)
    assert place(Layout(ulysses=2), "auto", "auto", later.with_speeds(pair)).speeds == (100, 50)
    later.keep_speeds(SimpleNamespace(ready=[SimpleNamespace(device_name="NVIDIA L40S", flops_per_s=3e14)]))
    assert Planning(StepTimes(), Counts(count_nothing), file).with_speeds(pair) == later.with_speeds(pair), (
        "they stay, and so does the image"
    )
    timed = [
        RankDevice("NVIDIA L40S", 48 << 30, flops_per_s=2e14),
        RankDevice("NVIDIA L40", 48 << 30, flops_per_s=1.5e14),
    ]
    fast, slow = machine_box(timed).box.devices
    slower = pytest.approx(0.75 * fast.matmul_flops_per_s)
    assert slow.matmul_flops_per_s == slow.attention_flops_per_s == slower
    timed = [RankDevice("NVIDIA H100 80GB HBM3", 80 << 30, flops_per_s=one) for one in (2e14, 1.5e14)]
    hot, cool = machine_box(timed).box.devices
    assert cool.attention_flops_per_s == pytest.approx(0.75 * hot.attention_flops_per_s)
    assert cool.attention_flops_per_s != pytest.approx(cool.matmul_flops_per_s)


def test_only_ranks_with_unlike_gpus_of_their_own_time_them():
    assert on(Layout(ulysses=3), *TITLES).times_devices
    assert not on(Layout(ulysses=3), *TITLES, devices="cuda:0,cuda:0,cuda:1").times_devices
    assert not on(Layout(ulysses=2), "NVIDIA L40", "NVIDIA L40").times_devices
    assert flops_per_s(torch.device("cpu")) == 0.0


def test_the_report_says_what_slower_devices_take_and_why():
    def said(placement):
        return [share.english for share in unlike_shares(placement)]

    assert said(on(Layout(ulysses=2), *RTX_4090_AND_3090)) == [
        "cuda:1 takes 32 % of the tokens, because it is 2.2 times slower than cuda:0."
    ]
    assert not said(place(Layout(ulysses=2), "cpu", "gloo", ()))
    stages = on(Layout(pipefusion=2), *RTX_4090_AND_3090, devices="cuda:1,cuda:0")
    assert said(stages) == ["Give stage 0 fewer blocks: it is 2.2 times slower than the fastest stage."]
    assert said(on(Layout(cfg=2), *RTX_4090_AND_3090)) == [
        "The group of cuda:1 gets fewer prompts and images, because it is 2.2 times slower."
    ]


def test_what_a_slower_device_computed_would_take_the_first_less():
    spans = {0: Span(0.0, 1.0, 0.0), 1: Span(0.0, 1.0, 0.0)}
    run = [Evaluation(1.0, 0.0, 0.0, 0, began=0.0, spans=spans)]
    made = on(Layout(cfg=2), "NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM4-80GB")
    assert times_as_long(run, made) == pytest.approx(1 + made.speeds[1] / 100)


# -- predicted


def test_a_box_of_unlike_devices_is_written_with_a_plus():
    mixed = published_box("1xRTX4090+2xA6000-PCIe")
    assert [device.name for device in mixed.devices] == ["RTX4090", "A6000", "A6000"]
    alone = {kind: published_box(f"3x{kind}-PCIe") for kind in ("RTX4090", "A6000")}
    assert mixed.levels == alone["RTX4090"].levels != alone["A6000"].levels, (
        "not all of them reach their peers"
    )
    here = machine_box(
        [RankDevice("NVIDIA GeForce RTX 4090", 24 << 30), RankDevice("NVIDIA RTX A6000", 48 << 30)]
    )
    assert (here.known, here.box.name) == ("published", "1xRTX4090+1xA6000-PCIe")
    unknown = machine_box(
        [RankDevice("NVIDIA GeForce RTX 4090", 24 << 30), RankDevice("Strange GPU", 48 << 30)]
    ).box.devices
    assert unknown[0].matmul_flops_per_s == unknown[1].matmul_flops_per_s


@pytest.mark.parametrize(
    "layout", [Layout(ulysses=2), Layout(ring=2), Layout(pipefusion=2), Layout(data=2)], ids=Layout.equation
)
def test_a_pair_of_unlike_devices_takes_what_both_can_do(layout):
    """Half as fast again as the faster one, but for what each computes whole, and whole heads."""
    pair = replace(box(2), devices=(*box(1).devices, *box(1, flops=0.5e12).devices))
    job = Job(whole=FLUX, evaluations=10_000, batch=3)
    alone = predict(job, Layout(), box(1))[0].seconds
    shared = min(one.seconds for one in predict(job, layout, pair))
    assert 1.4 < alone / shared <= 1.5 + 1e-6
    assert predict(job, layout, box(2))[0].seconds <= shared


def test_a_faster_group_needs_room_for_the_images_that_it_gets():
    """Three of four, all in one forward; the other group has one."""
    job = Job(whole=FLUX, batch=4, keeps=("whole",))
    alone = predict(replace(job, batch=1), Layout(), box(1))[0].memory_bytes

    def having(*memory):
        devices = [
            replace(box(1, flops=flops).devices[0], memory_bytes=one)
            for flops, one in zip((1e12, 0.3e12), memory, strict=True)
        ]
        return predict(job, Layout(data=2), replace(box(2), devices=tuple(devices)))

    due = alone + 2 * FLUX.activations.peak_bytes
    (enough,) = having(due, alone)
    assert enough.memory_bytes == due
    assert having(due - 1, alone) == having(due, alone - 1) == []
    assert predict(job, Layout(data=2), box(2))[0].memory_bytes == alone + FLUX.activations.peak_bytes


@settings(deadline=None)
@given(st.integers(1, 3), st.integers(1, 3), st.integers(20, 60), st.integers(2, 9), st.data())
def test_unlike_ranks_exchange_the_bytes_that_the_formula_says(ulysses, ring, tokens, heads, data):
    layout, attended = Layout(ulysses=ulysses, ring=ring), Attended(tokens, heads, 8)
    speeds = tuple(data.draw(st.lists(SPEED, min_size=layout.world_size, max_size=layout.world_size)))
    shared = SharedAttention(layout, attended, speeds)
    for rank in range(layout.world_size):
        part = shared.parts[rank // layout.sequence_size]
        own, own_heads = part.tokens[rank % layout.sequence_size], part.heads[rank % ulysses]
        others = part.groups[rank % layout.sequence_size // ulysses] - own
        due = 3 * own * (heads - own_heads) + others * own_heads  # 2309.14509, section 3.2
        assert shared.exchanged_bytes[rank] == attended.head_dim * ITEM_BYTES * due


# -- computed

UNLIKE = [
    (Layout(ring=3), (20, 100, 60)),
    (Layout(ulysses=2, ring=2), (100, 40, 70, 25)),
    (Layout(ulysses=3), (30, 100, 60)),
]
FAMILIES = list(dict.fromkeys((PLAIN, ATTENDS_TWICE, VIDEO)))
EXACT = [name for name, sample in SAMPLES.items() if not sample.bf16]
CASES = list(product(EXACT, UNLIKE)) if ALL else list(zip(FAMILIES, UNLIKE, strict=False))


@pytest.mark.parametrize(("family", "of"), CASES, ids=str)
def test_a_family_computes_on_unlike_devices_what_it_does_on_one(family, of, monkeypatch):
    (layout, speeds), sample = of, SAMPLES[family]
    stock = stock_model(sample.heads[-1], family=family)
    forward, (asked, *_) = asked_of(
        stock, Case(family, "ulysses1", "odd", sample.heads[-1], 1.0, bool(sample.masks), "euler")
    )
    with torch.inference_mode():
        truth = forward(**asked)
    (ours,) = evaluated_in_ranks(layout, stock, [asked], monkeypatch, speeds)
    for one, other in zip(
        *(out if isinstance(out, (tuple, list)) else [out] for out in (ours, truth)), strict=True
    ):
        assert relative_error(one, other) <= BOUND


def test_every_rank_is_told_how_fast_all_of_them_are(started):
    pool = started(
        replace(place(Layout(pipefusion=2), "cpu", "gloo", ()), speeds=(30, 100)), "*:Start=say-speeds"
    )
    assert [ready.device_name for ready in pool.ready] == ["30 100"] * 2


@pytest.mark.skipif(not ALL, reason="workers of their own; one process shows the same")
@pytest.mark.parametrize(
    "layout", [Layout(ulysses=2), Layout(ring=2), Layout(pipefusion=2), Layout(cfg=2)], ids=Layout.equation
)
def test_workers_share_by_the_speeds_that_they_are_told_and_the_image_is_stocks_own(layout, setup, files):
    def taken(speeds):
        """The bytes of the rank that sends most in an evaluation, and the weights of each."""
        handle = PoolHandle(replace(place(layout, "cpu", "gloo", ()), speeds=speeds), setup)
        pool, stock = RemotePool(handle), load(files["model"])
        try:
            ours = parallelize(
                load(files["model"]), pool, 0.0, Patching(3, ALL_WARM) if layout.pipefusion > 1 else None
            )
            assert_same(lambda model: run(model, cfg=3.0), ours, stock)
            assert_same(run, ours, stock)
            return pool.runs.last.evaluations[-1].sent_bytes, [
                memory.model for memory in pool.sessions.live.pool.memory
            ]
        finally:
            handle.close()

    assert taken((30, 100)) != taken(())


# -- room


def test_stages_that_have_no_room_by_speed_are_even_where_that_has():
    size = ModelBytes(
        weight_bytes=32 << 30, block_weight_bytes=[1 << 30] * 32, shareable=Shareable([0] * 32, 0, 0, 0)
    )
    wish = WeightsWish("auto", size)
    names, layout = ("cuda:0", "cuda:1"), Layout(pipefusion=2)
    memory = [SimpleNamespace(free=20 << 30, model=0)] * 2
    assert wish.kept_in(names, layout, memory, (100.0, 30.0)).kept == "offloaded"
    keeping, sizes = wish.cut_for(names, layout, memory, (), (100.0, 30.0))
    assert (keeping.kept, sizes) == ("whole", (16, 16))
    for speeds in ((60.0, 50.0), ()):
        assert wish.cut_for(names, layout, memory, (), speeds)[1] == ()
    assert wish.cut_for(names, layout, memory, (10, 22), (100.0, 30.0))[1] == (10, 22)


def test_comfyui_makes_room_for_the_part_that_a_faster_device_takes():
    shared, stages, groups = (
        Choice(on(layout, *RTX_4090_AND_3090))
        for layout in (Layout(ulysses=2), Layout(pipefusion=2), Layout(cfg=2))
    )
    assert shared.computed_on("cuda:0") == stages.held_on("cuda:0") == pytest.approx(0.68, abs=0.01)
    assert groups.computed_on("cuda:0") == 0.5


def test_ranks_on_one_device_share_its_speed():
    pair = gpus("NVIDIA H100 80GB HBM3", "NVIDIA GeForce RTX 4090")
    first, second, third = place(Layout(ulysses=3), "cuda:0,cuda:0,cuda:1", "gloo", pair).speeds
    assert first == second == 100 and third == pytest.approx(61, abs=1)


def test_speeds_of_another_torch_stay_in_the_file(tmp_path, monkeypatch):
    file = tmp_path / "devices.json"
    keep_devices(file, {"A": 1.0})
    with monkeypatch.context() as other:
        other.setattr("torch.__version__", "0.1")
        keep_devices(file, {"A": 2.0})
        assert read_devices(file) == {"A": 2.0}
    assert read_devices(file) == {"A": 1.0}
    keep_devices(file, {"A": 3.0, "B": 4.0})
    assert read_devices(file) == {"A": 1.0, "B": 4.0}, "or the last bits of images would change"


def test_room_on_the_uis_gpu_counts_what_its_torch_and_its_models_would_give_back(monkeypatch):
    """And a rank there has what is set aside for one already."""
    own = torch.device("cuda", 0)
    monkeypatch.setattr("comfy.model_management.get_torch_device", lambda: own)
    monkeypatch.setattr("pipemesh.nodes.room.free_on", lambda device: 1000)
    monkeypatch.setattr("torch.cuda.memory_reserved", lambda device: 70)
    monkeypatch.setattr("torch.cuda.memory_allocated", lambda device: 30)
    loaded = SimpleNamespace(device=own, model=SimpleNamespace(), model_loaded_memory=lambda: 500)
    monkeypatch.setattr("comfy.model_management.current_loaded_models", [loaded])
    assert room_on_devices([]) == {"cuda:0": 1540}
    pair = on(Layout(ulysses=2), "NVIDIA L40", "NVIDIA L40")
    live = [(pair, [SimpleNamespace(free=1, model=15, sets=5), SimpleNamespace(free=3, model=4, sets=0)])]
    assert room_on_devices(live) == {"cuda:0": 1560 + RESERVED, "cuda:1": 7 + RESERVED}
