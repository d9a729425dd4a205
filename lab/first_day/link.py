"""What links ranks that have no peer access: NCCL through shared memory, and beside it an exchange
by copy engines (``staged.py``).

The ranks share one GPU and its one way to main memory, and processes take turns on it unless MPS
runs: figures are the least that a box with a GPU for each rank shows.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, ProcessGroupGloo

from ...parallel_runtime.wire.segment import Segment, mapped
from .driver import USED, GpuEngine, driver
from .place import ALLOWS, FORK, Broken, Line, Place, backend_of, on_ranks, side_by_side
from .staged import Engine, PlainEngine, Room, Staged

MIB, KIB = 1 << 20, 1 << 10
LARGE_MB = (1, 8, 32)  # of a rank's tensor, its own part too
TINY_MB = (0.05,)
ROUNDS, TURNS = 10, 5
SLOT = 2 * MIB
SLOTS_TRIED = (MIB // 2, 8 * MIB)  # beside that
LIMIT_S = 12.0  # for one set of ranks
SHM = {"NCCL_P2P_DISABLE": "1", "NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,P2P,SHM,ENV"}
VARIANTS = {
    "": {},
    "by copy engines (NCCL_SHM_USE_CUDA_MEMCPY=1)": {"NCCL_SHM_USE_CUDA_MEMCPY": "1"},
    "over 8 channels": {"NCCL_MIN_P2P_NCHANNELS": "8", "NCCL_MAX_CTAS": "8"},
}
SHARED = "the least: one GPU and its one link for all ranks"
Move = Callable[[torch.Tensor, torch.Tensor, list[int]], None]  # into, out, the elements of each part


class Found(NamedTuple):
    """Milliseconds of an exchange by its size in MB; microseconds of one of 4 KB, alone and among
    many, and of the CPU to ask for one; bytes of the GPU that it takes for each rank.
    """

    ms: dict[float, float]
    alone_us: float
    among_us: float
    asked_us: float
    held: int = 0
    said: str = ""


def pattern(sender: int, receiver: int, turn: int, count: int, device: torch.device) -> torch.Tensor:
    """Return what one rank sends another: no other part or turn has it."""
    numbers = torch.arange(count, dtype=torch.int32, device=device)
    return numbers * 40503 + (sender * 64 + receiver) * 7919 + turn * 104729


def measured(place: Place, rank: int, ranks: int, meet: Callable[[], object], move: Move) -> Found:
    """``meet`` waits for all ranks. Raises Broken if other numbers come than were sent."""
    device, ms = place.own(), {}
    for mb in TINY_MB if place.is_tiny else LARGE_MB:
        part = int(mb * 1e6) // ranks // 512 * 128
        act, is_right = proven(place, rank, ranks, meet, move, part, TURNS)
        ms[mb] = 1e3 * taken_s(act, place.rounds(ROUNDS), device, meet)
        if not is_right():
            raise Broken(f"rank {rank} got other numbers of {mb:g} MB in the end than were sent")
    small, _ = proven(place, rank, ranks, meet, move, KIB // ranks, place.rounds(6 * TURNS))
    return Found(ms, *latency(place, meet, small))


def proven(
    place: Place, rank: int, ranks: int, meet: Callable[[], object], move: Move, part: int, turns: int
) -> tuple[Callable[[], None], Callable[[], bool]]:
    """Exchange parts of so many numbers, others in every turn. Return what exchanges once more, and
    whether the last turn's numbers lie there then. Raises Broken.
    """
    device = place.own()
    into, out = (torch.zeros(ranks, part, dtype=torch.int32, device=device) for _ in range(2))
    wrong = torch.zeros((), dtype=torch.int64, device=device)
    act = partial(move, into.view(-1), out.view(-1), [part] * ranks)

    def sent(turn: int) -> torch.Tensor:
        return torch.stack([pattern(rank, other, turn, part, device) for other in range(ranks)])

    def due(turn: int) -> torch.Tensor:
        return torch.stack([pattern(other, rank, turn, part, device) for other in range(ranks)])

    out.copy_(sent(0))  # memory and kernels are there before a queue waits for another rank
    wrong += (due(0) != due(0)).sum()
    over(device)
    meet()
    for turn in range(turns):
        out.copy_(sent(turn))
        act()
        wrong += (into != due(turn)).sum()
    if int(wrong):
        raise Broken(f"rank {rank} got {int(wrong)} of {part * ranks * turns} numbers other than sent")
    return act, lambda: torch.equal(into, due(turns - 1))


def latency(place: Place, meet: Callable[[], object], act: Callable[[], None]) -> tuple[float, float, float]:
    """Return microseconds of a message of 4 KB: alone, among many, and of the CPU to ask for it."""
    device, rounds = place.own(), place.rounds(2 * ROUNDS)
    among = taken_s(act, rounds, device, meet)
    alone = []
    for _ in range(rounds):
        began = time.perf_counter()
        act()
        over(device)
        alone.append(time.perf_counter() - began)
    meet()
    began = time.perf_counter()
    for _ in range(rounds):
        act()
    asked = (time.perf_counter() - began) / rounds
    over(device)
    return 1e6 * median(alone), 1e6 * among, 1e6 * asked


def taken_s(act: Callable[[], None], rounds: int, device: torch.device, meet: Callable[[], object]) -> float:
    """Return the seconds of each of so many rounds, which are asked for together."""
    act()
    over(device)
    meet()
    began = time.perf_counter()
    for _ in range(rounds):
        act()
    over(device)
    return (time.perf_counter() - began) / rounds


def over(device: torch.device) -> None:
    """Wait for this thread's stream alone: other ranks may be threads of this process."""
    if device.type == "cuda":
        torch.cuda.current_stream().synchronize()


