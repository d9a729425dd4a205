"""The vocabulary of token plans: where tokens enter a model's blocks, which arguments run along
them, where they leave.

A plan declares; it copies nothing of the model. Module hooks and the host's
``optimized_attention_override`` apply it. Shape legend: B batch, L tokens, H heads, D head dim, C
channels.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Along:
    """An argument with one row per token along ``dim``, over the given streams one after another.
    Same order for all blocks.

    ``repeated``: the argument may have fewer rows (one per frame, say), which the host repeats over
    equal runs of tokens; the runs are rounded up where they do not divide, as in
    comfy/ldm/wan/model.py:repeat_e@0.30.0.
    """

    arg: str
    dim: int
    streams: tuple[str, ...]
    repeated: bool = False


@dataclass(frozen=True, kw_only=True)
class Ranges:
    """An argument that lists ``(begin, end, ...)`` token ranges of ``stream``.

    ``after`` names a stream of the same tensor that comes first: the host shifts the ranges by its
    local length, except a begin of 0.
    """

    arg: str
    stream: str
    after: str | None = None


@dataclass(frozen=True, kw_only=True)
class Blocks:
    """A container of consecutive blocks. ``tokens``: argument -> the streams it holds, at dim 1 (B,
    L, C). ``returns``: those arguments in the order in which a block returns them, where it is not
    that of ``tokens``.

    ``positional`` names the arguments of a forward that takes ``*args``. ``local``: submodules of a
    block whose attention looks at something every rank has whole (cross-attention).
    ``self_attention_2``: of a block that has one, the attention over the plan's
    ``also_attend_alone`` streams. ``control``: key of the control dict whose residuals (B, L, C)
    the host adds to the stream that leaves, one behind each of these blocks; it only reads them.
    """

    path: str
    tokens: Mapping[str, tuple[str, ...]]
    along: tuple[Along, ...] = ()
    ranges: tuple[Ranges, ...] = ()
    positional: tuple[str, ...] = ()
    local: tuple[str, ...] = ()
    returns: tuple[str, ...] = ()
    self_attention_2: str = ""
    control: str = ""

    def __post_init__(self) -> None:
        if not self.returns:
            object.__setattr__(self, "returns", tuple(self.tokens))


@dataclass(frozen=True, kw_only=True)
class Leave:
    """The module after whose output (B, L, C) the tokens of ``stream`` are gathered: the last cheap
    point.
    """

    path: str
    stream: str
    along: tuple[Along, ...] = ()
    ranges: tuple[Ranges, ...] = ()


@dataclass(frozen=True, kw_only=True)
class TokenPlan:
    """``models``: host classes as ``module:Class``, exactly these. ``streams``: in the order in
    which attention sees them.

    ``also_attend_alone``: streams that blocks also attend over by themselves. ``positions``:
    modules whose output depends on the positions of tokens and on nothing else.
    """

    family: str
    models: tuple[str, ...]
    streams: tuple[str, ...]
    blocks: tuple[Blocks, ...]
    leave: Leave
    also_attend_alone: tuple[str, ...] = ()
    positions: tuple[str, ...] = ()
