"""The pools of this ComfyUI and the clients that talk to them: made once per server, handed to
every node.
"""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import comfy
import comfy.cli_args
import comfy.model_management
from comfy.model_patcher import ModelPatcher
from PIL.Image import Image

from ..launcher.pool.devices import Placement, place, visible_gpus
from ..launcher.pool.pool import PoolKeeper, RankSetup
from ..launcher.pool.remote_machine import between_hosts, check_rendezvous
from ..parallel_runtime.client.remote_model import Client
from ..parallel_runtime.client.remote_patcher import Patching, RemotePatcher, parallelize
from ..parallel_runtime.client.run_figures import Evaluation, RunFigures
from ..parallel_runtime.errors import LayoutError
from ..parallel_runtime.layout import Layout
from ..parallel_runtime.occupancy import busy_shares
from ..parallel_runtime.wire.tree import is_plain
from .report.picture import timeline

DEFAULT_STALL_S = 300.0
log = logging.getLogger("pipemesh")


@dataclass(frozen=True)
class Choice:
    """What PipeMesh Pool hands out. The placement alone says which pool: another ``patching`` needs
    no other ranks.
    """

    placement: Placement
    patching: Patching | None = None


def plain_args(args: dict[str, Any]) -> dict[str, Any]:
    """The parsed arguments of this ComfyUI that a rank takes over; ``fast`` is a set of enum
    members and goes by value.
    """
    plain = {name: value for name, value in args.items() if is_plain(value)}
    return {**plain, "fast": [feature.value for feature in args.get("fast") or ()]}


def rank_setup() -> RankSetup:
    return RankSetup(
        comfyui=str(Path(comfy.__path__[0]).parent),
        comfy_args=plain_args(vars(comfy.cli_args.args)),
        stall_s=float(os.environ.get("PIPEMESH_STALL_S", DEFAULT_STALL_S)),
        **between_hosts(os.environ),
    )


def choose_patching(layout: Layout, patches: int, warm_up: int, blocks: str) -> Patching | None:
    """``patches`` 0: one more than stages, so that every stage has one while another is in the UI.
    None where there are no stages.

    Raises LayoutError.
    """
    stages, sizes = layout.pipefusion, blocks_of_stages(blocks)
    if stages == 1:
        return None
    if sizes and len(sizes) != stages:
        raise LayoutError(f"stages {blocks} are {len(sizes)}, pipefusion {stages}: write one number of blocks for each stage, or nothing.")
    if patches and patches < stages:
        raise LayoutError(
            f"patches {patches}, pipefusion {stages}: some stages would always wait, choose at least as many patches as stages."
        )
    return Patching(patches or stages + 1, warm_up, sizes)


def blocks_of_stages(text: str) -> tuple[int, ...]:
    """Raises LayoutError."""
    numbers = [number.strip() for number in text.split(",")] if text.strip() else []
    if not all(number.isdecimal() and int(number) for number in numbers):
        raise LayoutError(f"stages {text!r} is no list of block counts: write how many blocks each stage gets, as in 20,37, or nothing.")
    return tuple(map(int, numbers))


def held_on(choice: Choice, device: str) -> float:
    """The part of a model's weights that ``device`` holds: an estimate for stages, whose blocks
    differ in size.
    """
    layout, stages = choice.placement.layout, choice.patching.stages if choice.patching else ()
    sizes = stages or (1,) * layout.pipefusion
    here = {layout.coordinates(rank)["pipefusion"] for rank, one in enumerate(choice.placement.devices) if one.name == device}
    return sum(sizes[stage] for stage in here) / sum(sizes)


def computed_on(choice: Choice, device: str) -> float:
    """The part of an evaluation's activations that ``device`` holds; each stage computes whole
    ones, the first.
    """
    layout = choice.placement.layout
    return sum(one.name == device for one in choice.placement.devices) / (layout.ulysses * layout.ring)


