"""Models that come and go, whole and in parts, groups joined and apart, ranks that fail together,
cancels, ends of runs, in any order: no ranks wait for each other, and what they compute is what one
computes. All ranks run in this process.
"""

import gc
import weakref
from dataclasses import dataclass, field
from random import Random

import pytest
import torch
from greenlet import getcurrent
from hypothesis import given, settings
from hypothesis import strategies as st
from pipemesh.parallel_runtime.comm.traffic import Stopped
from pipemesh.parallel_runtime.layout import Layout
from pipemesh.parallel_runtime.methods.factory import make_method
from pipemesh.parallel_runtime.patches import Part
from pipemesh.pool.verdict import Meets, are_even

from ..comm.test_collectives import Rank
from ..fixtures import ALL
from ..kit.collectives import World, disagreements, has_an_order
from ..kit.evenness import answered, done, failed
from ..kit.joint_model import PLAN, Model, inputs
from ..weights.test_sharded_weights import sharded

LAYOUT = Layout(ulysses=2, cfg=2)
CROSSED = Layout(ulysses=2, ring=2)  # a rank's message along one axis goes to others than along the other
LAYOUTS = [LAYOUT, Layout(ring=2, data=2), Layout(cfg=2, data=2), Layout(ulysses=3), CROSSED]
WAYS = {"a": "whole", "b": "sharded", "c": "whole"}  # of each model to keep its weights
BLOCKS = {"a": 2, "b": 2, "c": 3}
TEXTS = (5, 2)  # tokens: of the fewer, some ranks have none
WRITING = "writing"  # behind the forward
PLACES = ("input", "first block", "last block", "head", "behind all messages", WRITING)
PLENTY = 1 << 30  # bytes


@dataclass(eq=False)
class Act:
    """What is asked of some ranks. ``said``: by rank, its answer; ``outcomes``: what came of it."""

    does: str
    model: str
    ranks: tuple[int, ...]
    width: int = 1
    text: int = TEXTS[0]
    fails: tuple[tuple[int, ...], str] = ((), "")  # ranks, and where
    cancels: tuple[int, int] | None = None  # a rank, and the attention at which it hears of it
    attempt: int = 0
    room: int = -1  # bytes that messages may keep at the end of a run
    said: dict = field(default_factory=dict)
    outcomes: dict = field(default_factory=dict)

    @property
    def is_whole(self):
        return not (self.fails[0] or self.cancels)

    @property
    def succeeded(self):
        return all(isinstance(outcome, torch.Tensor) for outcome in self.outcomes.values())


class Turns:
    """Acts that are asked for at once, each of other ranks; the next ones when all are done."""

    def __init__(self, turns):
        self._turns = turns

    def arrive(self, rank, place):
        while place and not self.is_done(place - 1):
            getcurrent().parent.switch(Waits(self, place - 1))
        return [act for act in self._turns[place] if rank in act.ranks]

    def is_done(self, place):
        return all(len(act.outcomes) == len(act.ranks) for act in self._turns[place])


class Waits:
    def __init__(self, turns, place):
        self._turns, self._place = turns, place

    @property
    def done(self):
        return self._turns.is_done(self._place)


class Serving:
    """One rank, its models, and what happens to it in the act at hand."""

    def __init__(self, mesh):
        self.mesh, self.act, self.heard = mesh, None, 0
        self.models = {name: Holding(name, self) for name in WAYS}

    def fail_at(self, place):
        if self.act is not None and self.mesh.rank in self.act.fails[0] and self.act.fails[1] == place:
            raise ZeroDivisionError

    def wants_stop(self):
        self.heard += 1
        rank, attention = self.act.cancels if self.act and self.act.cancels else (-1, 0)
        return rank == self.mesh.rank and self.heard > attention

    def do(self, act):
        self.act, self.heard = act, 0
        self.mesh.sequence.use(act.width)
        rank, outcome = self.mesh.rank, None
        if act.does == "evaluate":
            outcome, act.said[rank] = self.models[act.model].evaluate(act)
        elif act.does == "end of the run":
            self.models[act.model].end_run(act.room)
        else:
            self.models.pop(act.model).detach()
            self.models[act.model] = Holding(act.model, self)
        act.outcomes[rank] = outcome


