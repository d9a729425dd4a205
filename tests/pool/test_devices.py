"""Devices for ranks, and every refusal in one sentence. No GPU and no process is needed."""

import os
import re
import socket
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pipemesh.parallel_runtime.comm.cores import share_of_cores
from pipemesh.parallel_runtime.errors import LayoutError
from pipemesh.parallel_runtime.layout import Layout
from pipemesh.pool.crew import Crew, rank_environment
from pipemesh.pool.devices import (
    Device,
    cost_of_order,
    hidden_gpus,
    place,
    visible_gpus,
)

from ..kit.fake_pools import fake_setup

GPUS = tuple(Device(f"cuda:{index}", f"GPU-{index}") for index in range(3))


PLACED = """
1 | auto                      | 3 | cuda:0               | nccl
2 | auto                      | 3 | cuda:0 cuda:1        | nccl
2 |                           | 3 | cuda:0 cuda:1        | nccl
3 | auto                      | 0 | cpu cpu cpu          | gloo
2 | cpu                       | 3 | cpu cpu              | gloo
2 | cpu, cpu                  | 3 | cpu cpu              | gloo
2 | cuda:2,cuda:0             | 3 | cuda:2 cuda:0        | nccl
2 | cuda:2 , cuda:0,          | 3 | cuda:2 cuda:0        | nccl
2 | cuda:1,cuda:1             | 3 | cuda:1 cuda:1        | gloo
3 | cuda:0,cuda:0,cuda:1      | 3 | cuda:0 cuda:0 cuda:1 | gloo
"""  # nccl takes one rank per GPU


def rows(table: str) -> list[list[str]]:
    """The cells of each line of a table."""
    return [[cell.strip() for cell in line.split("|")] for line in table.strip().splitlines()]


@pytest.mark.parametrize(("degree", "wanted", "gpus", "names", "backend"), rows(PLACED))
def test_ranks_get_the_devices_asked_for_and_the_backend_that_works_there(
    degree, wanted, gpus, names, backend
):
    placement = place(Layout(ulysses=int(degree)), f" {wanted} ", "auto", GPUS[: int(gpus)])
    assert [device.name for device in placement.devices] == names.split()
    assert placement.backend == backend


def test_ranks_on_other_machines_are_placed_by_name_alone():
    placement = place(Layout(ulysses=4), "cuda:1,node1/cuda:0,node1/cuda:1,node-2.lan/cuda:0", "auto", GPUS)
    assert placement.backend == "nccl"
    assert (placement.other_machines, placement.machines) == (("node1", "node-2.lan"), (0, 1, 1, 2))
    assert [placement.ranks_on(machine) for machine in ("", "node1", "node-2.lan")] == [(0,), (1, 2), (3,)]
    assert [(device.machine, device.local_name, device.is_gpu) for device in placement.devices[:2]] == [
        ("", "cuda:1", True),
        ("node1", "cuda:0", True),
    ]
    assert place(Layout(ulysses=2), "cpu,node1/cpu", "auto", GPUS).backend == "gloo"
    assert place(Layout(ulysses=2), "cpu", "auto", ()).machines == ()


def test_a_pool_may_have_all_its_ranks_elsewhere():
    placement = place(Layout(cfg=2), "node1/cuda:0,node1/cuda:1", "auto", ())
    assert (placement.backend, placement.machines) == ("nccl", (1, 1))
    assert not place(Layout(), "node1/cuda:0", "auto", ()).is_one_gpu, "ComfyUI cannot compute there"


