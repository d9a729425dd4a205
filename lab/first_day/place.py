"""Where steps run: the GPUs, or the CPU in their place, and processes that each begin without a
CUDA context.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from functools import partial
from multiprocessing import connection
from statistics import median
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore

from ...pool.worker_main import die_with_parent

if TYPE_CHECKING:
    from ...launcher.comfyui.host_record import ComfyInstall

FORK = multiprocessing.get_context("fork")  # a process that imported torch, and has no CUDA context
SHARES_A_GPU = (2, 30)  # of NCCL: ranks may share a GPU, where a variable allows it
ALLOWS = {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_MAX_CTAS": "4"}


@dataclass(frozen=True)
class Place:
    """``device``: cuda, or cpu in its place. ``ranks``: GPUs, or processes in their place.
    ``is_tiny``: sizes and rounds are no more than a step needs to run.
    """

    device: str
    ranks: int
    host: ComfyInstall
    is_tiny: bool = False

    @property
    def on_cpu(self) -> bool:
        return self.device == "cpu"

    def own(self, rank: int = 0) -> torch.device:
        return torch.device("cpu") if self.on_cpu else torch.device("cuda", rank)

    def rounds(self, number: int) -> int:
        return 1 if self.is_tiny else number


@dataclass(frozen=True)
class Line:
    """A figure, and what it says; ``fails``: it is not as it must be."""

    figure: str
    verdict: str = "fine"
    fails: bool = False


class Broken(Exception):
    """A process failed, ended or took too long."""


class Child:
    """A process of its own that yields what ``made`` does."""

    def __init__(self, made: Callable[[], Iterator[Any]]):
        self.told, there = FORK.Pipe(duplex=False)
        self._process = FORK.Process(target=_told, args=(there, made))
        self._process.start()
        there.close()

    def next(self) -> Any:
        """Return the next value; None at the end. Raises Broken."""
        try:
            kind, value = self.told.recv()
        except EOFError:
            self._process.join()
            raise Broken(f"its process ended with {self._process.exitcode}") from None
        if kind == "error":
            raise Broken(value)
        return value

    def end(self) -> None:
        self._process.join(1.0)
        self._process.kill()
        self._process.join()


def in_process(made: Callable[[], Iterator[Any]], limit_s: float) -> Iterator[Any]:
    """Yield what ``made`` yields in a process of its own. Raises Broken."""
    child, until = Child(made), time.monotonic() + limit_s
    try:
        while True:
            if not child.told.poll(max(0.0, until - time.monotonic())):
                raise Broken(f"took longer than {limit_s:.0f} s")
            if (value := child.next()) is None:
                return
            yield value
    finally:
        child.end()


def _told(there: Any, made: Callable[[], Iterator[Any]]) -> None:
    die_with_parent(os.getppid())  # a step that is ended leaves no process of its own
    try:
        with redirect_stdout(sys.stderr):  # ComfyUI's modules print
            for value in made():
                there.send(("value", value))
        there.send(("over", None))
    except Broken as error:
        there.send(("error", str(error)))
    except Exception as error:  # noqa: BLE001 the step fails, and the next goes on
        traceback.print_exc()
        there.send(("error", f"{type(error).__name__}: {error}".splitlines()[0]))
    there.close()
    sys.stderr.flush()
    os._exit(0)  # pools have been closed, and nothing else is to be waited for


def use_host(place: Place) -> None:
    """Have ComfyUI, which nothing has imported yet, compute as the place does."""
    import comfy.cli_args

    comfy.cli_args.args.cpu = place.is_tiny  # of a late GPU too: ComfyUI asks the driver itself
    comfy.cli_args.args.use_pytorch_cross_attention = True  # what it chooses on a GPU
    torch.set_num_threads(1)


def on_ranks(
    place: Place, ranks: int, share_one: bool, of_rank: Callable[[int, str], Any], limit_s: float
) -> tuple[str, list[Any]]:
    """Return the backend, and what each of ``ranks`` processes returns that are in one process
    group. ``share_one``: all are on the first device. Raises Broken.
    """
    backend = backend_of(place, share_one)

    def process(rank: int, folder: str) -> Iterator[Any]:
        torch.set_num_threads(1)
        os.environ |= {**ALLOWS, **os.environ} if share_one else {}
        own = place.own(0 if share_one else rank)
        if own.type == "cuda":
            torch.cuda.set_device(own)
        dist.init_process_group(
            backend,
            store=FileStore(f"{folder}/store", ranks),
            rank=rank,
            world_size=ranks,
            device_id=own if backend == "nccl" else None,
        )
        yield of_rank(rank, backend)
        dist.barrier()
        dist.destroy_process_group()

    with TemporaryDirectory(prefix="pipemesh-first-day-") as folder:
        return backend, side_by_side([partial(process, rank, folder) for rank in range(ranks)], limit_s)


def side_by_side(made: Sequence[Callable[[], Iterator[Any]]], limit_s: float) -> list[Any]:
    """Return the first value of each, all in processes of their own. Raises Broken."""
    children = [Child(one) for one in made]
    found: dict[int, Any] = {}
    until = time.monotonic() + limit_s
    try:
        while len(found) < len(made):
            left = {one.told: rank for rank, one in enumerate(children) if rank not in found}
            ready = connection.wait([*left], max(0.0, until - time.monotonic()))
            if not ready:
                raise Broken(f"ranks {sorted(left.values())} took longer than {limit_s:.0f} s")
            for one in ready:
                found[left[one]] = children[left[one]].next()  # type: ignore[index]
    finally:
        for child in children:
            child.end()
    return [found[rank] for rank in range(len(made))]


def backend_of(place: Place, share_one: bool) -> str:
    if place.on_cpu or not dist.is_nccl_available():
        return "gloo"
    return "gloo" if share_one and nccl_version()[:2] < SHARES_A_GPU else "nccl"


def nccl_version() -> tuple[int, ...]:
    """Return the version of the library that is loaded: torch tells the one it was built with."""
    number = ctypes.c_int()
    try:
        ctypes.CDLL("libnccl.so.2").ncclGetVersion(ctypes.byref(number))
    except OSError:
        return (0,)
    major, rest = divmod(number.value, 10_000)
    return major, rest // 100, rest % 100


def messages_on(device: torch.device, via_cpu: bool) -> torch.device:
    """Return where a rank's messages lie: gloo sends no memory of a GPU."""
    return torch.device("cpu") if via_cpu else device


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def milliseconds(act: Callable[[], Any], device: torch.device, rounds: int = 9) -> float:
    """Return what ``act`` takes in the median, with all that it enqueues."""
    taken = []
    for _ in range(rounds + 2):
        wait(device)
        began = time.perf_counter()
        act()
        wait(device)
        taken.append(1e3 * (time.perf_counter() - began))
    return median(taken[2:])
