"""Ranks on unlike devices: each takes as much as it is fast, and the result is that of one rank."""

from dataclasses import replace
from itertools import product
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pipemesh.lab.boxes import published_box
from pipemesh.lab.commands.parity import BOUND, Case, relative_error, stock_model
from pipemesh.nodes.measured_devices import MeasuredDevices
from pipemesh.nodes.room import room_on_devices
from pipemesh.nodes.settings import Choice
from pipemesh.nodes.status.reasons import unlike_shares
from pipemesh.nodes.status.sums import times_as_long
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
SEVERAL = st.lists(SPEED, min_size=1, max_size=6).map(tuple)
FLUX = counts("flux 1024")

# -- splits


@given(st.integers(0, 300), SEVERAL, st.integers(0, 1))
def test_a_weighted_split_covers_everything_leaves_no_part_empty_and_is_even_for_equal_weights(
    total, weights, least
):
    parts = len(weights)
    split = Split.by(weights, total, parts, least)
    assert (split.total, len(split.sizes)) == (total, parts)
    assert min(split.sizes) >= (least if total >= least * parts else 0)
    alike = Split.by(weights[:1] * parts, total, parts, least)
    assert alike == Split.by((), total, parts, least) == Split.even(total, parts)


@given(st.integers(0, 9), st.lists(SPEED, min_size=1, max_size=3).map(tuple), st.integers(0, 1))
def test_no_other_split_has_a_smaller_largest_part_for_its_weight(total, weights, least):
    def longest(sizes):
        return max(size / weight for size, weight in zip(sizes, weights, strict=True))

    least = least if total >= least * len(weights) else 0
    ways = [way for way in product(range(least, total + 1), repeat=len(weights)) if sum(way) == total]
    best = Split.by(weights, total, len(weights), least).sizes
    assert longest(best) == pytest.approx(min(map(longest, ways)))


def test_heads_go_to_faster_ranks_as_far_as_whole_ones_can():
    assert Split.by((2, 1), 24, 2).sizes == (16, 8)
    assert Split.by((100, 50), 2, 2).sizes == (1, 1), "none of two ways is faster, and this one is even"
    assert Split.by((100, 10), 2, 2).sizes == (2, 0)


def test_devices_that_are_about_alike_or_not_known_share_evenly():
    assert relative((100.0, 91.0)) == relative(()) == relative((5.0, 5.0)) == relative((10.0, 0.0)) == ()
    assert relative((362.05, 181.025)) == (100, 50)
    assert relative((1.0, 1e6)) == (1, 100)


# -- shares


def drawn_speeds(data, count):
    return tuple(data.draw(st.lists(SPEED, min_size=count, max_size=count)))


LAYOUTS = st.builds(
    Layout, ulysses=st.integers(1, 3), ring=st.integers(1, 3), cfg=st.integers(1, 2)
) | st.builds(Layout, ulysses=st.integers(1, 2), pipefusion=st.integers(2, 3), data=st.integers(1, 2))


@given(LAYOUTS, st.data())
def test_ranks_of_a_sequence_agree_on_its_shares_and_equal_ones_share_evenly(layout, data):
    speeds, alike = drawn_speeds(data, layout.world_size), (70,) * layout.world_size
    size = layout.sequence_size
    for rank in range(layout.world_size):
        shares = shares_of(layout, rank, speeds)
        assert shares == shares_of(layout, rank - rank % size, speeds), "of another rank of its stage"
        assert shares == shares_of(layout, layout.of_stages(rank)[0], speeds), "of another stage"
        assert (len(shares.tokens) or size, len(shares.heads) or layout.ulysses) == (size, layout.ulysses)
        assert shares_of(layout, rank, ()) == shares_of(layout, rank, alike) == EVEN
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
    alike = shares_of(Layout(cfg=2, ulysses=2), 3, (100, 100, 50, 50))
    assert alike == EVEN, "the ranks of a group are alike"


COSTS = st.lists(st.integers(1, 9).map(float), min_size=2, max_size=7)


@given(COSTS, st.lists(SPEED, min_size=2, max_size=2))
def test_no_other_way_to_share_blocks_out_over_unlike_stages_is_faster(costs, speeds):
    count = len(costs)
    ways = [[Stage(0, way, count), Stage(way, count, count)] for way in range(1, count)]
    assert slowest(costs, share_out(costs, 2, speeds), speeds) == min(
        slowest(costs, way, speeds) for way in ways
    )