COSTS = """
ulysses 2 cfg 2        | cpu,cpu,a/cpu,a/cpu           |
ulysses 2 cfg 2        | cpu,a/cpu,cpu,a/cpu           | 2 groups of ulysses; cpu,cpu,a/cpu,a/cpu; 0
ring 2 data 2          | a/cpu,b/cpu,b/cpu,a/cpu       | 2 groups of ring; a/cpu,a/cpu,b/cpu,b/cpu; 0
ulysses 2 cfg 2        | a/cpu,b/cpu,b/cpu,cpu         | 2 groups of ulysses; b/cpu,b/cpu,a/cpu,cpu; 1
ulysses 2 cfg 2        | cpu,a/cpu,a/cpu,a/cpu         |
ulysses 2 ring 2       | cpu,cpu,a/cpu,a/cpu           |
pipefusion 2 cfg 2     | cpu,a/cpu,cpu,a/cpu           | 2 groups of pipefusion; cpu,cpu,a/cpu,a/cpu; 0
ulysses 2 pipefusion 2 | cpu,cpu,a/cpu,a/cpu           |
cfg 2 data 2           | cpu,a/cpu,cpu,a/cpu           |
ulysses 4              | cpu,a/cpu,cpu,a/cpu           |
ulysses 2 cfg 3        | a/cpu,a/cpu,b/cpu,b/cpu,a/cpu,cpu |
ulysses 2 cfg 2        | cpu                           |
"""
# Layout | devices asked for | backend asked for | GPUs here | sentence
REFUSED = """
ulysses 4 | auto | auto | 3 | ulysses 4 = 4 ranks, 3 GPUs: choose ulysses 3 or ring 3, or list devices to share (backend gloo).
ulysses 2 | auto | auto | 1 | ulysses 2 = 2 ranks, 1 GPU: choose ulysses 1, or list devices to share (backend gloo).
ulysses 2 pipefusion 2 | auto | auto | 2 | ulysses 2 x pipefusion 2 = 4 ranks, 2 GPUs: choose ulysses 2 or pipefusion 2, or list devices to share (backend gloo).
pipefusion 3 | auto | auto | 2 | pipefusion 3 = 3 ranks, 2 GPUs: choose pipefusion 2 or ulysses 2, or list devices to share (backend gloo).
ulysses 3 | cuda:0,cuda:1 | auto | 3 | ulysses 3 = 3 ranks, 2 devices listed (cuda:0, cuda:1): list one device per rank, or choose ulysses 2 or ring 2.
ulysses 1 | cpu,cpu | auto | 0 | ulysses 1 = 1 rank, 2 devices listed (cpu, cpu): list one device per rank, or choose ulysses 2 or ring 2.
ulysses 2 | cuda:0 | auto | 3 | ulysses 2 = 2 ranks, 1 device listed (cuda:0): list one device per rank, or choose ulysses 1.
ulysses 2 | cuda:0,cuda:7 | auto | 2 | Device cuda:7 is not here: choose from cpu, cuda:0, cuda:1, or node1/cuda:0 of machine node1.
ulysses 1 | CPU0 | auto | 0 | Device CPU0 is not here: choose from cpu, or node1/cuda:0 of machine node1.
ulysses 2 | cpu,cuda:0 | auto | 2 | CPU and GPU ranks cannot be mixed (cpu, cuda:0): list one kind.
ulysses 2 | cpu,node1/gpu | auto | 2 | Device node1/gpu is not here: choose from cpu, cuda:0, cuda:1, or node1/cuda:0 of machine node1.
ulysses 2 | cpu,node1/cuda:0 | auto | 0 | CPU and GPU ranks cannot be mixed (cpu, node1/cuda:0): list one kind.
ulysses 64 | cpu | gloo | 0 | ulysses 64 = 64 ranks, at most 63 in one pool: lower the degrees.
ulysses 2 | cpu | nccl | 2 | Backend nccl needs GPUs and the ranks are on the CPU: choose auto or gloo.
ulysses 2 | cuda:0,cuda:0 | nccl | 2 | Backend nccl needs 2 GPUs for ulysses 2 = 2 ranks, 1 listed: choose gloo to share one.
"""


def layout_of(text: str) -> Layout:
    words = text.split()
    return Layout(**{axis: int(degree) for axis, degree in zip(words[::2], words[1::2], strict=True)})


@pytest.mark.parametrize(("layout", "devices", "cost"), rows(COSTS))
def test_an_order_of_devices_that_sends_more_between_machines_is_told_a_better_one(layout, devices, cost):
    now, better, then = cost.split("; ") if cost else ("", "", "")
    assert cost_of_order(place(layout_of(layout), devices, "auto", ())) == (
        cost
        and (
            f"As devices are listed, {now} send over the network between machines, which is slow: list {better},"
            f" and {then} do."
        )
    )


