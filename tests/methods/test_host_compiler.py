"""ComfyUI's model compiler, which newer ones have, told by doubles of its functions: it records
nothing of a run that is computed elsewhere, and blocks that it replays are no wrong image.
"""

import threading
from random import Random

import comfy.cli_args
import comfy.model_prefetch
import pytest
import torch
from comfy.patcher_extension import WrappersMP
from pipemesh.lab.commands.parity import BOUND, relative_error
from pipemesh.parallel_runtime.client.remote_forward import NO_COMPILER
from pipemesh.parallel_runtime.errors import ModelError
from pipemesh.parallel_runtime.layout import Layout
from pipemesh.parallel_runtime.methods.usp import SequenceParallel

from ..kit import joint_model
from ..kit.collectives import World
from ..kit.models import run


class Recording:
    """As ComfyUI keeps one for each thread."""

    def __init__(self):
        self.paused: set[int] = set()
        self.begun: list[bool] = []

    def __enter__(self):
        self.paused.add(threading.get_ident())

    def __exit__(self, *_error):
        self.paused.discard(threading.get_ident())

    def begin(self, executor, *args, **kwargs):
        """A forward that is recorded unless the option says otherwise."""
        self.begun.append(not getattr(comfy.cli_args.args, NO_COMPILER))
        return executor(*args, **kwargs)


@pytest.fixture
def recording(monkeypatch):
    made = Recording()
    monkeypatch.setattr(comfy.cli_args.args, NO_COMPILER, False, raising=False)
    monkeypatch.setattr(comfy.model_prefetch, "pause_malloc_graph", lambda: made, raising=False)
    return made


def test_nothing_is_recorded_of_a_run_in_the_pool_and_all_of_others(pair, client, recording, monkeypatch):
    stock, parallel = (one.clone() for one in pair)
    for one in (stock, parallel):
        one.add_wrapper_with_key(WrappersMP.APPLY_MODEL, "compiler", recording.begin)
    client.sessions.open(lambda: False)
    pool, asked = client.sessions.live.pool, []
    real = type(pool).submit

    def submit(self, request, *args):
        if type(request).__name__ == "Forward":
            asked.append(threading.get_ident() in recording.paused)
        return real(self, request, *args)

    monkeypatch.setattr(type(pool), "submit", submit)
    truth = run(stock)
    assert all(recording.begun) and not recording.paused
    recording.begun.clear()
    assert relative_error(run(parallel), truth) <= BOUND
    assert asked and all(asked) and not any(recording.begun) and not recording.paused
    assert getattr(comfy.cli_args.args, NO_COMPILER) is False, "the user's option is put back"


def test_the_option_is_put_back_after_an_error_too(pair, recording):
    def fail(*_args, **_kwargs):
        raise ZeroDivisionError

    parallel = pair[1].clone()
    parallel.add_wrapper_with_key(WrappersMP.APPLY_MODEL, "fails", fail)
    with pytest.raises(ZeroDivisionError):
        run(parallel)
    assert getattr(comfy.cli_args.args, NO_COMPILER) is False


def test_blocks_that_are_replayed_without_their_hooks_are_an_error_by_name(monkeypatch):
    outputs = []

    def work(mesh, _run):
        model = joint_model.Model(3)
        method = SequenceParallel(model, joint_model.PLAN, mesh.sequence)
        method.attach()
        outputs.append(method.forward(model, joint_model.inputs(5), 1))
        monkeypatch.setattr(model.blocks[1], "_call_impl", model.blocks[1].forward)  # no hooks any more
        with pytest.raises(ModelError, match=r"1 of 3 blocks of Model ran without the ranks' hooks"):
            method.forward(model, joint_model.inputs(5), 2)

    with torch.inference_mode():
        World(Layout(), "gloo", monkeypatch).run(work, Random(7).choice)
    assert outputs
