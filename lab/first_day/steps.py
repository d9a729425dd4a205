"""The steps, in the order in which they settle most: of one GPU, and of several."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ...parallel_runtime.comm.mesh import connect
from ...parallel_runtime.comm.parts import runs_of
from ...parallel_runtime.comm.traffic import no_wish
from ...parallel_runtime.layout import Layout
from ...pool.gpu_modes import SHARED, ask_driver, modes_in
from .beside_copies import attention_beside_copies, launch_costs
from .link import by_copies, over_nccl
from .lost_peer import lost_peer
from .one_rank import alone, together
from .place import (
    FORK,
    Broken,
    Line,
    Place,
    in_process,
    messages_on,
    milliseconds,
    nccl_version,
    on_ranks,
    use_host,
)

ROOT = Path(__file__).resolve().parents[2]
MIB, KIB = 1 << 20, 1 << 10
OFFSETS = (0, 2, 16)  # bytes that parts begin at
HELD_UP = 3.0  # times, from where it is the GPU that is shared in turns
SLOWER = 1.3  # times, from where a place is said to cost
LIMIT_S = 300.0
MPS = "CUDA_MPS_PIPE_DIRECTORY"


class Step(NamedTuple):
    """``never_late``: why only the CPU can stand in a GPU's place; empty where a late GPU can
    (tests/kit/late_device.py).
    """

    name: str
    run: Callable[[Place], Iterator[Line]]
    limit_s: float = LIMIT_S
    never_late: str = ""


def machine(place: Place) -> Iterator[Line]:
    from ...launcher.commands import doctor

    facts = doctor.gather(place.host)
    gpus = ", ".join(f"{one.name} ({doctor.gib(one.memory_bytes)})" for one in facts.torch.gpus) or "no GPU"
    nccl = ".".join(map(str, nccl_version())) if facts.torch.gpus else "none"
    yield Line(f"{gpus}; torch {facts.torch.version}, NCCL {nccl}, ComfyUI {place.host.version}")
    modes = {*modes_in(ask_driver()).values()}
    mps = Path(os.environ.get(MPS, "/tmp/nvidia-mps")).exists()
    yield Line(
        f"compute mode {', '.join(sorted(modes)) or 'not told'}; MPS {'runs' if mps else 'is off'}",
        "processes share a GPU" if modes <= {SHARED} else "nvidia-smi -c DEFAULT, as root",
        fails=not modes <= {SHARED},
    )
    for one in doctor.findings(facts):
        if one.level == "blocked":
            yield Line(one.text, one.remedy, fails=True)


def to_itself(place: Place) -> Iterator[Line]:
    """An exchange of a rank with itself: what it costs where parts begin."""
    for figures in on_ranks(place, 1, True, partial(exchanged, place, sizes(place)), LIMIT_S)[1]:
        yield from figures


def among_all(place: Place) -> Iterator[Line]:
    """The same among all GPUs."""
    backend, found = on_ranks(place, place.ranks, False, partial(exchanged, place, sizes(place)), LIMIT_S)
    for line in found[0]:
        yield Line(f"{place.ranks} ranks over {backend}, {line.figure}", line.verdict)


def sizes(place: Place) -> tuple[float, ...]:
    return (0.1,) if place.is_tiny else (0.4, 1.3, 5.0)


def exchanged(place: Place, megabytes: tuple[float, ...], rank: int, backend: str) -> list[Line]:
    ranks, found = dist.get_world_size(), []
    own = place.own(torch.cuda.current_device() if not place.on_cpu else 0)
    for size in megabytes:
        part = int(size * 1e6) // 2 // ranks // 64 * 64
        room = torch.zeros(2, ranks * part + 64, dtype=torch.bfloat16, device=own)
        room[1] = rank + 1
        parts = [part] * ranks

        def once(offset: int, room: torch.Tensor = room, parts: list[int] = parts) -> None:
            come, go = (one[offset // 2 :][: sum(parts)] for one in room)
            dist.all_to_all_single(come, go, parts, parts)

        taken = {
            offset: 1e3 * milliseconds(partial(once, offset), own, place.rounds(25)) for offset in OFFSETS
        }
        come = room[0, OFFSETS[-1] // 2 :][: sum(parts)].view(ranks, part)
        if not torch.equal(come.amin(1), come.amax(1)) or come[:, 0].tolist() != [*range(1, ranks + 1)]:
            raise Broken(f"rank {rank} got other numbers than were sent")
        slower = taken[OFFSETS[1]] / taken[OFFSETS[0]]
        found.append(
            Line(
                f"{size:g} MB: {', '.join(f'{us:.0f} us at offset {at}' for at, us in taken.items())}",
                f"{slower:.1f} times as slow where parts do not begin at 16 bytes"
                if slower > SLOWER
                else "where parts begin does not matter here",
            )
        )
    return found


@contextmanager
def busy(place: Place) -> Iterator[None]:
    """Have a second process compute on the same device."""
    ready, over = FORK.Event(), FORK.Event()
    process = FORK.Process(target=_multiply, args=(place, ready, over))
    process.start()
    try:
        if not ready.wait(60.0):
            raise Broken("the second process did not begin")
        yield
    finally:
        over.set()
        process.join(20.0)
        process.kill()


def _multiply(place: Place, ready: Any, over: Any) -> None:
    torch.set_num_threads(1)
    side = 256 if place.is_tiny else 4096
    one = torch.ones(side, side, device=place.own(), dtype=torch.float32 if place.is_tiny else torch.bfloat16)
    while not over.is_set():
        for _ in range(20):
            one.matmul(one)
        if not place.on_cpu:
            torch.cuda.synchronize()
        ready.set()
    os._exit(0)


def beside(place: Place) -> Iterator[Line]:
    """What ComfyUI's process waits for on a GPU that a rank keeps busy."""
    (idle,) = in_process(partial(latencies, place), LIMIT_S)
    with busy(place):
        (shared,) = in_process(partial(latencies, place), LIMIT_S)
    for name, ms in shared.items():
        times = ms / max(1e-6, idle[name])
        yield Line(
            f"{name}: {1e3 * idle[name]:.0f} us, beside a busy process {1e3 * ms:.0f} us",
            f"{times:.1f} times as long{', MPS may help' if times > HELD_UP else ''}",
        )


