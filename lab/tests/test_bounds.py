"""The bounds of tests/kit/bounds.py: another order of sums stays within them, a small fault does
not.
"""

from functools import cache, partial
from itertools import cycle

import pytest
import torch
from pipemesh.lab.commands.parity import BOUND, Case, conditioning, relative_error, sample, stock_model
from pipemesh.parallel_runtime.families.catalogue import PLAIN, REPRESENTATIVES, SAMPLES
from pipemesh.pool.trial.rounding import FACTOR, rounded, wrapped
from pipemesh.tests.kit.bounds import ADAPTIVE, assert_replayed, assert_same, bound
from pipemesh.tests.kit.models import run

HOW = [("euler", 1.0), ("dpmpp_2m_sde", 4.0), ("uni_pc", 4.0)]
FAULT = 1e-4  # of an evaluation's scale: a twentieth of the least that a broken rank does


@cache
def stock(name=PLAIN):
    return stock_model(SAMPLES[name].heads[-1], family=name)


@pytest.fixture(scope="module", autouse=True)
def models_let_go():
    yield
    stock.cache_clear()


def of_case(sampler="euler", cfg=1.0, name=PLAIN, **options):
    case = Case(name, "ulysses1", "odd", SAMPLES[name].heads[-1], cfg, False, sampler)
    return partial(sample, case=case, **options)


def with_other_sums(model):
    """As a CPU with other kernels: every matrix product in two parts."""

    def evaluate(executor, *args, **kwargs):
        whole = torch.nn.functional.linear

        def in_two_parts(x, weight, bias=None):
            half = weight.shape[1] // 2
            return whole(x[..., half:], weight[:, half:], bias) + whole(x[..., :half], weight[:, :half])

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.nn.functional, "linear", in_two_parts)
            return executor(*args, **kwargs)

    return wrapped(model, evaluate)


def with_a_fault(model, size=FAULT):
    """Every evaluation is a little too large."""
    return wrapped(
        model, lambda executor, x, *args, **kwargs: x - (1 + size) * (x - executor(x, *args, **kwargs))
    )


@pytest.mark.cover(4)
@pytest.mark.parametrize(
    ("name", "sampler", "cfg"), [(name, *how) for name, how in zip(REPRESENTATIVES, cycle(HOW), strict=False)]
)
def test_other_sums_stay_within_the_bound_and_a_small_fault_does_not(name, sampler, cfg):
    runs = of_case(sampler, cfg, name)
    assert relative_error(runs(with_other_sums(stock(name))), runs(stock(name))) > 0, "the sums are the same"
    assert_same(runs, with_other_sums(stock(name)), stock(name))
    with pytest.raises(AssertionError):
        assert_same(runs, with_a_fault(stock(name)), stock(name))


def unsampled(model):
    """From a picture to noise, as with FlipSigmas: what an evaluation at 1e-4 gives back is nearly
    the picture, and the difference of both goes through a step 2500 times as large.
    """
    import comfy.sample

    picture = torch.randn(1, 16, 24, 24, generator=torch.Generator().manual_seed(3))
    sigmas = torch.tensor([1e-4, 0.25, 0.5, 0.75, 0.9])
    how = (4, 1.0, "euler", "simple", conditioning(1, 16), conditioning(2, 16), picture)
    with torch.inference_mode():
        return comfy.sample.sample(model, torch.zeros_like(picture), *how, sigmas=sigmas, disable_pbar=True)


def test_other_sums_stay_within_the_bound_where_a_run_begins_without_noise_and_a_fault_does_not():
    error = relative_error(unsampled(with_other_sums(stock())), unsampled(stock()))
    assert error > BOUND, "nothing is cancelled"
    assert_same(unsampled, with_other_sums(stock()), stock())
    with pytest.raises(AssertionError):
        assert_same(unsampled, with_a_fault(stock(), 20 * FAULT), stock())


@pytest.mark.cover(4)
@pytest.mark.parametrize("sampler", ["euler", *ADAPTIVE])
def test_a_replay_lets_other_sums_through_and_no_small_fault(sampler):
    runs = of_case(sampler)
    assert_replayed(runs, with_other_sums(stock()), stock())
    with pytest.raises(AssertionError, match="evaluation 1 is off by"):
        assert_replayed(runs, with_a_fault(stock()), stock())


@pytest.mark.cover(4)
@pytest.mark.parametrize("other", [{"steps": 3}, {"seed": 8}, {"steps": 5}], ids=str)
def test_a_replay_finds_a_run_that_goes_another_way(other):
    runs = iter((of_case(), of_case(**other)))
    with pytest.raises(AssertionError, match="has other inputs"):
        assert_replayed(lambda model: next(runs)(model), stock(), stock())


@pytest.mark.cover(4)
@pytest.mark.parametrize("cfg", [1.0, 3.0])
def test_runs_that_are_held_to_the_constant_bound_have_room_for_any_cpu(cfg):
    """Tests that ask for something else than precision compare plain runs, with parity's bound."""
    runs = partial(run, cfg=cfg)
    assert bound(runs, stock()) <= BOUND
    assert FACTOR * relative_error(runs(rounded(stock(), seed=1)), runs(stock())) <= BOUND
