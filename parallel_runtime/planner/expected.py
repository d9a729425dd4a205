"""What one evaluation should cost each rank, by formula, to hold a dry run's figures to.

Legend: N ranks of a sequence = U ulysses x R ring, L tokens, H heads, D head dim, C = H * D; of one
rank: l tokens, g tokens of its ulysses group, h heads. Elements that a rank sends per attention:

- Ulysses (arXiv 2309.14509, section 3.2): q, k and v of its tokens for the other heads, and its
  heads' output for the other tokens: D * (3 * l * (H - h) + (g - l) * h). Evenly split this is
  4 * L * C / N * (U - 1) / U.
- Ring (arXiv 2310.01889, section 3): k and v of its own group and of all but the last that pass by:
  2 * (R - 1) * g * h * D, evenly split 2 * (R - 1) * L * C / N.

PipeFusion (arXiv 2405.14430, section 3.2) sends the hidden rows between stages, once an evaluation
whatever the patches: L * C / N, from each stage but the last. Within a stage Ulysses sends as much
as above for all patches together, a ring as much for each of them: a patch attends to the keys and
values of all tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

from ..comm.shares import EVEN, Shares
from ..layout import Layout, Split
from ..methods.inserts import Span
from ..weights.shared_layers import Sharing
from .figures import Attended, RankFigures, Whole

ITEM_BYTES = 2  # bf16
WITHIN = 0.02


def even_bytes(
    layout: Layout, tokens: int, hidden: int, blocks: int, item_bytes: int, batch: int = 1
) -> float:
    """Return the bytes that one rank of a sequence sends where everything splits evenly."""
    own = batch * tokens * hidden * blocks * item_bytes / layout.sequence_size
    return own * (4 * (layout.ulysses - 1) / layout.ulysses + 2 * (layout.ring - 1))


def sequence_bytes(layout: Layout, rank: int, attended: Attended, shares: Shares = EVEN) -> int:
    """Return the bytes that a rank sends for one attention. ``shares`` of its sequence, here and
    below.
    """
    return exchanged_bytes(layout, rank, attended, shares) + passed_bytes(layout, rank, attended, shares)


def exchanged_bytes(layout: Layout, rank: int, attended: Attended, shares: Shares = EVEN) -> int:
    """Return the bytes that a rank sends to its ulysses group for one attention."""
    tokens, own_heads = rank_tokens(layout, attended, shares), heads_of(layout, rank, attended, shares)
    own = tokens[rank % layout.sequence_size]
    others = group_tokens(layout, attended, shares)[layout.coordinates(rank)["ring"]] - own
    return attended.head_dim * ITEM_BYTES * (3 * own * (attended.heads - own_heads) + others * own_heads)


def passed_bytes(layout: Layout, rank: int, attended: Attended, shares: Shares = EVEN) -> int:
    """Return the bytes of keys and values that a rank passes on for one attention."""
    if layout.ring == 1:
        return 0
    groups = group_tokens(layout, attended, shares)
    # A rank's block has come round when it reaches the rank before it
    unsent = (layout.coordinates(rank)["ring"] + 1) % layout.ring
    return (
        2
        * heads_of(layout, rank, attended, shares)
        * (sum(groups) - groups[unsent])
        * attended.head_dim
        * ITEM_BYTES
    )


def rank_tokens(layout: Layout, attended: Attended, shares: Shares = EVEN) -> tuple[int, ...]:
    """Return the tokens of each rank of a sequence."""
    return Split.by(shares.tokens, attended.tokens, layout.sequence_size, least=1).sizes


def group_tokens(layout: Layout, attended: Attended, shares: Shares = EVEN) -> list[int]:
    """Return the tokens of each ulysses group of a sequence."""
    tokens, size = rank_tokens(layout, attended, shares), layout.ulysses
    return [sum(tokens[index * size : (index + 1) * size]) for index in range(layout.ring)]


def rank_heads(layout: Layout, attended: Attended, shares: Shares = EVEN) -> tuple[int, ...]:
    """Return the heads of each rank of a ulysses group."""
    return Split.by(shares.heads, attended.heads, layout.ulysses).sizes


def heads_of(layout: Layout, rank: int, attended: Attended, shares: Shares = EVEN) -> int:
    return rank_heads(layout, attended, shares)[layout.coordinates(rank)["ulysses"]]


def sent_bytes(
    whole: Whole, layout: Layout, rank: int, stage: tuple[int, int] | None, patches: int = 1
) -> int:
    """Return the bytes that a rank sends in one evaluation, but for the output's rows."""
    blocks = slice(0, len(whole.block_flops)) if stage is None else slice(*stage)
    own = [attended for block in whole.attended_by_block[blocks] for attended in block]
    within = sum(
        exchanged_bytes(layout, rank, attended) + patches * passed_bytes(layout, rank, attended)
        for attended in own
    )
    onwards = sum(whole.tokens.values()) * whole.hidden * ITEM_BYTES // (layout.sequence_size)
    return within + (0 if is_last(whole, stage) else onwards)


def is_last(whole: Whole, stage: tuple[int, int] | None) -> bool:
    """Return whether a rank has the last block."""
    return stage is None or stage[1] == len(whole.block_flops)


def weight_bytes(whole: Whole, stage: tuple[int, int] | None) -> int:
    """Return the bytes of a rank's weights: all, or the stage's blocks and what is around them."""
    blocks = sum(whole.block_weight_bytes)
    return (
        whole.weight_bytes
        if stage is None
        else whole.weight_bytes - blocks + sum(whole.block_weight_bytes[slice(*stage)])
    )


