"""Computes the cost of the parts of a job for each rank of a layout: seconds, sent bytes and
memory, from counts and the speeds of a box. Pure arithmetic: nothing is measured, and no published
time of a model is known here.

A rank's time is its FLOPs over its device's speed, never less than reading its weights. With few
rows, some processors of the device have no tile. Kernels between products move memory, through the
device's cache if it fits. The CPU starts one kernel after another meanwhile, as many for few rows
as for many: the longer of both counts. Ulysses waits for both exchanges of every attention. A
ring's messages travel while the attention over the previous block is computed, if the box allows
that; the longer of both counts. Around the ring of a stage the keys and values of all tokens travel
for every patch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain

from ..branches import Batch, BranchPlan, plan_branches
from ..comm.shares import group_speeds, relative, shares_of, stage_speeds
from ..layout import Layout
from ..stages import share_out
from . import messages
from .box import TILE, Box, DeviceSpeeds, SentBytes
from .evaluation_count import ITEM_BYTES
from .job import Job
from .messages import SharedAttention
from .ways import Kept

FP32_BYTES = 4
# Moved for each element of a ring's output at each merge, which is one kernel: it reads what is
# merged so far, in fp32, and the next part, and writes fp32. The first one reads two parts, and the
# last result is read once more and written as a part is.
MERGE_BYTES = FP32_BYTES + ITEM_BYTES + FP32_BYTES
MERGED_BYTES = (ITEM_BYTES - FP32_BYTES) + (FP32_BYTES + ITEM_BYTES)
# Operation by operation, as on a CPU: what is merged times its share, the part in fp32, that times
# its share, and their sum
UNFUSED_MERGE_BYTES = 8 + 6 + 8 + 12
# Kernels that a rank starts beside those of one GPU, a message as one, as its dry run counts them:
# for both exchanges of an attention, more where ranks have unlike parts, for its ring and each step
# of that, and for what a patch keeps of it, more where ranks exchange it.
OF_EXCHANGES, OF_UNLIKE, OF_RING, OF_RING_STEP, OF_PATCH, OF_SHARED_PATCH = 7, 7, 5, 3, 3, 6
# Kernels that take a CPU as long to start as a graph, and copies of a replay's inputs and output.
# A graph took 3.0 us where an addition took 7.4 (lab/docs/CUDA.md), and a kernel of a model in
# Python takes three times as long as that.
OF_GRAPH, OF_INPUTS = 1 / 8, 8
# Of a wave: half of one of qkv, out and up, and of down, 4 times as deep, where a block is
# 3 + 1 + 4 + 4 as wide as hidden.
IDLE = 0.5 * 7 / 12
NOWHERE = Box(name="", devices=(), levels=(), host_bytes_per_s=0.0, hop_s=0.0)  # where bytes are asked for

BlockRange = tuple[int, int]  # of a stage, [first, end)


@dataclass(frozen=True, kw_only=True)
class Costs:
    """The costs of a job's parts on a layout. ``speeds`` has the speed of each rank in percent of
    the fastest; empty if all are alike.
    """

    job: Job
    layout: Layout
    box: Box
    speeds: tuple[int, ...] = ()

    @cached_property
    def stages(self) -> Sequence[BlockRange]:
        """The blocks of each stage; all of them without a pipeline."""
        if self.layout.stages == 1:
            return [(0, len(self.job.whole.block_flops))]
        speeds = stage_speeds(self.layout, self.speeds)
        cut = share_out(self.job.whole.block_flops, self.layout.stages, speeds)
        return [(stage.first, stage.end) for stage in cut]

    @cached_property
    def patches(self) -> int:
        return self.job.patches_of(self.layout.stages)

    @cached_property
    def forwards(self) -> list[list[int]]:
        """The forwards that each group computes in an evaluation: the images of each."""
        planned = branches_of(self.job, self.layout, self.speeds)
        return [
            [share.end - share.start for share in planned.shares if share.group == group]
            for group in range(self.layout.groups)
        ]

    @cached_property
    def attentions_of(self) -> dict[BlockRange, list[tuple[SharedAttention, int]]]:
        """The kinds of attentions of each stage, and how many of each kind it has."""
        kinds = {one: SharedAttention(self.layout, one, self.speeds) for one in {*self.job.whole.attended}}
        found = {}
        for blocks in self.stages:
            counts = Counter(chain(*self.job.whole.attended_by_block[slice(*blocks)]))
            found[blocks] = [(kinds[one], count) for one, count in counts.items()]
        return found

    def blocks_of(self, rank: int) -> BlockRange:
        return self.stages[self.layout.stage(rank)]

    def sharers(self, rank: int, ranks: int) -> float:
        """Return how many of a rank, or of the ``ranks`` neighbours that it is among, would have
        all tokens of its sequence.
        """
        weights = shares_of(self.layout, rank, self.speeds).tokens or (1,) * self.layout.sequence_size
        first = rank % len(weights) // ranks * ranks
        return sum(weights) / sum(weights[first : first + ranks])

    # -- computing

    def computing_s(self, rank: int, share: float) -> float:
        """Return the seconds that a rank computes for ``share`` of an evaluation's tokens."""
        device, blocks, whole = self.box.devices[rank], self.blocks_of(rank), self.job.whole
        own = self.attentions_of[blocks]
        attention = sum(count * self._attention_s(device, rank, one, share) for one, count in own)
        part = share / self.sharers(rank, 1)
        tiles = part * sum(whole.tokens.values()) * whole.hidden / TILE**2
        flops = sum(whole.block_flops[slice(*blocks)]) - sum(count * one.attended.flops for one, count in own)
        matmul = part * flops / device.matmul_flops_per_s / device.busy(tiles, IDLE)
        read = sum(whole.block_weight_bytes[slice(*blocks)]) / device.memory_bytes_per_s
        around = whole.around_flops / device.matmul_flops_per_s
        number = blocks[1] - blocks[0]
        moving = self._moving_s(device, number, part)
        return around + max(matmul, read) + attention + moving + number * device.beside_s

    def _attention_s(self, device: DeviceSpeeds, rank: int, one: SharedAttention, share: float) -> float:
        """Return the seconds of a rank's part of one attention, of ``share`` of all tokens to all
        of them.
        """
        attended, heads = one.attended, one.heads[rank]
        part = share / self.sharers(rank, self.layout.ulysses)
        seconds = part * attended.flops * heads / attended.heads / device.attention_flops_per_s
        return seconds / device.busy(part * attended.tokens * heads / TILE)

    def _moving_s(self, device: DeviceSpeeds, blocks: int, part: float) -> float:
        """Return the seconds of kernels beside products and attentions, for ``part`` of all rows.
        Each block is taken to have as many.
        """
        whole = self.job.whole
        return (
            blocks
            / len(whole.block_flops)
            * sum(kernels * device.moving_s(part * nbytes) for nbytes, kernels in whole.activations.moved)
        )

    # -- messages

    def ulysses_s(self, blocks: BlockRange, share: float) -> float:
        """Return the seconds of the exchanges of a stage's attentions."""
        if self.layout.ulysses == 1:
            return 0.0
        seconds = 0.0
        for one, count in self.attentions_of[blocks]:
            for sent in (one.heads_for_tokens(), one.tokens_for_heads()):
                seconds += count * self.box.seconds(
                    [message._replace(nbytes=share * message.nbytes) for message in sent],
                    self.box.exchange_s(self.layout.ulysses),
                )
        return seconds

    def ring_s(self, ranks: Sequence[int], share: float) -> float:
        """Return the seconds that the slowest of these ranks, which have the same blocks, waits for
        keys and values, and merges parts. The keys and values of all tokens travel, whatever
        ``share`` of the tokens attends; the fullest block has the fresh rows of a patch beside the
        kept ones.
        """
        if self.layout.ring == 1:
            return 0.0
        steps, full, seconds = self.layout.ring - 1, 1 + share * (share < 1), dict.fromkeys(ranks, 0.0)
        for one, count in self.attentions_of[self.blocks_of(ranks[0])]:
            travels = self.box.seconds(
                [message._replace(nbytes=full * message.nbytes) for message in one.ring_step()]
            )
            merged = share * one.output_elements * (MERGE_BYTES * steps + MERGED_BYTES)
            for rank in ranks:
                device, covered = self.box.devices[rank], 0.0
                if self.box.overlaps:
                    covered = self._attention_s(device, rank, one, share) / self.layout.ring
                merging = merged / (device.merge_bytes_per_s or device.memory_bytes_per_s)
                seconds[rank] += count * (steps * max(0.0, travels - covered) + merging)
        return max(seconds.values())

    def stage_s(self, share: float) -> float:
        """Return the seconds of the hidden rows' way to the next stage."""
        return self.box.seconds(messages.stage_step(self.layout, share * self._hidden_bytes))

    @property
    def _hidden_bytes(self) -> int:
        return sum(self.job.whole.tokens.values()) * self.job.whole.hidden * ITEM_BYTES

    def sent_by(self, rank: int) -> dict[str, int]:
        """Return the bytes that a rank sends in an evaluation of one branch, by axis."""
        blocks = self.blocks_of(rank)
        own, is_last = self.attentions_of[blocks], blocks[1] == len(self.job.whole.block_flops)
        return {
            "ulysses": sum(count * one.exchanged_bytes[rank] for one, count in own),
            "ring": self.patches * sum(count * one.passed_bytes(rank) for one, count in own),
            "pipefusion": 0 if is_last else self._hidden_bytes // self.layout.sequence_size,
        }

    # -- memory

    def activation_bytes(self, blocks: BlockRange, forwards: Sequence[int]) -> int:
        """Return the bytes that a rank holds beside weights: the tensors of its group's largest
        forward, of so many images each in ``forwards``, uncut in a pipeline's warm-up, and buffers
        for messages, keys and values.
        """
        layout, own = self.layout, self.attentions_of[blocks]
        elements = max((one.output_elements for one, _ in own), default=0)
        buffers = 8 * elements * ITEM_BYTES * (layout.ulysses > 1)
        buffers += (6 * ITEM_BYTES + 2 * FP32_BYTES) * elements * (layout.ring > 1)
        held = sum(
            count * one.attended.tokens * one.attended.heads * one.attended.head_dim for one, count in own
        )
        places = min(
            self.sharers(rank, layout.ulysses) for rank in range(0, layout.world_size, layout.ulysses)
        )
        kept = int(2 * held * ITEM_BYTES / places) // layout.ulysses * sum(forwards) * (layout.stages > 1)
        # So many ranks like the fullest one would have all tokens
        fewest = min(self.sharers(rank, 1) for rank in range(layout.world_size))
        peak = int(self.job.whole.activations.peak_bytes // fewest)
        return max(forwards, default=0) * (peak + buffers) + kept


def launches_of(costs: Costs, rank: int) -> int:
    """Return the kernels that a rank starts for one forward, or for one patch."""
    layout, (first, end), of = costs.layout, costs.blocks_of(rank), costs.job.whole.block_launches
    if not of:
        return 0
    each = OF_RING * (layout.ring > 1) + OF_RING_STEP * (layout.ring - 1)
    each += (OF_PATCH + OF_SHARED_PATCH * (layout.ulysses > 1)) * (layout.stages > 1)
    more = sum(
        count * (each + (OF_EXCHANGES + OF_UNLIKE * one.is_unlike) * (layout.ulysses > 1))
        for one, count in costs.attentions_of[first, end]
    )
    return sum(of[first:end]) + of[-1] + more


def replay_launches_of(costs: Costs, rank: int) -> float:
    """Return what a rank starts to replay CUDA graphs of one forward, in kernels: messages, waits
    for those of a ring, a look at a flag for each attention, and the graphs between them.
    """
    layout, hops = costs.layout, costs.layout.ring - 1
    shares = layout.sequence_size > 1
    attentions = shares * sum(count for _, count in costs.attentions_of[costs.blocks_of(rank)])
    messages = attentions * (2 * (layout.ulysses > 1) + hops) + shares
    graphs = messages + attentions * (hops > 0) + 1
    return messages + attentions * (hops + 1) + OF_INPUTS + OF_GRAPH * graphs


def starting_s(costs: Costs, rank: int, kept: Kept) -> float:
    replays = costs.job.replays and kept == "whole" and costs.layout.stages == 1
    return (replay_launches_of if replays else launches_of)(costs, rank) * costs.box.devices[rank].launch_s


def latent_s(costs: Costs) -> tuple[float, float]:
    """Return the seconds of a latent's way from ComfyUI's machine to others with ranks of its
    group, and of its output's back. Those of a patch are as large.
    """
    layout, box, nbytes = costs.layout, costs.box, costs.job.whole.activations.out_bytes
    far = [rank for rank in range(layout.world_size) if box.spans((0, rank))]
    there = {(rank // layout.group_size, rank // box.machine): SentBytes(0, rank, nbytes) for rank in far}
    back = [SentBytes(rank, 0, nbytes) for rank in far if layout.writes(rank)]
    return box.seconds(there.values()), box.seconds(back)


def costs_of(job: Job, layout: Layout, box: Box, kept: Kept = "whole") -> Costs:
    """Return the costs of a layout. Its groups share a sequence if runs in this layout have them do
    so.
    """
    own = box.first(layout.world_size)
    speeds = relative([device.matmul_flops_per_s for device in own.devices])
    apart = kept == "sharded" or own.spans(range(layout.world_size))
    return Costs(job=job, layout=joined_layout(job, layout, speeds, apart), box=own, speeds=speeds)


def joined_layout(job: Job, layout: Layout, speeds: Sequence[int], apart: bool = False) -> Layout:
    """Return a layout's ranks with as many groups to a sequence as a run of the job joins. Groups
    that share weights out or are on several machines stay ``apart``, and those of a forward that
    cannot be cut.
    """
    widths = layout.widths if job.whole.attended and not apart else layout.widths[:1]
    return layout.joined(branches_of(job, layout, speeds, widths).width)


def branches_of(job: Job, layout: Layout, speeds: Sequence[int], widths: Sequence[int] = (1,)) -> BranchPlan:
    """Share out a job's branches and images over a layout's groups, as its runs do."""
    return plan_branches(
        [Batch(1, job.batch, 1.0, job.together)] * job.branches,
        layout.groups,
        widths,
        group_speeds(speeds, layout.groups),
    )
