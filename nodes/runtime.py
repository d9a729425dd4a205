"""The pools of this ComfyUI and the clients that talk to them: made once per server, handed to every node."""

from __future__ import annotations

import os
from pathlib import Path
from statistics import median
from typing import Any

import comfy
import comfy.cli_args
import comfy.model_management
from comfy.model_patcher import ModelPatcher

from ..launcher.devices import Placement, place, visible_gpus
from ..launcher.hosts import between_hosts, check_rendezvous
from ..launcher.pool import HostSetup, PoolKeeper
from ..parallel_runtime.client.remote_model import Client, RunFigures
from ..parallel_runtime.client.remote_patcher import RemotePatcher, parallelize
from ..parallel_runtime.errors import LayoutError
from ..parallel_runtime.layout import Layout
from ..parallel_runtime.wire.tree import is_plain

DEFAULT_STALL_S = 300.0


def plain_args(args: dict[str, Any]) -> dict[str, Any]:
    """The parsed arguments of this ComfyUI that a rank takes over; ``fast`` is a set of enum members and goes by value."""
    plain = {name: value for name, value in args.items() if is_plain(value)}
    return {**plain, "fast": [feature.value for feature in args.get("fast") or ()]}


def host_setup() -> HostSetup:
    return HostSetup(
        comfyui=str(Path(comfy.__path__[0]).parent),
        comfy_args=plain_args(vars(comfy.cli_args.args)),
        stall_s=float(os.environ.get("PIPEMESH_STALL_S", DEFAULT_STALL_S)),
        **between_hosts(os.environ),
    )


class Runtime:
    def __init__(self, setup: HostSetup):
        self._setup = setup
        self._keeper = PoolKeeper(setup)
        self._clients: dict[Placement, Client] = {}

    def place(self, devices: str, ulysses: int, ring: int, backend: str) -> Placement:
        """Raises LayoutError with the equation that fails."""
        placement = place(Layout(ulysses=ulysses, ring=ring), devices, backend, visible_gpus(comfy.cli_args.args.cpu))
        if placement.other_hosts:
            check_rendezvous(self._setup, placement.other_hosts[0])
        return placement

    def default_placement(self) -> Placement:
        """All GPUs, or two ranks on the CPU."""
        gpus = visible_gpus(comfy.cli_args.args.cpu)
        return place(Layout(ulysses=len(gpus) or 2), "auto", "auto", gpus)

    def parallelize(self, model: ModelPatcher, placement: Placement | None) -> RemotePatcher:
        if placement is None and isinstance(model, RemotePatcher):
            return model
        placement = placement or self.default_placement()
        if placement not in self._clients:
            shares = not placement.devices[0].is_gpu and not placement.other_hosts
            self._clients[placement] = Client(self._keeper.handle(placement), shares_weights=shares)
        ui_device = str(comfy.model_management.get_torch_device())
        return parallelize(model, self._clients[placement], holds_ui_device=placement.devices[0].name == ui_device)

    def check(self, devices: str, ulysses: int, ring: int, backend: str) -> bool | str:
        """For a node's validation: True, or the sentence to show."""
        try:
            self.place(devices, ulysses, ring, backend)
        except LayoutError as error:
            return str(error)
        return True

    def report(self, only: Placement | None = None) -> dict[str, Any]:
        """Plain data about every pool, or about ``only`` one: state, ranks, resident models, the last run's figures."""
        clients = list(self._clients.items())  # asked for by the server's thread while another runs a graph
        return {"pools": [self._report(placement, client) for placement, client in clients if only in (None, placement)]}

    def _report(self, placement: Placement, client: Client) -> dict[str, Any]:
        handle = self._keeper.handle(placement)
        pool, memory = handle.live(), client.memory
        ranks = [{"rank": rank, "device": device.name, **_rank(pool, rank)} for rank, device in enumerate(placement.devices)]
        report = {
            "state": handle.state,
            "layout": placement.layout.equation(),
            "grid": placement.layout.grid([device.name for device in placement.devices]),
            "backend": placement.backend,
            "ranks": ranks,
            "models": list(memory.patches) if memory else [],
            "loads": memory.loads if memory else 0,
            "patches": memory.patchings if memory else 0,
            "conditioning_uploads": memory.conditioning.uploads if memory else 0,
        }
        return {**report, "last_run": _last_run(memory.figures, placement.backend) if memory else None}


def _last_run(figures: RunFigures, backend: str) -> dict[str, Any] | None:
    """Times are medians. NCCL's messages run beside the clock that ranks look at, so what they take is not known: None."""
    evaluations = list(figures.evaluations)
    if not evaluations:
        return None
    timed = backend != "nccl"
    step_s, exchange_s = sum(one.seconds for one in evaluations), sum(one.exchange_s for one in evaluations)
    return {
        "began": figures.began_s,
        "evaluations": len(evaluations),
        "step_ms_p50": 1e3 * median(one.seconds for one in evaluations),
        "hop_ms_p50": 1e3 * median(one.hop_s for one in evaluations),
        "exchange_ms_p50": 1e3 * median(one.exchange_s for one in evaluations) if timed else None,
        "exchange_share": exchange_s / step_s if timed else None,
        "bytes_per_evaluation": max(one.sent_bytes for one in evaluations),
    }


def _rank(pool: Any, rank: int) -> dict[str, Any]:
    if pool is None or rank >= len(pool.memory):
        return {"pid": None, "phase": "closed", "memory": None}
    memory = pool.memory[rank]
    held = {"free": memory.free, "total": memory.total, "model": memory.model}
    return {"pid": pool.pids[rank] or None, "phase": pool.arena.board.phase(rank), "memory": held}