class Runtime:
    """``show`` is given what the node that samples is to say of itself."""

    def __init__(self, setup: RankSetup, show: Callable[[str], None] = lambda text: None):
        self._setup = setup
        self._show = show
        self._keeper = PoolKeeper(setup)
        self._clients: dict[Placement, Client] = {}

    def choose(
        self,
        devices: str,
        ulysses: int,
        backend: str,
        ring: int = 1,
        pipefusion: int = 1,
        patches: int = 0,
        warm_up: int = 1,
        stages: str = "",
    ) -> Choice:
        """Raises LayoutError with the equation that fails."""
        layout = Layout(ulysses=ulysses, ring=ring, pipefusion=pipefusion)
        placement = place(layout, devices, backend, visible_gpus(comfy.cli_args.args.cpu))
        if placement.other_hosts:
            check_rendezvous(self._setup, placement.other_hosts[0])
        return Choice(placement, choose_patching(layout, patches, warm_up, stages))

    def default_choice(self) -> Choice:
        """All GPUs, or two ranks on the CPU."""
        gpus = visible_gpus(comfy.cli_args.args.cpu)
        return Choice(place(Layout(ulysses=len(gpus) or 2), "auto", "auto", gpus))

    def parallelize(self, model: ModelPatcher, choice: Choice | None) -> RemotePatcher:
        if choice is None and isinstance(model, RemotePatcher):
            return model
        choice = choice or self.default_choice()
        placement = choice.placement
        if placement not in self._clients:
            whole = placement.layout.pipefusion == 1
            shares = whole and not placement.devices[0].is_gpu and not placement.other_hosts
            self._clients[placement] = Client(self._keeper.handle(placement), shares_weights=shares)
        client = self._clients[placement]
        device = str(comfy.model_management.get_torch_device())
        held, computed = held_on(choice, device), computed_on(choice, device)
        return parallelize(model, client, held, choice.patching, partial(self._sampled, client), computed)

    def _sampled(self, client: Client, mode: str) -> None:
        """A run in patches begins."""
        text = f"PipeMesh samples in patches, {mode}."
        log.info("[PipeMesh] %s", text)
        client.note_mode(mode)
        self._show(text)

    def check(self, **chosen: Any) -> bool | str:
        """For a node's validation: True, or the sentence to show."""
        try:
            self.choose(**chosen)
        except LayoutError as error:
            return str(error)
        return True

    def report(self, only: Choice | None = None) -> dict[str, Any]:
        """Plain data about every pool, or about ``only`` one: state, ranks, resident models, the
        last run's figures.
        """
        return {"pools": [self._report(placement, client) for placement, client in self._clients_of(only)]}

    def timeline(self, only: Choice | None = None) -> Image | None:
        """A picture of the last run, of all pools or of ``only`` one's. None unless it was one in
        patches, over gloo: NCCL works beside the clock that ranks look at.
        """
        clients = self._clients_of(only)
        ran = [(client.memory.figures, placement) for placement, client in clients if client.memory and client.memory.figures.evaluations]
        if not ran:
            return None
        figures, placement = max(ran, key=lambda run: run[0].began_s)
        if placement.backend == "nccl":
            return None
        names = [f"{rank} {device.name}" for rank, device in enumerate(placement.devices)]
        return timeline(names, list(figures.evaluations))

    def _clients_of(self, only: Choice | None) -> list[tuple[Placement, Client]]:
        clients = list(self._clients.items())  # asked for by the server's thread while another runs a graph
        return [(placement, client) for placement, client in clients if only is None or only.placement == placement]

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
    """Times are medians. NCCL's messages run beside the clock that ranks look at, so what they take
    is not known: None.
    """
    evaluations = list(figures.evaluations)
    if not evaluations:
        return None
    timed = backend != "nccl"
    if evaluations[0].part is not None:
        return _last_run_in_patches(figures.began_s, figures.mode, evaluations, timed)
    step_s, exchange_s = sum(one.seconds for one in evaluations), sum(one.exchange_s for one in evaluations)
    return {
        "began": figures.began_s,
        "in_patches": None,
        "busy": [],
        "evaluations": len(evaluations),
        "step_ms_mean": 1e3 * step_s / len(evaluations),
        "step_ms_p50": 1e3 * median(one.seconds for one in evaluations),
        "hop_ms_p50": 1e3 * median(one.hop_s for one in evaluations),
        "exchange_ms_p50": 1e3 * median(one.exchange_s for one in evaluations) if timed else None,
        "exchange_share": exchange_s / step_s if timed else None,
        "bytes_per_evaluation": max(one.sent_bytes for one in evaluations),
    }


def _last_run_in_patches(began_s: float, mode: str, submitted: list[Evaluation], timed: bool) -> dict[str, Any]:
    """Of what was submitted: patches, which overlap, and whole evaluations. So the time of an
    evaluation is a mean over the run, and how much of it was exchange or the hop is not known:
    None.
    """
    patches = [one.part for one in submitted if one.part.patch is not None]
    whole = len(submitted) - len(patches)
    evaluations = whole + sum(part.patch[0] == 0 for part in patches)
    by_branch = Counter(branch for branch, _patch in {(part.branch, part.patch) for part in patches})
    run_s = max(one.began + one.seconds for one in submitted) - min(one.began for one in submitted)
    return {
        "began": began_s,
        "in_patches": {"mode": mode, "patches": max(by_branch.values(), default=0), "whole": whole},
        "busy": busy_shares([one.spans for one in submitted if one.part.patch is not None]) if timed else [],
        "evaluations": evaluations,
        "step_ms_mean": 1e3 * run_s / evaluations,
        "step_ms_p50": None,
        "hop_ms_p50": None,
        "exchange_ms_p50": None,
        "exchange_share": None,
        "bytes_per_evaluation": round(sum(one.sent_bytes for one in submitted) / evaluations),
    }


def _rank(pool: Any, rank: int) -> dict[str, Any]:
    if pool is None or rank >= len(pool.memory):
        return {"pid": None, "phase": "closed", "memory": None}
    memory = pool.memory[rank]
    held = {"free": memory.free, "total": memory.total, "model": memory.model}
    return {"pid": pool.pids[rank] or None, "phase": pool.arena.board.phase(rank), "memory": held}