def latencies(place: Place) -> Iterator[dict[str, float]]:
    torch.set_num_threads(1)
    own = place.own()
    there = torch.ones(512 * KIB, dtype=torch.uint8, device=own)
    like, other = torch.ones(2, 4 * MIB, dtype=torch.uint8, device=own)
    pinned = torch.empty(512 * KIB, dtype=torch.uint8, pin_memory=not place.on_cpu)
    acts = {
        "512 KiB to pageable memory": lambda: there.cpu() if not place.on_cpu else there.clone(),
        "512 KiB to pinned memory": lambda: pinned.copy_(there, non_blocking=True),
        "4 MiB compared": lambda: torch.equal(like, other),
        "one addition": lambda: there.add_(1),
    }
    yield {name: milliseconds(act, own, place.rounds(25)) for name, act in acts.items()}


def ranks_of_pools(place: Place) -> Any:
    """Return the set-up of ranks, and the process that those of several pools are forked from."""
    use_host(place)
    from ...nodes.local_devices import rank_setup

    return rank_setup({})


@contextmanager
def pool_of(place: Place, layout: Layout, setup: Any, backend: str = "gloo") -> Iterator[Any]:
    """A parallel MODEL and its pool, whose ranks share the first device or have one each."""
    import comfy.model_management as mm

    from ...nodes.settings import Choice
    from ...parallel_runtime.client.remote_patcher import parallelize
    from ...parallel_runtime.client.remote_pool import RemotePool
    from ...pool.devices import place as placed
    from ...pool.devices import visible_gpus
    from ...pool.handle import PoolHandle
    from ..commands.parity import stock_model

    ranks = range(layout.world_size)
    names = ["cpu" if place.on_cpu else f"cuda:{rank if backend == 'nccl' else 0}" for rank in ranks]
    placement = placed(
        layout, ",".join(names), "gloo" if place.on_cpu else backend, visible_gpus(place.on_cpu)
    )
    handle, stock = PoolHandle(placement, setup), stock_model(HEADS)
    remote = RemotePool(handle)
    choice, here = Choice(placement, None), str(mm.get_torch_device())
    try:
        yield (
            parallelize(stock, remote, choice.held_on(here), None, activations=choice.computed_on(here)),
            remote,
        )
    finally:
        handle.close()


