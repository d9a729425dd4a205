"""Nodes that call the model several times in one evaluation, on tiles or under other patches:
through PipeFusion, what a call sees of its neighbours is its own.
"""

import pytest
import torch
from pipemesh.lab.commands.parity import BOUND, conditioning, relative_error

from ..kit.models import run
from ..kit.patched import TILED, TILES, models_let_go, of_tile, patched, stock, tiling, wrapped  # noqa: F401
from ..kit.pipelines import ALL_WARM


def test_a_tile_sees_its_own_neighbours_as_they_were_and_never_another_tile():
    truth, cold, warm = run(tiling(stock()), **TILED), patched(warm_up=1), patched(warm_up=ALL_WARM)
    stale = run(tiling(cold.model, marked=True), **TILED)
    assert relative_error(stale, truth) > 100 * BOUND, "nothing was stale"
    assert torch.equal(run(tiling(cold.model), **TILED), stale)
    assert cold.modes[0] == cold.modes[-1] and "wrapper" in cold.modes[0]
    assert relative_error(run(tiling(warm.model), **TILED), truth) <= BOUND
    cold.modes.clear()
    warm.modes.clear()


@pytest.mark.parametrize(
    "order",
    [lambda step: (3 * step, 3 * step + 10), lambda step: TILES[:: (-1) ** step]],
    ids=["that move", "in another order"],
)
def test_tiles_are_whole_and_exact_and_it_is_told_where_they(order):
    ours = patched(warm_up=1)
    made, truth = (run(tiling(model, order=order), **TILED) for model in (ours.model, stock()))
    assert relative_error(made, truth) <= BOUND
    assert len(ours.modes) == 2 and ours.modes[1].startswith(f"{ours.modes[0]}; whole if a latent")
    ours.modes.clear()


@pytest.mark.parametrize("sampler", ["euler", "heun"])
def test_a_second_pass_on_the_same_latent_has_keys_and_values_of_its_own(sampler):
    def with_second_pass(model, marked):
        def wrapper(apply_model, call):
            out, again = (
                apply_model(call["input"], call["timestep"], **of_tile(call["c"], marked and n))
                for n in (1, 2)
            )
            other = {**call["c"], "c_crossattn": -call["c"]["c_crossattn"]}
            return out + again - apply_model(call["input"], call["timestep"], **of_tile(other, marked and 3))

        return wrapped(model, wrapper)

    options = {**TILED, "sampler": sampler, "steps": 4}
    ours = patched(warm_up=1)
    stale = run(with_second_pass(ours.model, True), **options)
    assert torch.equal(run(with_second_pass(ours.model, False), **options), stale)
    assert relative_error(stale, run(with_second_pass(stock(), False), **options)) > 100 * BOUND, (
        "nothing was stale"
    )
    assert not any("; whole" in mode for mode in ours.modes)
    ours.modes.clear()


@pytest.mark.parametrize("sampler", ["heun", "lcm"])
def test_a_wrapper_that_calls_the_model_once_changes_nothing_whatever_the_sampler_does_to_its_latent(sampler):
    ours = patched(warm_up=1)
    once = wrapped(
        ours.model, lambda apply_model, call: apply_model(call["input"], call["timestep"], **call["c"])
    )
    options = {"size": (12, 10), "steps": 4, "cfg": 3.0, "negative": conditioning(2, 13), "sampler": sampler}
    assert relative_error(run(once, **options), run(ours.model, **options)) <= BOUND
    assert len(ours.modes) == 2, ours.modes
    ours.modes.clear()
