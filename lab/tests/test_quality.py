"""The benches of pictures: which cells are sampled in which order, that another run takes what is
there, and one cell as it is measured.
"""

import itertools
from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pipemesh.lab.bench import distribution, quality
from pipemesh.lab.bench.curves import HEIGHT, TOP, Panel, draw_panels
from pipemesh.lab.bench.figures import Options, exactly
from pipemesh.lab.bench.quality import AT_GOAL, FIRST, SAMPLERS, STEPS, WITH_GOALS, Cell, Pictures
from pipemesh.lab.pictures.scenes import draw
from pipemesh.launcher.errors import LaunchError

QUICK = Cell(2, 2, 4, "euler")


@given(st.integers(1, 200), st.integers(0, 200))
def test_batches_hold_every_caption_once_and_more_captions_change_only_the_last_one(count, more):
    cut, longer = list(quality.batches(count)), list(quality.batches(count + more))
    assert [part.start for part in cut] == [0, *(part.stop for part in cut[:-1])] and cut[-1].stop == count
    assert cut[:-1] == longer[: len(cut) - 1] and all(
        0 < part.stop - part.start <= quality.BATCH for part in longer
    )
    if count in FIRST:
        assert cut == longer[: len(cut)], "a round takes what the one before sampled"


def test_the_whole_product_has_few_pictures_before_any_cell_has_more():
    asked = list(quality.rounds((), 64))
    assert asked[: len(WITH_GOALS)] == [(cell, 64) for cell in WITH_GOALS]
    counts = [count for _, count in asked[len(WITH_GOALS) :]]
    assert counts == sorted(counts) and set(counts) == {*FIRST, 64}
    product = {cell for cell, count in asked if count == FIRST[0]}
    # Seven evaluations: four may be warm-up
    assert Counter((cell.sampler, cell.steps) for cell in product)["heun", 4] == 9
    assert len(product) == 9 * len(SAMPLERS) * len(STEPS) - 3 * 3 and product & set(WITH_GOALS) == {AT_GOAL}
    assert [count for cell, count in quality.rounds(("patches=8", "warm-up=4", "steps=8", "heun"), 5)] == [5]
    assert list(quality.cells(["patches=4", "steps=28", "euler", "warm-up=2"])) == [AT_GOAL]


def test_the_points_of_a_panel_are_of_as_many_pictures(monkeypatch):
    drawn = []
    monkeypatch.setattr(quality, "draw_panels", lambda title, rows, xs: drawn.append((title, rows)))
    others = [Cell(4, warm_up, 28, "euler") for warm_up in (1, 4)]
    found = {(cell, 8): 50.0 for cell in others} | {(AT_GOAL, 8): 51.0, (AT_GOAL, 64): 53.0}
    quality.curves(found | {(quality.DEFAULT, 64): 1.0})
    [(title, rows)] = drawn
    assert "n = 8 pictures" in title and rows[0][3].lines["4 patches"] == {1: 50.0, 2: 51.0, 4: 50.0}
    quality.curves({})


def test_an_exact_method_a_pipeline_of_ranks_and_a_longer_warm_up_have_goals_of_their_own():
    ulysses, loop, stages = quality.DEFAULTS
    early, late = (Cell(4, warm_up, 28, "heun") for warm_up in (1, 4))
    of_two = {loop: [52.0, 52.2], stages: [52.0, 51.0], ulysses: [60.0, 99.0], early: [50.0, 51.0]}
    found = {(cell, 2): values for cell, values in of_two.items()}

    def is_met(cell):
        return quality.goal_of(cell, 2, found).is_met(exactly(quality.mean(found[cell, 2])))

    assert is_met(ulysses) and not is_met(stages) and quality.goal_of(loop, 2, found) is None
    found |= {(ulysses, 2): [69.0, 69.0], (stages, 2): [52.0, 52.1], (AT_GOAL, 2): [24.0, 25.0]}
    assert not is_met(ulysses) and is_met(stages) and not is_met(AT_GOAL)
    assert quality.gain_of(early, 2, found) is None and quality.gain_of(loop, 2, found) is None
    for gained, is_risen in ((0.5, True), (-0.5, False)):
        figure = quality.gain_of(late, 2, {**found, (late, 2): [50.0 + gained, 51.0 + gained]})
        assert figure.estimate.value == gained and figure.is_met == is_risen


