"""Draw when the stages of a pipeline were at work in a run."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

from ...parallel_runtime.client.run import Evaluation

WIDTH, ROW, BAR, MARGIN, FOOT = 1000, 44, 30, 10, 80
FONT, LEGEND, LONG_LEGEND = 22, 118, 148
WHITE, INK, WHOLE = "#ffffff", "#222222", "#8a8f98"
PATCHES = ("#2a78d6", "#e8833a", "#3a9d5d", "#b04ac0", "#c9a227", "#1fa3a3")
STRIP = 8  # of a bar's height: a wait for messages
PANEL = Path(__file__).resolve().parents[2] / "web" / "panel.js"


def panel_colours(panel: Path = PANEL) -> dict[str, str]:
    """Returns the colours of waits in the panel, by what the messages are for."""
    (table,) = re.findall(r"^const AXES = \{(.*?)\};", panel.read_text(encoding="utf-8"), re.M)
    return dict(re.findall(r'(\w+): "(#\w+)"', table))


def draw_run(names: Sequence[str], evaluations: Sequence[Evaluation]) -> Image.Image | None:
    """Draw a row for each rank and in it a bar for each patch, at the times when the rank computed
    it. A strip before a bar is as long as the rank waited for messages of it, by axis. None if the
    run was not sampled in patches.
    """
    parts = [one.part for one in evaluations if one.part is not None]
    if not parts:
        return None
    spans = [span for one in evaluations for span in one.spans.values()]
    begin, end = min(span.came_in_s for span in spans), max(span.ended_s for span in spans)
    font, of_waits = ImageFont.load_default(FONT), panel_colours()
    first = bars_from(names)
    scale = (WIDTH - MARGIN - first) / (end - begin)
    starts = sorted({part.patch[0] for part in parts if part.patch})
    colours = {start: PATCHES[index % len(PATCHES)] for index, start in enumerate(starts)}
    image = Image.new("RGB", (WIDTH, ROW * len(names) + FOOT), WHITE)
    draw = ImageDraw.Draw(image)
    for row, name in enumerate(names):
        top = ROW * row + 8
        draw.text((MARGIN, top + BAR / 2), name, INK, font, anchor="lm")
        for one, part in zip(evaluations, parts, strict=True):
            if row not in one.spans:
                continue
            span = one.spans[row]
            left, width = first + (span.came_in_s - begin) * scale, span.busy_s * scale
            colour = colours[part.patch[0]] if part.patch else WHOLE
            draw.rectangle((left, top, left + max(0, width - 1), top + BAR), colour)
            for axis in of_waits:
                right, left = left, max(first, left - span.by_axis.get(axis, 0.0) * scale)
                if right - left >= 1:
                    draw.rectangle((left, top + BAR - STRIP, right - 1, top + BAR), of_waits[axis])
    foot = image.height - 20
    named = [(colour, f"patch {index}") for index, colour in enumerate(colours.values())]
    if len(named) > len(PATCHES):
        named = [(WHITE, f"{len(named)} patches, colours in turn")]
    draw_legend(draw, foot - 32, LEGEND, [(WHOLE, "whole"), *named])
    waits = {axis for span in spans for axis, seconds in span.by_axis.items() if seconds}
    waited_for = [(colour, axis) for axis, colour in of_waits.items() if axis in waits]
    draw_legend(draw, foot, LONG_LEGEND, [(WHITE, "waits for"), *waited_for] if waited_for else [])
    draw.text((WIDTH - MARGIN, foot), f"{end - begin:.2f} s", INK, font, anchor="rm")
    return image


def draw_legend(
    draw: ImageDraw.ImageDraw, middle: float, width: int, named: Sequence[tuple[str, str]]
) -> None:
    """Draw a line of colours and their names, each in so much room."""
    font = ImageFont.load_default(FONT)
    for index, (colour, label) in enumerate(named):
        left = MARGIN + width * index
        draw.rectangle((left, middle - 9, left + 18, middle + 9), colour)
        draw.text((left + 26, middle), label, INK, font, anchor="lm")


def bars_from(names: Sequence[str]) -> int:
    """Return the column where the bars begin: behind the longest name."""
    return 2 * MARGIN + math.ceil(max(map(ImageFont.load_default(FONT).getlength, names)))
