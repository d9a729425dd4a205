"""The first result of a kind is held to what surely is right, once, with one measure: what is wrong
stays refused, and what cannot be judged is told and tried again.
"""

from itertools import count

import pytest
import torch
from pipemesh.parallel_runtime.client.first_results import FirstResults
from pipemesh.parallel_runtime.errors import ModelError, OutOfMemory, PoolSpent, Refused
from pipemesh.parallel_runtime.tolerance import EVALUATION, ROWS_OF_BATCH, ROWS_OF_PICTURE

SURE = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(0))


class Held:
    """One work, of which ranks make ``ours`` and one worker makes ``sure``."""

    def __init__(self, known, ours=SURE, sure=SURE):
        self.known, self.ours, self.sure, self.asked = known, ours, sure, count()

    def __call__(self, *key):
        key, look = key or ("decode",), ((lambda: [self.ours]), self.surely)
        return self.known.hold(key, f"A {key[0]}", [look], EVALUATION.off, "It is {} off.")

    def surely(self):
        next(self.asked)
        if isinstance(self.sure, Exception):
            raise self.sure
        return [self.sure]

    @property
    def times(self):
        return next(self.asked)


def test_what_is_right_is_computed_once_and_what_is_wrong_stays_refused_without_computing():
    known = FirstResults()
    held = Held(known)
    assert held() and held() and held.times == 1
    wrong = Held(known, SURE + 1.0)
    for _ in range(2):
        with pytest.raises(Refused, match=r"^It is [0-9.]+% off"):
            wrong("a VAE", "encode")
    assert wrong.times == 1
    with pytest.raises(Refused, match="off"):
        Held(known)("a VAE", "tile")


@pytest.mark.parametrize(
    ("sure", "why"),
    [
        (OutOfMemory("Rank 0 ran out of memory.\nMore."), "Rank 0 ran out of memory"),
        (ModelError("Rank 0 failed."), "Rank 0 failed"),
        (torch.OutOfMemoryError("no room"), "no room"),
        (SURE * torch.inf, "one worker makes NaN or infinite numbers of it"),
    ],
)
def test_what_cannot_be_judged_is_told_once_and_tried_again(sure, why):
    told = []
    held = Held(FirstResults(notice=told.append), sure=sure)
    assert not held() and not held() and held.times == 2
    (notice,) = told
    assert notice.startswith("A decode could not be compared") and f"({why}): compare an image" in notice
    held.sure = SURE
    assert held() and held() and held.times == 4


def test_a_lack_of_memory_that_ended_the_pool_is_raised_for_without_a_pool_nothing_goes_on():
    told = []
    with pytest.raises(PoolSpent):
        Held(FirstResults(notice=told.append), sure=PoolSpent("Rank 0 ran out of memory."))()
    assert not told


@pytest.mark.parametrize("tolerance", [EVALUATION, ROWS_OF_BATCH, ROWS_OF_PICTURE])
@pytest.mark.parametrize("numbers", [torch.float32, torch.bfloat16])
def test_each_tolerance_lets_rounding_pass_and_nothing_that_is_more(tolerance, numbers):
    sure = (2 * SURE).to(numbers)
    scale = max(float(sure.float().std()), tolerance.least_scale)
    allowed = tolerance.allowed([sure]) * scale
    assert not tolerance.off([sure.float() + 0.9 * allowed], [sure])
    assert tolerance.off([sure.float() + 1.1 * allowed], [sure])
    for none in (sure * torch.nan, sure * torch.inf, sure[:1]):
        assert tolerance.off([none], [sure]) == torch.inf
    one = sure.float().clone()
    place = (0, 0, -2, 0)[: one.dim()]
    one[place] += 0.9 * allowed * {None: 1.0, 0: 192**0.5, -2: 96**0.5}[tolerance.axis]
    assert not tolerance.off([one], [sure]), "of one number, the mean of its row"


def test_grey_is_compared_by_a_pictures_scale():
    grey = torch.full((1, 3, 8, 8), 1e-3, dtype=torch.float16)
    assert not ROWS_OF_PICTURE.off([grey + 2e-3], [grey])
    assert ROWS_OF_PICTURE.off([grey + 2e-2], [grey])
