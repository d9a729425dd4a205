"""Make the benches' pools: the product's own, on the CPU."""

from __future__ import annotations

from typing import Any

from ...launcher.pool.devices import place
from ...launcher.pool.handle import PoolHandle
from ...launcher.pool.rank_setup import RankSetup
from ...parallel_runtime.layout import Layout


def cpu_pool(layout: Layout, comfyui: str, devices: str = "cpu", **known: Any) -> PoolHandle:
    """Return a pool that is not started yet. ``known``: more of its setup."""
    setup = RankSetup(comfyui=comfyui, comfy_args={"cpu": True}, **known)
    return PoolHandle(place(layout, devices, "gloo", ()), setup)
