"""What ranks know of the steps to come, and that they agree on it before they rely on it: models
that come and go, whole and in parts, groups joined and apart, ranks that fail, cancels, ends of
runs, in any order. All ranks run in this process.
"""

import gc
import weakref
from dataclasses import dataclass, field
from random import Random
from types import SimpleNamespace

import pytest
import torch
from greenlet import getcurrent
from hypothesis import given, settings
from hypothesis import strategies as st
from pipemesh.parallel_runtime.client.session import Resident, Session
from pipemesh.parallel_runtime.comm.in_step import (
    END,
    KEPT_KINDS,
    TOKENS,
    Expected,
    InStep,
    KnownSteps,
    Step,
    Stopped,
)
from pipemesh.parallel_runtime.comm.mesh import SequenceComm
from pipemesh.parallel_runtime.errors import ModelError
from pipemesh.parallel_runtime.layout import Layout
from pipemesh.parallel_runtime.methods.factory import make_method
from pipemesh.parallel_runtime.patches import Part
from pipemesh.pool.verdict import Meets

from .collectives import World, disagreements, has_an_order
from .conftest import ALL
from .evenness import answered, done, failed, held
from .joint_model import PLAN, Model, inputs
from .test_collectives import Rank
from .test_sharded_weights import sharded

LAYOUT = Layout(ulysses=2, cfg=2)
CROSSED = Layout(ulysses=2, ring=2)  # a rank's message along one axis goes to others than along the other
LAYOUTS = [LAYOUT, Layout(ring=2, data=2), Layout(cfg=2, data=2), Layout(ulysses=3), CROSSED]
WAYS = {"a": "whole", "b": "sharded", "c": "whole"}  # of each model to keep its weights
BLOCKS = {"a": 2, "b": 2, "c": 3}
TEXTS = (5, 2)  # tokens: of the fewer, some ranks have none
PLACES = ("input", "first block", "last block", "head", "behind all messages", "writing")
BEHIND, WRITING = PLACES[-2:]  # the last: behind the forward, and all that a rank learns of it
PLENTY = 1 << 30  # bytes


@dataclass(eq=False)
class Act:
    """What is asked of some ranks. ``header``: which steps they have confirmed, as far as is known
    then. ``answers``: by rank, what came of it, and which steps it has confirmed.
    """

    does: str
    model: str
    ranks: tuple[int, ...]
    width: int = 1
    text: int = TEXTS[0]
    looks: int = TEXTS[0]  # how many tokens the UI takes it for
    own: tuple[int, int] | None = None  # a rank, and the text tokens that it has in place of these
    fails: tuple[int, str] | None = None  # a rank, and where
    cancels: tuple[int, int] | None = None  # a rank, and the attention at which it hears of it
    number: int = 0
    header: int = 0
    room: int = -1  # bytes that messages may keep at the end of a run
    frees: int = -1  # a rank that has no such room
    named: tuple[int, ...] = ()
    answers: dict = field(default_factory=dict)
    said: dict = field(default_factory=dict)  # by rank: its answer on the wire

    @property
    def succeeded(self):
        return self.does == "evaluate" and all(
            isinstance(outcome, torch.Tensor) for outcome, _ in self.answers.values()
        )


class Turn:
    """Acts that are asked for at once, each of other ranks. The next turn waits for all."""

    def __init__(self, *acts):
        self.acts = acts

    def __repr__(self):
        return f"Turn{self.acts}"

    @property
    def done(self):
        return all(len(act.answers) == len(act.ranks) for act in self.acts)