def sharded_bytes(whole: Whole, layout: Layout, stage: tuple[int, int] | None) -> int:
    """Return the bytes of weights where each rank of a sequence has a part of every layer."""
    shared = shared_bytes(whole, stage)
    of = whole.shareable
    largest, two = of.largest, of.two
    if stage is not None and of.layers:
        own = sorted(chain(of.layers[-1], *of.layers[slice(*stage)]))
        largest, two = own[-1], sum(own[-2:])
    return Sharing(weight_bytes(whole, stage) - shared - of.aside, shared, largest, two).held(
        layout.sequence_size
    )


def gathered_bytes(whole: Whole, layout: Layout, stage: tuple[int, int] | None) -> int:
    """Return the bytes of its parts that a rank sends to the others of its sequence, which each
    layer's turn takes: (N - 1) / N of what is shared.
    """
    ranks = layout.sequence_size
    return turn_bytes(whole, stage) * (ranks - 1) // ranks


def turn_bytes(whole: Whole, stage: tuple[int, int] | None) -> int:
    """Return the bytes of the layers whose turn comes, as often as it comes."""
    return shared_bytes(whole, stage) + whole.shareable.more_turns


def shared_bytes(whole: Whole, stage: tuple[int, int] | None) -> int:
    """Return the bytes of weights that ranks of a sequence can share out."""
    blocks = whole.shareable.blocks
    return whole.shareable.around + sum(blocks if stage is None else blocks[slice(*stage)])


def flops(
    whole: Whole,
    layout: Layout,
    rank: int,
    stage: tuple[int, int] | None,
    cut: Sequence[tuple[int, int]] = (),
) -> float:
    """Return what a rank computes: an even share of the blocks, or of its stage's, and all that is
    around them, or in them on rows of other tokens, for each patch of ``cut``.

    Attention is shared by heads, which may not divide: a rank computes its own. Where it has a part
    of a frame it computes what modules do to all of it.
    """
    first, end = (0, len(whole.block_flops)) if stage is None else stage
    is_end = is_last(whole, stage)
    apart = whole.unshared.blocks
    own, passed = apart[first:end], apart[: end if is_end else end - 1]
    attended = [one for block in whole.attended_by_block[first:end] for one in block]
    place = layout.coordinates(rank)["ulysses"]
    unevenness = sum(
        attention_flops(one)
        * (Split.even(one.heads, layout.ulysses).sizes[place] / one.heads - 1 / layout.ulysses)
        for one in attended
    )
    alone = whole.around_flops - (0 if is_end else whole.unshared.closing) + sum(one.alone for one in own)
    shared = sum(whole.block_flops[first:end]) - sum(map(sum, own)) + sum(one.behind for one in passed)
    framed = sum(one.framed for one in own) + sum(one.framed_behind for one in passed)
    ranks = layout.sequence_size
    return (
        alone * max(1, len(cut))
        + shared / ranks
        + framed * share_of_frames(whole, layout, rank, cut)
        + unevenness / layout.ring
    )


def share_of_frames(whole: Whole, layout: Layout, rank: int, cut: Sequence[tuple[int, int]]) -> float:
    """Return the tokens of all frames that a rank has a token of, for each of ``cut``, over those
    of the evaluation.
    """
    if whole.unshared.frames is None:
        return 0.0
    each, total = whole.unshared.frames
    ranks = layout.sequence_size
    spans = []
    for start, end in cut or [(0, total)]:
        split = Split.even(end - start, ranks)
        first = start + split.starts[rank % ranks]
        spans.append(Span.over(first, first + split.sizes[rank % ranks], each, total))
    return sum(span.before + span.inside + span.behind for span in spans) / total


def attention_flops(attended: Attended) -> int:
    """Return the FLOPs of both products: scores, and their sum over values."""
    return 4 * attended.tokens**2 * attended.heads * attended.head_dim


def misses(whole: Whole, layout: Layout, figures: RankFigures, is_sharded: bool = False) -> list[str]:
    """Name each figure of a rank that is not as it should be. ``is_sharded``: its weights are."""
    found = []
    sent = sum(size for axis, size in figures.sent_bytes.items() if axis != "gather")
    gathered = figures.patches * gathered_bytes(whole, layout, figures.stage) if is_sharded else 0
    weights = (
        sharded_bytes(whole, layout, figures.stage) if is_sharded else weight_bytes(whole, figures.stage)
    )
    for name, value, due in (
        (
            "sent bytes",
            sent,
            sent_bytes(whole, layout, figures.rank, figures.stage, figures.patches) + gathered,
        ),
        ("gathered bytes of weights", figures.sent_bytes.get("weights", 0), gathered),
        ("bytes of weights", figures.weight_bytes, weights),
        ("FLOPs", figures.flops, flops(whole, layout, figures.rank, figures.stage, figures.cut)),
    ):
        if abs(value - due) > WITHIN * due:
            found.append(f"{value:.4g} {name} for {due:.4g}")
    if figures.wired_bytes != sum(figures.sent_bytes.values()):
        found.append(
            f"counts {sum(figures.sent_bytes.values())} sent bytes, and torch was given {figures.wired_bytes}"
        )
    return found + [f"waits for the device: {wait}" for wait in figures.waits if wait.is_ours]