def told(name: str, ranks: int, found: list[Found]) -> Line:
    """Return a line of a table, of the slowest rank."""
    rates = []
    for mb in found[0].ms:
        ms = max(one.ms[mb] for one in found)
        each = mb * (ranks - 1) / ranks / max(1e-6, ms)  # GB/s that a rank sends others
        rates.append(f"{mb:g} MB {ms:.2f} ms, {each:.1f} GB/s a rank ({ranks * each:.1f} in all)")
    slowest = [
        max(times)
        for times in zip(*((one.alone_us, one.among_us, one.asked_us) for one in found), strict=True)
    ]
    small = "4 KB {:.0f} us alone, {:.0f} among many, {:.0f} of the CPU".format(*slowest)
    held = f"; takes {found[0].held / MIB:.0f} MiB of GPU a rank" if found[0].held else ""
    return Line(f"{name}: {'; '.join(rates)}; {small}{held}{found[0].said}", SHARED)


def over_nccl(place: Place) -> Iterator[Line]:
    """All-to-all over NCCL without peer access, in processes, and in threads of one."""
    if not place.on_cpu and backend_of(place, share_one=True) != "nccl":
        yield Line("not tried", "NCCL shares a GPU from 2.30 on, LD_PRELOAD one")
        return
    for ranks in (2,) if place.is_tiny else (2, 4):
        for name, environ in VARIANTS.items() if ranks == 2 and not place.is_tiny else [("", {})]:
            if unknown := unknown_to_nccl(environ):
                yield Line(f"{ranks} ranks {name}: not tried", f"this NCCL has no {', '.join(unknown)}")
                continue
            for how, run in {"processes": in_processes, "threads": nccl_in_threads}.items():
                title = f"{ranks} {how} over {backend_of(place, share_one=True)} {name}".strip()
                yield part_of(title, ranks, partial(with_transport, environ, partial(run, place, ranks)))


def with_transport(environ: Mapping[str, str], run: Callable[[], list[Found]]) -> list[Found]:
    with TemporaryDirectory() as folder, patch.dict(os.environ, {**SHM, **environ}):
        os.environ["NCCL_DEBUG_FILE"] = f"{folder}/nccl.%p"
        first, *others = run()
        return [first._replace(said=transport(Path(folder))), *others]


