"""Ranks that record what they compute as CUDA graphs, on late GPUs (late_ranks.py)."""

from collections import defaultdict
from copy import deepcopy
from functools import partial
from itertools import count
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from pipemesh.lab.commands.parity import BOUND, PLAIN, relative_error, sampled, stock_model
from pipemesh.parallel_runtime.attention.kernels import EXPLICIT, Kernels
from pipemesh.parallel_runtime.comm.exchange import StopFlag
from pipemesh.parallel_runtime.comm.traffic import Stopped, Traffic, no_wish
from pipemesh.parallel_runtime.errors import ModelError
from pipemesh.parallel_runtime.families import plan_for
from pipemesh.parallel_runtime.families.catalogue import REPRESENTATIVES, SAMPLES
from pipemesh.parallel_runtime.forward import binder, forward_name
from pipemesh.parallel_runtime.methods.factory import make_method
from pipemesh.parallel_runtime.methods.recordings import Recordings, why_not_recorded
from pipemesh.parallel_runtime.patches import Part
from torch.utils._pytree import tree_leaves

from ..comm.test_collectives import Rank
from ..methods.test_late_methods import on_gpu
from . import joint_model
from .in_ranks import Crossed
from .late_device import late_device
from .late_queues import DEVICE
from .late_ranks import LateWorld, own_gpu

VIDEO = next(name for name, one in REPRESENTATIVES.items() if one.latents["odd"][2:3] == (3,))  # frames
GIVEN = {
    PLAIN: {"x": (1, 16, 13, 12), "context": (1, 7, 64), "y": (1, 32), "guidance": (1,)},
    VIDEO: {"x": (1, 16, 2, 6, 8), "context": (1, 7, 64)},
}


def given(family, number, **shapes):
    generator = torch.Generator().manual_seed(number)
    tensors = {
        name: torch.randn(shape, generator=generator) for name, shape in {**GIVEN[family], **shapes}.items()
    }
    return {**tensors, "timestep": torch.rand(1, generator=generator), "transformer_options": {}}


class Asked(NamedTuple):
    """An evaluation. ``run``: where it is another than before, that one has ended. ``stops``: it is
    cancelled.
    """

    arguments: dict
    model: int = 0
    run: int = 0
    is_wanted: bool = True
    stops: bool = False


class Seen(NamedTuple):
    """What a rank had done behind each evaluation: graphs recorded and replayed, ticks of progress,
    and messages.
    """

    recorded: list
    replayed: list
    ticks: list
    sent: list


def evaluated(layout, asked, models, *, seed=0, prepare=lambda *_: None, room=1 << 30, worth=0):
    """What ranks compute of all that is asked, by rank and place, and what each has seen.
    ``room``: of what may stay from run to run.
    """
    outputs, seen = {}, defaultdict(lambda: Seen([], [], [], []))

    def work(mesh, run):
        stopping = [False]
        run.wants_stop = lambda: stopping[0]
        own, methods, kept, rank, ticks = deepcopy(models), [], [], Rank([]), count()
        rank.tick = lambda: next(ticks)
        for model in own:
            plan = joint_model.PLAN if is_joint(model) else plan_for(type(model))
            kept.append(Recordings(model, mesh.sequence, rank.tick, why_not_recorded(plan), worth))
            kernels = Kernels((EXPLICIT,))
            methods.append(make_method(model, plan, mesh, rank, (), kernels, kept[-1].tick))
            model.to(own_gpu())
            methods[-1].attach()
        for at, one in enumerate(asked):
            prepare(mesh, run, own, kept, at)
            model, method, recordings = own[one.model], methods[one.model], kept[one.model]
            if at and one.run != asked[at - 1].run:
                method.end_run(room)
                recordings.end_run(room)
            method.begin(Part(one.run, one.model))
            recordings.is_wanted, stopping[0] = one.is_wanted, one.stops
            compute = partial(method.forward, forward_of(model), number=at + 1)
            try:
                output = recordings.evaluate(on_gpu(one.arguments), compute, method.forget)
                recordings.after(None)
                outputs[mesh.rank, at] = [each.to("cpu", non_blocking=True) for each in tree_leaves(output)]
            except (Stopped, ModelError, torch.OutOfMemoryError, SystemExit) as error:
                outputs[mesh.rank, at] = error
                if isinstance(error, SystemExit):
                    break
            mesh.sequence.traffic.is_complete = True
            seen[mesh.rank].recorded.append(run.gpu.recordings)
            seen[mesh.rank].replayed.append(run.gpu.replays)
            seen[mesh.rank].ticks.append(next(ticks))
            traffic = mesh.sequence.traffic
            seen[mesh.rank].sent.append((traffic.at, dict(traffic.sent_bytes), len(run.trace)))
        torch.cuda.synchronize()  # a rank leaves when it has answered
        for method in methods:
            method.end_run()
            method.detach()

    with pytest.MonkeyPatch.context() as patch, late_device(seed) as box:
        LateWorld(layout, box, patch).run(work)
    return outputs, [seen[rank] for rank in range(layout.world_size)]


