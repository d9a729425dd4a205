"""Say why a layout was taken, which share slower devices take of a run, and which causes kept a run
from being faster. All texts exist in every language, but for the reasons that workers give.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from ...parallel_runtime.comm.shares import group_speeds, shares_of, stage_speeds
from ...parallel_runtime.layout import Layout
from ...parallel_runtime.methods.recordings import NOT_ASKED
from ...parallel_runtime.texts import Text
from ...parallel_runtime.wire.messages import Recorded
from ...pool.devices import Placement
from .figures import ModelStatus, RunFigures

WAITED_FOR = 1.2  # a rank that computed so many times as long as the least busy one makes it wait
MUCH = 0.2  # of a run that went into communication
SLOWER = ("sharded", "offloaded")  # ways to keep weights


def why_layout(layout: Layout) -> tuple[Text, ...]:
    """Say the purpose of each axis of a layout."""
    used = tuple(Text(f"why_{axis.name}", (str(getattr(layout, axis.name)),)) for axis in layout.used())
    return used or (Text("why_alone"),)


def slowed(devices: Sequence[str], models: Sequence[ModelStatus], run: RunFigures) -> tuple[Text, ...]:
    """List the causes that kept the ranks on these devices from being faster, the plainest
    first.
    """
    found = []
    if run.exchange_share is not None and run.exchange_share > MUCH:
        found.append(Text("slowed_communication", (percent(run.exchange_share),)))
    if run.busy and max(run.busy) > WAITED_FOR * min(run.busy):
        found.append(Text("slowed_imbalance", (str(run.busy.index(max(run.busy))),)))
    mode, _, reason = run.in_patches.mode.partition(", because of ") if run.in_patches else ("", "", "")
    if mode == "single-timeline" and reason:
        found.append(Text("slowed_single_timeline", (reason,)))
    found += [Text(f"slowed_{one.kept}", (one.title,)) for one in models if one.kept in SLOWER]
    found += [
        Text("slowed_uncompiled", (one.title,))
        for one in models
        if one.kept == "sharded" and one.title == run.to_compile
    ]
    gpus = [name for name in devices if not name.endswith("cpu")]
    shared = [name for name in dict.fromkeys(gpus) if gpus.count(name) > 1]
    return (*found, *(Text("slowed_shared_device", (name,)) for name in shared))


def as_graphs(recorded: Iterable[Recorded | None]) -> tuple[Text, ...]:
    """Say how many evaluations of a model's last run ranks replayed as CUDA graphs, and why they
    computed others, in English. Empty without GPUs, and if nobody asked for graphs.
    """
    told = [one for one in recorded if one is not None and one.why != NOT_ASKED]
    counts = sum(one.replayed for one in told), sum(one.evaluations for one in told)
    replayed = (Text("graphs_replayed", tuple(map(str, counts))),) if counts[1] else ()
    whys = dict.fromkeys(one.why.partition("\n")[0] for one in told if one.why)
    return (*replayed, *(Text("graphs_why", (why,)) for why in whys))


def unlike_shares(placement: Placement) -> tuple[Text, ...]:
    """Say which share each slower rank takes, and why: of the tokens within its sequence, of the
    blocks if it is a stage, of prompts and images if its whole group is slower. Empty if all
    devices are alike.
    """
    if not placement.speeds:
        return ()
    return (*_of_tokens(placement), *_of_stages(placement), *_of_groups(placement))


def _of_tokens(placement: Placement) -> Iterator[Text]:
    layout, speeds = placement.layout, placement.speeds
    size = layout.sequence_size
    for rank, device in enumerate(placement.devices):
        first = rank - rank % size
        tokens = shares_of(layout, rank, speeds).tokens
        own, most = speeds[rank], max(speeds[first : first + size])
        if tokens and own < most and tokens[rank - first] * size < sum(tokens):
            fastest = placement.devices[speeds.index(most, first)].name
            share = percent(tokens[rank - first] / sum(tokens))
            yield Text("share_tokens", (device.name, share, f"{most / own:.1f}", fastest))


def _of_stages(placement: Placement) -> Iterator[Text]:
    speeds = stage_speeds(placement.layout, placement.speeds)
    for stage, speed in enumerate(speeds):
        if speed < max(speeds):
            yield Text("share_stage", (str(stage), f"{max(speeds) / speed:.1f}"))


def _of_groups(placement: Placement) -> Iterator[Text]:
    speeds = group_speeds(placement.speeds, placement.layout.groups)
    for group, speed in enumerate(speeds):
        if speed < max(speeds):
            names = dict.fromkeys(placement.devices[rank].name for rank in placement.layout.members(group))
            yield Text("share_group", (", ".join(names), f"{max(speeds) / speed:.1f}"))


def percent(share: float) -> str:
    return f"{100 * share:.0f} %"
