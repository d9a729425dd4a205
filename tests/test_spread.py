"""What crosses between machines by broadcast: the right bytes, to every machine, conditioning once;
and the model file each machine has.
"""

import os
import sys
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from pipemesh.launcher.pool.crew import rank_environment
from pipemesh.launcher.pool.devices import Device
from pipemesh.launcher.pool.supervisor import Command
from pipemesh.parallel_runtime.checkpoint import check_copy
from pipemesh.parallel_runtime.comm.machines import MachineComm
from pipemesh.parallel_runtime.crossing.source import call_factory, find_here
from pipemesh.parallel_runtime.errors import Refused
from pipemesh.parallel_runtime.wire.arena import Arena
from pipemesh.parallel_runtime.wire.tree import encode_tree
from pipemesh.parallel_runtime.worker.arena_io import ArenaIO
from torch.distributed import distributed_c10d as c10d

from .conftest import all_said_by

ROOT = Path(__file__).resolve().parent.parent
JOIN = """
import os
import sys
sys.path.insert(0, sys.argv[1] + "/launcher")
from package import register_package
sys.path.pop(0)
register_package(sys.argv[1])
import torch
import torch.distributed as dist
from pipemesh.parallel_runtime.comm.machines import MachineComm

rank, machines = int(sys.argv[3]), list(map(int, sys.argv[4]))
dist.init_process_group("gloo", store=dist.FileStore(sys.argv[2], len(machines)), rank=rank, world_size=len(machines))
comm = MachineComm(machines, rank)
"""
OWN_ARENAS = """
for number in range(3):
    arena = torch.full((64,), rank, dtype=torch.uint8)
    comm.spread([arena[8:16], arena[32 + number : 40]][: number + 1] if number < 2 else [])
    print(rank, number, arena.unique().tolist(), int(arena[8]), int(arena[39]))
"""
ONE_ARENA_PER_MACHINE = """
arena = torch.from_file(f"{sys.argv[2]}-{machines[rank]}", shared=True, size=64, dtype=torch.uint8)
seen = []
for number in range(100):
    if rank == 0:
        arena.fill_(number)
    dist.barrier()
    comm.spread([arena[8:16]])
    seen.append(int(arena[8]))
    dist.barrier()
print(seen == list(range(100)) or seen)
"""
LEAVE = """
dist.barrier()
sys.stdout.flush()
os._exit(0)  # as ranks do
"""


@pytest.fixture
def ranks_say(setup, tmp_path):
    """Each rank's machine by its number, and a script -> the lines of each rank."""

    def say(machines: str, body: str) -> list[list[str]]:
        (tmp_path / "rank.py").write_text(JOIN + body + LEAVE)
        command = (sys.executable, str(tmp_path / "rank.py"), str(ROOT), str(tmp_path / "store"))
        env = {**rank_environment(Device("cpu"), "gloo", dict(os.environ)), "GLOO_SOCKET_IFNAME": "lo"}
        with ExitStack() as stack:
            made = []
            for rank in range(len(machines)):
                made.append(setup.start(Command((*command, str(rank), machines), env, 0)))
                stack.callback(made[-1].wait)
                stack.callback(made[-1].kill)
            return [all_said_by(process).splitlines() for process in made]

    return say


def test_leaders_receive_what_rank_0_has_and_nobody_elses_arena_is_touched(ranks_say):
    """Rank 2 would map its leader's arena, rank 3 that of rank 0."""
    said = ranks_say("01102", OWN_ARENAS)
    for rank, leads in ((0, False), (1, True), (2, False), (3, False), (4, True)):
        both, one = f"[0, {rank}]" if leads else f"[{rank}]", 0 if leads else rank
        assert said[rank] == [
            f"{rank} 0 {both} {one} {rank}",
            f"{rank} 1 {both} {one} {one}",
            f"{rank} 2 [{rank}] {rank} {rank}",
        ]


def test_ranks_beside_a_leader_read_its_arena_when_it_is_filled(ranks_say):
    assert ranks_say("0111", ONE_ARENA_PER_MACHINE) == [["True"]] * 4


