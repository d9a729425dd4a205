"""What an evaluation promises the sampler beside the image: an output of any size, and torch as it
was.
"""

import os
import resource
from functools import partial
from pathlib import Path

import pytest
import torch
from pipemesh.lab.commands.parity import BOUND, Case, relative_error
from pipemesh.parallel_runtime.client.branch import Branch
from pipemesh.parallel_runtime.client.evaluations import Work, one_thread
from pipemesh.parallel_runtime.crossing.source import state_source
from pipemesh.parallel_runtime.errors import ModelError, Refused
from pipemesh.parallel_runtime.families.catalogue import PLAIN

from ..kit.models import asked_of


def never():
    return False


def loaded_again(client, parallel):
    """Whatever another test did to the weights."""
    model, source = parallel.remote.model, parallel.remote.source
    client.residency.load(model, source, lambda: state_source(parallel), never)
    client.residency.set_weight_patches(model, "", {}, ("", {}), never)
    return client.runs.of(model)


@pytest.fixture
def asked(pair):
    """A stock forward, the arguments of one evaluation, and the MODEL in a pool."""
    stock, parallel = pair
    forward, (arguments, *_) = asked_of(stock, Case(PLAIN, "ulysses2", "odd", 4, 1.0, False, "euler"))
    arguments["transformer_options"] = {}
    return forward, arguments, parallel


@pytest.fixture
def evaluated(asked, client):
    """One evaluation of a run, with its latent changed, in the first of two branches or in the
    other.
    """
    _, arguments, parallel = asked
    client.residency.release(parallel.remote.model)  # another test may have had its weights shared out
    loaded_again(client, parallel)
    latent = next(iter(arguments))

    def evaluated(change, branch="first"):
        works = [Work({**arguments, latent: change(arguments[latent])}, Branch((branch,)))]
        (output,) = client.evaluations.dispatch(client.runs.of(parallel.remote.model), works, never)
        return output

    yield evaluated
    client.runs.end(parallel.remote.model)


@pytest.mark.parametrize("before", [(), ("other",), ("other",) * 3], ids=len)
def test_a_first_output_that_is_not_finite_is_an_error_that_names_the_layout(evaluated, before):
    for branch in before:
        evaluated(lambda x: x, branch)
    says = r"from ulysses 2 with whole weights has \d+ of \d+ numbers that are NaN or infinite"
    with pytest.raises(ModelError, match=says):
        evaluated(lambda x: x.sign() * 3e38)
    assert evaluated(lambda x: x).isfinite().all(), "the pool is usable"


def test_numbers_that_the_model_is_given_or_makes_later_are_the_samplers(evaluated):
    assert evaluated(lambda x: x * float("nan")).isnan().any()
    assert not evaluated(lambda x: x.sign() * 3e38).isfinite().all()


@pytest.fixture
def dispatched(asked):
    """Has a pool compute the same evaluation in so many branches, together: no output fits, as the
    first argument counts as the latent, and is the time steps there. Checks each output.
    """
    (forward, arguments, parallel), used = asked, []
    with torch.inference_mode():
        truth = forward(**arguments)
    x, timestep, *others = arguments
    swapped = {name: arguments[name] for name in (timestep, x, *others)}

    def dispatched(client, branches):
        used.append(client)
        works = [Work(swapped, Branch((str(branch),))) for branch in range(branches)]
        outputs = client.evaluations.dispatch(loaded_again(client, parallel), works, never)
        for output in outputs:
            assert relative_error(output, truth) <= BOUND
        return outputs

    yield dispatched
    for client in used:
        client.runs.end(parallel.remote.model)


def outputs_held(client):
    """Descriptors of outputs that this process has, and ranks that wait for a request."""
    pool = client.sessions.live.pool
    while any(pool.arena.board.phase(rank) != "waiting" for rank in pool.facts.everyone):
        os.sched_yield()
    held = [fd for pid in (*pool.ranks.pids, os.getpid()) for fd in Path(f"/proc/{pid}/fd").iterdir()]
    return [fd for fd in held if fd.is_symlink() and "memfd:pipemesh-parcel" in os.readlink(fd)]


@pytest.mark.parametrize("degrees", [(2,), (1, 1, 2)], ids=["a sequence", "a pipeline"])
def test_outputs_that_do_not_fit_come_with_their_answers_in_memory_that_is_the_callers_own(
    clients, dispatched, degrees
):
    client = clients(*degrees)
    before = client.sessions.open(never).pool.arena.nbytes
    outputs = [*dispatched(client, 2), *dispatched(client, 2)]
    assert len({one.untyped_storage().data_ptr() for one in outputs}) == 4
    assert client.sessions.live.pool.arena.nbytes == before
    assert outputs_held(client) == []


def test_a_rank_without_room_for_an_output_says_so_and_the_pool_goes_on(client, dispatched):
    """Before it writes there: the system would end it with a signal."""
    dispatched(client, 1)
    pool, before = client.sessions.live.pool, resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        for pid in pool.ranks.pids:
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (1 << 10, before[1]))
        with pytest.raises(Refused, match=r"Shared memory is full: .* could not be reserved"):
            dispatched(client, 2)
    finally:
        for pid in pool.ranks.pids:
            resource.prlimit(pid, resource.RLIMIT_FSIZE, before)
    dispatched(client, 1)
    assert client.sessions.live.pool is pool and outputs_held(client) == []


def test_torch_computes_on_one_thread_inside_and_on_as_many_as_before_afterwards(request):
    request.addfinalizer(partial(torch.set_num_threads, torch.get_num_threads()))
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
