"""The figures of a pipelined run, and the picture of when its stages were at work."""

from itertools import accumulate, groupby

import pytest
from PIL import ImageColor
from pipemesh.lab.bench import pipefusion
from pipemesh.lab.bench.run_picture import (
    BAR,
    FOOT,
    MARGIN,
    PATCHES,
    ROW,
    WHITE,
    WHOLE,
    WIDTH,
    bars_from,
    draw_run,
    panel_colours,
)
from pipemesh.parallel_runtime.client.run import Evaluation
from pipemesh.parallel_runtime.occupancy import Span
from pipemesh.parallel_runtime.patches import Part

NAMES = ["0 cpu", "1 node1/cuda:0"]
# Rank 1 takes 6, then 3 of the seconds from 0 to 13
RUN = [{0: Span(0, 4, 0), 1: Span(0, 9, 3)}, {0: Span(4, 8, 0), 1: Span(9, 13, 1)}]


def test_the_pipelines_figures_are_those_of_their_definitions():
    patched = evaluations(RUN, (0, 4, False), (4, 4, True))
    figures = pipefusion.figures_of([evaluation(RUN[0], None), *patched], "free")
    assert figures["occupancy"] == pytest.approx(8 / 13)
    assert figures["bubble_ms"] == pytest.approx(1000.0), "rank 1 is idle from 9 to 10"
    assert figures["sent_bytes"] == 2 * 7
    assert pipefusion.formula_bytes(4, 1024, 256, 4) == (1024 + 3) * 256 * 4
    assert pipefusion.ideal_occupancy(2) == 54 / 55
    # 10 of the whole evaluation, then 4 + 6 + 3; here they overlap
    assert figures["of_schedule"] == pytest.approx(23 / 13)
    times = {"stock": 20.0, "alone": 21.0, "free": 12.0, "single": 15.0}
    assert pipefusion.speedup("single")([times]) == pytest.approx(20 / 15)
    assert pipefusion.patch_tax([times]) == pytest.approx(21 / 20)


def evaluation(spans, patch):
    return Evaluation(0.1, 0.0, 0.0, 7, part=Part(1, 0, patch), spans=spans)


def evaluations(run, *cut):
    return [evaluation(spans, patch) for spans, patch in zip(run, cut, strict=True)]


def colours(*names):
    return [ImageColor.getrgb(name) for name in names]


def bars_of(image, row, height=BAR // 2):
    """(colour, from, to) of every bar in a row, in seconds of the 13 that the picture spans."""
    pixels = [image.getpixel((x, ROW * row + 8 + height)) for x in range(bars_from(NAMES), WIDTH - MARGIN)]
    ends = [(colour, len(list(run))) for colour, run in groupby(pixels)]
    at = list(accumulate((count for _, count in ends), initial=0))
    scale = 13 / (WIDTH - MARGIN - bars_from(NAMES))
    return [
        (colour, at[i] * scale, at[i + 1] * scale)
        for i, (colour, _) in enumerate(ends)
        if colour != ImageColor.getrgb(WHITE)
    ]


def test_the_picture_has_a_bar_for_every_rank_and_patch_where_it_computed():
    image = draw_run(NAMES, evaluations(RUN, None, (7, 9, True)))
    for row, times in enumerate(([(0, 4), (4, 8)], [(3, 9), (10, 13)])):
        drawn = bars_of(image, row)
        assert [bar[0] for bar in drawn] == colours(WHOLE, PATCHES[0])
        assert [bar[1:] for bar in drawn] == [pytest.approx(one, abs=0.05) for one in times]


def test_a_wait_for_messages_is_a_strip_before_the_bar_that_it_was_for():
    """Of 13 seconds: one for the stage before, then two in messages of the stage."""
    spans = [
        {0: Span(0, 4, 0), 1: Span(0, 9, 4, {"pipefusion": 1.0, "ulysses": 2.0, "wire": 9.0})},
        {0: Span(4, 13, 0)},
    ]
    image = draw_run(NAMES, evaluations(spans, None, (7, 9, True)))
    strips = [bar for bar in bars_of(image, 1, height=BAR - 2) if bar[0] not in colours(WHOLE)]
    shown = panel_colours()
    assert [bar[0] for bar in strips] == colours(shown["ulysses"], shown["pipefusion"])
    assert [bar[1:] for bar in strips] == [pytest.approx(times, abs=0.05) for times in ((1, 3), (3, 4))]
    assert [bar[0] for bar in bars_of(image, 1)] == colours(WHOLE)


def test_there_is_a_picture_of_any_number_of_patches_and_none_of_a_run_without():
    assert draw_run(NAMES, [Evaluation(0.1, 0.0, 0.0, 0, spans=RUN[0])]) is None
    for number in (1, 6, 7, 64):
        image = draw_run(NAMES, [evaluation(RUN[0], (start, 1, False)) for start in range(number)])
        assert image.size == (WIDTH, 2 * ROW + FOOT) and bars_of(image, 0) and bars_of(image, 1)
