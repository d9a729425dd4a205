"""What an evaluation promises the sampler beside the image: an output of any size, and torch as it
was.
"""

import pytest
import torch
from pipemesh.launcher.commands.parity import BOUND, Case, relative_error
from pipemesh.parallel_runtime.client.evaluations import Work, one_thread
from pipemesh.parallel_runtime.comfy_bridge.source import state_source
from pipemesh.parallel_runtime.families import PLAIN

from .models import asked_of


def never():
    return False


def test_an_output_larger_than_the_latent_is_fetched(pair, client, requests):
    """The first argument counts as the latent: with the time steps there, no output fits."""
    stock, parallel = pair
    source = parallel.remote.source
    forward, (arguments, *_) = asked_of(stock, Case(PLAIN, "ulysses2", "odd", 4, 1.0, False, "euler"))
    arguments["transformer_options"] = {}
    with torch.inference_mode():
        truth = forward(**arguments)
    client.residency.load(source, lambda: state_source(parallel), never)
    client.residency.set_weight_patches(source.model, "", {}, {}, {}, never)
    x, timestep, *others = arguments
    swapped = {name: arguments[name] for name in (timestep, x, *others)}
    requests.clear()
    for branch in ("first", "second"):
        (output,) = client.evaluations.evaluate(client.runs.of(source.model), [Work(swapped, (branch,))], never)
        assert relative_error(output, truth) <= BOUND
    assert requests == {"Forward": 2, "Fetch": 2}
    client.runs.end(source.model)


def test_torch_computes_on_one_thread_inside_and_on_as_many_as_before_afterwards():
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        with one_thread():
            assert torch.get_num_threads() == 1
            with one_thread():
                pass
            assert torch.get_num_threads() == 1
        assert torch.get_num_threads() == 2
        with pytest.raises(KeyError), one_thread():
            raise KeyError
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
