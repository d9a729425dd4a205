"""The vocabulary of token plans: where tokens enter a model's blocks, which arguments have a row
for each token, and where tokens leave.

A plan declares; it copies nothing of the model. Module hooks and ComfyUI's
``optimized_attention_override`` apply it. Shape legend: B batch, L tokens, H heads, D head dim, C
channels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

from ..errors import Refused


@dataclass(frozen=True, kw_only=True)
class Along:
    """An argument with one row per token along ``dim``, over the given streams one after another,
    in the same order for all blocks; or a tuple, each of whose tensors has such rows.

    ``repeated``: the argument may have fewer rows (one per frame, say), which ComfyUI repeats over
    equal runs of tokens. If the runs do not divide evenly, they are rounded up, as in
    comfy/ldm/wan/model.py:repeat_e@0.30.0.

    ``masks_keys``: blocks make the attention's mask of the rows that they are given, and of zeros
    over their other tokens. Attention over all tokens gets the mask of all rows in its place.

    ``within``: how to cut an argument that is an object of the model's. A function of the object
    and of a function that cuts a tensor of such rows; returns what blocks are given instead.
    """

    arg: str
    dim: int
    streams: tuple[str, ...]
    repeated: bool = False
    masks_keys: bool = False
    within: Callable[[Any, Callable[[Any], Any]], Any] | None = None


@dataclass(frozen=True, kw_only=True)
class Ranges:
    """An argument that lists ``(begin, end, ...)`` token ranges of the given streams one after
    another; an end of None is the last token's.

    ``after`` names a stream that comes first in the same tensor: ComfyUI shifts the ranges by its
    local length, except a begin of 0. ``rows``: what else a range has, without ``after``, may be
    a tensor with a row per token of the range.
    """

    arg: str
    streams: tuple[str, ...]
    after: str | None = None
    rows: bool = False


@dataclass(frozen=True, kw_only=True)
class Boundary:
    """An argument that counts the tokens of the given streams, one after another. The model treats
    the tokens before this boundary differently from the tokens behind it.
    """

    arg: str
    streams: tuple[str, ...]


COMPILE = "torch_compile"  # the transformer option that says which modules to compile, and how
LEFT_OUT = "blocks_left_out"  # the transformer option that lists (kind, index) of blocks to leave out
# Points where ComfyUI calls patches of nodes before the blocks
BEFORE_BLOCKS = ("post_input", "noise_refiner")


@dataclass(frozen=True, kw_only=True)
class BlockPatch:
    """A node's patch that ComfyUI calls in or behind blocks, and the tokens that it needs.

    ``code`` is ``module:name`` of the function, or of the class whose instances are called. As a
    rule the patch computes each row of tokens by itself. ``attributes`` are the instance's own
    tensors (B, L, C) with a row for each of the image's first tokens; ``options`` are entries of
    ``transformer_options`` that are dicts of such tensors. With ``adds``, it adds values to tokens
    without looking at them. With ``padded``, it is given the latent padded to whole tokens, and
    encodes an image for that size.

    ``instead`` says what ranks do in place of the patch. "keep references": the keys and values of
    the reference images' tokens, which are the image's last, are those of the run's first
    evaluation; the tokens still go through the blocks. "nothing": another patch does its part.
    """

    code: str
    attributes: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    adds: bool = False
    padded: bool = False
    instead: Literal["", "keep references", "nothing"] = ""


@dataclass(frozen=True, kw_only=True)
class Frames:
    """Arguments that belong together frame by frame, of a module whose queries look at nothing but
    keys of their own frame: it is given the frames that local tokens are of, so that no rank needs
    another's tokens.

    ``tokens``: the argument with the rows of ``stream``. ``each``: other arguments -> their rows
    for each frame, along dim 1. ``count``: the argument that says how many tokens, from the first
    one, are of frames; else all are.
    """

    stream: str
    each: Mapping[str, int]
    tokens: str = "x"
    count: str = ""


@dataclass(frozen=True, kw_only=True)
class Insert:
    """Modules that the model runs between its blocks, or within them, on tokens that are cut, and
    that return as many.

    ``path``: in the model; ``*`` in it stands for any name. ``along`` and ``frames``: their other
    arguments, by tokens and by frames. Attention within blocks is ``Blocks.local`` as well.
    """

    path: str
    along: tuple[Along, ...] = ()
    frames: Frames | None = None


@dataclass(frozen=True, kw_only=True)
class Prefix:
    """Tokens before all others that every rank computes whole, and that look at no other tokens.
    The model may keep their keys and values from one evaluation to the next, and gives its blocks
    the other tokens alone then. They are no stream of the plan's: attention gets their keys before
    those of its streams.

    ``stream``: its name in ``tokens`` and of arguments along them. ``counted_by``: the forward's
    argument that counts them. ``kept_in``: the blocks' argument with their keys and values, empty
    where the model gives the tokens themselves. Without it, ``counted_by`` is the blocks' argument
    that counts those that a block is given: before the others, none, or no others. ``forget``: the
    model's method that frees what it kept, called when a run ends.
    """

    stream: str
    counted_by: str
    kept_in: str = ""
    forget: str = ""


@dataclass(frozen=True, kw_only=True)
class BranchCache:
    """Tokens of a branch that the model keeps for the later evaluations of a run. The ``node`` puts
    the ``cache``, a ``module:Class`` of ComfyUI's, into ``transformer_options`` as ``option``.

    ``entry``: the block's method that the model calls on such tokens in place of the branch's own,
    for their keys and values alone; ``tokens``: its argument with them.
    """

    node: str
    option: str
    cache: str
    entry: str
    tokens: str


@dataclass(frozen=True, kw_only=True)
class BranchTokens:
    """Tokens of another stream that go through the same blocks. The model calls each block on them,
    by its method ``entry``, right before it calls the block on its own tokens, and hands what that
    returns behind these tokens, their keys and values (B, L, H, D), to this second call.

    ``tokens``: the argument with the rows of ``stream``; ``along``: others that run along them.
    ``keys``: the arguments of the block's own entry with keys and values: tokens of a frame look at
    those of the frame before in the branch too, and so the first ones at none. ``frame``: the
    argument that says how many tokens a frame has. ``counted_by``: the module whose first output
    (B, C, ...) in an evaluation has the rows of the block's own tokens. ``kept``: where a node has
    the model keep what its blocks are given.
    """

    entry: str
    stream: str
    keys: tuple[str, str]
    frame: str
    counted_by: str
    tokens: str = "x"
    along: tuple[Along, ...] = ()
    kept: BranchCache | None = None


@dataclass(frozen=True, kw_only=True)
class Blocks:
    """A container of consecutive blocks.

    ``tokens``: argument -> the streams that it holds along dim 1 (B, L, C), or of (L, C), without a
    batch, along dim 0; of a tuple, ``x.0`` is its first element. Of (B, T, H, W, C) blocks get the
    local tokens as (B, l, 1, 1, C), and behind the last block it has its shape again. ``returns``:
    these arguments in the order in which a block returns them, where that differs, and others that
    it changes and every rank has whole.
    ``positional`` names the arguments of a forward that takes ``*args``. ``local``: submodules that
    attend to tensors which every rank has whole (cross-attention). ``whole_queries``: submodules
    whose queries every rank has whole, and whose keys are of the stream that leaves.
    ``self_attention_2``: the submodule that attends over the plan's ``also_attend_alone`` streams,
    in blocks that have one. ``control``: the key of the control dict whose residuals (B, L, C)
    ComfyUI adds to the stream that leaves, one behind each of these blocks, and only reads.
    ``interleaved``: the model calls these blocks between those of earlier containers, with whole
    tokens or with local ones. Such a model cannot be cut into pipeline stages. ``inserts``: modules
    that run between these blocks, or within them, and take arguments by tokens or by frames.
    ``without_options``: the submodule whose forward calls ComfyUI's ``optimized_attention`` without
    ``transformer_options``.

    ``lengths``: stream -> the module whose output (B, L, C) has its rows, for streams that the
    plan's first container gets in one argument; one of these has no entry and gets the rest.
    ``prefix``: the tokens of the first container that are no stream. ``sliced_between``: streams
    that the model slices and joins between blocks, by lengths from before them. There they have all
    their rows, those of other ranks zero; each block is given its own.

    ``entry``: the method of a block that the model calls. ``branch``: other tokens that it calls
    the blocks on as well.

    ``patches``: those of nodes that are known. ``points``: where patches get a dict, which of its
    entries together hold which streams along dim 1: there a patch that is not known is called on
    all tokens.
    """

    path: str
    tokens: Mapping[str, tuple[str, ...]]
    along: tuple[Along, ...] = ()
    ranges: tuple[Ranges | Boundary, ...] = ()
    positional: tuple[str, ...] = ()
    local: tuple[str, ...] = ()
    whole_queries: tuple[str, ...] = ()
    returns: tuple[str, ...] = ()
    self_attention_2: str = ""
    control: str = ""
    without_options: str = ""
    interleaved: bool = False
    inserts: tuple[Insert, ...] = ()
    lengths: Mapping[str, str] = field(default_factory=dict)
    sliced_between: tuple[str, ...] = ()
    prefix: Prefix | None = None
    entry: str = "forward"
    branch: BranchTokens | None = None
    patches: tuple[BlockPatch, ...] = ()
    points: Mapping[str, Mapping[tuple[str, ...], tuple[str, ...]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.returns:
            object.__setattr__(self, "returns", tuple(self.tokens))

    @cached_property
    def told(self) -> set[str]:
        """Returns the streams whose rows are known before the tokens are."""
        return {*self.lengths, *([self.prefix.stream] if self.prefix else [])}


@dataclass(frozen=True, kw_only=True)
class Leave:
    """The module whose output (B, L, C) is gathered over the tokens of ``stream``: choose the last
    one before the tokens become pixels, because the fewest numbers travel there.

    ``instead`` is the module that the model runs in its place for some inputs.

    ``path`` may be that of the last ``Blocks``, if the code that follows takes all tokens: the
    output is gathered behind the last block then. If this output holds other streams as well, these
    stay local, as the model slices them off by lengths.

    ``streams`` lists the streams of the output, one after another, if it has more than ``stream``
    and the model slices it by lengths from before the blocks: it gets as many rows then, and rows
    of the other streams are zero.
    """

    path: str
    stream: str
    instead: str = ""
    streams: tuple[str, ...] = ()
    along: tuple[Along, ...] = ()
    ranges: tuple[Ranges, ...] = ()

    @property
    def paths(self) -> tuple[str, ...]:
        return (self.path, self.instead) if self.instead else (self.path,)


@dataclass(frozen=True, kw_only=True)
class Together:
    """The reasons that keep the patches of an evaluation together under PipeFusion.

    ``always`` says, in words for users, why this model's evaluations cannot be cut at all.
    ``arguments`` are arguments of the forward that put other tokens before the image's in its
    stream, so that it cannot be cut. ``refiners`` are modules before the blocks that look at the
    whole image: with them, patches may not run ahead of each other, because a refiner would see
    tokens that no sampler has made yet.
    """

    always: str = ""
    arguments: tuple[str, ...] = ()
    refiners: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class TokenPlan:
    """How one forward is cut along its tokens. ``streams``: in the order in which attention sees
    them.

    ``also_attend_alone``: streams that blocks also attend over by themselves. ``together``:
    where PipeFusion cannot let patches run apart. ``patch_size``: the model's attribute that says
    how many latent pixels a token stands for, along each of the last two dimensions or of all; or
    one attribute for each; or that number. ``rebuilt``: entries of dicts among the forward's
    arguments (``payload.layout``) that are no plain data, and that the model makes anew where they
    are missing: they stay in ComfyUI's process.

    A plan without blocks is of a model whose forward is never cut: each group of ranks computes it
    whole on one of them. Without ``is_tried`` it is of those that nobody has tried so.
    """

    streams: tuple[str, ...]
    blocks: tuple[Blocks, ...]
    leave: Leave
    also_attend_alone: tuple[str, ...] = ()
    together: Together = Together()
    patch_size: str | int | tuple[str, ...] = "patch_size"
    rebuilt: tuple[str, ...] = ()
    is_tried: bool = True

    @property
    def why_no_stages(self) -> str:
        """Returns why PipeFusion refuses the model, in words for users; empty if it takes it."""
        among = next((group.path for group in self.blocks if group.interleaved), "")
        if among:
            return f"its {among} run among its other blocks, so that no stage can hold a part of it"
        if any(group.branch for group in self.blocks):
            return "its blocks are called twice, and the second call needs what the first one made"
        return (
            "it keeps the keys and values of the prompt in all its blocks, of which a stage has some"
            if self.prefix
            else ""
        )

    @cached_property  # asked for at every evaluation
    def prefix(self) -> Prefix | None:
        return self.blocks[0].prefix if self.blocks else None

    @property
    def kept(self) -> BranchCache | None:
        return next((group.branch.kept for group in self.blocks if group.branch), None)

    def require_stages(self, model_class: type) -> None:
        """Raises Refused if no stage can hold a part of such a model."""
        if self.why_no_stages:
            raise Refused(
                f"{model_class.__name__} cannot be divided into stages, because {self.why_no_stages}: set"
                " pipefusion to 1."
            )

    def block_patch(self, code: str) -> BlockPatch | None:
        """Returns the plan's entry for a node's patch, by the patch's code."""
        return next((patch for group in self.blocks for patch in group.patches if patch.code == code), None)

    def has_own_rows(self, code: str) -> bool:
        """Returns whether a node's patch is known to compute each row by itself."""
        patch = self.block_patch(code)
        return patch is not None and not patch.adds and patch.instead != "keep references"

    def gathers_at(self, point: str) -> bool:
        return any(point in group.points for group in self.blocks)

    @cached_property
    def leaves_behind_blocks(self) -> bool:
        """Whether tokens leave behind the last block: the code that follows takes all tokens."""
        return bool(self.blocks) and self.leave.path == self.blocks[-1].path

    def __post_init__(self) -> None:
        for arg, streams in self.blocks[0].tokens.items() if self.blocks else ():
            if len(set(streams) - self.blocks[0].told) != 1:
                raise ValueError(f"A plan must give `lengths` of all but one of the streams in {arg}.")

    def patch_size_of(self, model: Any) -> Any:
        if isinstance(self.patch_size, tuple):
            return tuple(getattr(model, name) or 1 for name in self.patch_size)
        return getattr(model, self.patch_size) if isinstance(self.patch_size, str) else self.patch_size
