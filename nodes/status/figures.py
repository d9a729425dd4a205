"""What GET /pipemesh/status answers with: every name of the JSON is a field here."""

from __future__ import annotations

from dataclasses import dataclass

from ..notices import Notice
from ..report.causes import Cause
from ..report.figures import LastRun, PlanFigures, RankFigures
from ..report.shares import Share
from ..timing import Speed


@dataclass(frozen=True)
class AutoStatus:
    """``unavailable``: why the setting has no effect on auto mode, ``why`` in a word; empty where
    it has.
    """

    on: bool
    unavailable: str
    why: str = ""


@dataclass(frozen=True)
class DeviceStatus:
    """Bytes. ``free`` is None where neither ComfyUI nor a live rank computes on the device: asking
    it would take memory there.
    """

    name: str
    title: str
    total: int
    free: int | None


@dataclass(frozen=True)
class ModelStatus:
    """``model``: its id in the pool; ``title``: its file. ``state``: loading, patching or ready."""

    model: str
    title: str
    state: str


@dataclass(frozen=True, kw_only=True)
class PoolStatus:
    """``id`` is the same for as long as ComfyUI runs. ``models``: least recently used first.
    ``why`` this layout; ``shares``: what slower devices take; ``fault``: why it takes no requests,
    with the last log lines of the worker that died.
    """

    id: str
    state: str
    layout: str
    grid: str
    backend: str
    ranks: tuple[RankFigures, ...]
    models: tuple[ModelStatus, ...]
    why: tuple[Cause, ...] = ()
    shares: tuple[Share, ...] = ()
    fault: str = ""


@dataclass(frozen=True)
class StepStatus:
    """How far a run is, or came, in steps of its sampler; 0 of 0 before the first. ``left_s``:
    seconds until its end, None before the second step and of a run that has ended. ``fault``: why
    the pool could not go on.
    """

    done: int = 0
    total: int = 0
    left_s: float | None = None
    fault: str = ""


@dataclass(frozen=True)
class RunStatus:
    """``began`` and ``ended``: seconds since 1970; ``ended`` is None while it goes on. ``figures``
    are None before its first evaluation, ``speed`` before its second step. ``slowed``: what kept
    it from being faster. ``plan``: why its layout was chosen; None while it goes on, and where the
    layout was chosen by hand.
    """

    pool: str
    model: str
    title: str
    began: float
    ended: float | None
    figures: LastRun | None
    speed: Speed | None = None
    slowed: tuple[Cause, ...] = ()
    plan: PlanFigures | None = None
    steps: StepStatus = StepStatus()


@dataclass(frozen=True, kw_only=True)
class Status:
    """``last_runs`` and ``notices``: the newest first. ``busy``: no pool can be acted on now.
    ``pools``: those that are up or have failed, and that of each run that is told of.
    """

    busy: bool
    auto: AutoStatus
    devices: tuple[DeviceStatus, ...]
    pools: tuple[PoolStatus, ...]
    current_run: RunStatus | None
    last_runs: tuple[RunStatus, ...]
    notices: tuple[Notice, ...]
