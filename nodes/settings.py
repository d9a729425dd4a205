"""Defines the inputs of PipeMesh Pool: the values that each takes, the check of all values, and the
choice that they make.

The node's sockets and the checks read the same definitions, because ComfyUI checks no value that
comes over a link, and no input that the node's own validation asks for. No process starts here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from reprlib import repr as short
from typing import Any

from ..parallel_runtime.client.patching import Patching
from ..parallel_runtime.comm.shares import shares_of, stage_speeds
from ..parallel_runtime.errors import LayoutError
from ..parallel_runtime.layout import AXES, Layout, in_one_sequence
from ..parallel_runtime.planner.ways import ASKED
from ..pool.devices import Device, Placement, place
from .auto.switch import ALL_SOONEST, FIRST_SOONEST

MOST_DIGITS = 6  # of a number of blocks
BY_HAND, AUTO = "by hand", "auto"
EXACT, APPROXIMATE = "exact", "approximate allowed"
CPU_RANKS = 2  # where ComfyUI computes on the CPU
FOR_EVERY_LAYOUT = {"devices", "layout", "quality", "weights", "queue"}
PLACED_BY = {"layout", "devices", *(axis.name for axis in AXES)}  # what decides which GPU each rank has


@dataclass(frozen=True)
class Takes:
    """The values that an input takes, for its socket and its check: one of ``options``. Without
    options it takes a number from ``least`` to ``most`` if the default is a number, else any text.
    """

    default: str | int
    least: int = 0
    most: int = 0
    options: tuple[str, ...] = ()
    advanced: bool | None = None

    def check(self, name: str, value: object) -> None:
        """Raises LayoutError."""
        said, least, most = f"{name} {short(value)}", self.least, self.most
        if self.options:
            if value not in self.options:
                known = f"{', '.join(self.options[:-1])} or {self.options[-1]}"
                raise LayoutError(f"{said} is not known: choose {known}.")
        elif isinstance(self.default, str):
            if not isinstance(value, str):
                raise LayoutError(f"{said} is no text: connect text, or type it in.")
        elif not isinstance(value, int) or isinstance(value, bool):
            raise LayoutError(f"{said} is no whole number: choose one from {least} to {most}.")
        elif not least <= value <= most:
            raise LayoutError(f"{said} is out of range: choose {least} to {most}.")


def taking(takes: Takes) -> Any:
    return field(default=takes.default, metadata={"takes": takes})


@dataclass(frozen=True, kw_only=True)
class PoolSettings:
    """The inputs of PipeMesh Pool, in the order of its sockets: first the inputs for every layout,
    then the degrees and sizes of a layout by hand. ``checked`` makes one. Labels and tooltips are
    in ``locales/``.
    """

    devices: str = taking(Takes("auto"))
    layout: str = taking(Takes(AUTO, options=(AUTO, BY_HAND)))
    quality: str = taking(Takes(EXACT, options=(EXACT, APPROXIMATE)))
    weights: str = taking(Takes(ASKED[0], options=ASKED))
    ulysses: int = taking(Takes(2, 1, 32))
    ring: int = taking(Takes(1, 1, 32))
    cfg: int = taking(Takes(1, 1, 32))
    data: int = taking(Takes(1, 1, 32))
    pipefusion: int = taking(Takes(1, 1, 32))
    patches: int = taking(Takes(0, 0, 64, advanced=True))
    warm_up: int = taking(Takes(1, 1, 10000, advanced=True))
    stages: str = taking(Takes("", advanced=True))
    backend: str = taking(Takes("auto", options=("auto", "nccl", "gloo"), advanced=True))
    queue: str = taking(Takes(ALL_SOONEST, options=(ALL_SOONEST, FIRST_SOONEST)))

    @property
    def allows_approximate(self) -> bool:
        """Whether a layout that changes the image a little may be chosen. By hand none is chosen:
        ``pipefusion`` says what the user wants.
        """
        return self.layout == AUTO and self.quality == APPROXIMATE

    @classmethod
    def inputs(cls) -> dict[str, Takes]:
        """Return the definition of each input, in the order of the sockets."""
        return {one.name: one.metadata["takes"] for one in fields(cls)}

    @classmethod
    def checked(cls, values: Mapping[str, Any]) -> PoolSettings:
        """Check each of ``values`` and fill in the default of each input that is left out. Raises
        LayoutError.
        """
        inputs = cls.inputs()
        for name, value in values.items():
            if name not in inputs:
                raise LayoutError(
                    f"PipeMesh Pool has no input {name}, only {', '.join(inputs)}: remove the link to it, or"
                    " add the node again."
                )
            inputs[name].check(name, value)
        by_hand = [name for name in values if name not in FOR_EVERY_LAYOUT]
        if by_hand and "layout" not in values:
            raise LayoutError(
                f"{by_hand[0]} counts only with layout {BY_HAND}: give layout too, or leave out"
                f" {' and '.join(by_hand)}."
            )
        return cls(**values)

    def degrees(self, gpus: tuple[Device, ...] = ()) -> Layout:
        """Return the layout that is asked for. If ``layout`` is auto, it is one sequence over the
        chosen ``gpus``. Raises LayoutError.
        """
        if self.layout == AUTO:
            return in_one_sequence(how_many(self.devices, gpus))
        return Layout(**{axis.name: getattr(self, axis.name) for axis in AXES})

    def place(self, gpus: tuple[Device, ...], own: str) -> Placement:
        """``own``: the device that ComfyUI computes on. Raises LayoutError with the equation that
        fails.
        """
        return place(
            self.degrees(gpus), self.devices, "auto" if self.layout == AUTO else self.backend, gpus, own
        )

    def patching(self) -> Patching | None:
        """Return how stages share out patches and blocks; None without stages. ``patches`` 0 means
        one patch more than stages, so that every stage has a patch while one patch is in the UI: 5
        for 4 stages. Raises LayoutError.
        """
        stages, sizes = self.pipefusion, blocks_of_stages(self.stages)
        if stages == 1 or self.layout == AUTO:
            return None
        if sizes and len(sizes) != stages:
            raise LayoutError(
                f"stages {self.stages} has {len(sizes)} number{'s' * (len(sizes) > 1)}, and pipefusion is"
                f" {stages}: write one number of blocks for each stage, or leave stages empty."
            )
        if self.patches and self.patches < stages:
            raise LayoutError(
                f"patches {self.patches}, pipefusion {stages}: some stages would always wait, choose at least"
                " as many patches as stages."
            )
        return Patching(self.patches or stages + 1, self.warm_up, sizes)


def how_many(devices: str, gpus: tuple[Device, ...]) -> int:
    """Count the devices that a text lists; ``auto`` stands for all GPUs."""
    names = [name.strip() for name in devices.split(",") if name.strip()] or ["auto"]
    return len(gpus) or CPU_RANKS if names == ["auto"] else CPU_RANKS if names == ["cpu"] else len(names)


def blocks_of_stages(text: str) -> tuple[int, ...]:
    """Parse ``20,37``. Raises LayoutError."""
    counts = [count.strip() for count in text.split(",")] if text.strip() else []
    if not all(count.isdecimal() and len(count) <= MOST_DIGITS and int(count) for count in counts):
        raise LayoutError(
            f"stages {short(text)} is no list of block counts: write how many blocks each stage gets, for"
            " example 20,37, or leave stages empty."
        )
    return tuple(map(int, counts))


@dataclass(frozen=True)
class Choice:
    """The output of PipeMesh Pool. The placement alone says which pool: another ``patching``, or
    other ``weights``, need no other ranks. ``allows_approximate``: a layout that PipeMesh chooses
    may change the image a little. ``is_open``: the layout is chosen for each sampling, when it
    starts; the placement has all devices that may take part. ``looks_ahead``: prompts that wait may
    be sampled beside the one that runs; None: as the setting says when it does.
    """

    placement: Placement
    patching: Patching | None = None
    weights: str = ASKED[0]
    allows_approximate: bool = False
    is_open: bool = False
    looks_ahead: bool | None = None

    def covers(self, placement: Placement) -> bool:
        """Return whether a pool of this placement is one that this choice may have led to."""
        mine = self.placement
        return placement == mine or (
            self.is_open and placement.devices == mine.devices[: len(placement.devices)]
        )

    def held_on(self, device: str) -> float:
        """Return the part of a model's weights that ``device`` holds. It is an estimate for
        stages, whose blocks differ in size.
        """
        layout, stages = self.placement.layout, self.patching.stages if self.patching else ()
        sizes = stages or stage_speeds(layout, self.placement.speeds) or (1,) * layout.stages
        here = {layout.stage(rank) for rank, one in enumerate(self.placement.devices) if one.name == device}
        return sum(sizes[stage] for stage in here) / sum(sizes)

    def computed_on(self, device: str) -> float:
        """Return the part of an evaluation's activations that ``device`` holds. Every stage holds
        those of a whole evaluation, because the first evaluations are whole.
        """
        layout, speeds = self.placement.layout, self.placement.speeds
        size = layout.sequence_size
        part = 0.0
        for rank, one in enumerate(self.placement.devices):
            tokens = shares_of(layout, rank, speeds).tokens or (1,) * size
            part += (one.name == device) * tokens[rank % size] / sum(tokens)
        return part / layout.groups