def test_cells_that_are_not_there_are_named():
    with pytest.raises(
        LaunchError, match=r"^No cell of quality has all of the words patches=5: its cells read patches=4 "
    ):
        next(quality.bench(Options(host=None, only=("patches=5",))))


def test_curves_lie_higher_where_values_are_larger():
    panel = Panel("euler, 4 steps", {"2 patches": {1: 41.0, 2: 79.0}, "4 patches": {}})
    picture = draw_panels("PSNR", [[panel, panel], [panel]], (1, 2, 4))
    panel_alone = itertools.product(range(picture.width // 2), range(TOP - 10, TOP + HEIGHT))
    blue = [point for point in panel_alone if picture.getpixel(point) == (0x30, 0x54, 0xDC)]
    first, last = min(blue), max(blue)
    assert first[0] < last[0] and first[1] > last[1]
    assert draw_panels("PSNR", [[Panel("nothing yet", {})]], (1, 2, 4)).width


@pytest.fixture
def pictures_of(monkeypatch, tmp_path):
    """Makes a bench's pictures, kept in a folder, and counts the batches that are sampled."""
    sampled, own = [], Pictures._sample
    monkeypatch.setattr(Pictures, "_sample", lambda *given: sampled.append(given[1:]) or own(*given))
    return lambda prompts: (Pictures(prompts, tmp_path, None), sampled)


def test_a_cell_is_measured_against_stock_and_another_run_samples_nothing_again(
    pictures_of, tmp_path, monkeypatch
):
    rightly = {"place": 1.0, "all": 1.0}
    monkeypatch.setattr("pipemesh.lab.pictures.classifier.accuracy", lambda *_: rightly)
    only, case = str(QUICK).split(), f"{QUICK} n=2"
    made, sampled = pictures_of(2)
    figures = list(quality.measured(made, only, tmp_path, lambda: None))
    assert {(figure.case, figure.metric) for figure in figures} >= {(case, "psnr"), (case, "ssim")}
    right = {figure.case for figure in figures if figure.metric == "all right"}
    assert right == {case, "stock steps=4 euler n=2"}
    assert 30 < next(figure.estimate.value for figure in figures if figure.metric == "psnr") < quality.EQUAL
    assert (tmp_path / quality.CURVES).exists() and len(sampled) == 2
    again = list(quality.measured(pictures_of(2)[0], only, tmp_path, lambda: None))
    assert [figure.estimate for figure in again] == [figure.estimate for figure in figures]
    assert len(sampled) == 2


def test_the_autoencoders_features_are_what_its_encoder_makes(pictures_of):
    made, _ = pictures_of(1)
    shown = draw(made.scenes, 0)
    expected = made._vae.encode(shown.movedim(1, -1)).flatten(1)
    torch.testing.assert_close(made.features(shown), expected, atol=1e-4, rtol=1e-4)


def test_the_goal_of_the_distance_is_stocks_own_over_all_pictures(monkeypatch):
    monkeypatch.setattr(distribution, "FEW", 2)
    monkeypatch.setattr(distribution, "DRAWN", 8)
    monkeypatch.setattr(
        Pictures, "_sample", lambda self, cell, batch: torch.rand(batch.stop - batch.start, 3, 128, 128)
    )
    figures = list(distribution.bench(Options(host=None, prompts=3)))
    assert [figure.case.rpartition(" ")[2] for figure in figures] == ["n=2"] * 3 + ["n=3"] * 3
    stock, ours, other = figures[3:]
    assert ours.goal.at_least < stock.estimate.value < ours.goal.at_most and not stock.goal and not other.goal
    assert not any(figure.goal for figure in figures[:3])
