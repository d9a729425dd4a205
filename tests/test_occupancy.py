"""How busy stages were, and the picture of it."""

from xml.etree import ElementTree

import pytest
from pipemesh.parallel_runtime.occupancy import LEFT, PATCHES, WHOLE, Span, busy_shares, timeline

RUN = [(Span(0, 4, 0), Span(0, 9, 3)), (Span(4, 8, 0), Span(9, 13, 1))]  # rank 1 takes 6, then 3 of the seconds from 0 to 13


def test_a_rank_is_busy_while_it_neither_waits_nor_is_idle():
    assert busy_shares(RUN) == pytest.approx([8 / 13, 9 / 13])
    assert busy_shares([]) == []


def test_the_picture_has_a_bar_for_every_rank_and_submission_where_it_computed():
    drawn = ElementTree.fromstring(timeline(["0 cpu", "1 <cpu>"], RUN, [None, 7]))
    bars = [rect for rect in drawn if rect.tag.endswith("rect") and rect.get("height") == "20"]
    lefts = [(float(bar.get("x")) - LEFT) / (1000 - LEFT - 10) * 13 for bar in bars]
    assert lefts == pytest.approx([0, 4, 3, 10], abs=0.1)
    assert [bar.get("fill") for bar in bars] == [WHOLE, PATCHES[0]] * 2
    assert [text.text for text in drawn if text.tag.endswith("text")][:2] == ["0 cpu", "1 <cpu>"]