class Asking:
    """The UI: asks for one turn after the other, and says what all ranks have confirmed."""

    def __init__(self, turns):
        self._turns, self._asked = turns, -1
        self._session = Session(
            SimpleNamespace(arena=SimpleNamespace(at_close=[]), facts=SimpleNamespace(speeds=())), Layout()
        )
        self._session.models = {name: Resident() for name in WAYS}

    def arrive(self, rank, place):
        """The acts of this turn that are asked of ``rank``, once all before are done."""
        while place and not self._turns[place - 1].done:
            getcurrent().parent.switch(self._turns[place - 1])
        if self._asked < place:
            self._asked = place
            self._hear(self._turns[place - 1] if place else Turn())
            self._ask(self._turns[place])
        return [act for act in self._turns[place].acts if rank in act.ranks]

    def _ask(self, turn):
        for at, act in enumerate(turn.acts):
            act.number, act.header = (
                10 * self._asked + at + 1,
                self._session.known_steps(act.model, act.looks, act.ranks),
            )
            if act.does == "end of the run":
                act.named = self._session.lasting_steps(act.model)
            if act.does == "reload":
                self._session.models[act.model] = Resident()

    def _hear(self, turn):
        for act in turn.acts:
            if act.does == "end of the run" and not all(stays for stays, _ in act.answers.values()):
                self._session.end_run()
            if act.succeeded:
                run = SimpleNamespace(model=act.model)
                ticket = SimpleNamespace(run=run, kind=act.looks, ranks=act.ranks)
                self._session.confirm(
                    ticket,
                    [SimpleNamespace(confirmed=number) for _, number in act.answers.values()],
                )


class Serving:
    """One rank, its models, and what happens to it in the act at hand."""

    def __init__(self, mesh):
        self.mesh, self.act, self.heard = mesh, None, 0
        self.models = {name: Holding(name, self) for name in WAYS}

    def fail_at(self, place):
        if self.act is not None and self.act.fails == (self.mesh.rank, place):
            raise ZeroDivisionError

    def wants_stop(self):
        self.heard += 1
        rank, attention = (
            self.act.cancels if self.act is not None and self.act.cancels is not None else (-1, 0)
        )
        return rank == self.mesh.rank and self.heard > attention

    def do(self, act):
        self.act, self.heard = act, 0
        self.mesh.sequence.use(act.width)
        if act.does == "evaluate":
            outcome = self.models[act.model].evaluate(act)
            at, what = self.mesh.sequence.traffic.at, outcome[0]
            act.said[self.mesh.rank] = done(at, cancelled=what is Stopped)
            if what is ZeroDivisionError:
                is_written = act.fails == (self.mesh.rank, WRITING)
                act.said[self.mesh.rank] = failed(at, self.models[act.model].told, complete=is_written)
            return outcome
        if act.does == "end of the run":
            room = -1 if act.frees == self.mesh.rank else act.room
            return self.models[act.model].end_run(act.named, room), 0
        else:
            self.models.pop(act.model).detach()
            self.models[act.model] = Holding(act.model, self)
        return None, 0


class Holding:
    """One rank's model, as ``ResidentModel`` has it, without a host."""

    def __init__(self, name, serving):
        self.model, self.serving, self.turns = Model(BLOCKS[name]), serving, None
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
        self.model.register_forward_hook(lambda *_: serving.fail_at(BEHIND))

    def evaluate(self, act):
        self.method.begin(
            Part(1, 0), Expected(act.looks, act.header, lasts=self.turns is None or self.turns.are_known)
        )
        try:
            try:
                self.serving.fail_at("input")
            except ZeroDivisionError:
                self.method.fail(act.number)
                raise
            who, text = act.own or (-1, 0)
            tokens = text if who == self.serving.mesh.rank else act.text
            outcome = self.method.forward(self.model, inputs(tokens), act.number)
            if self.turns is not None:
                self.turns.learn()
            self.serving.fail_at(WRITING)
        except (Stopped, ZeroDivisionError, ModelError) as error:
            outcome = type(error)
        if self.turns is not None:
            self.turns.end_evaluation()
        self.told = self.method.facts.messages_done
        assert self.told == "all"
        return outcome, self.method.facts.confirmed

    def end_run(self, named, room):
        if self.turns is not None:
            self.turns.end_run()
            room = -1
        return self.method.end_run(named, room)

    def detach(self):
        self.method.detach()
        if self.turns is not None:
            self.turns.detach()


