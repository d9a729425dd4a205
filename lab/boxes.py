"""Boxes that nobody here owns, by their names, of published figures."""

from __future__ import annotations

import re
from dataclasses import replace

from ..parallel_runtime.errors import LayoutError
from ..parallel_runtime.planner.box import Box
from ..parallel_runtime.planner.published_boxes import (
    LINKS,
    box_of,
    device,
    figures,
    links,
    network_of,
    slowest_link,
)

DEVICES = r"\d+x\w+(?:\+\d+x\w+)*"
NAME = re.compile(rf"(?:(?P<machines>\d+)x)?(?P<devices>{DEVICES})-(?P<link>\w+)(?:-(?P<network>[1-9]\d*)G)?")
FORM = (
    "COUNTxDEVICE-LINK, as 8xL40-PCIe or 1xRTX4090+1xRTX3090-PCIe, or with machines before and their network"
    " behind it, as 2x8xL40-PCIe-100G"
)


def published_box(name: str) -> Box:
    """Parse ``8xL40-PCIe``, ``1xRTX4090+1xRTX3090-PCIe`` or ``2x8xL40-PCIe-100G``. Raises
    LayoutError with what is known.
    """
    found = NAME.fullmatch(name)
    if found is None:
        raise LayoutError(f"{name!r} is no box: write {FORM}.")
    known, link, network = figures(), found["link"], found["network"]
    several = [
        (kind, int(count)) for count, kind in (one.split("x", 1) for one in found["devices"].split("+"))
    ]
    for word, among in (*((kind, known["devices"]) for kind, _ in several), (link, LINKS)):
        if word not in among:
            raise LayoutError(f"{word} of the box {name} is not known: choose from {', '.join(among)}.")
    machines, count = int(found["machines"] or 1), sum(count for _, count in several)
    if not 0 < machines * count <= 64 or (machines > 1) != (network is not None):
        raise LayoutError(f"{name!r} is no box: write {FORM}, with 64 devices at most.")
    kinds = [kind for kind, count in several for _ in range(count)] * machines
    figure = slowest_link(kinds)
    made = box_of(name, tuple(map(device, kinds)), figure, links(figure, link, count))
    if not network:
        return made
    return replace(made, levels=(*made.levels, network_of(count, int(network))), machine=count)
