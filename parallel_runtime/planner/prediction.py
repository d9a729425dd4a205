"""Predict the time and the memory of a job on a layout, from the costs of its parts.

A pipeline lasts as long as its slowest stage has patches to compute, or ComfyUI's process patches
to sample, or as one patch takes through all stages if that is longer; whole evaluations of the
warm-up go through it one stage after the other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from statistics import fmean

from ..layout import Layout
from ..weights.shared_layers import Sharing
from . import messages
from .box import Box
from .cost import NOWHERE, BlockRange, Costs, costs_of, joined_layout, latent_s, starting_s
from .evaluation_count import ModelBytes, Whole
from .job import Job
from .ways import Kept

RESERVED = 1 << 30  # bytes of each device: its context, communicators, fragments
FRAGMENTS = 1 << 29  # bytes that an allocator has no use for, and communicators


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


def predict(job: Job, layout: Layout, box: Box) -> list[Prediction]:
    """Return a prediction for each way to keep weights that the job allows and that fits the
    devices; empty if none fits.
    """
    made = [_kept(costs_of(job, layout, box, kept), kept) for kept in job.keeps]
    return [replace(one, layout=layout) for one in made if one is not None]


def _kept(costs: Costs, kept: Kept) -> Prediction | None:
    """Predict the layout with weights kept in this way; None if they do not fit, or if this way
    gains nothing.
    """
    whole, layout = costs.job.whole, costs.layout
    room, weights, activations = fullest(costs, kept)
    moved_s = 0.0
    if kept == "sharded":
        if layout.sequence_size == 1:
            return None
        moved_s = max(
            sum(
                costs.box.seconds(messages.weights_step(layout, size))
                for size in whole.block_weight_bytes[slice(*blocks)]
            )
            for blocks in costs.stages
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


# -- time


def _waits(costs: Costs, kept: Kept, moved_s: float, computing_s: float) -> float:
    """Return the seconds that a forward waits for weights. Sharded weights are gathered while it
    computes, if the box allows that.
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
    one["launches"] = max(
        0.0, max(starting_s(costs, rank, kept) for rank in ranks) - max(computing) - sum(one.values())
    )
    parts = {name: seconds * max(turns) for name, seconds in one.items()}
    parts["compute"] = fmean(busy) if costs.speeds else fmean(computing) * costs.job.even_turns(costs.layout)
    parts["imbalance"] = max(busy) - parts["compute"]
    hop_s = costs.box.hop_s + max(turns) * sum(latent_s(costs))
    parts["hop"] = hop_s if costs.layout.world_size > 1 else 0.0
    return parts


def _pipeline(costs: Costs, kept: Kept, moved_s: float) -> dict[str, float]:
    """Return the parts of an evaluation in the mean of a run: whole ones first, then patches."""
    job, layout = costs.job, costs.layout
    share = job.share_of_patch(costs.patches)
    # Where speeds are alike, so are the groups
    reach = layout.world_size if costs.speeds else layout.sequence_size
    firsts = [layout.of_stages(rank) for rank in range(reach) if layout.stage(rank) == 0]

    def stage_times(share: float) -> list[dict[str, float]]:
        times = []
        for stage, blocks in enumerate(costs.stages):
            ranks = [of_stages[stage] for of_stages in firsts]
            computing = max(costs.computing_s(rank, share) for rank in ranks)
            one = {
                "compute": computing,
                "ulysses": costs.ulysses_s(blocks, share),
                "ring": costs.ring_s(ranks, share),
                "weights": _waits(costs, kept, moved_s, computing),
            }
            starting = max(starting_s(costs, rank, kept) for rank in ranks)
            times.append({**one, "launches": max(0.0, starting - sum(one.values()))})
        return times

    times = stage_times(share)
    of_patch, of_whole = ([sum(one.values()) for one in of] for of in (times, stage_times(1.0)))
    turns, link_s, host_s = max(turns_of(costs)), costs.stage_s(share), latent_s(costs)
    hop_s = costs.box.hop_s + sum(host_s)
    slowest = max(*of_patch, link_s, *host_s) if costs.box.overlaps else max(of_patch) + link_s
    round_trip = sum(of_patch) + (layout.stages - 1) * link_s + hop_s
    period = turns * max(costs.patches * max(slowest, costs.box.patch_s), round_trip)
    warm_up = sum(of_whole) + (layout.stages - 1) * costs.stage_s(1.0) + (turns - 1) * max(of_whole) + hop_s
    warm = min(job.warm_up, job.evaluations)
    patched = job.evaluations - warm
    run = warm * warm_up + patched * period + (round_trip - slowest if patched else 0.0)
    parts = {
        name: turns * costs.patches * max(one[name] for one in times)
        for name in ("ulysses", "ring", "weights", "launches")
    }
    parts["compute"] = costs.patches * job.even_turns(layout) * fmean(one["compute"] for one in times)
    parts["hop"] = 0.0
    parts["imbalance"] = turns * costs.patches * max(of_patch) - sum(parts.values())
    parts["pipeline"] = run / job.evaluations - sum(parts.values())
    return parts


