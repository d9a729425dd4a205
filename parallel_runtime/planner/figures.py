"""The figures of a dry run: of the model on one device, and of one rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import NamedTuple

PACK = Path(__file__).resolve().parent.parent.parent


class Wait(NamedTuple):
    """A call that makes the CPU wait for the device, and where the code has it."""

    call: str
    file: str
    function: str

    @property
    def is_ours(self) -> bool:
        """Whether the call is the pack's own; ComfyUI and its models have others."""
        return Path(self.file).is_relative_to(PACK)

    def __str__(self) -> str:
        return f"{self.call} in {'/'.join(Path(self.file).parts[-2:])}, {self.function}"


class Attended(NamedTuple):
    """One attention of the whole model that ranks share."""

    tokens: int
    heads: int
    head_dim: int


class Shareable(NamedTuple):
    """Bytes of weights that ranks of a sequence can share out: of each of the blocks, of all that
    is around them, and of the ``largest`` layer and the largest ``two``. ``aside``: of those that
    stay in the machine's memory then. ``more_turns``: gathered beyond each layer once, because some
    compute several times; below zero where others never do. ``layers``: the bytes of each, block by
    block, last of those around them; empty where they are not known.
    """

    blocks: Sequence[int]
    around: int
    largest: int
    two: int
    aside: int = 0
    more_turns: int = 0
    layers: Sequence[Sequence[int]] = ()


class FrameTokens(NamedTuple):
    """``each`` frame has so many tokens, which are the first ``total`` of their stream."""

    each: int
    total: int


class Apart(NamedTuple):
    """FLOPs of a block that ranks share otherwise than by its rows: ``alone`` on rows of no shared
    token, such as a text's that tokens attend to, of which every rank computes all; ``framed`` in
    modules that are given whole frames. ``behind`` it, and ``framed_behind``: in modules that a
    stage runs behind the blocks of those before it too, but not behind its own last one.
    """

    alone: int = 0
    framed: int = 0
    behind: int = 0
    framed_behind: int = 0


class Unshared(NamedTuple):
    """What ranks do not share by rows. ``blocks``: of each block; ``closing``: FLOPs behind all of
    them; ``frames``: those that modules are given whole.
    """

    blocks: Sequence[Apart] = ()
    closing: int = 0
    frames: FrameTokens | None = None


NOTHING_APART = Unshared()


class Activations(NamedTuple):
    """Tensors beside the weights: what they take at once, and ``moved``, (bytes, kernels): how many
    kernels beside products and attentions read and write so many bytes.
    """

    peak_bytes: int
    moved: Sequence[tuple[int, int]] = ()


@dataclass(frozen=True, kw_only=True)
class Whole:
    """One evaluation on a single device. ``around_flops`` are computed outside the blocks.
    ``tokens`` of each stream enter the blocks, ``hidden`` wide.
    """

    weight_bytes: int
    block_weight_bytes: Sequence[int]
    block_flops: Sequence[int]
    around_flops: int
    activations: Activations
    attended_by_block: Sequence[Sequence[Attended]]
    tokens: Mapping[str, int]
    hidden: int
    shareable: Shareable
    unshared: Unshared = NOTHING_APART

    @property
    def flops(self) -> int:
        return self.around_flops + sum(self.block_flops)

    @property
    def attended(self) -> Sequence[Attended]:
        return tuple(chain(*self.attended_by_block))


@dataclass(frozen=True, kw_only=True)
class RankFigures:
    """One evaluation on one rank: under a pipeline all its patches, and ``peak_bytes`` of the
    warm-up too. Weights are not in ``peak_bytes``. ``kept_bytes`` of it are held when it has ended:
    keys and values, buffers for messages.

    ``sent_bytes``: by axis, the output's rows under ``gather``, parts of shared weights under
    ``weights``. ``wired_bytes``: what torch was given to send. ``stage``: the rank's blocks [first,
    end). ``cut``: tokens [start, end) of each patch, of the stream that leaves; empty without a
    pipeline.
    """

    rank: int
    weight_bytes: int
    flops: int
    sent_bytes: Mapping[str, int]
    wired_bytes: int
    peak_bytes: int
    kept_bytes: int
    waits: Mapping[Wait, int]
    stage: tuple[int, int] | None = None
    cut: Sequence[tuple[int, int]] = ()

    @property
    def patches(self) -> int:
        return max(1, len(self.cut))