def is_joint(model):
    return isinstance(model, joint_model.Model)


def forward_of(model):
    return model if is_joint(model) else getattr(model, forward_name(model))


def is_right(output, model, arguments):
    with torch.inference_mode():
        truth = forward_of(model)(**arguments)
    (one,) = output
    return relative_error(one, truth) <= BOUND


def assert_same(outputs, expected):
    """To the bit, of what was not stopped."""
    assert outputs.keys() >= expected.keys()
    for key, computed in expected.items():
        if isinstance(computed, list):
            assert all(map(torch.equal, outputs[key], computed)), key
        else:
            assert type(outputs[key]) is type(computed), key


def replays(seen):
    """Whether each evaluation was replayed."""
    return [int(b > a) for a, b in zip([0, *seen.replayed], seen.replayed, strict=False)]


def asked_by_sampler(family, count, cfg=1.0):
    """What a sampler asks of a sample's model, with its embeddings, masks and options."""
    patcher, asked = stock_model(2, family=family), []
    transformer = patcher.model.diffusion_model
    name = forward_name(transformer)
    compute, named = getattr(transformer, name), binder(getattr(type(transformer), name))

    def note(*args, **kwargs):
        asked.append(Crossed(patcher).arguments(named(args, kwargs)))
        return compute(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transformer, name, note)
        sampled(patcher, SAMPLES[family], "odd", cfg, False, "euler", 0, count)
    return transformer, asked


JOINT = joint_model.Model(2)


def cond(number, text=5, mask=False):
    generator = torch.Generator().manual_seed(number)
    made = joint_model.inputs(text, mask).items()
    return {
        name: torch.randn(one.shape, generator=generator) if isinstance(one, torch.Tensor) else one
        for name, one in made
    }


def stale(place):
    def fault(recording):
        recording.inputs[place] = recording.inputs[place].clone()
        return recording

    return fault


def lost(place):
    def fault(recording):
        pieces = [*recording.pieces]
        pieces[place] = pieces[place]._replace(graph=None)
        return recording._replace(pieces=tuple(pieces))

    return fault


class Used:
    """Recordings of a model whose evaluation is a product."""

    def __init__(self, worth):
        comm = SimpleNamespace(traffic=Traffic(), world=0, weights=None, buffers=[], stop=StopFlag(no_wish))
        self.kept = Recordings(torch.nn.Module(), comm, lambda: None, worth=worth)
        self.kept.is_wanted = True

    def evaluate(self, size, times=1):
        for _ in range(times):
            self.kept.evaluate({"x": torch.ones(size, device=DEVICE)}, lambda given: given["x"] * 2, int)
            torch.cuda.synchronize()

    def waited(self, size):
        """How many evaluations come before one is recorded."""
        return next(count for count in range(1, 99) if self.evaluate(size) or self.kept.recorded)
