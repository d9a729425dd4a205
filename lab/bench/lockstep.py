"""Run the same rounds in several processes in lockstep: each phase of a round by all of them at
once, or by one while the others block.

A phase is a function that returns the seconds it took. A bench starts the processes with ``run``;
each of them measures through its ``Ranks``.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...parallel_runtime.comm.cores import giving_way, keep_to, share_of_cores
from ...parallel_runtime.errors import PipeMeshError
from .figures import Options, Round, Where

if TYPE_CHECKING:
    from ...parallel_runtime.comm.mesh import Mesh
    from ...parallel_runtime.layout import Layout
    from ...pool.fork_server import ServerProcess
    from ...pool.supervisor import Process

WARM_UP = 2
POLL_S = 0.02
SAID_BYTES = 1 << 16  # taken at once of what a process says
LIMIT_S, SMALLEST_LIMIT_S = 6 * 3600.0, 600.0  # for a bench, and for one of smallest cases
SCRIPT = Path(__file__).with_name("lockstep_main.py")


@dataclass(frozen=True)
class Phase:
    """A part of a round. ``alone``: run by one process, another one in each round, while the others
    block.
    """

    seconds: Callable[[], float]
    alone: bool = False


class Ranks(Where):
    """One process among those in lockstep. All of them must call ``measure`` alike."""

    def __init__(
        self,
        store: str,
        rank: int,
        size: int,
        cores: Sequence[int] = (),
        comfyui: str = "",
        smallest: bool = False,
        server: ServerProcess | None = None,
    ):
        """Join the others. ``cores``: all that the bench may use; where given, this process keeps
        to its share of them, as a CPU rank does.
        """
        import torch.distributed as dist
        from torch.distributed import FileStore  # pyright: ignore[reportPrivateImportUsage]

        self.all_cores = cores
        self.own_cores = share_of_cores(cores, rank, size) if cores else ()
        keep_to(self.own_cores)

        self.rank = rank
        self.size = size
        self._comfyui = comfyui
        self.smallest = smallest
        self.server = server
        with giving_way():
            dist.init_process_group(
                "gloo", store=FileStore(store, size), rank=rank, world_size=size, timeout=timedelta(hours=1)
            )
        self._barrier = dist.barrier  # waits on a socket: an idle rank takes no time from the others

    @property
    def comfyui(self) -> str:
        return self._comfyui

    def connect(self, layout: Layout, speeds: Sequence[int] = ()) -> Mesh:
        """Join the groups that this rank has in ``layout``. ``speeds``: as a mesh has them."""
        from ...parallel_runtime.comm.mesh import connect

        with giving_way():
            return connect(layout, self.rank, via_cpu=False, wants_stop=lambda: False, speeds=tuple(speeds))

    def measure(self, phases: Mapping[str, Phase], rounds: int) -> list[dict[str, float]]:
        """Measure, per round, the seconds of each phase in which this rank took part. The first
        rounds are warm-up and dropped, fewer where that would be most of them.
        """
        measured = []
        warm_up = min(WARM_UP, rounds - 1)
        for index in range(warm_up + rounds):
            if self.rank == 0 and sys.stderr.isatty():
                print(f"\rround {index + 1} of {warm_up + rounds} ", end="", file=sys.stderr, flush=True)
            measured.append({})
            for name, phase in phases.items():
                self._barrier()
                if not phase.alone or index % self.size == self.rank:
                    measured[-1][name] = phase.seconds()
            self._barrier()
        if self.rank == 0 and sys.stderr.isatty():
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
        return measured[warm_up:]


def attend_with_sdpa() -> None:
    """Let ComfyUI attend as it does on GPUs, as counts are made, and as diffusers does everywhere:
    on a CPU it would choose a slower way. Call it before any model is built.
    """
    import comfy.cli_args

    comfy.cli_args.args.use_pytorch_cross_attention = True
    import comfy.model_management

    assert comfy.model_management.pytorch_attention_enabled()


def timed(call: Callable[[], Any]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def run(options: Options, size: int, function: str, **arguments: Any) -> list[Any]:
    """Call ``function`` (``module:name`` below this package) in ``size`` processes of one thread
    each, as ``function(ranks, **arguments)``, and return their results by rank. Raises
    PipeMeshError if one of them failed.
    """
    with tempfile.TemporaryDirectory(prefix="pipemesh-bench-") as folder, ExitStack() as stack:
        processes = []
        for rank in range(size):
            word = {
                "comfyui": options.comfyui,
                "folder": folder,
                "rank": rank,
                "size": size,
                "smallest": options.smallest,
                "function": function,
                "arguments": arguments,
            }
            process = start(json.dumps(word), options.server)
            stack.callback(process.wait)
            stack.callback(process.kill)
            processes.append(process)
        wait_for(processes, SMALLEST_LIMIT_S if options.smallest else LIMIT_S)
        return [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(size)]


def start(word: str, server: ServerProcess | None) -> Process:
    """Start a process of ``lockstep_main.py``: a fork of the ``server``, which tells it how to ask
    for more of them, or a program of its own.
    """
    from ...pool.crew import KEEP_MEMORY
    from ...pool.supervisor import Command

    env = {**os.environ, **KEEP_MEMORY, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    if server is not None:
        argv = (sys.executable, str(SCRIPT), "{parent}", word, "{fd}")
        return server.fork(Command(argv, env, server.control.fileno()))
    argv = (sys.executable, str(SCRIPT), str(os.getpid()), word)
    return subprocess.Popen(argv, env=env, stdin=subprocess.DEVNULL, stdout=sys.stderr)


def wait_for(processes: Sequence[Process], limit_s: float) -> None:
    """Show what the processes say until all have ended. Raises PipeMeshError if one has failed, or
    some are left after ``limit_s``.
    """
    until = time.monotonic() + limit_s
    outputs = [process.stdout for process in processes if process.stdout is not None]
    while left := [rank for rank, process in enumerate(processes) if process.poll() is None]:
        if any(process.returncode for process in processes):
            break
        pass_on(outputs, POLL_S)
        if time.monotonic() > until:
            raise PipeMeshError(
                f"Rank {left[0]} of the bench has not ended after {limit_s:.0f} s: if other programs kept the"
                " cores busy, end them and run the bench again; else the lines above say how far it came."
            )
    for rank in left:
        processes[rank].kill()
    while pass_on(outputs):
        pass
    for rank, process in enumerate(processes):
        if process.returncode and rank not in left:
            raise PipeMeshError(
                f"Rank {rank} of the bench ended with exit status {process.returncode}: its last lines say"
                " why."
            )


def pass_on(outputs: list[Any], wait_s: float = 0.0) -> bool:
    """Show what was said, and wait a moment for it: a process whose words nobody takes blocks.
    Return whether there was any. Outputs that have ended are taken off.
    """
    ready = select.select(outputs, [], [], wait_s)[0]
    for output in ready:
        said = output.read(SAID_BYTES)
        print((said or b"").decode(errors="replace"), end="", file=sys.stderr)
        if not said:
            outputs.remove(output)
    return bool(ready)


def merge(by_rank: Sequence[Sequence[Round]]) -> list[Round]:
    """Merge the rounds of all ranks: a phase lasts as long as its slowest rank."""
    rounds = []
    for parts in zip(*by_rank, strict=True):
        phases = dict.fromkeys(name for part in parts for name in part)
        rounds.append({name: max(part[name] for part in parts if name in part) for name in phases})
    return rounds
