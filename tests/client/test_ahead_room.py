"""What waits for its prompt has room, keeps no MODEL, and goes when nothing can use it."""

import gc
import weakref
from dataclasses import replace

import pytest
from pipemesh.nodes.planning import Planning
from pipemesh.nodes.timing import StepTimes
from pipemesh.parallel_runtime.client.description import tensors_of as tensors_in
from pipemesh.parallel_runtime.layout import Layout
from pipemesh.parallel_runtime.planner.counts import Counts, NotCounted, count_nothing

from ..kit.queues import Workflow, in_line, seeds_of, to_come, unload_all_models
from ..planner.test_planning import OPEN
from .test_ahead import Ahead, assert_alike, stocks


def no_count():
    raise NotCounted("not counted")


def test_no_more_is_sampled_ahead_than_has_room():
    prompts, three, latent = seeds_of(Workflow(), 11, 12, 13), Layout(data=3), 16 * 8 * 10 * 4
    ample = Ahead(three)
    ample.line.put(*prompts)
    ample.line.run(ample.model)
    shared = sum(one.nbytes for one in tensors_in(next(iter(ample.ahead._kept.values())).asked))
    each = 12 * latent  # two of every sigma, of which there are four, and four
    for results, used in ((0.9, 0), (1.9, 1), (2, 2)):
        ours = Ahead(three, most_bytes=int(shared + results * each))
        in_line(ours.model, ours.line, *prompts)
        assert ours.images == (used, 0), results


def with_one_that_waits(ours):
    ours.line.put(*seeds_of(Workflow(), 11, 12))
    ours.line.run(ours.model)
    assert len(ours.ahead._kept) == 1
    return ours


def test_what_waits_is_freed_where_comfyui_frees_the_model_between_prompts_and_not_within_one():
    ours = with_one_that_waits(Ahead())
    with ours.line._at("prompt 1", {}, "decode"):
        unload_all_models()
    assert len(ours.ahead._kept) == 1
    assert_alike(ours.line.run(ours.model), stocks(*seeds_of(Workflow(), 12)))
    assert ours.images == (1, 0)
    with_one_that_waits(ours)
    unload_all_models()
    assert not ours.ahead._kept and not ours.ahead._done


def test_what_waits_keeps_no_model_in_memory_and_goes_with_it():
    ours = with_one_that_waits(Ahead())
    with ours.line._at("prompt 1", {}, "decode"):  # what frees memory for itself within a prompt
        unload_all_models()
    model = weakref.ref(ours.stock.model)
    ours.model = ours.pool = ours.stock = None
    gc.collect()
    assert model() is None and not ours.ahead._kept and ours.images == (0, 1)


def test_what_waits_is_forgotten_when_a_run_of_another_layout_is_planned_behind_its_queue():
    ours = with_one_that_waits(Ahead())
    with ours.line._at("another", Workflow().graph(13), "1"):
        ours.line.now = replace(ours.line.now, others=())
        made = Planning(StepTimes(), Counts(count_nothing), ahead=ours.ahead)
        assert made.choose(ours.stock.model, OPEN, no_count, ()).why == "not counted"
    assert not ours.ahead._kept and ours.images == (0, 1)


@pytest.mark.parametrize(("alike", "expected"), [(3, (4, 3)), (1, (2, 1))])
def test_a_queue_counts_as_far_as_its_prompts_are_alike(alike, expected):
    ours, other = Ahead(), Workflow(steps=2)
    ours.line.put(*seeds_of(Workflow(), *range(12, 12 + alike)), *seeds_of(other, *range(20, 31 - alike)))
    with ours.line._at("0", Workflow().graph(11), "1"):
        assert ours.ahead.at_once(4, to_come(11)) == expected
