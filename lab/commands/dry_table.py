"""The table of released models in lab/docs/CUDA.md: of each layout the rank with the most, as the
dry run counts it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from ...parallel_runtime.layout import Layout

HEAD = (
    "| Model and request | Layout | Weights, GiB | TFLOP | Sent, MiB | Peak, GiB |",
    "|---|---|---|---|---|---|",
)
GIB, MIB = 1 << 30, 1 << 20

Record = Mapping[str, Any]  # as ``dryrun --json`` has them


def lines(records: Sequence[Record]) -> list[str]:
    """Return the table's lines, the model where it changes."""
    before = ""
    found: list[str] = list(HEAD)
    for (title, layout), cells in rows(records).items():
        found.append(f"| {title if title != before else ''} | {layout} | {' | '.join(cells)} |")
        before = title
    return found


def rows(records: Sequence[Record]) -> dict[tuple[str, str], tuple[str, ...]]:
    """(model and request, layout) -> figures, where all ranks of the layout are among ``records``
    and keep their weights whole.
    """
    kept = [
        one for one in records if one["title"] and "flops" in one and one.get("weights", "whole") == "whole"
    ]
    found: dict[tuple[str, str], tuple[str, ...]] = {}
    for _, same in groupby(kept, key=lambda one: (one["model"], one["equation"])):
        ranks = list(same)
        if len({one["rank"] for one in ranks}) == Layout(**ranks[0]["layout"]).world_size:
            found[title_of(ranks[0]), layout_of(ranks[0])] = figures(ranks)
    return found


def written(document: str) -> Iterator[tuple[tuple[str, str], tuple[str, ...]]]:
    """Yield the rows of the table in a document."""
    title, is_table = "", False
    for line in document.splitlines():
        if is_table and not line.startswith("|"):
            return
        if is_table and line != HEAD[1]:
            model, layout, *cells = (cell.strip() for cell in line.strip("|").split("|"))
            title = model or title
            yield (title, layout), tuple(cells)
        is_table = is_table or line == HEAD[0]


def figures(ranks: Sequence[Record]) -> tuple[str, ...]:
    tera = max(one["flops"] for one in ranks) / 1e12
    sent = max(sum(one["sent_bytes"].values()) for one in ranks)
    weights, peak = (max(one[name] for one in ranks) / GIB for name in ("weight_bytes", "peak_bytes"))
    return (
        f"{weights:.1f}",
        f"{tera:.2f}" if tera < 100 else f"{tera:.0f}",
        f"{sent / MIB:.0f}",
        f"{peak:.2f}",
    )


def title_of(record: Record) -> str:
    width, height, frames = record["extent"]
    return f"{record['title']}, {width} x {height}" + (f", {frames} frames" if frames > 1 else "")


def layout_of(record: Record) -> str:
    return (
        " x ".join(f"{axis} {degree}" for axis, degree in record["layout"].items() if degree > 1) or "one GPU"
    )
