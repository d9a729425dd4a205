"""Which layout a queue of seeds gets: groups where that ends all of them sooner, else what one
image alone would get.
"""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from pipemesh.lab.commands.parity import stock_model
from pipemesh.nodes.planning import Planning
from pipemesh.parallel_runtime.client.alike_prompts import Moment, Pending
from pipemesh.parallel_runtime.client.queue_lookahead import QueueLookahead
from pipemesh.parallel_runtime.layout import Layout
from pipemesh.parallel_runtime.planner.choice import START_S, plan
from pipemesh.parallel_runtime.planner.job import Job
from pipemesh.parallel_runtime.planner.machine import MachineBox

from ..kit.planned import box
from ..kit.queues import Workflow, to_come
from .test_planning import FLUX, OPEN, asked, planning

AHEAD = replace(OPEN, looks_ahead=True)


def queue_of(seeds, text=0):
    """A prompt that runs, before others."""
    graphs = [Workflow().graph(seed) for seed in seeds]
    for graph in graphs[2:]:
        graph["text"]["inputs"]["number"] = text
    others = tuple(Pending(str(number), graph, ("1",)) for number, graph in enumerate(graphs[1:], 1))
    return Moment("0", "1", None, graphs[0], others)


def planned(moment, choice=AHEAD, running=(), comes=None, **options):
    made = planning()
    made.ahead = QueueLookahead(lambda: moment)
    comes = comes or (to_come(moment.graph["1"]["inputs"]["seed"]) if moment is not None else None)
    return made.choose(stock_model(5).model, choice, asked(**options), running, to_come=comes)


def test_prompts_that_wait_and_differ_in_the_seed_get_groups_and_one_alone_all_ranks():
    assert planned(queue_of([1])).layout == planned(None).layout == Layout(ulysses=2)
    several = planned(queue_of([1, 2, 3]))
    assert several.layout == Layout(data=2) and several.asked.endswith("20 evaluations, 2 queued at once")
    first = replace(OPEN, looks_ahead=False)
    assert planned(queue_of([1, 2, 3]), first).layout == Layout(ulysses=2), "first image soonest"


def test_prompts_that_differ_in_more_get_what_one_alone_gets():
    moment = queue_of([1, 2])
    moment.others[0].graph["text"]["inputs"]["number"] = 5
    assert planned(moment).layout == Layout(ulysses=2)


def test_what_is_predicted_is_of_as_many_images_as_are_sampled_at_once():
    """With two prompts of conditioning, groups for these are as good, and one image has both."""
    two = planned(queue_of([1, 2, 3]), branches=2)
    alone = planned(queue_of([1]), branches=2)
    if two.layout.parts_of_batches == 1:
        assert (two.layout, two.seconds, two.asked) == (alone.layout, alone.seconds, alone.asked)
    else:
        assert two.seconds == pytest.approx(2 * alone.seconds, rel=0.1)


def test_a_layout_that_is_up_is_left_where_the_whole_queue_saves_more_than_its_start(monkeypatch):
    linked = box(2, port=3e10, flops=1e14)
    monkeypatch.setattr(Planning, "_here", lambda *_: MachineBox(linked, "published", "by numbers"))
    rows = plan(Job(whole=FLUX, evaluations=20, batch=2), linked).rows
    seconds = {row.layout: row.prediction.seconds for row in rows if row.prediction}
    saved_s = 20 * (seconds[Layout(ulysses=2)] - seconds[Layout(data=2)])
    few, many = int(0.6 * START_S / saved_s), int(2 * START_S / saved_s) + 1
    assert 1 <= few < many <= 40, saved_s
    for rounds, layout in ((few, Layout(ulysses=2)), (many, Layout(data=2))):
        found = planned(queue_of(range(2 * rounds)), running=[Layout(ulysses=2)])
        assert found.layout == layout
        assert ("2 queued at once" in found.asked) == (layout == Layout(data=2))


def test_a_prompt_whose_image_is_there_starts_no_other_layout():
    made = planning()
    moment = queue_of([2])
    made.ahead = QueueLookahead(lambda: moment)
    made.ahead._kept["0", "1", None] = SimpleNamespace(at_once=2)
    chosen = made.choose(stock_model(5).model, AHEAD, asked(), [Layout(data=2)], to_come=to_come(2))
    assert chosen.layout == Layout(data=2)
    assert made.ahead.at_once(2, to_come(2)) == (2, 1)


def test_after_a_result_of_no_use_a_queue_is_planned_as_single_images():
    ahead = QueueLookahead(lambda: queue_of([1, 2, 3]))
    assert ahead.at_once(2, to_come(1)) == (2, 2)
    assert ahead.at_once(1, to_come(1)) == (1, 1)
    ahead._useless.add("1")
    assert ahead.at_once(2, to_come(1)) == (1, 1)


@pytest.mark.parametrize(
    "comes",
    [{"sampler": "uni_pc"}, {"drawn": 3}, {"seed": 5}],
    ids=["a sampler that keeps a state", "noise that is no seed's", "another seed"],
)
def test_what_cannot_be_sampled_at_once_is_planned_as_one_image_before_it_is_known_in_its_sampler(comes):
    assert planned(queue_of([1, 2, 3]), comes=to_come(1)).layout == Layout(data=2)
    found = planned(queue_of([1, 2, 3]), comes=to_come(**{"seed": 1, **comes}))
    assert found.layout == Layout(ulysses=2) and "at once" not in found.asked


def test_what_has_no_room_to_wait_is_planned_as_one_image():
    latent = 16 * 8 * 10 * 4
    for results, images in ((0.9, 1), (1, 2)):
        ahead = QueueLookahead(lambda: queue_of([1, 2, 3]), most_bytes=int(results * 12 * latent))
        assert ahead.at_once(2, to_come(1))[0] == images


def test_a_plan_leaves_the_random_numbers_as_they_were():
    comes = to_come(1)
    left = torch.get_rng_state()
    planned(queue_of([1, 2, 3]), comes=comes)
    assert torch.equal(torch.get_rng_state(), left)


def test_the_running_prompts_own_evaluation_is_predicted_beside_that_of_all(monkeypatch):
    monkeypatch.setattr(
        Planning, "_here", lambda *_: MachineBox(box(2, port=3e10, flops=1e14), "published", "by numbers")
    )
    several, alone = planned(queue_of([1, 2, 3])), planned(None)
    assert several.first_s == alone.seconds == alone.first_s < several.seconds