def played(layout, turns, backend="gloo", then=lambda serving: None):
    """What each rank sent and received, by act. What they computed is what one computes, and all
    went on to the end; ``then`` is called in each.
    """
    asking, spans = Asking(turns), []

    def work(mesh, run):
        serving = Serving(mesh)
        run.wants_stop = serving.wants_stop
        for place in range(len(turns)):
            for act in asking.arrive(mesh.rank, place):
                began = len(run.trace)
                act.answers[mesh.rank] = serving.do(act)
                spans.append((act, mesh.rank, began, len(run.trace)))
        then(serving)

    with pytest.MonkeyPatch.context() as patch, torch.inference_mode():
        world = World(layout, backend, patch)
        traces = world.run(work, Random(7).choice)
        assert disagreements(traces, world.members) == []
        before = {}  # what ranks compute is the same to the bit as long as their places say that they are even
        for act in (act for turn in turns for act in turn.acts if act.does == "evaluate"):
            if not held(answered(Meets.SEQUENCE, act.said)):
                before.clear()
            if act.succeeded:
                output = act.answers[act.ranks[0]][0]
                assert torch.equal(before.setdefault((act.model, act.text, act.ranks), output), output), act
                whole = Model(BLOCKS[act.model])(**inputs(act.text))
                assert torch.allclose(output, whole, atol=1e-5), act
    assert has_an_order(traces, in_order=backend == "nccl")
    return [(act, traces[rank][began:end]) for act, rank, began, end in spans]


def evaluate(model="a", width=1, group=0, layout=LAYOUT, text=TEXTS[0], **more):
    return Act("evaluate", model, layout.members(group, width), width, text, **{"looks": text, **more})


def end_of_run(model="a", layout=LAYOUT, **more):
    return Act("end of the run", model, tuple(range(layout.world_size)), **more)


def questions(turns, spans):
    """How often a rank is asked in each turn, by all that are asked."""
    asked = [
        [(act, sum(map(is_question, events))) for act, events in spans if act in turn.acts] for turn in turns
    ]
    assert all(len({count for _, count in of}) == 1 for of in asked), "some are asked more often than others"
    return [of[0][1] for of in asked]


def is_question(event):
    return event.operation == "all_to_all" and set(event.counts) == {0, 3}


TWO_MODELS = [("a", 2), ("b", 1), ("a", 2), ("b", 1), ("a", 2), ("b", 1)]


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_a_model_for_which_groups_join_and_one_for_which_they_do_not_take_turns(backend):
    """Only one group meets the second. Then a rank fails in the first."""
    turns = [Turn(evaluate(model, width)) for model, width in TWO_MODELS]
    turns += [
        Turn(evaluate("a", 2, fails=(1, "last block"))),
        Turn(evaluate("b", fails=(0, "head"))),
        Turn(evaluate("a", 2)),
    ]
    played(LAYOUT, turns, backend)
    assert [turn.acts[0].succeeded for turn in turns] == [True] * 6 + [False] * 2 + [True]


def test_ranks_ask_each_other_before_each_message_once_for_a_kind_then_once_for_each_run_and_never_within_it():
    turns = (
        [Turn(evaluate(width=2)) for _ in range(3)]
        + [Turn(end_of_run())]
        + [Turn(evaluate(width=2)) for _ in range(2)]
    )
    turns += [Turn(evaluate(width=2, text=TEXTS[1])), Turn(evaluate(width=1)), Turn(evaluate(width=2))]
    messages = 2 * BLOCKS["a"] + 1
    learned = 1 + messages + 1  # what is known, before each message, and at the end
    assert questions(turns, played(LAYOUT, turns, "nccl")) == [learned, 0, 0, 0, 1, 0, learned, learned, 0]


def test_in_a_later_run_nobody_asks_where_the_memory_of_messages_stayed():
    """Not even after a run in which one failed, or another model was computed."""
    turns = [Turn(evaluate()), Turn(end_of_run(room=PLENTY)), Turn(evaluate()), Turn(evaluate("c"))]
    turns += [Turn(evaluate(fails=(1, BEHIND))), Turn(end_of_run("c", room=PLENTY)), Turn(evaluate())]
    turns += [Turn(end_of_run("c")), Turn(evaluate()), Turn(evaluate("c"))]
    asked = dict(zip(turns, questions(turns, played(LAYOUT, turns, "nccl")), strict=True))
    learned = asked[turns[0]]
    assert [asked[turn] for turn in turns if turn.acts[0].does == "evaluate"] == [
        learned, 0, learned + 2, 0, 0, 1, 1
    ]  # fmt: skip


def test_where_one_rank_frees_the_memory_of_messages_all_ask_before_they_rely_on_what_they_know():
    """It could not go through them, where it finds no memory for its own part any more."""
    turns = [Turn(evaluate()), Turn(end_of_run(room=PLENTY, frees=1)), Turn(evaluate())]
    asked = questions(turns, played(LAYOUT, turns, "nccl"))
    assert asked[0] > 2 and asked[1:] == [0, 1]