HEADS = 8


def hop(place: Place) -> Iterator[Line]:
    """An evaluation's way to a rank and back, beside what the rank computes."""
    with pool_of(place, Layout(), ranks_of_pools(place)) as (model, remote):
        for _ in range(2 if place.is_tiny else 8):
            sampled(model)
        evaluations = remote.runs.last.evaluations
    ms = 1e3 * median(one.hop_s for one in evaluations)
    yield Line(f"{ms:.2f} ms of an evaluation's {1e3 * median(one.seconds for one in evaluations):.2f} ms")


def sampled(model: Any) -> torch.Tensor:
    from ...parallel_runtime.families.catalogue import PLAIN
    from ..commands.parity import Case, sample

    return sample(model, Case(PLAIN, "ulysses1", "odd", HEADS, 4.0, False, "euler"))


def several_on_one(place: Place) -> Iterator[Line]:
    """The pack's exchange among ranks that share a GPU: over NCCL where it lets them."""
    for ranks in (2,) if place.is_tiny else (2, 4):
        backend, taken = on_ranks(place, ranks, True, partial(passed, place, ranks), LIMIT_S)
        why = "" if place.on_cpu or backend == "nccl" else "; NCCL shares a GPU from 2.30 on, LD_PRELOAD one"
        yield Line(f"{ranks} ranks over {backend}: {max(taken):.2f} ms an exchange", f"all came right{why}")


def passed(place: Place, ranks: int, rank: int, backend: str) -> float:
    via_cpu = backend == "gloo" and not place.on_cpu
    own = messages_on(place.own(), via_cpu)
    mesh = connect(Layout(ulysses=ranks), rank, device=own, via_cpu=via_cpu, wants_stop=lambda: False)
    sent = torch.full((ranks, 1 << (10 if place.is_tiny else 18)), float(rank), device=place.own())
    came = torch.empty_like(sent)
    exchange = mesh.sequence.ulysses
    parts = [1] * ranks

    def once() -> None:
        exchange.all_to_all([runs_of(sent, 0, parts)], runs_of(came, 0, parts), no_wish)

    ms = milliseconds(once, place.own(), place.rounds(9))
    due = torch.arange(ranks, dtype=came.dtype, device=came.device)
    if not torch.equal(came, due[:, None].expand_as(came)):
        raise Broken(f"rank {rank} got other numbers than were sent")
    return ms


def same_seed(place: Place, backend: str = "gloo") -> Iterator[Line]:
    """Twice in one pool, and in a pool that is started anew."""
    images, layout = [], Layout(ulysses=min(2, place.ranks) if backend == "nccl" else 2)
    setup = ranks_of_pools(place)
    for times in (2, 1):
        with pool_of(place, layout, setup, backend) as (model, _):
            images += [sampled(model) for _ in range(times)]
    again, anew = (torch.equal(images[0], other) for other in images[1:])
    yield Line(
        f"{layout.product()}: {'the same' if again else 'other'} bits in the same pool,"
        f" {'the same' if anew else 'others'} in another",
        "repeatable" if again and anew else "ranks race, or a kernel adds in any order",
        fails=not (again and anew),
    )


def checks(place: Place, chosen: str) -> Iterator[Line]:
    """The checks of tests/cuda: ``chosen`` of them."""
    command = [sys.executable, "-m", "launcher", "test", "--cuda", "--cuda-as", place.device, "-q", "-k"]
    chosen = "nccl_connects" if place.is_tiny else chosen
    ran = subprocess.run([*command, chosen], cwd=ROOT, capture_output=True, text=True, check=False)
    failed = re.findall(r"^FAILED +(.+)$", ran.stdout, re.MULTILINE)
    said = re.findall(r"\d+ (?:passed|failed|left out)[^\n]*", ran.stdout)
    yield Line(
        said[-1] if said else (ran.stderr or ran.stdout).strip().splitlines()[-1],
        "; ".join(failed) or ("fine" if ran.returncode == 0 else f"exit status {ran.returncode}"),
        fails=ran.returncode != 0,
    )