@pytest.mark.parametrize(("layout", "wanted", "backend", "gpus", "sentence"), rows(REFUSED))
def test_an_impossible_placement_is_refused_in_one_sentence(layout, wanted, backend, gpus, sentence):
    with pytest.raises(LayoutError, match=f"^{re.escape(sentence)}$") as caught:
        place(layout_of(layout), wanted, backend, GPUS[: int(gpus)])
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize(
    ("ranks", "limit", "threads"), [(1, None, 8), (3, None, 2), (9, None, 1), (1, "2", 2), (4, "3", 2)]
)
def test_the_cores_of_this_process_are_shared_out_among_its_ranks(monkeypatch, ranks, limit, threads):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    if limit is None:
        monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    else:
        monkeypatch.setenv("OMP_NUM_THREADS", limit)
    assert place(Layout(ulysses=ranks), "cpu", "auto", ()).threads(0) == threads


def test_the_ranks_of_each_machine_share_its_cores_and_gpu_ranks_are_tied_to_none(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    placement = place(Layout(ulysses=3), "cpu,node1/cpu,node1/cpu", "auto", ())
    assert [len(placement.cores(rank)) for rank in range(3)] == [8, 4, 4]
    assert place(Layout(), "cuda:0", "auto", GPUS).cores(0) == ()


@given(cores=st.lists(st.integers(0, 255), min_size=1, max_size=24, unique=True), ranks=st.integers(1, 16))
def test_ranks_have_equal_shares_of_cores_and_share_one_only_where_there_are_too_few(cores, ranks):
    shares = [share_of_cores(cores, rank, ranks) for rank in range(ranks)]
    assert len({len(share) for share in shares}) == 1
    used = [core for share in shares for core in share]
    assert set(used) <= set(cores)
    if ranks <= len(cores):
        assert len(set(used)) == len(used)
    else:
        assert max(map(used.count, cores)) - min(map(used.count, cores)) <= 1


@pytest.mark.parametrize(
    ("environ", "seen"),
    [
        ({}, "0,1"),
        ({"HIP_VISIBLE_DEVICES": "3, 1, 7"}, "3,1"),
        ({"CUDA_VISIBLE_DEVICES": "2,5"}, "2,5"),
    ],
)
def test_gpus_of_amds_are_addressed_by_their_index_among_all(monkeypatch, environ, seen):
    """HIP takes no UUID, and indices in a rank count from those that ComfyUI was given."""
    for name in ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("torch.version.hip", "6.4", raising=False)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setattr(
        "torch.cuda.get_device_properties", lambda index: SimpleNamespace(name=f"AMD {index}")
    )
    gpus = visible_gpus(cpu_only=False)
    assert [gpu.title for gpu in gpus] == ["AMD 0", "AMD 1"]
    for gpu in gpus:
        env = rank_environment(gpu, "nccl", {"HIP_VISIBLE_DEVICES": "3,1", "CUDA_VISIBLE_DEVICES": "2,5"})
        assert env["HIP_VISIBLE_DEVICES"] == seen and "CUDA_VISIBLE_DEVICES" not in env


def test_every_rank_sees_all_gpus_that_comfyui_sees_in_its_order_and_computes_on_its_own(monkeypatch):
    titles = ["NVIDIA H100 80GB HBM3"] * 2 + ["NVIDIA H100 80GB HBM3 MIG 1g.10gb"]
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: len(titles))
    monkeypatch.setattr(
        "torch.cuda.get_device_properties",
        lambda index: SimpleNamespace(name=titles[index], uuid=f"{index}a"),
    )
    placement = place(Layout(ulysses=2), "cuda:2,cuda:1", "nccl", visible_gpus(cpu_only=False))
    crew = Crew(placement, "", fake_setup())
    ours, _theirs = socket.socketpair()
    seen = {crew._command(rank, ours, None).env["CUDA_VISIBLE_DEVICES"] for rank in crew.ranks}
    assert seen == {"GPU-0a,GPU-1a,MIG-2a"}
    assert [crew._first_message(rank, 0, None).device for rank in crew.ranks] == ["cuda:2", "cuda:1"]


def test_gpus_that_a_variable_hides_are_counted_by_what_the_driver_has(tmp_path):
    for name in ("0000:01:00.0", "0000:02:00.0"):
        (tmp_path / name).mkdir()
    assert hidden_gpus({"CUDA_VISIBLE_DEVICES": "1"}, tmp_path) == 2
    assert hidden_gpus({}, tmp_path) == 0, "a container may have been given one"
    assert hidden_gpus({"CUDA_VISIBLE_DEVICES": "1"}, tmp_path / "none") == 0
