"""Make the benches' pools: the product's own, on the CPU, with ranks that may lack memory."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from ...parallel_runtime.layout import Layout
from ...pool.devices import place
from ...pool.handle import PoolHandle
from ...pool.rank_setup import RankSetup
from .figures import Where


def cpu_pool(where: Where, layout: Layout, devices: str = "cpu", **known: Any) -> PoolHandle:
    """Return a pool that is not started yet. ``known``: more of its setup."""
    return PoolHandle(place(layout, devices, "gloo", ()), cpu_setup(where, **known))


def cpu_setup(where: Where, **known: Any) -> RankSetup:
    """Return the setup of ranks on the CPU, which are started as users' are unless ``where`` says
    otherwise.
    """
    forked = {} if where.server is None else {"start": where.server.fork}
    return RankSetup(comfyui=where.comfyui, comfy_args={"cpu": True}, **{**forked, **known})


@contextmanager
def confined(pids: Sequence[int], room: int) -> Iterator[None]:
    """Inside, the kernel gives these processes ``room`` bytes of address space more, and no more
    than that.
    """
    before = {pid: resource.prlimit(pid, resource.RLIMIT_AS) for pid in pids}
    for pid, (_, hard) in before.items():
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[0])
        resource.prlimit(pid, resource.RLIMIT_AS, (pages * os.sysconf("SC_PAGE_SIZE") + room, hard))
    try:
        yield
    finally:
        for pid, limit in before.items():
            with suppress(ProcessLookupError):  # it has ended since
                resource.prlimit(pid, resource.RLIMIT_AS, limit)