class Holding:
    """One rank's model, as ``ResidentModel`` has it, without a host."""

    def __init__(self, name, serving):
        self.model, self.serving, self.turns = Model(BLOCKS[name]), serving, None
        self.run = 1 + sorted(WAYS).index(name)
        self.method = make_method(self.model, PLAN, serving.mesh, Rank([]))
        for module, place in (
            (self.model.blocks[0], PLACES[1]),
            (self.model.blocks[-1], PLACES[2]),
            (self.model.head, PLACES[3]),
        ):
            module.register_forward_pre_hook(lambda *_, place=place: serving.fail_at(place))
        if WAYS[name] == "sharded":
            serving.mesh.sequence.use(1)  # weights are kept by group
            weights = sharded(self.model, serving.mesh)
            self.turns, self.parts = weights.turns, [layer.part for layer, _ in weights._sharded.values()]
            self.turns.attach()
        self.method.attach()
        self.model.register_forward_hook(lambda *_: serving.fail_at(PLACES[4]))

    def evaluate(self, act):
        traffic = self.serving.mesh.sequence.traffic
        self.method.begin(Part(self.run, 0, attempt=act.attempt))
        try:
            return self._evaluated(act, traffic), done()
        except Stopped:
            return Stopped, done(cancelled=True)
        except ZeroDivisionError as error:
            return type(error), failed(traffic.at, traffic.is_complete)

    def _evaluated(self, act, traffic):
        self.serving.fail_at("input")
        tokens = inputs(act.text)
        if self.turns is None:
            output = self.method.forward(self.model, tokens, 1)
        else:
            with self.turns.evaluation():
                output = self.method.forward(self.model, tokens, 1)
                self.turns.learn()
        traffic.is_complete = True
        self.serving.fail_at(WRITING)
        return output

    def end_run(self, room):
        if self.turns is not None:
            self.turns.end_run()
        self.method.end_run(room)

    def detach(self):
        self.method.detach()
        if self.turns is not None:
            self.turns.detach()


def played(layout, turns, backend="gloo", then=lambda serving: None):
    """All went on to the end, each group was even behind each act, and what ranks computed is what
    one computes, to the bit what they computed before; ``then`` is called in each.
    """
    asking, attempts = Turns(turns), dict.fromkeys(WAYS, 0)
    for act in (act for turn in turns for act in turn if act.does == "evaluate"):
        act.attempt = attempts[act.model]
        attempts[act.model] += not act.is_whole

    def work(mesh, run):
        serving = Serving(mesh)
        run.wants_stop = serving.wants_stop
        for place in range(len(turns)):
            for act in asking.arrive(mesh.rank, place):
                serving.do(act)
        then(serving)

    with pytest.MonkeyPatch.context() as patch, torch.inference_mode():
        world = World(layout, backend, patch)
        traces = world.run(work, Random(7).choice)
        assert disagreements(traces, world.members) == []
        before = {}
        for act in (act for turn in turns for act in turn if act.does == "evaluate"):
            assert are_even(answered(Meets.SEQUENCE, act.said)), act
            if act.is_whole:
                assert act.succeeded, act
                output = act.outcomes[act.ranks[0]]
                assert torch.equal(before.setdefault((act.model, act.text, act.ranks), output), output), act
                assert torch.allclose(output, Model(BLOCKS[act.model])(**inputs(act.text)), atol=1e-5), act
    assert has_an_order(traces, in_order=backend == "nccl")


def act_of(model="a", width=1, group=0, layout=LAYOUT, text=TEXTS[0], **more):
    return Act("evaluate", model, layout.members(group, width), width, text, **more)


@st.composite
def histories(draw):
    """A layout, and what is asked of its ranks one after the other."""
    layout = draw(st.sampled_from(LAYOUTS))
    turns = []
    for _ in range(draw(st.integers(2, 10))):
        model = draw(st.sampled_from(sorted(WAYS)))
        does = draw(st.sampled_from(("evaluate",) * 5 + ("end of the run", "reload")))
        if does != "evaluate":
            room = draw(st.sampled_from((-1, PLENTY, 3000)))  # the last: for the messages of some
            turns.append([Act(does, model, tuple(range(layout.world_size)), room=room)])
            continue
        width = 1 if WAYS[model] == "sharded" else draw(st.sampled_from(layout.widths))
        acts = []
        for group in sorted(draw(st.sets(st.integers(0, layout.groups // width - 1), min_size=1))):
            act = act_of(model, width, group, layout, draw(st.sampled_from(TEXTS)))
            what = draw(st.sampled_from(("", "", "fails", "cancels")))
            if what == "fails":
                place = draw(st.sampled_from(PLACES))
                one = (draw(st.sampled_from(act.ranks)),)
                act.fails = one if place == WRITING else act.ranks, place
            elif what == "cancels":
                act.cancels = draw(st.sampled_from(act.ranks)), draw(st.integers(0, 2))
            acts.append(act)
        turns.append(acts)
    return layout, turns, draw(st.sampled_from(("gloo", "nccl")))


@settings(max_examples=500 if ALL else 25)
@given(histories())
def test_no_sequence_of_requests_has_ranks_wait_for_each_other(history):
    layout, turns, backend = history
    played(layout, turns, backend)


def test_a_model_that_is_released_in_the_middle_of_a_run_leaves_none_of_its_weights_behind():
    """Its ranks go on, and no run has ended."""
    left = {}

    def release(serving):
        parts = [weakref.ref(part) for part in serving.models["b"].parts]
        serving.models.pop("b").detach()
        gc.collect()
        left[serving.mesh.rank] = sum(part() is not None for part in parts)

    played(
        LAYOUT,
        [[act_of("b")], [act_of("b")], [act_of("b", fails=((0, 1), "head"))]],
        then=release,
    )
    assert left == dict.fromkeys(range(4), 0)