def test_conditioning_goes_once_and_what_changes_goes_every_time():
    arena = Arena()
    spread = []
    machines = SimpleNamespace(
        away=True, spread=lambda pieces: spread.append([piece.numel() for piece in pieces])
    )
    io = ArenaIO(arena.segment, torch.device("cpu"), machines)
    text, other = arena.put(torch.ones(6), version=1), arena.put(torch.ones(7), version=2)
    x, nothing = arena.put(torch.ones(5)), arena.put(torch.ones(0))

    def evaluate(**arguments) -> list[int]:
        refs = iter(arguments.values())
        io.read(encode_tree({name: torch.empty(0) for name in arguments}, lambda _path, _tensor: next(refs)))
        return spread[-1]

    assert evaluate(x=x, context=text, y=nothing) == [20, 24]
    assert evaluate(x=x, context=text, again=text) == [20]
    assert evaluate(x=x, twice=x, context=other) == [20, 28]
    assert evaluate(context=text) == []
    arena.close()


# -- the model file


def test_a_file_is_found_at_the_same_path_or_in_this_comfyuis_models(tmp_path, monkeypatch):
    import comfy

    monkeypatch.setattr(comfy, "__path__", [str(tmp_path / "here" / "comfy")])
    own = tmp_path / "here" / "models" / "unet" / "flux.safetensors"
    own.parent.mkdir(parents=True)
    own.write_bytes(b"12345")
    assert find_here(str(own)) == str(own)
    assert find_here("/elsewhere/ComfyUI/models/unet/flux.safetensors") == str(own)
    assert find_here("/models/ComfyUI/models/unet/flux.safetensors") == str(own)
    for path in ("/elsewhere/ComfyUI/models/unet/other.safetensors", "/elsewhere/flux.safetensors"):
        assert find_here(path) == path


def test_on_another_machine_the_size_decides(tmp_path):
    file = tmp_path / "flux.safetensors"
    file.write_bytes(b"12345")
    check_copy(str(file), 5)
    with pytest.raises(
        Refused,
        match=(
            r"^The checkpoint .* has 5 bytes on machine .* and 6 where ComfyUI runs: copy the same file to"
            r" every machine\.$"
        ),
    ):
        check_copy(str(file), 6)
    with pytest.raises(
        Refused,
        match=(
            r"^The checkpoint /none is missing on machine .*: put it back or choose another in the loader"
            r" node\.$"
        ),
    ):
        check_copy("/none", 6)


def test_a_rank_calls_comfyuis_own_loaders_only():
    with pytest.raises(
        Refused, match=r"^The model's loader os:system is not ComfyUI's own: use a stock loader\.$"
    ):
        call_factory("os:system", ("true",), None)


class Splitting:
    """A communicator that is bound to a GPU, as far as torch asks it to be split."""

    def __init__(self):
        self.splits = 0

    def perform_nocolor_split(self, device):
        self.splits += 1


def groups_of(monkeypatch, machines, rank):
    """What ``rank`` makes in a world that is bound to GPUs: its groups' names by their members, and
    how often it splits that world for groups that it is not in.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    world, made = Splitting(), {}
    with monkeypatch.context() as patch:
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=len(machines))
        try:
            real = dist.new_group
            patch.setattr(dist, "new_group", lambda ranks, backend, **how: real(ranks, backend="fake", **how))
            patch.setattr(c10d, "_get_split_source", lambda group: world)
            dist.group.WORLD.bound_device_id = torch.device("cuda", 0)
            MachineComm(machines, rank)
            for group, name in c10d._world.pg_names.items():
                made[tuple(dist.get_process_group_ranks(group))] = name
        finally:
            dist.destroy_process_group()
    return made, world.splits


@pytest.mark.parametrize("machines", ["01", "0011", "000111", "00112", "01233"])
def test_ranks_on_gpus_make_groups_of_machines_without_those_that_are_not_in_them(monkeypatch, machines):
    """NCCL splits a communicator where all its ranks do, and those that are in a group over gloo
    never would. Members meet under one name.
    """
    places = [int(machine) for machine in machines]
    made = [groups_of(monkeypatch, places, rank) for rank in range(len(places))]
    assert [splits for _, splits in made] == [0] * len(places)
    leaders = tuple(places.index(machine) for machine in dict.fromkeys(places))
    assert all((leaders in groups) is (rank in leaders) for rank, (groups, _) in enumerate(made))
    for members in {members for groups, _ in made for members in groups}:
        assert len({groups[members] for rank, (groups, _) in enumerate(made) if rank in members}) == 1, (
            members
        )