def unknown_to_nccl(names: Iterable[str]) -> list[str]:
    """Return which variables the library in use does not name: there may be two in the process."""
    address = ctypes.cast(ctypes.CDLL("libnccl.so.2").ncclGetVersion, ctypes.c_void_p).value or 0
    (path,) = (
        line.split()[-1]
        for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
        if (span := [int(one, 16) for one in line.split()[0].split("-")])[0] <= address < span[1]
    )
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        return [name for name in names if content.find(name.encode()) < 0]


def part_of(title: str, ranks: int, run: Callable[[], list[Found]]) -> Line:
    """Say what a set of ranks shows, or how it failed: the next set is tried all the same."""
    try:
        return told(title, ranks, run())
    except Broken as error:
        return Line(f"{title}: {error}", "not to be had here", fails=True)


def transport(folder: Path) -> str:
    """Return what NCCL says that it chose."""
    said = "\n".join(file.read_text(errors="replace") for file in folder.glob("nccl.*"))
    ways = Counter(re.findall(r" via (\S+)", said)).most_common(3)
    channels = re.findall(r"\d+ p2p channels per peer", said)
    version = re.findall(r"NCCL version (\S+)", said)
    return "".join(f"; {one}" for one in (*version[:1], *(f"{way} x {n}" for way, n in ways), *channels[:1]))


def in_processes(place: Place, ranks: int) -> list[Found]:
    barrier = FORK.Barrier(ranks)

    def of_rank(rank: int, backend: str) -> Found:
        def move(into: torch.Tensor, out: torch.Tensor, sizes: list[int]) -> None:
            dist.all_to_all_single(into, out, sizes, sizes)

        connected(place, ranks, move)
        meet = meeting(barrier)
        found = measured(place, rank, ranks, meet, move)
        return found if place.on_cpu else found._replace(held=held_by_another(place, ranks, meet))

    return on_ranks(place, ranks, True, of_rank, LIMIT_S)[1]


def connected(place: Place, ranks: int, move: Move) -> None:
    one = torch.zeros(2, ranks * KIB, device=place.own())
    move(one[0], one[1], [KIB] * ranks)


def held_by_another(place: Place, ranks: int, meet: Callable[[], object]) -> int:
    """Return the bytes of the GPU that each rank's part of one more communicator takes, which has
    sent a message.
    """
    one = torch.zeros(2, ranks * KIB, device=place.own())
    over(place.own())
    meet()
    before = torch.cuda.mem_get_info()[0]
    meet()
    dist.all_to_all_single(one[0], one[1], group=dist.new_group([*range(ranks)]))
    over(place.own())
    meet()
    taken = before - torch.cuda.mem_get_info()[0]
    meet()
    return taken // ranks


def meeting(barrier: Any) -> Callable[[], object]:
    return partial(barrier.wait, LIMIT_S)


def nccl_in_threads(place: Place, ranks: int) -> list[Found]:
    """Ranks of one process do not take turns on its GPU."""

    def process() -> Iterator[list[Found]]:
        os.environ |= {**ALLOWS, **os.environ}
        groups: list[Any] = []  # until the process ends: to leave one may wait for another
        yield threaded(place, ranks, partial(grouped, place, ranks, groups))

    return side_by_side([process], LIMIT_S)[0]


def grouped(
    place: Place, ranks: int, groups: list[Any], rank: int, folder: str, meet: Callable[[], object]
) -> Found:
    """Measure as a rank in a process group of its own, beside other ranks of the process."""
    store, limit = FileStore(f"{folder}/store", ranks), timedelta(seconds=LIMIT_S)
    group: Any
    if place.on_cpu:
        group = ProcessGroupGloo(store, rank, ranks, limit)
    else:
        group = dist.ProcessGroupNCCL(store, rank, ranks, dist.ProcessGroupNCCL.Options())
    groups.append(group)

    def move(into: torch.Tensor, out: torch.Tensor, sizes: list[int]) -> None:
        group.alltoall_base(into, out, sizes, sizes).wait()

    connected(place, ranks, move)
    return measured(place, rank, ranks, meet, move)


