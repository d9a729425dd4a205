"""The schema of every message between the UI, its ranks and other machines' leaders. Trees are
bytes made by ``wire.tree``.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from ..patches import Part
from .channel import Carried
from .segment import TensorRef


class Meeting(msgspec.Struct, frozen=True, array_like=True):
    """The meeting place of the ranks of a pool over several machines: torchrun's store, and a name
    of the pool's own in it.
    """

    address: str
    port: int
    name: str


class Start(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Sets a rank up: its first message. Carries the descriptors of the arena and of the rendezvous
    store, in this order.

    ``device`` is a GPU by the starting process's numbering; every rank there sees the same GPUs.
    ``cores`` are the cores of a CPU rank; empty for a rank on a GPU. ``machines`` has a number for
    each rank's machine, 0 for ComfyUI's own; it is empty if there is only one machine. With several
    machines ``meeting`` takes the place of the store. ``sharers`` counts the ranks of its stage on
    its device. ``speeds`` has the speed of each rank's device in percent of the fastest; empty if
    all are alike. With ``times_itself`` the rank reports how fast its device is, with
    ``times_links`` how fast it exchanges with other ranks.
    """

    rank: int
    degrees: dict[str, int]
    device: str
    backend: Literal["gloo", "nccl"]
    threads: int
    cores: tuple[int, ...]
    timeout_s: float
    comfyui: str
    comfy_args: bytes
    arena_bytes: int
    log_level: int
    machines: tuple[int, ...] = ()
    sharers: int = 1
    meeting: Meeting | None = None
    speeds: tuple[int, ...] = ()
    times_itself: bool = False
    times_links: bool = False


