"""When runs of a pool count as slower than one GPU."""

import pytest
from pipemesh.nodes.speed_verdict import JUDGED, Slower, StepTime
from pipemesh.parallel_runtime.layout import Layout

PAIR = Layout(ulysses=2)


def step_of(step_s, spread=0.0, steps=9):
    return StepTime.of([step_s * (1 + spread * (2 * index / (steps - 1) - 1)) for index in range(steps)])


TOOK = "took 3.70 s a step in ulysses 2 = 2 ranks, but one GPU"


@pytest.mark.parametrize(
    ("runs", "one_gpu", "said"),
    [
        ([(3.7, None)] * 2, 2.4, f"{TOOK} takes 2.40 s."),
        ([(3.7, 0.65)] * 2, None, f"{TOOK} is predicted to take 2.41 s."),
        ([(3.7, 0.65)] * 2, 3.6, ""),  # what is timed counts more than what is predicted
        ([(3.7, 0.65)], None, ""),
        ([(3.7, 0.95)] * 2, None, ""),
        ([(3.7, None)] * 2, None, ""),
        ([(3.7, None), (2.0, None)], 2.4, ""),
        ([(2.5, None)] * 2, 2.4, ""),
        ([(3.7, None), (3.7, None), (2.0, None)], 2.4, ""),
    ],
)
def test_two_runs_are_slower_where_what_is_known_of_them_does_not_overlap_with_one_gpus(runs, one_gpu, said):
    made = Slower()
    for step_s, longer in runs:
        own = step_of(step_s)
        made.note("kind", PAIR, own, None if longer is None else own.times(longer))
    why = made.why("kind", PAIR, None if one_gpu is None else step_of(one_gpu))
    assert why.endswith(said) and bool(why) == bool(said)
    assert not made.why("kind", Layout(cfg=2), step_of(1.0)) and not made.why("other", PAIR, step_of(1.0))


def test_steps_that_differ_much_or_are_few_tell_less():
    made = Slower()
    for _ in range(2):
        made.note("spread", PAIR, step_of(3.0, spread=0.9), None)
        made.note("few", PAIR, step_of(3.0, steps=JUDGED - 1), None)
        made.note("known", PAIR, step_of(3.0), None)
    is_slower = [bool(made.why(kind, PAIR, step_of(2.0))) for kind in ("spread", "few", "known")]
    assert is_slower == [False, False, True]
