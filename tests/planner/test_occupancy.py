"""How busy stages were."""

import pytest
from pipemesh.parallel_runtime.occupancy import Span, busy_shares

# Rank 1 takes 6, then 3 of the seconds from 0 to 13
RUN = [{0: Span(0, 4, 0), 1: Span(0, 9, 3)}, {0: Span(4, 8, 0), 1: Span(9, 13, 1)}]


def test_a_rank_is_busy_while_it_neither_waits_nor_is_idle():
    assert busy_shares(RUN) == pytest.approx([8 / 13, 9 / 13])
    assert busy_shares([]) == []
    assert busy_shares([{0: Span(0, 4, 2)}]) == [1.0], "a stage waits for its input before all else"


def test_ranks_of_groups_are_busy_with_submissions_of_their_own():
    first, second = RUN
    assert busy_shares([{1: first[0]}, {2: second[1]}]) == pytest.approx([0, 4 / 13, 3 / 13])