class Load(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Build a model. ``source`` is a tree: a factory to call, or a configuration and a state dict.

    Its tensors lie in the segment carried. ``stages``: how many blocks each stage of a pipeline
    has; empty: as many each. ``weights``: whether a rank holds all of its blocks, its part of each
    block, or as much as ``budget`` bytes, the rest in the machine's memory. ``by_layer``: of parts,
    that each layer is gathered by itself. ``title``: the name by which users know the model.
    ``checks``: only say whether the model's file is here.
    """

    request: int
    model: str
    source: bytes
    title: str = ""
    stages: tuple[int, ...] = ()
    weights: Literal["whole", "sharded", "offloaded"] = "whole"
    budget: int = 0
    by_layer: bool = False
    checks: bool = False


class ReadWeights(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Read this rank's part of a model's weights, and gather the rest from the other ranks that
    hold the same weights. Every rank has built the model before. ``title`` names the model to
    users, as in ``Load``.
    """

    request: int
    model: str
    title: str = ""


class SetWeightPatches(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Weight patches and object patches of a model, replacing earlier ones.

    ``payload`` is the tree ``{"patches", "objects"}``; carries the segment of its tensors. Without
    "patches" a rank takes the set that it has kept under this name, or answers that it ``lacks``
    it; without "objects" those that it has stay. ``comes_back``: sets take turns, so ranks keep
    this one and the one in place if they can.
    """

    request: int
    model: str
    patches_id: str
    payload: bytes
    comes_back: bool = False


class DropSets(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Free the sets of patched weights that ranks keep beside the sets in place, and recorded CUDA
    graphs, for all models. If memory ``is_short``, these models record no more.
    """

    request: int
    is_short: bool = False


class Release(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Free a model."""

    request: int
    model: str


class EndRun(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Free all that is kept for the run of a model, which is over. ``cleared``: ranks that must
    call ``torch.cuda.empty_cache()``, because another process needs memory on their GPU.
    ``arena_bytes``: what lies behind is let go of, because ComfyUI's process gives it back; 0 for
    nothing.
    """

    request: int
    model: str
    cleared: tuple[int, ...] = ()
    arena_bytes: int = 0


class Forward(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Compute one evaluation, or a ``part`` of it if the ranks are a pipeline. The rank that has
    the output writes it into ``out`` if it fits, else into memory of its own. ``width`` is how many
    neighbouring groups compute this evaluation as one longer sequence; with ``layout.ALONE`` a
    single rank computes it. With ``in_fp32`` it is computed in fp32, even if the weights are in
    bf16. With ``record`` ranks may record CUDA graphs of such evaluations.
    """

    request: int
    model: str
    patches_id: str
    arguments: bytes
    out: TensorRef
    part: Part
    width: int = 1
    in_fp32: bool = False
    record: bool = False


Request = Load | ReadWeights | SetWeightPatches | DropSets | Release | EndRun | Forward


class Close(msgspec.Struct, frozen=True, tag=True):
    """End the process, or the lending of a machine."""


class Memory(msgspec.Struct, frozen=True, array_like=True):
    """Bytes of a rank's device. ``model`` counts the weights of its resident models,
    ``conditioning`` the run's conditioning that it keeps, ``kept`` the buffers of messages and the
    tensors that its methods keep between evaluations. ``sets`` counts sets of patched weights that
    may come back, on the device; ``sets_in_main`` counts the same in main memory. ``graphs`` counts
    the part of ``kept`` that recorded CUDA graphs have.
    """

    free: int
    total: int
    model: int
    conditioning: int = 0
    kept: int = 0
    sets: int = 0
    sets_in_main: int = 0
    graphs: int = 0


class Ready(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Answers Start: the rank has met the others and waits for requests.

    ``kernel``: that a ring's attention runs on, as a rule; empty without a ring.
    ``refused_kernels``: a sentence for each that was found wrong. If it was asked for,
    ``flops_per_s`` of its device, else 0; and ``links``: numbers of neighbours that exchange all
    with all, the bytes that the rank sends in a second, and the seconds of a short message.
    """

    device_name: str
    memory: Memory
    kernel: str = ""
    refused_kernels: tuple[str, ...] = ()
    flops_per_s: float = 0.0
    links: tuple[tuple[int, float, float], ...] = ()


class Recorded(msgspec.Struct, frozen=True, array_like=True):
    """Of the ``evaluations`` of a run on a rank with a GPU, those that were ``replayed`` as CUDA
    graphs, and ``why`` others were not.
    """

    evaluations: int = 0
    replayed: int = 0
    why: str = ""


class Done(msgspec.Struct, frozen=True, tag=True, kw_only=True, omit_defaults=True):
    """Answers a request that was carried out. ``output`` is a tree, from the rank that has it;
    ``apart``: the memory in which its tensors lie, if they did not fit into the arena.

    ``block_s``: seconds that a patch took in each block of a pipeline's stage, if they were
    measured. ``compute_s``: since ``began_s`` (of its machine's monotonic clock), ``waited_s`` of
    them for other ranks' messages, by axis. ``unread``: the model is built, and its ``ReadWeights``
    is to follow. ``lacks``: as ``SetWeightPatches`` has it. ``wrote``: where in the arena the
    output's tensors lie, as offset and bytes. ``idle``: the GPU had computed what it was given
    before it was given the rest; None if that was replayed. ``recorded`` answers the end of a run.
    """

    request: int
    memory: Memory
    output: bytes = b""
    wrote: tuple[int, int] = (0, 0)
    apart: Carried | None = None
    cancelled: bool = False
    began_s: float = 0.0
    compute_s: float = 0.0
    waited_s: dict[str, float] = {}
    sent_bytes: int = 0
    block_s: dict[int, float] = {}
    unread: bool = False
    lacks: bool = False
    idle: bool | None = None
    recorded: Recorded | None = None

    @property
    def exchange_s(self) -> float:
        return sum(self.waited_s.values())


# room: so much is not free, and nothing was begun. skipped: for an earlier failure of this rank
FailureKind = Literal["memory", "room", "refused", "error", "skipped"]


class Failed(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Answers a request that failed on this rank. ``at``: how far it came in the evaluation's
    messages, as ``Traffic`` has it; None also if the device is dead. ``complete``: it left no
    message that other ranks wait for, as all were over, or it went through those that were left.
    """

    request: int
    kind: FailureKind
    phase: str
    text: str
    trace: str = ""
    memory: Memory = Memory(0, 0, 0)
    at: tuple[int, int] | None = None
    complete: bool = False


FromRank = Ready | Done | Failed


class Open(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Start a pool's ranks on ``machine``: the first message to its leader. ``devices`` of all
    ranks, by name; ``speeds`` as ``Start`` has them.
    """

    machine: str
    degrees: dict[str, int]
    devices: tuple[str, ...]
    backend: Literal["gloo", "nccl"]
    meeting: str
    comfy_args: bytes
    arena_bytes: int
    speeds: tuple[int, ...] = ()


class ForRanks(msgspec.Struct, frozen=True, tag=True):
    """Pass a request on to some of the ranks on that machine. Carries the request's descriptors;
    behind them, for the same places there, what ComfyUI's arena has in ``pieces`` (offset, bytes).
    ``arena_bytes``: how large that arena is, for an evaluation; else 0.
    """

    ranks: tuple[int, ...]
    request: Request
    pieces: tuple[tuple[int, int], ...] = ()
    arena_bytes: int = 0


class Cancel(msgspec.Struct, frozen=True, tag=True):
    """Calls the ranks on that machine back from ``request``, and from all before it."""

    request: int


class Said(msgspec.Struct, frozen=True, tag=True):
    """Passes back the answer of a rank on that machine. Carries what it wrote of an output."""

    rank: int
    message: FromRank


class Beat(msgspec.Struct, frozen=True, tag=True):
    """Tells the board's lines of the ranks on that machine, while they owe an answer."""

    lines: dict[int, tuple[int, int, int, int]]


class Ended(msgspec.Struct, frozen=True, tag=True):
    """Tells that a rank's process is gone. ``status`` is negative for a signal, None where it only
    closed its connection. ``tail``: the last lines of its log.
    """

    rank: int
    status: int | None
    tail: tuple[str, ...]


class Denied(msgspec.Struct, frozen=True, tag=True):
    """Tells why the leader cannot start these ranks."""

    text: str


class CountLike(msgspec.Struct, frozen=True, tag=True):
    """Sets up the process that counts, or that tries a host: its first message. The arguments are
    of a ComfyUI on the CPU.
    """

    comfyui: str
    comfy_args: bytes


class Count(msgspec.Struct, frozen=True, tag=True):
    """Asks for the count of one evaluation of a model that ``planner.meta_model`` describes."""

    described: bytes


class Counted(msgspec.Struct, frozen=True, tag=True):
    """Answers with a ``planner.whole.Whole``, as bytes."""

    whole: bytes


class Uncounted(msgspec.Struct, frozen=True, tag=True):
    """Tells why an evaluation cannot be counted."""

    why: str


class Try(msgspec.Struct, frozen=True, tag=True):
    """Asks whether ranks compute the same as stock with a class, ``module:Class``."""

    kind: str


class TrialStep(msgspec.Struct, frozen=True, tag=True):
    """Tells which sample is compared next; ``done`` of ``total`` samples have been compared."""

    text: str
    done: int
    total: int


class Tried(msgspec.Struct, frozen=True, tag=True):
    """Answers with the verdict, and the comparison that it rests on, in words."""

    is_same: bool
    says: str


ToRank = Start | Request | Close
ToMachine = Open | ForRanks | Cancel | Close
FromMachine = Said | Beat | Ended | Denied
ToCounter = CountLike | Count
FromCounter = Counted | Uncounted
ToTrial = CountLike | Try
FromTrial = TrialStep | Tried
PHASE = {
    Load: "loading",
    ReadWeights: "loading",
    SetWeightPatches: "patching",
    DropSets: "releasing",
    Release: "releasing",
    EndRun: "releasing",
    Forward: "computing",
}
