"""Compare stock ComfyUI with the pool on the same seed, through ``comfy.sample.sample``; broken
ranks show that it can fail.
"""

import json
from dataclasses import fields, replace
from functools import partial
from itertools import combinations

import pytest
import torch
from pipemesh.lab.commands import parity
from pipemesh.lab.commands.parity import (
    BF16_BOUNDS,
    BOUND,
    Bench,
    Case,
    conditioning,
    cover,
    full_product,
    relative_error,
    sample,
)
from pipemesh.parallel_runtime.client.remote_patcher import parallelize
from pipemesh.parallel_runtime.families.catalogue import NOT_HERE, PLAIN, REPRESENTATIVES, SAMPLES
from pipemesh.pool.trial.tiny_samples import attention_mask
from pipemesh.tests.fixtures import running_clients
from pipemesh.tests.kit.bounds import assert_replayed, assert_same

OTHER = next(one.name for one in SAMPLES.values() if not one.bf16 and not one.masks)


def plain(ranks, tokens, heads, mask, method="ulysses"):
    return Case(PLAIN, f"{method}{ranks}", tokens, heads, 1.0, mask, "euler")


@pytest.fixture(scope="module")
def bench(setup):
    """On pools of this module: two dozen ranks, which would take the room of others."""
    with running_clients(setup) as clients:
        yield Bench(clients)


def of_cover():
    """In an order that starts no pool twice. On every host: each sample once, on two ranks, and all
    cases of those that the oldest one lacks.
    """
    for case in sorted(cover(), key=lambda case: (case.ranks, case.method)):
        faces_host = case.method == "ulysses2" or SAMPLES[case.family].since
        yield pytest.param(case, marks=[pytest.mark.host] if faces_host else [], id=str(case))
    for name, why in NOT_HERE.items():
        yield pytest.param(None, marks=[pytest.mark.host, pytest.mark.skip(reason=why)], id=name)


@pytest.mark.parametrize("case", of_cover())
def test_the_pool_computes_what_stock_computes(bench, case):
    """A plan that brings no new word in a first evaluation and a later one."""
    steps = parity.STEPS if case.family in REPRESENTATIVES else 2
    error = bench.error(case, steps)
    assert error <= BOUND or error <= bench.bound(case, steps)


def test_the_cover_holds_every_pair_of_values_of_two_axes_of_the_representatives():
    names = [field.name for field in fields(Case)]

    def pairs(cases):
        return {
            frozenset([(a, getattr(case, a)), (b, getattr(case, b))])
            for case in cases
            for a, b in combinations(names, 2)
        }

    covered = [case for case in cover() if case.family in REPRESENTATIVES]
    product = [case for case in full_product() if case.family in REPRESENTATIVES]
    product = [case for case in product if case.method not in ("ulysses4", "ring4")]
    assert pairs(covered) == pairs(product)
    for one in (one for one in SAMPLES.values() if len(one.heads) > 1):
        of_one = (pairs(case for case in cases if case.family == one.name) for cases in (covered, product))
        assert next(of_one) == next(of_one)
    assert len(covered) < len(product) / 8


def test_every_other_sample_has_an_uneven_split_and_a_ring_in_the_cover():
    """With what its plan alone can get wrong: prompts of two lengths in one run, and masks."""
    product, covered = set(full_product()), cover()
    for one in (one for one in SAMPLES.values() if not one.stands_for):
        odd, even = (case for case in covered if case.family == one.name)
        assert {odd, even} <= product
        assert (odd.method, odd.tokens, odd.cfg, odd.mask) == ("ulysses2", "odd", 4.0, one.masks is not None)
        assert even.tokens == "even" and even.layout[1] > 1


def test_a_mask_changes_the_picture_so_that_dropping_it_would_show(bench):
    case = plain(1, "odd", 5, True)
    with_mask, without = (sample(bench.stock(5), replace(case, mask=mask)) for mask in (True, False))
    assert relative_error(with_mask, without) > 1e-2