def test_weights_that_are_gathered_are_known_when_it_is_known_which_layer_follows_which():
    turns = [Turn(evaluate("b")) for _ in range(4)]
    asked = questions(turns, played(LAYOUT, turns, "nccl"))
    assert min(asked[:2]) > 2 and asked[2:] == [0, 0]


def test_ranks_that_know_other_steps_learn_them_anew():
    """The number of tokens changes where nobody could know of it."""
    turns = [Turn(evaluate(width=2, text=text, looks=5)) for text in (5, 2, 5, 5)] + [Turn(end_of_run())]
    turns += [Turn(evaluate(width=2, text=5, looks=5)) for _ in range(2)]
    asked = questions(turns, played(LAYOUT, turns, "nccl"))
    assert min(asked[:4]) > 2 and asked[4:] == [0, 1, 0]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("knows", ["nothing", "what the request says", "what all say"])
def test_a_rank_that_fails_leaves_with_all_others_whatever_they_know(place, knows):
    before = {
        "nothing": [],
        "what the request says": [evaluate(width=2)],
        "what all say": [evaluate(width=2), end_of_run()],
    }[knows]
    for who in range(LAYOUT.world_size) if ALL else (1,):
        turns = [Turn(act) for act in [*before, evaluate(width=2, fails=(who, place)), evaluate(width=2)]]
        played(LAYOUT, turns)
        assert not turns[-2].acts[0].succeeded and turns[-1].acts[0].succeeded
        left = {outcome for rank, (outcome, _) in turns[-2].acts[0].answers.items() if rank != who}
        assert place not in PLACES[:2] or left == {Stopped}, "they compute on with nothing"


