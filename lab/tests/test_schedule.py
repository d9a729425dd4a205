"""A pipelined run against its ideal schedule: the time it could have taken, and what it lost."""

import pytest
from pipemesh.lab.bench.schedule import Submission, held_to_schedule, makespan, needed_outputs
from pipemesh.parallel_runtime.occupancy import Span


def played(order, stages, *, busy=1.0, hand_over=0.0, sampler=0.0, between=0.0, one_timeline=False):
    """Play a run through stages that each take ``busy``, with delays."""
    made, free, outputs = [], [0.0] * stages, []
    blank = [Submission(branch, patch, 0.0, ()) for branch, patch in order]
    for (branch, patch), before in zip(order, needed_outputs(blank, one_timeline), strict=True):
        ready = max((outputs[index] + sampler for index in before), default=0.0)
        submitted, spans = ready, []
        for stage in range(stages):
            looks = free[stage] + between if made else 0.0
            begins = max(ready, looks)
            began = looks if stage else begins  # the first stage has its input with the request
            spans.append(Span(began, begins + busy, begins - began))
            free[stage], ready = begins + busy, begins + busy + hand_over
        outputs.append(free[-1])
        made.append(Submission(branch, patch, submitted, spans))
    return made


def patches(evaluations: int, count: int, warm_up: int = 1) -> list:
    return [(0, None)] * warm_up + [(0, 10 * patch) for _ in range(evaluations) for patch in range(count)]


@pytest.mark.parametrize(
    ("count", "stages", "steps"),
    [
        # Patches of each evaluation, and the stages but one to drain
        *((count, stages, 9 * count + stages - 1) for count, stages in ((2, 2), (4, 2), (5, 4))),
        (2, 3, 9 * 3 + 1),  # fewer patches than stages wait for their own output
    ],
)
def test_a_run_without_delays_keeps_its_schedule(count, stages, steps):
    """Warm-up one stage after the other, then the patches."""
    held = held_to_schedule(played(patches(9, count), stages))
    assert held.ideal_s == held.taken_s == pytest.approx(stages + steps)
    assert held.share == 1 and not any(held.lost_s.values())
    assert held_to_schedule([]) is None


def test_one_timeline_drains_after_each_evaluation():
    made = played(patches(9, 4), 2, one_timeline=True)
    assert held_to_schedule(made, one_timeline=True).ideal_s == pytest.approx(2 + 9 * 5)
    assert held_to_schedule(made).share == pytest.approx((2 + 36 + 1) / (2 + 45))


def test_a_step_needs_the_outputs_of_both_branches():
    order = [(0, None), (1, None), *[(branch, patch) for patch in (0, 10) for branch in (0, 1)] * 2]
    needs = needed_outputs([Submission(*one, 0.0, ()) for one in order], one_timeline=False)
    assert needs == [[], [], [0, 1], [0, 1], [0, 1], [0, 1], [2, 3], [2, 3], [4, 5], [4, 5]]


@pytest.mark.parametrize(
    ("cause", "delay"), [("sampler", "sampler"), ("hand-over", "hand_over"), ("stage", "between")]
)
def test_what_is_lost_is_told_by_its_cause(cause, delay):
    submissions = played(patches(9, 2), 2, **{delay: 0.25})
    held = held_to_schedule(submissions)
    assert held.taken_s > held.ideal_s == pytest.approx(2 + 18 + 1)
    assert sum(held.lost_s.values()) == pytest.approx(held.taken_s - held.ideal_s)
    assert max(held.lost_s, key=held.lost_s.get) == cause


def test_the_schedule_has_the_times_of_the_run_and_a_slow_stage_sets_its_pace():
    submissions = played(patches(4, 3, warm_up=0), 2)
    slower = [one._replace(spans=(one.spans[0], Span(0, 2, 0))) for one in submissions]
    assert makespan(slower, needed_outputs(slower, False)) == pytest.approx(1 + 12 * 2)
