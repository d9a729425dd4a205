"""What one evaluation should cost each rank, by formula, to hold a dry run's figures to.

Evenly split, the ranks of a sequence (U ulysses x R ring = N) with L tokens of width C send per
attention, in elements:

- Ulysses (arXiv 2309.14509, section 3.2): q, k, v for the other heads, and the output for the other
  tokens: 4 * L * C / N * (U - 1) / U.
- Ring (arXiv 2310.01889, section 3): keys and values of its own and of all but the last that pass
  by: 2 * (R - 1) * L * C / N.

What ranks send where it does not split evenly, and the weights they hold, is what the planner
predicts (``planner/cost.py``).
"""

from __future__ import annotations

from collections.abc import Sequence

from ...parallel_runtime.layout import Layout, Split
from ...parallel_runtime.methods.inserts import FrameSpan
from ...parallel_runtime.planner.cost import NOWHERE, Costs, launches_of, replay_launches_of
from ...parallel_runtime.planner.evaluation_count import Whole
from ...parallel_runtime.planner.job import Job
from ...parallel_runtime.planner.prediction import sharded_bytes, weight_bytes
from .ranks import RankFigures
from .rows import WholeByRows

WITHIN = 0.02
COMPARES = "compare"  # in the first evaluation ranks compare their tokens so
Stage = tuple[int, int]  # blocks [first, end)


def even_bytes(
    layout: Layout, tokens: int, hidden: int, blocks: int, item_bytes: int, batch: int = 1
) -> float:
    """Return the bytes that one rank of a sequence sends where everything splits evenly."""
    own = batch * tokens * hidden * blocks * item_bytes / layout.sequence_size
    return own * (4 * (layout.ulysses - 1) / layout.ulysses + 2 * (layout.ring - 1))


def sent_bytes(whole: Whole, layout: Layout, rank: int, patches: int = 1) -> int:
    """Return the bytes that a rank sends in one evaluation, but for weights and the output's rows,
    as the planner predicts.
    """
    costs = Costs(job=Job(whole=whole, patches=patches), layout=layout, box=NOWHERE)
    return sum(costs.sent_by(rank).values())


def launches(whole: Whole, layout: Layout, figures: RankFigures) -> int:
    """Return the kernels that a rank starts in one evaluation, as the planner predicts."""
    costs = Costs(job=Job(whole=whole, patches=figures.patches), layout=layout, box=NOWHERE)
    return figures.patches * launches_of(costs, figures.rank)


def replay_launches(whole: Whole, layout: Layout) -> float:
    """Return what the last rank starts to replay an evaluation, in kernels, as the planner
    predicts.
    """
    costs = Costs(job=Job(whole=whole), layout=layout, box=NOWHERE)
    return replay_launches_of(costs, layout.world_size - 1)


def gathered_bytes(whole: WholeByRows, layout: Layout, stage: Stage) -> int:
    """Return the bytes of its parts that a rank sends to the others of its sequence, which each
    layer's turn takes: (N - 1) / N of what is shared.
    """
    ranks = layout.sequence_size
    return turn_bytes(whole, stage) * (ranks - 1) // ranks


def turn_bytes(whole: WholeByRows, stage: tuple[int, int | None] = (0, None)) -> int:
    """Return the bytes of the layers whose turn comes, as often as it comes."""
    return whole.shareable.around + sum(whole.shareable.blocks[slice(*stage)]) + whole.more_turns


def flops(
    whole: WholeByRows, layout: Layout, rank: int, stage: Stage, cut: Sequence[tuple[int, int]] = ()
) -> float:
    """Return what a rank computes: an even share of its stage's blocks, and all that is around
    them, or in them on rows of other tokens, for each patch of ``cut``.

    Attention is shared by heads, which may not divide: a rank computes its own. Where it has a part
    of a frame it computes what modules do to all of it.
    """
    first, end = stage
    is_end = end == len(whole.block_flops)
    apart = whole.unshared.blocks
    own, passed = apart[first:end], apart[: end if is_end else end - 1]
    attended = [one for block in whole.attended_by_block[first:end] for one in block]
    place = layout.coordinates(rank)["ulysses"]
    unevenness = sum(
        one.flops * (Split.even(one.heads, layout.ulysses).sizes[place] / one.heads - 1 / layout.ulysses)
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


def share_of_frames(whole: WholeByRows, layout: Layout, rank: int, cut: Sequence[tuple[int, int]]) -> float:
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
        spans.append(FrameSpan.over(first, first + split.sizes[rank % ranks], each, total))
    return sum(span.before + span.inside + span.behind for span in spans) / total


def misses(whole: WholeByRows, layout: Layout, figures: RankFigures, is_sharded: bool = False) -> list[str]:
    """Name each figure of a rank that is not as it should be. ``is_sharded``: its weights are."""
    stage, found = figures.stage, []
    sent = sum(size for axis, size in figures.sent_bytes.items() if axis != "gather")
    gathered = figures.patches * gathered_bytes(whole, layout, stage) if is_sharded else 0
    weights = sharded_bytes(whole, layout, stage) if is_sharded else weight_bytes(whole, stage)
    for name, value, due in (
        ("sent bytes", sent, sent_bytes(whole, layout, figures.rank, figures.patches) + gathered),
        ("gathered bytes of weights", figures.sent_bytes.get("weights", 0), gathered),
        ("bytes of weights", figures.weight_bytes, weights),
        ("FLOPs", figures.flops, flops(whole, layout, figures.rank, stage, figures.cut)),
    ):
        if abs(value - due) > WITHIN * due:
            found.append(f"{value:.4g} {name} for {due:.4g}")
    if figures.wired_bytes != sum(figures.sent_bytes.values()):
        found.append(
            f"counts {sum(figures.sent_bytes.values())} sent bytes, and torch was given {figures.wired_bytes}"
        )
    if figures.watched.unaligned:
        found.append(f"{figures.watched.unaligned} places of messages that are not aligned")
    waits = {
        *figures.watched.later_waits,
        *(one for one in figures.watched.waits if one.function != COMPARES),
    }
    return found + [f"waits for the device: {wait}" for wait in waits if wait.is_ours]
