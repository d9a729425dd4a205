"""Give each CPU rank cores of its own, and its message threads a low priority there; keep a GPU's
rank on the cores near the GPU.

gloo moves messages on a thread of its own. Left to the scheduler, an exchange between two computing
ranks lasts 2 to 10 ms instead of 0.3: the thread waits behind the other rank's computation until
the next tick (4 ms at 250 Hz), or interrupts its own rank in the middle of a send.
lab/docs/BENCHMARKS.md has what each half of the remedy brings.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

# About a tenth of a computing thread's weight: enough to move messages beside it, too little to be
# put in its place
GIVE_WAY = 10


def share_of_cores(cores: Sequence[int], rank: int, ranks: int) -> tuple[int, ...]:
    """Return the rank's equal run of ``cores``. If there are more ranks than cores, each gets one
    in turn: of cores 0 and 1, rank 2 gets core 0.
    """
    each = len(cores) // ranks
    return tuple(cores[rank * each : (rank + 1) * each]) if each else (cores[rank % len(cores)],)


def bus_of(gpu: Any) -> str:
    """Return the address at which the system lists a GPU, such as ``0000:17:00.0``, from torch's
    properties of it; empty if torch does not tell.
    """
    parts = [getattr(gpu, f"pci_{part}_id", None) for part in ("domain", "bus", "device")]
    return "" if None in parts else "{:04x}:{:02x}:{:02x}.0".format(*parts)


def cores_near(bus: str, system: Path = Path("/sys")) -> tuple[int, ...]:
    """Return the cores of the NUMA node of the device at ``bus``; () if the system does not tell,
    or if this process may not use all cores, because somebody has chosen them.
    """
    place = system / "bus/pci/devices" / bus
    try:
        node, listed = (place / "numa_node").read_text(), (place / "local_cpulist").read_text()
        every = (system / "devices/system/cpu/online").read_text()
        if not bus or int(node) < 0 or os.sched_getaffinity(0) != set(cores_in(every)):
            return ()
        return tuple(cores_in(listed))
    except (OSError, ValueError, AttributeError):
        return ()


def cores_in(listed: str) -> list[int]:
    """Read a list as the kernel writes it: ``0-3,8``."""
    ends = [part.split("-") for part in listed.strip().split(",")]
    return [core for first, *rest in ends for core in range(int(first), int((rest or [first])[-1]) + 1)]


def keep_to(cores: Sequence[int]) -> None:
    """Keep all present and future threads of this process on ``cores``; () changes nothing."""
    for thread in threads() if cores else ():
        # It has ended, or this process may not use those cores any more: slower, not wrong
        with suppress(OSError):
            os.sched_setaffinity(thread, cores)


@contextmanager
def giving_way() -> Iterator[None]:
    """Lower the priority of the threads that are started inside: they mostly run while the other
    threads of this process wait.
    """
    before = threads()
    yield
    for thread in threads() - before:
        with suppress(OSError):  # it has ended, or ComfyUI runs under a policy that may not be left
            os.setpriority(os.PRIO_PROCESS, thread, max(GIVE_WAY, os.getpriority(os.PRIO_PROCESS, thread)))
            os.sched_setscheduler(thread, os.SCHED_BATCH, os.sched_param(0))


def threads() -> set[int]:
    return set(map(int, os.listdir("/proc/self/task"))) if os.path.isdir("/proc/self/task") else set()
