"""When the stages of a pipeline were at work: how busy they were, and a picture of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

WIDTH, ROW, BAR, LEFT = 1000, 30, 20, 110
WHOLE = "#8a8f98"
PATCHES = ("#2a78d6", "#e8833a", "#3a9d5d", "#b04ac0", "#c9a227", "#1fa3a3")


@dataclass(frozen=True)
class Span:
    """When a rank was at work on an evaluation, by its host's monotonic clock, and how long it waited for others meanwhile."""

    began_s: float
    ended_s: float
    waited_s: float

    @property
    def busy_s(self) -> float:
        return self.ended_s - self.began_s - self.waited_s

    @property
    def came_in_s(self) -> float:
        """When there was something to compute: a stage waits before all else."""
        return self.began_s + self.waited_s


def busy_shares(submissions: Sequence[Sequence[Span]]) -> list[float]:
    """Of each rank, the share of the time from the first to the last of these submissions in which it computed."""
    ranks = list(zip(*submissions, strict=True))
    if not ranks:
        return []
    whole = max(span.ended_s for rank in ranks for span in rank) - min(span.came_in_s for rank in ranks for span in rank)
    return [sum(span.busy_s for span in rank) / whole for rank in ranks]


def timeline(names: Sequence[str], submissions: Sequence[Sequence[Span]], patches: Sequence[int | None]) -> str:
    """An SVG: a row per rank, a bar for every submission. ``patches``: the first token of each one's patch; None: all of them."""
    spans = [span for ranks in submissions for span in ranks]
    begin, end = min(span.came_in_s for span in spans), max(span.ended_s for span in spans)
    scale = (WIDTH - LEFT - 10) / (end - begin)
    colours = {start: PATCHES[index % len(PATCHES)] for index, start in enumerate(sorted({p for p in patches if p is not None}))}
    height = ROW * len(names) + 34
    drawn = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" font-size="13">']
    drawn.append(f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>')
    for row, name in enumerate(names):
        top = ROW * row + 8
        drawn.append(f'<text x="8" y="{top + 15}" fill="#222222">{escape(name)}</text>')
        for ranks, patch in zip(submissions, patches, strict=True):
            span = ranks[row]
            left, width = LEFT + (span.came_in_s - begin) * scale, max(0.5, span.busy_s * scale - 0.4)
            colour = WHOLE if patch is None else colours[patch]
            drawn.append(f'<rect x="{left:.2f}" y="{top}" width="{width:.2f}" height="{BAR}" fill="{colour}"/>')
    labels = [(WHOLE, "whole"), *((colour, f"patch {index}") for index, colour in enumerate(colours.values()))]
    for index, (colour, label) in enumerate(labels):
        drawn.append(f'<rect x="{LEFT + 90 * index}" y="{height - 20}" width="12" height="12" fill="{colour}"/>')
        drawn.append(f'<text x="{LEFT + 90 * index + 17}" y="{height - 9}" fill="#222222">{label}</text>')
    drawn.append(f'<text x="{WIDTH - 10}" y="{height - 9}" text-anchor="end" fill="#222222">{end - begin:.2f} s</text></svg>')
    return "\n".join(drawn) + "\n"
