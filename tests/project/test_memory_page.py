"""What is kept from one evaluation, run or model to the next: docs/MEMORY.md names it, with the
bound and the figure that the code has.
"""

import re
from dataclasses import fields

from pipemesh.nodes.status.figures import MemoryFigures, SharedFigures
from pipemesh.parallel_runtime.client import calls, queue_lookahead, runs
from pipemesh.parallel_runtime.comm import stage_link
from pipemesh.parallel_runtime.methods import recordings
from pipemesh.parallel_runtime.wire import arena
from pipemesh.parallel_runtime.worker import device_memory, patched_sets

from ..fixtures import ROOT
from ..kit.kept import bytes_held

PAGE = (ROOT / "docs" / "MEMORY.md").read_text(encoding="utf-8")
ROWS = [line for line in PAGE.splitlines() if line.startswith("| ")][1:]
KEPT = re.compile(r"`(\w+\.\w+)`")
MIB = 1 << 20
# How each row begins, and what of the code its words stand for
BOUNDS = {
    "Memory that": (
        f"{arena.KEPT_ARENA // MIB} MiB and what",
        f"; {arena.KEPT_ARENA // MIB} MiB between runs",
    ),
    "Prompts in it": (f"{arena.KEPT_CONDITIONING // MIB} MiB",),
    "Copies of these": ("the same as above",),
    "A run's prompts": (f"{arena.KEPT_CONDITIONING // MIB} MiB",),
    "Memory of messages": (f"1/{device_memory.LITTLE} of",),
    "CUDA graphs of": (f"{recordings.MOST} of a model", f"1/{device_memory.LITTLE} of"),
    "Sets of patched": (f"1/{1 / patched_sets.SHARE_OF_SETS:.0f} of",),
    "Such sets": (f"1/{1 / patched_sets.SHARE_OF_SETS:.0f} of",),
    "Rows on their way": (f"{stage_link.IN_FLIGHT} messages",),
    "Pictures of the queue": (f"{queue_lookahead.MOST_BYTES >> 30} GiB",),
    "Latents by which": (f"{calls.KEPT_LATENTS // MIB} MiB",),
    "Figures of runs": (f"{runs.KEPT} runs; {runs.MOST_EVALUATIONS} evaluations",),
}
FIGURES = {
    "shared": {one.name for one in fields(SharedFigures)},
    "memory": {one.name for one in fields(MemoryFigures)},
    "queue": {one.name for one in fields(queue_lookahead.Images)},
}


def test_the_page_names_what_is_kept_with_the_bounds_and_the_figures_of_the_code():
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in ROWS]
    assert {one for what, *_ in cells for one in KEPT.findall(what)} == {*bytes_held()}
    for begins, words in BOUNDS.items():
        (most,) = [most for what, _, most, *_ in cells if what.startswith(begins)]
        assert all(one in most for one in words), begins
    counted = {one for *_, figure in cells for one in re.findall(r"`(\w+)\.(\w+)`", figure)}
    assert all(name in FIGURES[figure] for figure, name in counted) and len(counted) >= 8
