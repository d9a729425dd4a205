"""The answer of GET /pipemesh/status: every name of the JSON is a field here. The text of PipeMesh
Report is made of the same figures.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ...parallel_runtime.client.queue_lookahead import Images
from ...parallel_runtime.texts import Text
from ..notices import Notice
from ..prompt_times import PromptFigures
from ..timing import Speed


@dataclass(frozen=True)
class AutoStatus:
    """Says whether auto mode is ``on``. ``unavailable`` says why the setting has no effect on auto
    mode; None if it has. ``queue_unavailable`` says the same of the setting for queued prompts.
    """

    on: bool
    unavailable: Text | None
    queue_unavailable: Text | None


@dataclass(frozen=True)
class HostStatus:
    """Names this ComfyUI's ``version`` and the versions that PipeMesh was ``tested`` with. The
    other fields list model classes that were asked for and that no tested ComfyUI has: classes that
    were ``verified`` here on the CPU, that were ``refused``, and that are ``pending``.
    """

    version: str
    tested: tuple[str, ...]
    verified: tuple[str, ...] = ()
    refused: tuple[str, ...] = ()
    pending: tuple[str, ...] = ()


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
class MemoryFigures:
    """Bytes on a rank's device; ``model``: held by the rank's models, ``conditioning`` of a run,
    ``kept`` of evaluations before: keys and values, the memory of messages, and what CUDA graphs
    have, ``graphs`` of it. ``sets``: of sets of patched weights that may come back, with those in
    main memory.
    """

    free: int
    total: int
    model: int
    conditioning: int = 0
    kept: int = 0
    sets: int = 0
    graphs: int = 0


@dataclass(frozen=True)
class SharedFigures:
    """Bytes that ComfyUI's process holds for a pool. ``arena``: of the memory that it shares with
    workers, of which ``registered`` are pinned for GPUs, and ``conditioning`` is prompts;
    ``copies`` of these on its own GPU.
    """

    arena: int = 0
    registered: int = 0
    conditioning: int = 0
    copies: int = 0


@dataclass(frozen=True)
class RankFigures:
    rank: int
    device: str
    pid: int | None = None
    phase: str = "closed"
    memory: MemoryFigures | None = None


@dataclass(frozen=True)
class ModelStatus:
    """``model``: its id in the pool; ``title``: its file. ``state``: loading, patching or ready.
    ``kept``: how ranks keep its weights, ``whole``, ``sharded`` or ``offloaded``, and ``why``.
    ``graphs``: how much of its last run GPUs replayed as CUDA graphs, and why not all.
    """

    model: str
    title: str
    state: str
    kept: str
    why: str
    graphs: tuple[Text, ...] = ()


@dataclass(frozen=True)
class RingKernels:
    """The kernel of every rank that a ring's attention runs on, as a rule; ``refused``: a sentence
    for each that was found wrong.
    """

    names: tuple[str, ...] = ()
    refused: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class PoolStatus:
    """``id`` is the same for as long as ComfyUI runs. ``models``: least recently used first.
    ``loads``, ``patchings`` (of sets of weight patches) and ``conditioning_uploads`` are counted
    since the pool started; ``shared``: what it takes of main memory. ``kernels`` where it has a
    ring. ``why`` this layout; ``shares``: what slower devices take; ``fault``: why it takes no
    requests, with the last log lines of the worker that died.
    """

    id: str
    state: str
    layout: str
    grid: str
    backend: str
    ranks: tuple[RankFigures, ...]
    models: tuple[ModelStatus, ...]
    loads: int = 0
    patchings: int = 0
    conditioning_uploads: int = 0
    shared: SharedFigures = SharedFigures()
    kernels: RingKernels = RingKernels()
    why: tuple[Text, ...] = ()
    shares: tuple[Text, ...] = ()
    fault: str = ""


@dataclass(frozen=True)
class InPatches:
    """Figures of a run that was sampled in patches. ``patches`` is 0 where it was all warm-up."""

    mode: str
    patches: int
    whole: int


@dataclass(frozen=True, kw_only=True)
class RunFigures:
    """Figures of one run. None means not known: NCCL's messages run beside the clock that ranks
    look at, and the times of patches overlap. ``exchange_by_axis``: the shares of the run in which
    one rank waited for messages, of the rank that did so most; empty where that is not known.
    ``to_compile``: the title of its MODEL where that was to be compiled.
    """

    began: float
    in_patches: InPatches | None = None
    busy: tuple[float, ...] = ()
    evaluations: int
    step_ms_mean: float
    step_ms_p50: float | None = None
    hop_ms_p50: float | None = None
    exchange_ms_p50: float | None = None
    exchange_share: float | None = None
    exchange_by_axis: Mapping[str, float] = field(default_factory=dict)
    bytes_per_evaluation: int
    to_compile: str = ""


@dataclass(frozen=True)
class Loser:
    """A layout that was not chosen, and why. ``predicted_ms`` is None where it has no room."""

    layout: str
    predicted_ms: float | None
    why: Text


@dataclass(frozen=True, kw_only=True)
class PlanFigures:
    """Why a run's layout was chosen. ``why``: by which speeds, or why nothing was predicted;
    ``known`` the same in a word, empty where nothing was, and ``box`` the name of the devices.
    ``predicted_ms`` of an evaluation of all prompts and images, ``achieved_ms`` of it, and
    ``alone_ms`` predicted of it on one device; ``speedup`` predicted over one device. ``losers``:
    other layouts, the best first.
    """

    layout: str
    asked: str
    why: str
    known: str = ""
    box: str = ""
    predicted_ms: float | None = None
    achieved_ms: float | None = None
    alone_ms: float | None = None
    speedup: float | None = None
    losers: tuple[Loser, ...] = ()


@dataclass(frozen=True)
class QueueFigures:
    """Images ``at_once`` of so many ``queued``. ``step_s``: predicted for an evaluation of all
    these; ``first_s`` of the first alone, in the layout that is best for one.
    """

    at_once: int
    queued: int
    step_s: float | None = None
    first_s: float | None = None


@dataclass(frozen=True)
class StepStatus:
    """How far a run is, or came, in steps of its sampler; 0 of 0 before the first. ``left_s``:
    seconds until its end, None before the second step and of a run that has ended. ``fault``: why
    the pool could not go on. ``prompt``: what its prompt waited for; None while the run goes on.
    ``queue``: None where it was sampled alone.
    """

    done: int = 0
    total: int = 0
    left_s: float | None = None
    fault: str = ""
    prompt: PromptFigures | None = None
    queue: QueueFigures | None = None


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
    figures: RunFigures | None
    speed: Speed | None = None
    slowed: tuple[Text, ...] = ()
    plan: PlanFigures | None = None
    steps: StepStatus = StepStatus()


@dataclass(frozen=True, kw_only=True)
class Status:
    """``last_runs`` and ``notices``: the newest first. ``busy``: no pool can be acted on now.
    ``pools``: those that are up or have failed, and that of each run that is told of. ``queue``:
    what was sampled ahead so far.
    """

    busy: bool
    auto: AutoStatus
    host: HostStatus
    devices: tuple[DeviceStatus, ...]
    queue: Images
    pools: tuple[PoolStatus, ...]
    current_run: RunStatus | None
    last_runs: tuple[RunStatus, ...]
    notices: tuple[Notice, ...]