def turns_of(costs: Costs) -> list[int]:
    """Return how many evaluations, of one branch and image, each group computes in turn."""
    return [sum(forwards) for forwards in costs.forwards]


def sent_bytes(costs: Costs) -> dict[str, int]:
    """Return the bytes of an evaluation by axis, of the rank that sends most."""
    turns = turns_of(costs)
    of_ranks = [
        {
            axis: nbytes * turns[rank // costs.layout.group_size]
            for axis, nbytes in costs.sent_by(rank).items()
            if nbytes
        }
        for rank in range(costs.layout.world_size)
    ]
    return max(of_ranks, key=lambda sent: sum(sent.values()))


# -- memory


def fullest(costs: Costs, kept: Kept) -> tuple[int, int, int]:
    """Return, for the rank with the least to spare, the bytes that its device has for it, the bytes
    of its weights when ``kept`` in this way, and the bytes that it holds beside them.
    """
    whole, layout, there = costs.job.whole, costs.layout, {}
    for rank, device in enumerate(costs.box.devices):
        place = costs.blocks_of(rank), tuple(costs.forwards[rank // layout.group_size])
        there[place] = min(there.get(place, device.memory_bytes), device.memory_bytes)
    found = []
    for (blocks, forwards), memory in there.items():
        room, beside = int(memory) - RESERVED, costs.activation_bytes(blocks, forwards)
        weights = weight_bytes(whole, blocks)
        if kept == "sharded":
            weights = sharded_bytes(whole, layout, blocks)
            if weights > room - beside:
                weights = sharded_bytes(whole, layout, blocks, by_layer=True)
        found.append((room, weights, beside))
    return min(found, key=lambda one: one[0] - one[1] - one[2])


def bytes_needed(job: Job, layout: Layout, box: Box) -> tuple[int, int]:
    """Return the bytes that the tightest rank needs for whole weights, and the bytes of its
    device.
    """
    there, weights, activations = fullest(costs_of(job, layout, box), "whole")
    return weights + activations + RESERVED, there + RESERVED


def weight_bytes(model: ModelBytes, blocks: BlockRange) -> int:
    """Return the bytes of a rank's weights: its blocks, and the layers around all blocks."""
    of_blocks = model.block_weight_bytes
    return model.weight_bytes - sum(of_blocks) + sum(of_blocks[slice(*blocks)])


def sharded_bytes(model: ModelBytes, layout: Layout, blocks: BlockRange, by_layer: bool = False) -> int:
    """Return the bytes of a rank's weights if each rank of a sequence has a shard of every
    block.
    """
    of = model.shareable
    shared = of.around + sum(of.blocks[slice(*blocks)])
    largest, two, pieces = of.largest, of.two, of.layers if by_layer else of.together
    if pieces:
        own = sorted(chain(pieces[-1], *pieces[slice(*blocks)]))
        largest, two = max(own, default=0), sum(own[-2:])  # of a GGUF model no layer is shared
    own_whole = weight_bytes(model, blocks) - shared - of.aside
    return Sharing(own_whole, shared, largest, two, by_layer).held(layout.sequence_size)


def beside_bytes(whole: Whole, layout: Layout, branches: int, batch: int, speeds: Sequence[int] = ()) -> int:
    """Return the bytes that the rank with the most holds beside weights in an evaluation, for its
    device to have them free. ``whole``: of one branch and image.
    """
    job, own = Job(whole=whole, branches=branches, batch=batch), tuple(speeds)
    # Groups of sharded weights stay apart
    ways = [
        Costs(job=job, layout=one, box=NOWHERE, speeds=own)
        for one in (layout, joined_layout(job, layout, own))
    ]
    return FRAGMENTS + max(
        costs.activation_bytes(blocks, forwards)
        for costs in ways
        for blocks in costs.stages
        for forwards in costs.forwards
    )
