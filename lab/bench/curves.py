"""Draw small multiples: panels with the same axes, each with a few lines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from PIL import Image, ImageDraw

COLOURS = ("#3054dc", "#d0602c", "#2c8a4b", "#8a4bc0")
WIDTH, HEIGHT, GAP = 190, 120, 34  # of a panel's plot; pixels between two
LEFT, TOP = 40, 54
STEP = 10.0  # between two grid lines


@dataclass(frozen=True)
class Panel:
    """``lines``: by their names, y by x."""

    title: str
    lines: Mapping[str, Mapping[int, float]]


def draw_panels(title: str, panels: Sequence[Sequence[Panel]], xs: Sequence[int]) -> Image.Image:
    """Draw rows of panels. ``xs`` lie evenly on the axis; the axis of y is cut to what there is."""
    values = [
        y for row in panels for panel in row for line in panel.lines.values() for y in line.values()
    ] or [0.0]
    low, high = STEP * (min(values) // STEP), STEP * (max(values) // STEP + 1)
    columns = max(map(len, panels))
    picture = Image.new("RGB", (LEFT + columns * (WIDTH + GAP), TOP + len(panels) * (HEIGHT + GAP)), "white")
    pen = ImageDraw.Draw(picture)
    pen.text((LEFT, 8), title, fill="black")
    names = list(dict.fromkeys(name for row in panels for panel in row for name in panel.lines))
    for index, name in enumerate(names):
        pen.text((LEFT + 100 * index, 24), f"- {name}", fill=COLOURS[index % len(COLOURS)])
    for row, several in enumerate(panels):
        for column, panel in enumerate(several):
            corner = LEFT + column * (WIDTH + GAP), TOP + row * (HEIGHT + GAP)
            draw_panel(pen, panel, corner, xs, (low, high))
    return picture


def draw_panel(
    pen: ImageDraw.ImageDraw,
    panel: Panel,
    corner: tuple[int, int],
    xs: Sequence[int],
    ends: tuple[float, float],
) -> None:
    left, top = corner
    low, high = ends

    def level(y: float) -> float:
        return top + HEIGHT * (high - y) / (high - low)

    def place(x: int) -> float:
        return left + WIDTH * (xs.index(x) + 0.5) / len(xs)

    pen.text((left, top - 14), panel.title, fill="black")
    for line in range(round((high - low) / STEP) + 1):
        y = low + STEP * line
        pen.line([(left, level(y)), (left + WIDTH, level(y))], fill="#dddddd")
        pen.text((left - 22, level(y) - 6), f"{y:.0f}", fill="#555555")
    for x in xs:
        pen.text((place(x) - 3, top + HEIGHT + 2), str(x), fill="#555555")
    for colour, points in zip(COLOURS, panel.lines.values(), strict=False):
        drawn = [(place(x), level(points[x])) for x in xs if x in points]
        if len(drawn) > 1:
            pen.line(drawn, fill=colour, width=2)
        for x, y in drawn:
            pen.ellipse((x - 3, y - 3, x + 3, y + 3), fill=colour)
