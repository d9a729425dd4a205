"""How fast GPUs exchange, measured when a pool starts, and what is chosen by it."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pipemesh.lab.commands.parity import stock_model
from pipemesh.launcher.commands import doctor
from pipemesh.nodes.measured_devices import MeasuredDevices, addresses_of, times_links
from pipemesh.nodes.planning import Planning
from pipemesh.nodes.settings import Choice
from pipemesh.nodes.timing import StepTimes
from pipemesh.parallel_runtime.comm import link_speed
from pipemesh.parallel_runtime.comm.link_speed import nested
from pipemesh.parallel_runtime.layout import Layout
from pipemesh.parallel_runtime.planner.box import LinkSpeed, SentBytes, measured_levels
from pipemesh.parallel_runtime.planner.choice import plan
from pipemesh.parallel_runtime.planner.job import Job
from pipemesh.parallel_runtime.planner.machine import RankDevice, machine_box
from pipemesh.parallel_runtime.planner.measurements import DEVICES, keep_links, link_versions, slowest_links
from pipemesh.pool.devices import Device, Placement

from ..fixtures import running_clients
from ..kit.planned import box, counts
from .test_planning import asked

CARD = RankDevice("NVIDIA GeForce RTX 4090", 24 << 30)


def test_groups_of_each_size_hold_whole_smaller_ones():
    assert [nested(ranks) for ranks in (1, 2, 3, 4, 6, 8)] == [[], [2], [3], [2, 4], [2, 6], [2, 4, 8]]


@given(
    ranks=st.sampled_from([2, 3, 4, 6, 8]),
    gb_per_s=st.lists(st.floats(0.5, 50), min_size=3, max_size=3),
    us=st.integers(1, 500),
)
def test_a_box_of_measured_levels_exchanges_as_fast_as_was_measured(ranks, gb_per_s, us):
    """Unless the ways out of smaller groups make it slower."""
    nbytes, known = 1 << 20, {}
    for size, speed in zip(nested(ranks), gb_per_s, strict=False):
        groups = [range(first, first + size) for first in range(0, ranks, size)]
        messages = [SentBytes(one, to, nbytes) for group in groups for one in group for to in group]
        within_s = replace(box(ranks), levels=tuple(measured_levels(known))).seconds(messages)
        known[size] = LinkSpeed(speed * 1e9, us * 1e-6)
        made = replace(box(ranks), levels=tuple(measured_levels(known)))
        measured_s = us * 1e-6 + (size - 1) * nbytes / known[size].bytes_per_s
        assert made.seconds(messages) == pytest.approx(max(within_s, measured_s))


def test_a_larger_group_has_a_way_of_its_own_only_if_that_is_what_makes_it_slower():
    def levels(**gb_per_s):
        links = {int(ranks[1:]): LinkSpeed(speed * 1e9, 0.0) for ranks, speed in gb_per_s.items()}
        return [(level.ranks, level.bytes_per_s / 1e9) for level in measured_levels(links)]

    assert levels(_2=3, _4=3, _8=3) == [(1, 3)]
    assert levels(_2=9, _4=3) == [(1, 9), (2, pytest.approx(4))]


def test_the_slowest_rank_decides_and_what_one_has_not_measured_is_not_known():
    assert slowest_links([]) == slowest_links([((2, 1.0, 1.0),), ()]) == {}
    assert slowest_links([((2, 5e9, 1e-5), (4, 1, 1)), ((2, 4e9, 3e-5),)]) == {2: LinkSpeed(4e9, 3e-5)}


@pytest.mark.parametrize(
    ("gb_per_s", "ranks", "least", "most"), [(2, 1, 1, 1), (4, 1, 1, 1), (8, 2, 1.1, 1.5), (20, 2, 1.5, 2)]
)
def test_two_cards_share_an_image_only_if_their_link_makes_that_faster(gb_per_s, ranks, least, most):
    """By published figures of the cards alone it is always faster."""
    job = Job(whole=replace(counts("flux 1024"), weight_bytes=12 << 30), evaluations=20)
    assert plan(job, machine_box([CARD] * 2).box).best.layout.world_size == 2
    here = machine_box([CARD] * 2, measured={2: LinkSpeed(gb_per_s * 1e9, 4e-5)})
    made = plan(job, here.box)
    assert here.said.endswith(f", and the {gb_per_s:.1f} GB/s that these GPUs exchange, measured here")
    assert made.best.layout.world_size == ranks and least <= made.speedup(made.best) <= most


def test_of_four_cards_of_which_two_have_exchanged_the_others_are_as_published():
    published, measured = machine_box([CARD] * 8).box, {2: LinkSpeed(3e9, 4e-5)}
    some, all_of = machine_box([CARD] * 8, measured=measured).box, {**measured, 8: LinkSpeed(1e9, 5e-5)}
    assert [level.ranks for level in some.levels] == [1, 4] and some.levels[1] == published.levels[1]
    assert some.levels[0].bytes_per_s == 3e9
    assert [level.ranks for level in machine_box([CARD] * 8, measured=all_of).box.levels] == [1, 2]


def placement(*devices, ulysses=2, cfg=1, backend="nccl"):
    return Placement(
        layout=Layout(ulysses=ulysses, cfg=cfg), devices=tuple(map(Device, devices)), backend=backend
    )


@pytest.fixture
def cards(monkeypatch):
    """Four of them, cuda:2 at the address of none."""
    buses = {"cuda:0": 23, "cuda:1": 101, "cuda:3": 152}

    def properties(name):
        place = {"pci_domain_id": 0, "pci_bus_id": buses[name], "pci_device_id": 0} if name in buses else {}
        return SimpleNamespace(name=CARD.title, total_memory=CARD.memory_bytes, **place)

    monkeypatch.setattr("torch.cuda.get_device_properties", properties)


def said_by_ranks(*links, of):
    """A pool that has just started, whose two ranks say this."""
    ready = [SimpleNamespace(device_name="", flops_per_s=0.0, links=one) for one in links]
    return SimpleNamespace(placement=of, ready=ready)


def test_what_ranks_measure_once_is_known_to_every_pool_of_these_cards(cards, tmp_path, monkeypatch):
    file, pair = tmp_path / "devices.json", placement("cuda:0", "cuda:1")
    groups, three = (
        placement("cuda:0", "cuda:1", ulysses=1, cfg=2),
        placement("cuda:0", "cuda:1", "cuda:3", ulysses=3),
    )
    monkeypatch.delenv("NCCL_P2P_DISABLE", raising=False)
    file.write_text(json.dumps({"2.0": {"NVIDIA L40": 1e14}, "links": {"torch 2.0": {"a,b": {"2": [1, 2]}}}}))
    here = MeasuredDevices(file)
    assert times_links(pair) and times_links(groups) and not here.links_of(pair)
    said = said_by_ranks(*(((2, speed, 3e-5),) for speed in (4e9, 3.9e9)), of=pair)
    here.keep(said)
    known = {2: LinkSpeed(3.9e9, 3e-5)}
    for now in (here, MeasuredDevices(file)):
        assert now.links_of(pair) == now.links_of(groups) == now.links_of(three) == known
        assert not now.links_of(placement("cuda:1", "cuda:0"))
    kept = json.loads(file.read_text())
    assert kept["2.0"] == {"NVIDIA L40": 1e14}, "another torch's speeds stay"
    assert [*kept["links"].values()][-1] == {"0000:17:00.0,0000:65:00.0": {"2": [3.9e9, 3e-5]}}
    with monkeypatch.context() as patch:
        patch.setenv("NCCL_P2P_DISABLE", "1")
        patch.setenv("NCCL_DEBUG", "INFO")
        other = MeasuredDevices(file)
        assert not other.links_of(pair), "NCCL goes another way now"
        other.keep(said)
    monkeypatch.setattr("torch.cuda.nccl.version", lambda: (1, 0, 0))
    assert not MeasuredDevices(file).links_of(pair)


def test_what_ranks_have_said_is_what_the_next_choice_goes_by(cards, tmp_path):
    whole = replace(counts("flux 1024"), weight_bytes=12 << 30)
    planning = Planning(StepTimes(), SimpleNamespace(of=lambda *_: whole), tmp_path / "devices.json")
    pair, model = placement("cuda:0", "cuda:1"), stock_model(5).model
    for ranks in (2, 1):
        chosen = planning.choose(model, Choice(pair, is_open=True), asked(), ())
        assert chosen.layout.world_size == ranks
        planning.measured.keep(said_by_ranks(((2, 3e9, 4e-5),), of=pair))
    assert "the 3.0 GB/s that these GPUs exchange, measured here" in chosen.why


def test_links_are_not_timed_where_nccl_does_not_move_messages_between_known_gpus(cards):
    assert addresses_of(placement("cuda:0", "cuda:1")) == ["0000:17:00.0", "0000:65:00.0"]
    for other in (
        placement("cuda:0", "cuda:1", backend="gloo"),
        placement("cuda:0", "far/cuda:0"),
        placement("cuda:0", "cuda:2"),
    ):
        assert addresses_of(other) == [] and not times_links(other)


def test_a_figure_is_the_fastest_of_all_starts_and_that_of_a_pair_its_own(cards, tmp_path):
    here, pair = MeasuredDevices(tmp_path / "devices.json"), placement("cuda:0", "cuda:1")
    three = placement("cuda:0", "cuda:1", "cuda:3", ulysses=3)
    for of, links in (
        (pair, ((2, 5e9, 4e-5),)),
        (pair, ((2, 4e9, 3e-5),)),
        (three, ((2, 2e9, 1e-5), (3, 1e9, 1e-5))),
    ):
        here.keep(said_by_ranks(links, of=of))
    assert here.links_of(pair) == {2: LinkSpeed(5e9, 4e-5)}
    assert here.links_of(three) == {2: LinkSpeed(5e9, 4e-5), 3: LinkSpeed(1e9, 1e-5)}


@pytest.mark.parametrize("size", [2, 3, 4, 6])
def test_a_speed_is_what_a_rank_sends_to_others_in_a_second(size, monkeypatch):
    """Of exchanges that take 1 ms, and a second for each GB."""
    clock, sizes = [0.0], []

    def swap(rows, came):
        sizes.append(rows[0].nbytes)
        clock[0] += 1e-3 + rows[1:].nbytes / 1e9

    monkeypatch.setattr("time.perf_counter", lambda: clock[0])
    speed, latency_s = link_speed._speed(
        SimpleNamespace(swap=swap), size, link_speed.LONG, torch.device("cpu")
    )
    assert (speed, latency_s) == (pytest.approx(1e9), pytest.approx(1e-3))
    assert all(nbytes % 128 == 0 for nbytes in sizes), "as parts of messages are"


def test_real_ranks_exchange_with_their_neighbours_alone_and_say_how_fast(ranks):
    for rank, said in enumerate(ranks(Layout(ulysses=4), "links")):
        pair = rank // 2 * 2
        assert said["came"] == [[10 * pair + rank % 2] * 3, [10 * (pair + 1) + rank % 2] * 3]
        assert [ranks for ranks, *_ in said["links"]] == [2, 4]
        assert all(speed > 0 and latency >= 0 for _, speed, latency in said["links"])


def test_ranks_of_a_pool_that_is_asked_time_their_links_when_they_join(setup):
    with running_clients(replace(setup, times_links=lambda of: of.layout.cfg == 2)) as client:
        for layout, sizes in (((1, 1, 1, 2), {2}), ((2,), set())):
            pool = client(*layout)
            pool.sessions.open(lambda: False)
            assert [{ranks for ranks, *_ in one.links} for one in pool.sessions.live.pool.ready] == [
                sizes
            ] * 2


def test_the_doctor_says_how_fast_gpus_of_this_machine_exchange(tmp_path, monkeypatch):
    monkeypatch.setenv("PIPEMESH_CACHE", str(tmp_path))
    for addresses, gb_per_s in (("a,b", 3.9), ("b,gone", 9)):
        keep_links(tmp_path / DEVICES, link_versions(), addresses, {2: LinkSpeed(gb_per_s * 1e9, 3e-5)})
    assert list(doctor.measured_exchanges(["c", "a", "b"])) == [((1, 2), ((2, pytest.approx(3.9)),))]
    seen = (((0, 1, 2, 3), ((2, 3.9), (4, 3.0))),)
    torch = doctor.Torch(
        version="2.11.0", gpus=(doctor.Gpu("GPU", 1),) * 4, backends=("nccl",), exchanges=seen
    )
    found = list(
        doctor.about_devices(SimpleNamespace(torch=torch, machine=SimpleNamespace(gpu_driver="NVIDIA")))
    )
    said = "GPUs 0, 1, 2, 3 exchange, as workers measured, GB/s each: 3.9 in groups of 2, 3.0 in groups of 4."
    assert found[-1] == doctor.Finding("works", said)