def test_what_blocks_took_on_a_slower_stage_is_not_taken_for_their_cost():
    """Twelve blocks alike, of which eight ran on a stage twice as fast as the other."""
    times = [dict.fromkeys(range(8), 1.0), dict.fromkeys(range(8, 12), 2.0)]

    def chosen(*speeds):
        balance = StageBalance()
        balance.learn(Part(1, 0, (0, 4, False)), times, *speeds)
        return balance.choose((), 2, *speeds)

    assert chosen((2.0, 1.0)) == (), "the stages are as fast as can be"
    assert chosen() != ()


# -- groups

BATCHES = st.lists(
    st.builds(Batch, st.integers(1, 3), st.integers(1, 5), st.floats(1, 1000)), min_size=1, max_size=4
)
GROUPS = st.sampled_from([(1, (1,)), (2, (1, 2)), (3, (1,)), (4, (1, 2, 4)), (6, (1, 3, 6))])


@given(BATCHES, GROUPS, st.data())
def test_groups_compute_every_row_once_and_finish_together_whether_they_are_alike_or_not(
    batches, groups, data
):
    count, widths = groups
    speeds = drawn_speeds(data, count) if data.draw(st.booleans()) else []
    plan = plan_branches(batches, count, widths, speeds)
    rows = [(number, row) for number, start, end, _ in plan.shares for row in range(start, end)]
    assert rows == [(number, row) for number, batch in enumerate(batches) for row in range(batch.rows)]
    assert plan.width in widths and {share.group for share in plan.shares} <= set(range(count // plan.width))
    for number, start, end, _ in plan.shares:
        items = batches[number].items
        assert start // items == (end - 1) // items, "a share is of one branch"
    each = sum(batch.rows * batch.weight for batch in batches) / count
    longest = max(batch.items * batch.weight for batch in batches) * (1 if speeds else 1 - 1 / count)
    cost = cost_of(plan, batches, speeds)
    assert cost <= each + longest + 1e-6, "they finish together, as far as the longest piece lets them"
    assert count not in widths or cost <= SEQUENCE_COST * each + 1e-6, "one sequence would be faster"


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


L40 = "NVIDIA L40"


@pytest.mark.parametrize(
    ("titles", "devices", "speeds", "is_timed"),
    [
        (TITLES, "auto", tuple(TITLES.values()), True),
        (TITLES, "cuda:2,cuda:1", (46, 100), True),
        (TITLES, "cuda:0,cuda:0,cuda:1", (100, 100, 61), False),  # ranks on one device share its speed
        ((L40, "Strange GPU"), "auto", (), True),
        ((L40, L40), "auto", (), False),
        ((), "cpu,cpu", (), False),
    ],
)
def test_a_placement_knows_how_fast_its_devices_are_by_their_titles_and_times_unlike_gpus(
    titles, devices, speeds, is_timed
):
    ranks = len(devices.split(",")) if devices != "auto" else len(titles)
    made = on(Layout(ulysses=ranks), *titles, devices=devices)
    assert (made.speeds, made.times_devices) == (speeds, is_timed)
    assert flops_per_s(torch.device("cpu")) == 0.0


def keeping(file, **measured):
    """What another start knows, and what ranks have said then of how fast their devices are."""
    made = MeasuredDevices(file)
    ready = [
        SimpleNamespace(device_name=f"{name.replace('_', ' ')}", flops_per_s=one, links=())
        for name, one in measured.items()
    ]
    made.keep(SimpleNamespace(ready=ready))
    return made


def test_measured_speeds_count_before_published_ones_where_all_were_measured(tmp_path):
    file, pair = tmp_path / "devices.json", gpus("NVIDIA L40S", "Strange GPU")
    assert place(Layout(ulysses=2), "auto", "auto", pair).speeds == ()
    chooser = keeping(file, NVIDIA_L40S=2e14, Strange_GPU=1e14)
    assert chooser.with_speeds(pair) == pair, "another speed would be another pool"
    later = keeping(file)
    fast = later.with_speeds(pair)
    assert place(Layout(ulysses=2), "auto", "auto", fast).speeds == (100, 50)
    keeping(file, NVIDIA_L40S=3e14)
    assert keeping(file).with_speeds(pair) == fast, "they stay, and so does the image"


def test_devices_that_were_timed_are_predicted_by_that():
    def timed(first, second):
        """Of two of which the second was three quarters as fast."""
        made = [
            RankDevice(first, 48 << 30, flops_per_s=2e14),
            RankDevice(second, 48 << 30, flops_per_s=1.5e14),
        ]
        return machine_box(made).box.devices

    fast, slow = timed("NVIDIA L40S", L40)
    slower = pytest.approx(0.75 * fast.matmul_flops_per_s)
    assert slow.matmul_flops_per_s == slow.attention_flops_per_s == slower
    hot, cool = timed(*["NVIDIA H100 80GB HBM3"] * 2)
    assert cool.attention_flops_per_s == pytest.approx(0.75 * hot.attention_flops_per_s)
    assert cool.attention_flops_per_s != pytest.approx(cool.matmul_flops_per_s)


def test_the_report_says_what_slower_devices_take_and_why():
    for layout, devices, said in (
        (
            Layout(ulysses=2),
            "auto",
            "cuda:1 takes 32 % of the tokens, because it is 2.2 times slower than cuda:0.",
        ),
        (
            Layout(pipefusion=2),
            "cuda:1,cuda:0",
            "Give stage 0 fewer blocks: it is 2.2 times slower than the fastest stage.",
        ),
        (
            Layout(cfg=2),
            "auto",
            "The group of cuda:1 gets fewer prompts and images, because it is 2.2 times slower.",
        ),
    ):
        (share,) = unlike_shares(on(layout, *RTX_4090_AND_3090, devices=devices))
        assert share.english == said
    assert not unlike_shares(place(Layout(ulysses=2), "cpu", "gloo", ()))


def test_what_a_slower_device_computed_would_take_the_first_less():
    spans = {0: Span(0.0, 1.0, 0.0), 1: Span(0.0, 1.0, 0.0)}
    run = [Evaluation(1.0, 0.0, 0.0, 0, began=0.0, spans=spans)]
    made = on(Layout(cfg=2), "NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM4-80GB")
    assert times_as_long(run, made) == pytest.approx(1 + made.speeds[1] / 100)


# -- predicted


def test_a_box_of_unlike_devices_is_written_with_a_plus():
    mixed = published_box("1xRTX4090+2xA6000-PCIe")
    assert [device.name for device in mixed.devices] == ["RTX4090", "A6000", "A6000"]
    fast, slow = (published_box(f"3x{kind}-PCIe").levels for kind in ("RTX4090", "A6000"))
    assert mixed.levels == fast != slow, "not all of them reach their peers"

    def here(other):
        return machine_box([RankDevice("NVIDIA GeForce RTX 4090", 24 << 30), RankDevice(other, 48 << 30)])

    known = here("NVIDIA RTX A6000")
    assert (known.known, known.box.name) == ("published", "1xRTX4090+1xA6000-PCIe")
    one, other = here("Strange GPU").box.devices
    assert one.matmul_flops_per_s == other.matmul_flops_per_s


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
        both = zip((1e12, 0.3e12), memory, strict=True)
        devices = tuple(box(1, flops=flops, memory=one).devices[0] for flops, one in both)
        return predict(job, Layout(data=2), replace(box(2), devices=devices))

    due = alone + 2 * FLUX.activations.peak_bytes
    (enough,) = having(due, alone)
    assert enough.memory_bytes == due
    assert having(due - 1, alone) == having(due, alone - 1) == []
    assert predict(job, Layout(data=2), box(2))[0].memory_bytes == alone + FLUX.activations.peak_bytes


@given(st.integers(1, 3), st.integers(1, 3), st.integers(20, 60), st.integers(2, 9), st.data())
def test_unlike_ranks_exchange_the_bytes_that_the_formula_says(ulysses, ring, tokens, heads, data):
    layout, attended = Layout(ulysses=ulysses, ring=ring), Attended(tokens, heads, 8)
    shared = SharedAttention(layout, attended, drawn_speeds(data, layout.world_size))
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
    heads = sample.heads[-1]
    stock = stock_model(heads, family=family)
    case = Case(family, "ulysses1", "odd", heads, 1.0, bool(sample.masks), "euler")
    forward, (asked, *_) = asked_of(stock, case)
    with torch.inference_mode():
        truth = forward(**asked)
    (ours,) = evaluated_in_ranks(layout, stock, [asked], monkeypatch, speeds)
    both = (out if isinstance(out, (tuple, list)) else [out] for out in (ours, truth))
    assert all(relative_error(*pair) <= BOUND for pair in zip(*both, strict=True))


def test_every_rank_is_told_how_fast_all_of_them_are(started):
    unlike = replace(place(Layout(pipefusion=2), "cpu", "gloo", ()), speeds=(30, 100))
    assert [ready.device_name for ready in started(unlike, "*:Start=say-speeds").ready] == ["30 100"] * 2


@pytest.mark.skipif(not ALL, reason="workers of their own; one process shows the same")
@pytest.mark.parametrize(
    "layout", [Layout(ulysses=2), Layout(ring=2), Layout(pipefusion=2), Layout(cfg=2)], ids=Layout.equation
)
def test_workers_share_by_the_speeds_that_they_are_told_and_the_image_is_stocks_own(layout, setup, files):
    def taken(speeds):
        """The bytes of the rank that sends most in an evaluation, and the weights of each."""
        handle = PoolHandle(replace(place(layout, "cpu", "gloo", ()), speeds=speeds), setup)
        pool, stock = RemotePool(handle), load(files["model"])
        patching = Patching(3, ALL_WARM) if layout.pipefusion > 1 else None
        try:
            ours = parallelize(load(files["model"]), pool, 0.0, patching)
            assert_same(lambda model: run(model, cfg=3.0), ours, stock)
            assert_same(run, ours, stock)
            held = [memory.model for memory in pool.sessions.live.pool.memory]
            return pool.runs.last.evaluations[-1].sent_bytes, held
        finally:
            handle.close()

    assert taken((30, 100)) != taken(())


# -- room


def test_stages_that_have_no_room_by_speed_are_even_where_that_has():
    size = ModelBytes(
        weight_bytes=32 << 30, block_weight_bytes=[1 << 30] * 32, shareable=Shareable([0] * 32, 0, 0, 0)
    )
    wish = WeightsWish("auto", size)
    asked = ("cuda:0", "cuda:1"), Layout(pipefusion=2), [SimpleNamespace(free=20 << 30, model=0)] * 2
    assert wish.kept_in(*asked, (100.0, 30.0)).kept == "offloaded"
    keeping, sizes = wish.cut_for(*asked, (), (100.0, 30.0))
    assert (keeping.kept, sizes) == ("whole", (16, 16))
    for speeds in ((60.0, 50.0), ()):
        assert wish.cut_for(*asked, (), speeds)[1] == ()
    assert wish.cut_for(*asked, (10, 22), (100.0, 30.0))[1] == (10, 22)


def test_comfyui_makes_room_for_the_part_that_a_faster_device_takes():
    shared, stages, groups = (
        Choice(on(layout, *RTX_4090_AND_3090))
        for layout in (Layout(ulysses=2), Layout(pipefusion=2), Layout(cfg=2))
    )
    assert shared.computed_on("cuda:0") == stages.held_on("cuda:0") == pytest.approx(0.68, abs=0.01)
    assert groups.computed_on("cuda:0") == 0.5


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
    for name, nbytes in (
        ("pipemesh.nodes.room.free_on", 1000),
        ("torch.cuda.memory_reserved", 70),
        ("torch.cuda.memory_allocated", 30),
    ):
        monkeypatch.setattr(name, lambda device, nbytes=nbytes: nbytes)
    loaded = SimpleNamespace(device=own, model=SimpleNamespace(), model_loaded_memory=lambda: 500)
    monkeypatch.setattr("comfy.model_management.current_loaded_models", [loaded])
    assert room_on_devices([]) == {"cuda:0": 1540}
    held = [SimpleNamespace(free=1, model=15, sets=5), SimpleNamespace(free=3, model=4, sets=0)]
    room = room_on_devices([(on(Layout(ulysses=2), L40, L40), held)])
    assert room == {"cuda:0": 1560 + RESERVED, "cuda:1": 7 + RESERVED}
