"""Predict every legal layout of a box and choose the fastest; say of each other why it loses."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from ..layout import Layout, layouts_of
from ..texts import Text
from .box import Box
from .job import Job
from .keeping import as_gib
from .prediction import Prediction, bytes_needed, predict

EACH = 8  # devices, up to which every number of them is tried
START_S = 10.0  # to start ranks in another layout and load a model there again


@dataclass(frozen=True)
class Row:
    """A layout with its prediction, None if it does not fit. ``loss`` says why it loses, None for
    the best row; ``why`` is its text, empty for the best.
    """

    layout: Layout
    prediction: Prediction | None
    loss: Text | None = None

    @property
    def why(self) -> str:
        return "" if self.loss is None else self.loss.english


@dataclass(frozen=True)
class Plan:
    """All layouts, the fastest that may be chosen first. ``best`` is None where none has room."""

    rows: tuple[Row, ...]

    @property
    def best(self) -> Row | None:
        return next((row for row in self.rows if not row.why), None)

    def alone(self) -> Row | None:
        """Return the row of one device."""
        return next((row for row in self.rows if row.layout.world_size == 1), None)

    def speedup(self, row: Row) -> float | None:
        """Return how many times as fast as one device the row is; None if one device has too little
        memory.
        """
        alone = self.alone()
        if row.prediction is None or alone is None or alone.prediction is None:
            return None
        return alone.prediction.seconds / row.prediction.seconds


def plan(
    job: Job,
    box: Box,
    *,
    allows_approximate: bool = False,
    sizes: tuple[int, ...] = (),
) -> Plan:
    """Predict every legal layout of as many devices as ``sizes_of`` says, or of ``sizes``."""
    rows = []
    for size in sizes or sizes_of(len(box.devices)):
        for layout in legal_layouts(job, size):
            made = predict(job, layout, box)
            rows.append((layout, min(made, key=lambda one: one.seconds) if made else None))
    chosen = fastest(
        [one for _, one in rows if one is not None and (allows_approximate or not one.layout.is_approximate)]
    )
    table = [
        Row(layout, one, reason(job, box, one, layout, chosen, allows_approximate)) for layout, one in rows
    ]
    return Plan(tuple(sorted(table, key=_order)))


def sizes_of(devices: int) -> tuple[int, ...]:
    """Return every number of devices up to eight, from there powers of two, and all of them: three
    prompts may be fastest on three of four.
    """
    powers = {1 << power for power in range(devices.bit_length())}
    return tuple(sorted({*range(1, min(devices, EACH) + 1), *powers, devices}))


def legal_layouts(job: Job, world_size: int) -> Iterator[Layout]:
    """Yield the layouts of so many ranks that this job can use: a stage has a block, a rank a head,
    a group a branch or an image, and there are as many patches as stages. An axis that nothing is
    said of here is not used.
    """
    heads = min((one.heads for one in job.whole.attended), default=1)
    most = {
        "ulysses": heads,
        "ring": world_size if job.whole.attended and job.merges else 1,  # else the forward cannot be cut so
        "pipefusion": len(job.whole.block_flops),
        "cfg": job.branches,
        "data": 1 if job.together else job.batch,
    }
    if job.patches:
        most["pipefusion"] = min(most["pipefusion"], job.patches)
    for layout in layouts_of(world_size):
        if all(degree <= most.get(axis, 1) for axis, degree in layout.degrees().items()):
            yield layout


def with_running(
    job: Job,
    box: Box,
    made: Plan,
    running: Layout | None,
    *,
    allows_approximate: bool = False,
    is_wanted_again: bool = False,
) -> Plan:
    """Return ``made`` with the layout ``running``, whose ranks are up, as its best. Another layout
    stays the best if it saves more in this run than its start takes, and, if the running one
    ``is_wanted_again``, than the second start takes too. Groups that are up share a sequence if
    some of them would wait. One rank, and a layout that this job may not have, are never kept.
    """
    best = made.best
    if running is None or best is None or best.prediction is None:
        return made
    if running == best.layout or running.world_size == 1:
        return made
    if running.is_approximate and not allows_approximate:
        return made
    wide = {running.joined(width) for width in (running.widths if job.whole.attended else running.widths[:1])}
    ways = predict(job, running, box) if wide & {*legal_layouts(job, running.world_size)} else []
    quickest = min(ways, key=lambda one: one.seconds, default=None)
    if quickest is None or (quickest.seconds - best.prediction.seconds) * job.evaluations > START_S * (
        1 + is_wanted_again
    ):
        return made
    loss = Text("lost_running_again" if is_wanted_again else "lost_running")
    others = [replace(row, loss=row.loss or loss) for row in made.rows if row.layout != running]
    return Plan((Row(running, quickest), *others))


def fastest(predictions: list[Prediction]) -> Prediction | None:
    """Of equal ones take the one with fewer ranks, then the one that sends less."""
    return min(
        predictions,
        key=lambda one: (one.seconds, one.layout.world_size, sum(one.sent_bytes.values())),
        default=None,
    )


def reason(
    job: Job,
    box: Box,
    one: Prediction | None,
    layout: Layout,
    chosen: Prediction | None,
    allows_approximate: bool,
) -> Text | None:
    """Return why a layout is not the chosen one; None for the chosen one."""
    if one is None:
        return Text("lost_memory", tuple(map(as_gib, bytes_needed(job, layout, box))))
    if one is chosen:
        return None
    if layout.is_approximate and not allows_approximate:
        return Text("lost_approximate")
    if chosen is None:
        return None
    more = {name: seconds - chosen.parts.get(name, 0.0) for name, seconds in one.parts.items()}
    worst = max(more, key=more.__getitem__)
    return Text(f"lost_{worst}", (f"{1e3 * more[worst]:.1f}",))


def _order(row: Row) -> tuple[bool, bool, float]:
    """Sort the chosen row first, then rows that may be chosen, and rows that do not fit last."""
    return bool(row.why), row.prediction is None, row.prediction.seconds if row.prediction else 0.0
