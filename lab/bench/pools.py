"""Make the benches' pools: the product's own, on the CPU."""

from __future__ import annotations

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