def threaded(
    place: Place, ranks: int, of_rank: Callable[[int, str, Callable[[], object]], Found]
) -> list[Found]:
    """Return what each rank finds that is a thread with a stream of its own."""
    barrier = threading.Barrier(ranks)

    def thread(rank: int, folder: str) -> Found:
        try:
            with streaming(place):
                return of_rank(rank, folder, meeting(barrier))
        except BaseException:
            barrier.abort()
            raise

    with TemporaryDirectory() as folder, ThreadPoolExecutor(ranks) as threads:
        found = [threads.submit(thread, rank, folder) for rank in range(ranks)]
        errors = [error for one in found if (error := one.exception())]
        for error in sorted(errors, key=lambda one: isinstance(one, threading.BrokenBarrierError)):
            raise Broken(f"{type(error).__name__}: {error}".splitlines()[0])
        return [one.result() for one in found]


@contextmanager
def streaming(place: Place) -> Iterator[None]:
    torch.set_num_threads(1)
    if not place.on_cpu:
        driver()
        torch.cuda.set_device(place.own())
        torch.zeros(1, device=place.own())  # a context, of which the driver's calls are
    with nullcontext() if place.on_cpu else torch.cuda.stream(torch.cuda.Stream()):
        yield


@contextmanager
def engine_of(place: Place, fd: int, nbytes: int, flags: int = USED) -> Iterator[Engine]:
    """Map a segment into this process, as each of its ranks does for itself."""
    mapping = mapped(fd, nbytes)
    address = ctypes.addressof(mapping)
    engine: Engine = PlainEngine(address) if place.on_cpu else GpuEngine(address, nbytes, flags)
    try:
        yield engine
    finally:
        engine.close()
        del mapping


def by_copies(place: Place) -> Iterator[Line]:
    """The exchange of staged.py, in processes, and in threads of one, which do not take turns."""
    sets = [(ranks, SLOT, run) for ranks in (2, 4) for run in (staged_in_processes, staged_in_threads)]
    sets += [(2, slot, staged_in_threads) for slot in SLOTS_TRIED]
    for ranks, slot, run in sets[:2] if place.is_tiny else sets:
        how = "processes" if run is staged_in_processes else "threads"
        title = f"{ranks} {how} by copies, slots of {slot / MIB:g} MiB"
        yield part_of(title, ranks, partial(run, place, ranks, slot))
    if not place.on_cpu:
        with patch.dict(os.environ, CUDA_DEVICE_MAX_CONNECTIONS="1"):
            run = partial(staged_in_processes, place, 2, SLOT)
            yield part_of("2 processes by copies, all streams in one queue", 2, run)


def staged_in_processes(place: Place, ranks: int, slot: int) -> list[Found]:
    room, barrier = Room(ranks, slot), FORK.Barrier(ranks)
    segment = Segment.create("first-day", room.nbytes)

    def process(rank: int) -> Iterator[Found]:
        with streaming(place):
            yield staged(place, room, segment.fd, rank, meeting(barrier))
        meeting(barrier)()

    try:
        return side_by_side([partial(process, rank) for rank in range(ranks)], LIMIT_S)
    finally:
        segment.close()


def staged_in_threads(place: Place, ranks: int, slot: int) -> list[Found]:
    room = Room(ranks, slot)
    segment = Segment.create("first-day", room.nbytes)

    def process() -> Iterator[list[Found]]:
        yield threaded(place, ranks, lambda rank, _, meet: staged(place, room, segment.fd, rank, meet))

    with patch.dict(os.environ, CUDA_DEVICE_MAX_CONNECTIONS="32"):  # no rank's queue is another's
        try:
            return side_by_side([process], LIMIT_S)[0]
        finally:
            segment.close()


def staged(place: Place, room: Room, fd: int, rank: int, meet: Callable[[], object]) -> Found:
    began = time.perf_counter()
    with engine_of(place, fd, room.nbytes) as engine:
        ready_ms = 1e3 * (time.perf_counter() - began)
        exchange = Staged(engine, room, rank)

        def move(into: torch.Tensor, out: torch.Tensor, sizes: list[int]) -> None:
            exchange.all_to_all(into, out, sizes, sizes)

        found = measured(place, rank, room.ranks, meet, move)
        meet()
    return found._replace(said=f"; {room.nbytes / MIB:.0f} MiB registered in {ready_ms:.0f} ms")