@pytest.mark.parametrize("who", range(CROSSED.world_size) if ALL else (0,))
def test_a_rank_with_tokens_of_its_own_has_all_leave_though_another_fails_first(who):
    """Not all of them get a message from the first."""
    turns = []
    for fails in (rank for rank in range(CROSSED.world_size) if rank != who):
        for place in PLACES if ALL else PLACES[:1]:
            turns += [evaluate(layout=CROSSED), end_of_run(layout=CROSSED), evaluate(layout=CROSSED)]
            turns += [evaluate(layout=CROSSED, own=(who, TEXTS[1]), fails=(fails, place))]
    played(CROSSED, [Turn(act) for act in turns])
    assert [act.succeeded for act in turns if act.does == "evaluate"] == [True, True, False] * (
        len(turns) // 4
    )


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
            turns.append(Turn(Act(does, model, tuple(range(layout.world_size)), room=room)))
            continue
        width = 1 if WAYS[model] == "sharded" else draw(st.sampled_from(layout.widths))
        acts = []
        for group in sorted(draw(st.sets(st.integers(0, layout.groups // width - 1), min_size=1))):
            act = evaluate(model, width, group, layout, draw(st.sampled_from(TEXTS)))
            what = draw(st.sampled_from(("", "", "fails", "cancels")))
            if what == "fails":
                act.fails = draw(st.sampled_from(act.ranks)), draw(st.sampled_from(PLACES))
            elif what == "cancels":
                act.cancels = draw(st.sampled_from(act.ranks)), draw(st.integers(0, 2))
            if len(act.ranks) > 1 and draw(st.integers(0, 3)) == 3:
                act.own = draw(st.sampled_from(act.ranks)), sum(TEXTS) - act.text
            acts.append(act)
        turns.append(Turn(*acts))
    return layout, turns, draw(st.sampled_from(("gloo", "nccl")))


@settings(max_examples=500 if ALL else 25)
@given(histories())
def test_no_sequence_of_requests_has_ranks_wait_for_each_other(history):
    layout, turns, backend = history
    played(layout, turns, backend)
    for act in (
        act
        for turn in turns
        for act in turn.acts
        if act.does == "evaluate" and not (act.fails or act.cancels or act.own)
    ):
        assert act.succeeded


# -- what is kept


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
        [Turn(evaluate("b")), Turn(evaluate("b")), Turn(evaluate("b", fails=(1, "head")))],
        then=release,
    )
    assert left == dict.fromkeys(range(4), 0)


def test_what_is_known_of_steps_holds_no_tensor():
    def look(serving):
        known = [one.method._known for one in serving.models.values()]
        steps = [step for one in known for steps in one._steps.values() for step in steps]
        assert steps or serving.mesh.rank > 1
        assert all(is_plain(step) for step in steps)

    played(LAYOUT, [Turn(evaluate(model)) for model in ("a", "b", "b", "c")], then=look)


def is_plain(value):
    if isinstance(value, tuple):
        return all(map(is_plain, value))
    return value is None or isinstance(value, (str, int, torch.dtype, torch.device))


def test_what_was_learned_longest_ago_is_forgotten_at_the_end_of_a_run_and_not_within_it():
    known = KnownSteps()
    for kind in range(1, KEPT_KINDS + 3):
        known.learn(kind, kind, [Step("end")])
    assert known.number_of(1) == 1
    known.change(5)
    assert known.number_of(5) == 0 and known.steps_of(5)
    known.end_run()
    assert [kind for kind in range(1, 9) if known.number_of(kind)] == [3, 4, 5, 6, 7, 8]
    assert not known.steps_of(1) and known.steps_of(3)


def test_steps_that_the_ui_may_still_name_are_known_in_the_next_run():
    """All had confirmed the first; then one rank learned others, and the rest failed."""
    known = KnownSteps()
    known.learn("kind", 1, [Step("ring")])
    known.learn("kind", 2, [Step("end")])
    known.end_run([1])
    assert known.steps_of(1) == [Step("ring")] and known.number_of("kind") == 2
    known.end_run()
    assert not known.steps_of(1)


def test_the_ui_names_no_more_steps_than_ranks_keep_in_any_case():
    session = Session(
        SimpleNamespace(arena=SimpleNamespace(at_close=[]), facts=SimpleNamespace(speeds=())), Layout()
    )
    session.models["m"] = resident = Resident()
    resident.confirmed = {(kind, (0, 1)): kind for kind in range(KEPT_KINDS + 5)}  # one not: 0
    assert session.lasting_steps("m") == tuple(range(5, KEPT_KINDS + 5)) and session.lasting_steps("n") == ()
    assert session.known_steps("m", 4, (0, 1)) == 0 and session.known_steps("m", 5, (0, 1)) == 5


def test_a_rank_that_does_not_know_what_all_have_confirmed_says_so_at_once():
    """It cannot be; a rank that went on would have the others wait for it."""
    layout = Layout(ulysses=2)
    act = evaluate(layout=layout)

    def later(serving):
        method = serving.models["a"].method
        with pytest.raises(RuntimeError, match="evaluation 99 are not known here"):
            method.begin(Part(1, 0), Expected(5, 99))
        assert method.facts.messages_done == "some"

    played(layout, [Turn(act)], then=later)


def test_a_rank_that_cannot_even_go_through_what_is_known_asks_nobody_and_is_not_even():
    """It has other tokens than all have confirmed, and no memory. The others exchange messages."""
    asked, known = [], KnownSteps()

    def go_through(what, wish):
        raise torch.OutOfMemoryError

    steps = InStep(lambda *told: asked.append(told), lambda flag: None)
    steps.join(SimpleNamespace(axis="ring", go_through=go_through))
    known.learn("kind", 1, [Step(TOKENS, "few"), Step("ring"), Step(END)])
    steps.begin(known, Expected("kind", 1))
    with pytest.raises(torch.OutOfMemoryError):
        steps.expect("many", 9)
    steps.fail()
    assert not asked and not steps.is_even


@pytest.mark.parametrize(
    ("theirs", "told"),
    [((0, 3), (False, 3)), ((0, 5), (False, 0)), ((0, 0), (False, 0)), ((1, 3), (True, 3))],
)
def test_ranks_rely_on_no_steps_that_one_of_them_does_not_know(theirs, told):
    """Of two ranks, this one knows the steps of evaluation 3."""
    failed, known = theirs
    world = SimpleNamespace(largest=lambda flags: flags.maximum(torch.tensor([failed, known, -known])))
    comm = SimpleNamespace(size=2, device="cpu", world=world)
    answer = SequenceComm._ask(comm, False, 3)
    assert (answer.has_failed, answer.common) == told
