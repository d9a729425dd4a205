"""Samplers that run at once: each gets its own evaluations and random numbers, and the first one
waits for no more than one evaluation of the others.
"""

import pytest
import torch
from greenlet import getcurrent
from hypothesis import given, settings
from hypothesis import strategies as st
from pipemesh.parallel_runtime.client.branch import Branch, SampleCall
from pipemesh.parallel_runtime.client.coroutines import RandomState
from pipemesh.parallel_runtime.client.seeds import SeedSampler, sample_together
from pipemesh.parallel_runtime.errors import ModelError, PoolFailed

from ..kit.queues import suspended

CPU = torch.device("cpu")


def start(seed, evaluations, branches=1, fails_at=None):
    """A sampler that adds up what it is answered, and draws a random number at each step."""

    def sample():
        total = torch.zeros(1)
        for step in range(evaluations):
            if step == fails_at:
                raise ZeroDivisionError
            asked = [SampleCall({"x": total + seed + part}, Branch()) for part in range(branches)]
            total = total + sum(getcurrent().outputs_of(asked)) + torch.rand(1)
        return total

    torch.manual_seed(seed)
    return SeedSampler(sample, RandomState(CPU))


def doubled(calls):
    return [2 * call.arguments["x"] for call in calls]


def by_itself(*args, **kwargs):
    (one,) = sample_together([start(*args, **kwargs)], None, doubled, CPU)
    return one.samples


@settings(max_examples=40)
@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.integers(1, 3))
def test_each_gets_its_own_answers_and_random_numbers_and_the_first_ones_state_is_left(lengths, branches):
    starts = [start(seed, length, branches) for seed, length in enumerate(lengths)]
    done = sample_together(starts, doubled, doubled, CPU)
    left = torch.get_rng_state()
    for seed, (length, one) in enumerate(zip(lengths, done, strict=True)):
        if length <= lengths[0]:
            assert torch.equal(one.samples, by_itself(seed, length, branches))
        else:
            assert one is None, "the first does not wait for what takes longer"
    assert torch.equal(left, done[0].random.tensors[0])


def asking(error=None, at=0):
    """As ``doubled``, which raises this the time with that number, and the calls of each time."""
    asked = []

    def together(calls):
        asked.append([call.branch.call for call in calls])
        if len(asked) == at:
            raise error
        return doubled(calls)

    return together, asked


def test_the_first_waits_for_one_evaluation_of_the_others_at_most_and_leaves_none_suspended():
    together, asked = asking()
    done = sample_together([start(1, 2), start(2, 5), start(3, 5)], together, doubled, CPU)
    assert [*map(len, asked)] == [3, 3] and done[1:] == [None, None]
    assert not suspended()


def test_evaluations_of_different_seeds_are_of_different_branches():
    together, asked = asking()
    sample_together([start(1, 1, 2), start(2, 1, 2), start(3, 1, 2)], together, doubled, CPU)
    assert asked == [[0, 0, 1, 1, 2, 2]]


def test_what_fails_ends_alone_unless_it_is_the_first():
    done = sample_together([start(1, 3), start(2, 3, fails_at=1), start(3, 3)], doubled, doubled, CPU)
    assert done[1] is None
    assert torch.equal(done[0].samples, by_itself(1, 3)) and torch.equal(done[2].samples, by_itself(3, 3))
    with pytest.raises(ZeroDivisionError):
        sample_together([start(1, 3, fails_at=1), start(2, 3)], doubled, doubled, CPU)
    assert not suspended()


def test_after_a_failure_of_all_at_once_the_first_goes_on_alone():
    together, asked = asking(ModelError("No."), 2)
    first, other = sample_together([start(1, 4), start(2, 4)], together, doubled, CPU)
    assert torch.equal(first.samples, by_itself(1, 4)) and other is None
    assert [*map(len, asked)] == [2, 2] and not suspended()


def test_what_the_first_cannot_do_alone_and_a_lost_pool_are_raised():
    for error in (ModelError("No."), PoolFailed("A worker died.")):
        together, alone = (asking(error, 1)[0] for _ in "12")
        with pytest.raises(type(error)):
            sample_together([start(1, 4), start(2, 4)], together, alone, CPU)
        assert not suspended()