def topology(place: Place) -> Iterator[Line]:
    try:
        ran = subprocess.run(
            ["nvidia-smi", "topo", "-m"], capture_output=True, text=True, check=False, timeout=20
        )
        said = ran.stdout
    except (OSError, subprocess.TimeoutExpired):
        said = ""
    rows = [line.split()[1 : 1 + place.ranks] for line in said.splitlines() if line.startswith("GPU")]
    kinds = sorted({kind for row in rows for kind in row} - {"X"})
    linked = "NVLink between all" if all(kind.startswith("NV") for kind in kinds) else "slower than NVLink"
    yield Line(
        f"{place.ranks} GPUs, linked by {', '.join(kinds) or 'what nobody tells'}",
        linked if kinds else "nvidia-smi does not say",
    )


def memory_of_groups(place: Place) -> Iterator[Line]:
    """What joining takes of each GPU's memory, and a first exchange."""
    backend, found = on_ranks(place, place.ranks, False, partial(held, place), LIMIT_S)
    joined, sent = (max(one[at] for one in found) / MIB for at in (0, 1))
    yield Line(f"over {backend}: {joined:.0f} MiB to join, {sent:.0f} MiB more for a first exchange")


def held(place: Place, rank: int, backend: str) -> tuple[int, int]:
    def free() -> int:
        return torch.cuda.mem_get_info()[0] if not place.on_cpu else 0

    torch.zeros(1, device=place.own(rank))
    before = free()
    connect(
        Layout(ulysses=place.ranks),
        rank,
        device=place.own(rank),
        via_cpu=False,
        wants_stop=lambda: False,
    )
    joined = free()
    one = torch.zeros(place.ranks * KIB, device=place.own(rank))
    parts = [KIB] * place.ranks
    dist.all_to_all_single(torch.empty_like(one), one, parts, parts)
    return before - joined, joined - free()


OF_DRIVER = "asks drivers, and computes nothing"
OF_POOLS = "ranks of a pool are processes of their own"
OF_PYTEST = "pytest runs in a process of its own"
OF_NUMBERS = "numbers pass by calls of the driver's own"
OF_QUEUES = "times what only a GPU has"

ON_ONE = (
    Step("this machine", machine, never_late=OF_DRIVER),
    Step("one rank of several, alone", alone, 600.0),
    Step("an exchange with itself", to_itself),
    Step("beside a busy process", beside),
    Step("to a rank and back", hop, never_late=OF_POOLS),
    Step("several ranks on one GPU", several_on_one),
    Step("the same seed", same_seed, never_late=OF_POOLS),
    Step("the checks", partial(checks, chosen="kernels or gloo or memory or one_rank"), 900.0, OF_PYTEST),
    Step("an exchange by copies", by_copies, 60.0, OF_NUMBERS),
    Step("a rank that is lost", lost_peer, 40.0, OF_NUMBERS),
    Step("attention beside copies", attention_beside_copies, 30.0, OF_QUEUES),
    Step("the cost of a launch", launch_costs, 20.0, OF_QUEUES),
    Step("NCCL through shared memory", over_nccl, 70.0, OF_QUEUES),
)
ON_SEVERAL = (
    Step("this machine", machine, never_late=OF_DRIVER),
    Step("what links the GPUs", topology, never_late=OF_DRIVER),
    Step("an exchange among all", among_all),
    Step("memory of a group", memory_of_groups),
    Step("all ranks of a layout", together, 900.0),
    Step("the same seed", partial(same_seed, backend="nccl"), never_late=OF_POOLS),
    Step("the checks", partial(checks, chosen="nccl"), 900.0, OF_PYTEST),
)
