"""Predict the time and the memory of a job on a layout, from counts and the speeds of a box. Pure
arithmetic: nothing is measured, and no published time of a model is known here.

A rank's time is its FLOPs over its device's speed, never less than reading its weights or starting
its kernels; where it has few rows, processors of the device have no tile of them. Kernels between
products move memory, through the device's cache if it has room. Ulysses waits for both exchanges
of every attention. A ring's messages travel while the attention over the block before is computed,
where the box lets them; the time that is longer counts. A pipeline lasts as long as its slowest
stage has patches to compute, or as one patch takes through all stages if that is longer; whole
evaluations of the warm-up go through it one stage after the other. Around the ring of a stage the
keys and values of all tokens travel for every patch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from statistics import fmean

from ..branches import Batch, BranchPlan, plan_branches
from ..comm.shares import Shares, group_speeds, relative, shares_of, stage_speeds
from ..layout import Layout
from ..stages import Stage, share_out
from . import expected, messages
from .box import TILE, Box, Device
from .figures import Attended
from .job import Job
from .keeping import Kept

# Moved for each element of a ring's output at each merge: attention/kernels.py, operation by
# operation
MERGE_BYTES = 34
RESERVED = 1 << 30  # bytes of each device: its context, communicators, fragments
FP32_BYTES = 4
# Of a wave: half of one of qkv, out and up, and of down, 4 times as deep, where a block is
# 3 + 1 + 4 + 4 as wide as hidden.
IDLE = 0.5 * 7 / 12


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """``parts``: seconds of an evaluation of all branches, in the mean of a run, by cause.
    ``memory_bytes`` of the fullest rank; ``sent_bytes`` of an evaluation by axis, of the rank that
    sends most.
    """

    layout: Layout
    kept: Kept = "whole"
    parts: Mapping[str, float]
    weight_bytes: int
    memory_bytes: int
    sent_bytes: Mapping[str, int] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        return sum(self.parts.values())


@dataclass(frozen=True, kw_only=True)
class Costs:
    """The costs of a job's parts on a layout: what ``predict`` puts together."""

    job: Job
    layout: Layout
    box: Box
    speeds: tuple[int, ...] = ()  # of the ranks, as a placement has them

    @cached_property
    def stages(self) -> Sequence[tuple[int, int]]:
        """Blocks [first, end) of each stage; of all without a pipeline."""
        if self.layout.stages == 1:
            return [(0, len(self.job.whole.block_flops))]
        speeds = stage_speeds(self.layout, self.speeds)
        cut: Sequence[Stage] = share_out(self.job.whole.block_flops, self.layout.stages, speeds)
        return [(stage.first, stage.end) for stage in cut]

    @cached_property
    def patches(self) -> int:
        return self.job.patches_of(self.layout.stages)

    def shares(self, rank: int) -> Shares:
        """Return the shares of the sequence that a rank is in."""
        return shares_of(self.layout, rank, self.speeds)

    def stage_of(self, rank: int) -> tuple[int, int]:
        return self.stages[self.layout.stage(rank)]

    def attended(self, stage: tuple[int, int]) -> Counter[Attended]:
        return Counter(one for block in range(*stage) for one in self.job.whole.attended_by_block[block])

    # -- computing

    def matmul_flops(self, stage: tuple[int, int]) -> float:
        """Return a stage's FLOPs but for attention, of a whole evaluation."""
        return sum(self.job.whole.block_flops[slice(*stage)]) - sum(
            count * expected.attention_flops(one) for one, count in self.attended(stage).items()
        )

    def attention_s(self, device: Device, rank: int, attended: Attended, share: float) -> float:
        """Return the seconds of a rank's part of one attention, of ``share`` of all tokens to all
        of them.
        """
        own, shares = (
            expected.heads_of(self.layout, rank, attended, self.shares(rank)),
            self.shares(rank).tokens,
        )
        part = share / (
            sharers_of(shares, self.layout, rank, self.layout.ulysses) if shares else self.layout.ring
        )
        seconds = (
            part * expected.attention_flops(attended) * own / attended.heads / device.attention_flops_per_s
        )
        return seconds / device.busy(part * attended.tokens * own / TILE)

    def computing_s(self, rank: int, share: float) -> float:
        """Return the seconds that a rank computes for ``share`` of an evaluation's tokens."""
        device, stage, whole = self.box.devices[rank], self.stage_of(rank), self.job.whole
        attention = sum(
            count * self.attention_s(device, rank, one, share) for one, count in self.attended(stage).items()
        )
        shares = self.shares(rank).tokens
        part = share / (sharers_of(shares, self.layout, rank, 1) if shares else self.layout.sequence_size)
        tiles = part * sum(whole.tokens.values()) * whole.hidden / TILE**2
        matmul = part * self.matmul_flops(stage) / device.matmul_flops_per_s / device.busy(tiles, IDLE)
        read = sum(whole.block_weight_bytes[slice(*stage)]) / device.memory_bytes_per_s
        around = whole.around_flops / device.matmul_flops_per_s
        moving = moving_s(self.job, device, stage, part)
        blocks = stage[1] - stage[0]
        return (
            around
            + max(max(matmul, read) + attention + moving, blocks * device.block_s)
            + blocks * device.beside_s
        )

    # -- messages

    def ulysses_s(self, stage: tuple[int, int], share: float) -> float:
        """Return the seconds of the exchanges of a stage's attentions."""
        if self.layout.ulysses == 1:
            return 0.0
        seconds = 0.0
        for one, count in self.attended(stage).items():
            for sends in (messages.heads_for_tokens, messages.tokens_for_heads):
                sent = sends(self.layout, one, self.speeds)
                seconds += count * self.box.seconds(
                    [message._replace(nbytes=share * message.nbytes) for message in sent]
                )
        return seconds

    def ring_s(self, ranks: Sequence[int], share: float) -> float:
        """Return the seconds that the slowest of these ranks, which have the same blocks, waits for
        keys and values, and merges parts. Those of all tokens travel, whatever ``share`` of them
        attends; the fullest block has the fresh rows of a patch beside those that are kept.
        """
        if self.layout.ring == 1:
            return 0.0
        steps, full, seconds = self.layout.ring - 1, 1 + share * (share < 1), dict.fromkeys(ranks, 0.0)
        for one, count in self.attended(self.stage_of(ranks[0])).items():
            step = messages.ring_step(self.layout, one, self.speeds)
            travels = self.box.seconds([message._replace(nbytes=full * message.nbytes) for message in step])
            merged = share * MERGE_BYTES * self.output_elements(one)
            for rank in ranks:
                device = self.box.devices[rank]
                covered = (
                    self.attention_s(device, rank, one, share) / self.layout.ring
                    if self.box.overlaps
                    else 0.0
                )
                merging = merged / (device.merge_bytes_per_s or device.memory_bytes_per_s)
                seconds[rank] += count * steps * (max(0.0, travels - covered) + merging)
        return max(seconds.values())

    def output_elements(self, attended: Attended) -> int:
        """Return the elements of the fullest rank's output of one attention."""
        elements = 0
        for shares in {*messages.shares_of_sequences(self.layout, self.speeds)}:
            heads = max(expected.rank_heads(self.layout, attended, shares))
            elements = max(
                elements,
                max(expected.group_tokens(self.layout, attended, shares)) * heads * attended.head_dim,
            )
        return elements

    def stage_s(self, share: float) -> float:
        """Return the seconds of the hidden rows' way to the next stage."""
        whole = self.job.whole
        nbytes = share * sum(whole.tokens.values()) * whole.hidden * expected.ITEM_BYTES
        return self.box.seconds(messages.stage_step(self.layout, nbytes))

    def sent_by(self, rank: int) -> dict[str, int]:
        """Return the bytes that a rank sends in an evaluation of one branch, by axis."""
        whole, stage, shares = self.job.whole, self.stage_of(rank), self.shares(rank)
        attended = self.attended(stage).items()
        onwards = sum(whole.tokens.values()) * whole.hidden * expected.ITEM_BYTES // self.layout.sequence_size
        return {
            "ulysses": sum(
                count * expected.exchanged_bytes(self.layout, rank, one, shares) for one, count in attended
            ),
            "ring": self.patches
            * sum(count * expected.passed_bytes(self.layout, rank, one, shares) for one, count in attended),
            "pipefusion": onwards if stage[1] < len(whole.block_flops) else 0,
        }

    # -- memory

    def activation_bytes(self, stage: tuple[int, int], forwards: Sequence[int]) -> int:
        """Return what a rank holds beside weights: tensors of one of its group's ``forwards``, of
        so many images each, whole in a pipeline's warm-up, and buffers for messages, keys and
        values.
        """
        layout, own = self.layout, list(self.attended(stage))
        elements = max((self.output_elements(one) for one in own), default=0)
        buffers = 6 * elements * expected.ITEM_BYTES * (layout.ulysses > 1)
        buffers += (6 * expected.ITEM_BYTES + 2 * FP32_BYTES) * elements * (layout.ring > 1)
        held = sum(
            count * one.tokens * one.heads * one.head_dim for one, count in self.attended(stage).items()
        )
        shares = [one.tokens for one in messages.shares_of_sequences(layout, self.speeds) if one.tokens]
        of_places = [
            sharers_of(tokens, layout, rank, layout.ulysses)
            for tokens in shares
            for rank in range(0, len(tokens), layout.ulysses)
        ]
        places = min(of_places, default=layout.ring)
        kept = (
            int(2 * held * expected.ITEM_BYTES / places)
            // layout.ulysses
            * sum(forwards)
            * (layout.stages > 1)
        )
        # Such ranks would have all tokens
        fewest = min((sum(tokens) / max(tokens) for tokens in shares), default=self.layout.sequence_size)
        return (
            max(forwards, default=0) * (int(self.job.whole.activations.peak_bytes // fewest) + buffers) + kept
        )


def costs_of(job: Job, layout: Layout, box: Box, kept: Kept = "whole") -> Costs:
    """Return the costs of a layout whose groups share a sequence where its runs have them do so."""
    own = box.first(layout.world_size)
    speeds = relative([device.matmul_flops_per_s for device in own.devices])
    widths = layout.widths if job.whole.attended and kept != "sharded" else layout.widths[:1]
    return Costs(
        job=job, layout=layout.joined(branches_of(job, layout, speeds, widths).width), box=own, speeds=speeds
    )


def branches_of(job: Job, layout: Layout, speeds: Sequence[int], widths: Sequence[int] = (1,)) -> BranchPlan:
    """Share out a job's branches and images over a layout's groups, as its runs do."""
    return plan_branches(
        [Batch(1, job.batch, 1.0)] * job.branches, layout.groups, widths, group_speeds(speeds, layout.groups)
    )


def moving_s(job: Job, device: Device, stage: tuple[int, int], part: float) -> float:
    """Return the seconds of a stage's kernels beside products and attentions, for ``part`` of all
    rows. Each block is taken to have as many.
    """
    if job.is_compiled:
        return 0.0
    blocks = (stage[1] - stage[0]) / len(job.whole.block_flops)
    return blocks * sum(
        kernels * device.moving_s(part * nbytes) for nbytes, kernels in job.whole.activations.moved
    )


def sharers_of(weights: Sequence[int], layout: Layout, rank: int, ranks: int) -> float:
    """Return how many of a rank, or of the ``ranks`` neighbours that it is among, would have all
    tokens of its sequence.
    """
    first = rank % len(weights) // ranks * ranks
    return sum(weights) / sum(weights[first : first + ranks])


def forwards_of(costs: Costs) -> list[list[int]]:
    """Return the forwards that each group computes in an evaluation: the images of each."""
    planned = branches_of(costs.job, costs.layout, costs.speeds)
    return [
        [share.end - share.start for share in planned.shares if share.group == group]
        for group in range(costs.layout.groups)
    ]


def turns_of(costs: Costs) -> list[int]:
    """Return how many evaluations, of one branch and image, each group computes in turn."""
    return [sum(forwards) for forwards in forwards_of(costs)]


def sent_bytes(costs: Costs) -> dict[str, int]:
    """Return the bytes of an evaluation by axis, of the rank that sends most."""
    turns, size = turns_of(costs), costs.layout.group_size
    of_ranks = [
        {axis: nbytes * turns[rank // size] for axis, nbytes in costs.sent_by(rank).items() if nbytes}
        for rank in range(costs.layout.world_size)
    ]
    return max(of_ranks, key=lambda sent: sum(sent.values()))


def predict(job: Job, layout: Layout, box: Box) -> list[Prediction]:
    """Return a prediction for each way to keep weights that the job may have and the devices have
    room for; none where no way fits.
    """
    made = [_kept(costs_of(job, layout, box, kept), kept) for kept in job.keeps]
    return [replace(one, layout=layout) for one in made if one is not None]


def bytes_needed(job: Job, layout: Layout, box: Box) -> tuple[int, int]:
    """Return the bytes of the rank with the least room for whole weights, and those of its
    device.
    """
    there, weights, activations = fullest(costs_of(job, layout, box), "whole")
    return weights + activations + RESERVED, there + RESERVED


def fullest(costs: Costs, kept: Kept) -> tuple[int, int, int]:
    """Return the room that the rank has which has least to spare, its weights, kept so, and what
    it holds beside them.
    """
    whole, layout, forwards, there = costs.job.whole, costs.layout, forwards_of(costs), {}
    for rank, device in enumerate(costs.box.devices):
        place = costs.stage_of(rank), tuple(forwards[rank // layout.group_size])
        there[place] = min(there.get(place, device.memory_bytes), device.memory_bytes)
    found = []
    for (stage, own), memory in there.items():
        weights = (
            expected.sharded_bytes(whole, layout, stage)
            if kept == "sharded"
            else expected.weight_bytes(whole, stage)
        )
        found.append((int(memory) - RESERVED, weights, costs.activation_bytes(stage, own)))
    return min(found, key=lambda one: one[0] - one[1] - one[2])


def _kept(costs: Costs, kept: Kept) -> Prediction | None:
    """Predict with weights kept so; None where they do not fit, or nothing is gained by it."""
    whole, layout = costs.job.whole, costs.layout
    room, weights, activations = fullest(costs, kept)
    moved_s = 0.0
    if kept == "sharded":
        if layout.sequence_size == 1:
            return None
        moved_s = max(
            sum(
                costs.box.seconds(messages.weights_step(layout, size))
                for size in whole.block_weight_bytes[slice(*stage)]
            )
            for stage in costs.stages
        )
    elif kept == "offloaded":
        if weights + activations <= room:
            return None
        on_device, weights = weights, room - activations
        if weights < 2 * max(whole.block_weight_bytes):
            return None
        moved_s = (on_device - weights) / costs.box.host_bytes_per_s
    if weights + activations > room:
        return None
    return Prediction(
        layout=layout,
        kept=kept,
        parts=_pipeline(costs, kept, moved_s) if layout.stages > 1 else _sequence(costs, kept, moved_s),
        weight_bytes=weights,
        memory_bytes=weights + activations + RESERVED,
        sent_bytes=sent_bytes(costs),
    )


def _waits(costs: Costs, kept: Kept, moved_s: float, computing_s: float) -> float:
    """Return what a forward waits for weights: gathered ones come while it computes, where the box
    lets them.
    """
    return max(0.0, moved_s - computing_s) if kept == "sharded" and costs.box.overlaps else moved_s


def _sequence(costs: Costs, kept: Kept, moved_s: float) -> dict[str, float]:
    """Return the parts of an evaluation whose ranks all have all blocks."""
    ranks, turns = range(costs.layout.world_size), turns_of(costs)
    computing = [costs.computing_s(rank, 1.0) for rank in ranks]
    busy = [seconds * turns[rank // costs.layout.group_size] for rank, seconds in enumerate(computing)]
    one = {
        "ulysses": costs.ulysses_s(costs.stages[0], 1.0),
        "ring": costs.ring_s(ranks, 1.0),
        "weights": _waits(costs, kept, moved_s, max(computing)),
    }
    parts = {name: seconds * max(turns) for name, seconds in one.items()}
    parts["compute"] = fmean(busy) if costs.speeds else fmean(computing) * costs.job.even_turns(costs.layout)
    parts["imbalance"] = max(busy) - parts["compute"]
    parts["hop"] = costs.box.hop_s if costs.layout.world_size > 1 else 0.0
    return parts


def _pipeline(costs: Costs, kept: Kept, moved_s: float) -> dict[str, float]:
    """Return the parts of an evaluation in the mean of a run: whole ones first, then patches."""
    job, layout = costs.job, costs.layout
    # Else groups are alike
    share, reach = (
        job.share_of_patch(costs.patches),
        layout.world_size if costs.speeds else layout.sequence_size,
    )
    firsts = [layout.of_stages(rank) for rank in range(reach) if layout.stage(rank) == 0]

    def stage_times(share: float) -> list[dict[str, float]]:
        times = []
        for stage, blocks in enumerate(costs.stages):
            computing = max(costs.computing_s(ranks[stage], share) for ranks in firsts)
            exchanged = {
                "ulysses": costs.ulysses_s(blocks, share),
                "ring": costs.ring_s([ranks[stage] for ranks in firsts], share),
            }
            times.append(
                {"compute": computing, **exchanged, "weights": _waits(costs, kept, moved_s, computing)}
            )
        return times

    times = stage_times(share)
    of_patch, of_whole = ([sum(one.values()) for one in of] for of in (times, stage_times(1.0)))
    turns, link_s = max(turns_of(costs)), costs.stage_s(share)
    slowest = max(*of_patch, link_s) if costs.box.overlaps else max(of_patch) + link_s
    round_trip = sum(of_patch) + (layout.stages - 1) * link_s + costs.box.hop_s
    period = turns * max(costs.patches * slowest, round_trip)
    warm_up = (
        sum(of_whole)
        + (layout.stages - 1) * costs.stage_s(1.0)
        + (turns - 1) * max(of_whole)
        + costs.box.hop_s
    )
    warm = min(job.warm_up, job.evaluations)
    patched = job.evaluations - warm
    run = warm * warm_up + patched * period + (round_trip - slowest if patched else 0.0)
    parts = {
        name: turns * costs.patches * max(one[name] for one in times)
        for name in ("ulysses", "ring", "weights")
    }
    parts["compute"] = costs.patches * job.even_turns(layout) * fmean(one["compute"] for one in times)
    parts["hop"] = 0.0
    parts["imbalance"] = turns * costs.patches * max(of_patch) - sum(parts.values())
    parts["pipeline"] = run / job.evaluations - sum(parts.values())
    return parts