@pytest.mark.parametrize(
    "mutation, case",
    [
        ("gather_order", plain(2, "odd", 5, False)),
        ("token_order", plain(2, "even", 12, False)),
        ("mask_permutation", plain(2, "odd", 12, True)),
        ("mask_dropped", plain(2, "odd", 12, True)),
        ("pe_slice", plain(2, "even", 12, False)),
        ("uneven_split", plain(2, "odd", 12, False)),
        ("lse_merge", plain(2, "odd", 5, False, "ring")),
        ("ring_order", plain(3, "odd", 12, True, "ring")),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_parity_goes_red_when_a_rank_breaks(broken, bench, mutation, case):
    model = parallelize(bench.stock(case.heads), broken(mutation, *case.layout), holds_ui_device=False)
    error = relative_error(sample(model, case), bench.truth(replace(case, method="ulysses1")))
    assert error > 100 * bench.bound(case) and error > 10 * BOUND


def test_a_replay_goes_red_when_a_rank_breaks(broken, bench):
    case = replace(plain(2, "even", 12, False), sampler="dpm_adaptive")
    model = parallelize(bench.stock(case.heads), broken("token_order", *case.layout), holds_ui_device=False)
    with pytest.raises(AssertionError, match="evaluation 1 is off by"):
        assert_replayed(partial(sample, case=case), model, bench.stock(case.heads))


def in_bf16():
    """Choose one case of each way to share a sequence: on CPUs bf16 takes five times as long. All
    cases run by ``parity --bf16``.
    """
    first = {}
    for case in parity.cover_of([case for case in full_product() if SAMPLES[case.family].bf16]):
        first.setdefault(case.method, case)
    return [first[method] for method in ("ulysses2", "ring2", "2x2")]


@pytest.mark.parametrize("case", in_bf16(), ids=str)
def test_bf16_is_as_far_from_the_truth_as_stock_bf16(bench, case):
    least, most = BF16_BOUNDS
    assert least <= bench.bf16_ratio(case) <= most


@pytest.mark.cover(2)
@pytest.mark.parametrize("layout", [(3, 1), (1, 3), (2, 2)], ids=["ulysses3", "ring3", "2x2"])
@pytest.mark.parametrize("text_tokens", [1, 2])
def test_fewer_text_tokens_than_ranks_are_exact_too(bench, text_tokens, layout):
    import comfy.sample

    def run(model):
        latent = torch.zeros(2, 16, 6, 2)
        noise = comfy.sample.prepare_noise(latent, 3)
        mask = attention_mask(5, text_tokens + 3)
        positive, negative = conditioning(1, text_tokens, mask, (3, 1)), conditioning(2, 1)
        with torch.inference_mode():
            return comfy.sample.sample(
                model, noise, 3, 2.0, "euler", "simple", positive, negative, latent, disable_pbar=True, seed=3
            )

    assert_same(run, bench.parallel(5, layout), bench.stock(5))


# -- the command


@pytest.mark.parametrize(("error", "status"), [(BOUND / 2, 0), (BOUND * 2, 1), (float("nan"), 1)])
def test_the_command_fails_on_every_error_that_is_not_within_the_bound(
    monkeypatch, capsys, host, error, status
):
    monkeypatch.setattr(Bench, "error", lambda self, case: error)
    monkeypatch.setattr(Bench, "bound", lambda self, case: BOUND / 3)
    argv = ["--family", OTHER, "--method", "ring2", "--json"]
    assert parity.main(argv, host) == status
    lines = capsys.readouterr().out.splitlines()
    assert lines and all(json.loads(line)["ok"] is (status == 0) for line in lines)


def test_the_command_holds_a_sensitive_model_to_stocks_own_sensitivity_and_says_so(monkeypatch, capsys, host):
    monkeypatch.setattr(Bench, "error", lambda self, case: 2 * BOUND)
    monkeypatch.setattr(Bench, "bound", lambda self, case: 3 * BOUND)
    assert parity.main(["--family", OTHER, "--method", "ring2"], host) == 0
    for line in capsys.readouterr().out.splitlines():
        assert line.startswith("ok ") and "stock's own sensitivity allows 6e-05" in line


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (
            "--method ulysses2 --ranks 4",
            "no case has --method ulysses2 --ranks 4: choose of --method ulysses1 (--ranks 1), ",
        ),
        (
            f"--bf16 --family {OTHER}",
            f"--bf16 measures {PLAIN} alone, not --family {OTHER}: choose --family {PLAIN}",
        ),
    ],
)
def test_options_that_select_nothing_are_refused_with_what_can_be_chosen(capsys, argv, says):
    with pytest.raises(SystemExit) as ended:
        parity.chosen(argv.split())
    assert ended.value.code == 2 and says in capsys.readouterr().err


def test_options_select_what_they_name():
    options, cases = parity.chosen(["--method", "2x2", "--ranks", "4", "--bf16"])
    assert options.bf16 and {(case.family, case.method) for case in cases} == {(PLAIN, "2x2")}
    assert parity.chosen(["--cover"])[1] == sorted(cover(), key=parity.by_method)
