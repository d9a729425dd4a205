"""Collects the status of this ComfyUI's pools, and for PipeMesh Report the run that began last.
Asked for by threads of the server while another runs a graph: nothing is waited for, and nothing
changes.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace

import comfy.cli_args
import comfy.model_management as mm
import torch

from ...parallel_runtime.client.remote_pool import RemotePool
from ...parallel_runtime.client.run import Run
from ...parallel_runtime.client.session import Session
from ...parallel_runtime.memory import system_memory
from ...pool.devices import Placement, visible_gpus
from ...pool.handle import PoolHandle
from ...pool.pool import refused_kernels
from ...pool.trial.host_trials import HostTrials
from ...pool.trial.known_hosts import known_hosts
from ..auto.mode import Auto
from ..planning import PlannedLayout
from ..runtime import Runtime
from ..timing import Stepped
from .figures import (
    AutoStatus,
    DeviceStatus,
    HostStatus,
    MemoryFigures,
    ModelStatus,
    PoolStatus,
    QueueFigures,
    RankFigures,
    RingKernels,
    RunStatus,
    SharedFigures,
    Status,
    StepStatus,
)
from .reasons import as_graphs, slowed, unlike_shares, why_layout
from .sums import plan_figures, run_figures

MOST = 10  # runs that are told of


def status_of(runtime: Runtime, auto: Auto, busy: bool = False) -> Status:
    known, ahead = runtime.pools(), runtime.planning.ahead
    recent = [
        (run, handle, pool) for handle, pool in known for run in list(pool.runs.recent) if run.queued.at_once
    ]
    newest = sorted(recent, key=lambda one: -one[0].began_s)[:MOST]
    runs = [run_status(runtime, handle, pool, run) for run, handle, pool in newest]
    told = {id(pool) for _, _, pool in newest}
    listed = [(handle, pool) for handle, pool in known if handle.state != "closed" or id(pool) in told]
    pools = tuple(pool_status(handle, pool) for handle, pool in listed)
    return Status(
        busy=busy,
        auto=AutoStatus(auto.is_on(), auto.unavailable, auto.switch.queue_overruled),
        host=host_status(runtime.trials),
        devices=device_statuses([rank for pool in pools for rank in pool.ranks]),
        queue=replace(ahead.images, held=ahead.held_bytes),
        pools=pools,
        current_run=next((run for run in runs if run.ended is None), None),
        last_runs=tuple(run for run in runs if run.ended is not None),
        notices=runtime.notices.latest(),
    )


def host_status(trials: HostTrials) -> HostStatus:
    verdicts = trials.verdicts()
    return HostStatus(
        trials.version,
        tuple(known_hosts().versions),
        tuple(one.name for one in verdicts if one.is_same),
        tuple(one.name for one in verdicts if not one.is_same),
        trials.pending(),
    )


def pool_id(placement: Placement) -> str:
    """Name a pool by its layout and devices, in letters that fit an address."""
    names = [device.name for device in placement.devices]
    return hashlib.blake2b(
        repr((placement.layout, names, placement.backend)).encode(), digest_size=4
    ).hexdigest()


def pool_status(handle: PoolHandle, pool: RemotePool) -> PoolStatus:
    placement, held = handle.placement, pool.sessions.live
    return PoolStatus(
        id=pool_id(placement),
        state=handle.state,
        layout=placement.layout.equation(),
        grid=placement.layout.grid([device.name for device in placement.devices]),
        backend=placement.backend,
        ranks=rank_figures(handle),
        models=model_statuses(pool),
        loads=held.loads if held else 0,
        patchings=held.patchings if held else 0,
        conditioning_uploads=held.conditioning.uploads if held else 0,
        shared=shared_figures(held),
        kernels=ring_kernels(handle),
        why=why_layout(placement.layout),
        shares=unlike_shares(placement),
        fault=handle.fault,
    )


def shared_figures(session: Session | None) -> SharedFigures:
    if session is None:
        return SharedFigures()
    arena, cache = session.pool.arena, session.conditioning
    return SharedFigures(
        arena.nbytes,
        arena.segment.registered_bytes,
        cache.nbytes,
        cache.copied_bytes,
    )


def model_statuses(pool: RemotePool) -> tuple[ModelStatus, ...]:
    session = pool.sessions.live  # once: the pool may end meanwhile
    models = dict(session.models) if session is not None else {}
    return tuple(
        ModelStatus(
            model.name,
            model.title,
            held.state.name.lower(),
            held.weights.kept,
            held.weights.why,
            as_graphs(held.recorded),
        )
        for model, held in models.items()
    )


def rank_figures(handle: PoolHandle) -> tuple[RankFigures, ...]:
    """Describe every rank. A rank whose pool is not live has no process and no memory."""
    names, pool = [device.name for device in handle.placement.devices], handle.live()
    if pool is None or len(pool.memory) < len(names):
        return tuple(RankFigures(rank, name) for rank, name in enumerate(names))
    board, pids = pool.arena.board, pool.ranks.pids or [0] * len(names)  # none has one here
    return tuple(
        RankFigures(
            rank,
            name,
            pids[rank] or None,
            board.phase(rank),
            MemoryFigures(
                one.free,
                one.total,
                one.model,
                one.conditioning,
                one.kept,
                one.sets + one.sets_in_main,
                one.graphs,
            ),
        )
        for rank, (name, one) in enumerate(zip(names, pool.memory, strict=False))
    )


def ring_kernels(handle: PoolHandle) -> RingKernels:
    pool = handle.live()
    if pool is None or not handle.placement.layout.merges_parts:
        return RingKernels()
    return RingKernels(tuple(one.kernel for one in pool.ready), refused_kernels(pool.ready))


def run_status(runtime: Runtime, handle: PoolHandle, pool: RemotePool, run: Run) -> RunStatus:
    placement, planned, title = handle.placement, runtime.planning.of(run), run.model.title
    speed = runtime.planning.times.speed_of(run)
    figures = run.once("figures", lambda: run_figures(run, title, placement.backend))
    devices = [device.name for device in placement.devices]
    return RunStatus(
        pool=pool_id(placement),
        model=run.model.name,
        title=title,
        began=run.began_s,
        ended=run.ended_s or None,
        figures=figures,
        speed=speed,
        slowed=slowed(devices, model_statuses(pool), figures) if figures else (),
        plan=run.once("plan", lambda: plan_figures(planned, run)) if planned else None,
        steps=step_status(runtime, pool, run, speed.ratio if speed is not None else None),
    )


def queue_figures(run: Run, planned: PlannedLayout | None) -> QueueFigures | None:
    at_once = run.queued.at_once
    if at_once < 2:
        return None
    if planned is None or planned.known in ("", "plain") or planned.images != at_once:
        return QueueFigures(*run.queued)
    return QueueFigures(*run.queued, planned.seconds, planned.first_s)


def step_status(runtime: Runtime, pool: RemotePool, run: Run, ratio: float | None) -> StepStatus:
    """``ratio``: how many times as fast as one device the run was."""
    stepped = runtime.planning.times.stepped(run) or Stepped(0, 0)
    return StepStatus(
        stepped.done,
        stepped.total,
        None if run.ended_s else stepped.left_s,
        run.fault,
        runtime.planning.times.prompts.of(run, ratio),
        queue_figures(run, runtime.planning.of(run)),
    )


def device_statuses(ranks: list[RankFigures]) -> tuple[DeviceStatus, ...]:
    """Describe the devices of this machine. If ComfyUI computes on a device that no pool can use,
    describe only that one.
    """
    gpus, own = visible_gpus(comfy.cli_args.args.cpu), mm.get_torch_device()
    if not gpus:
        if own.type == "cpu":
            free, total = system_memory()
            return (DeviceStatus(str(own), "CPU", total, free),)
        title = mm.get_torch_device_name(own)
        return (DeviceStatus(str(own), title, mm.get_total_memory(own), mm.get_free_memory(own)),)
    free = {rank.device: rank.memory.free for rank in ranks if rank.memory is not None}
    free[str(own)] = int(mm.get_free_memory(own))
    properties = {gpu.name: torch.cuda.get_device_properties(index) for index, gpu in enumerate(gpus)}
    return tuple(
        DeviceStatus(name, one.name, one.total_memory, free.get(name)) for name, one in properties.items()
    )
