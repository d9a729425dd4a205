"""Evaluations that are recorded as CUDA graphs and replayed are those of stock, and nothing is in a
graph that a replay would have as it was: late GPUs record what they are asked for.
"""

import gc
import weakref
from collections import Counter, defaultdict
from copy import deepcopy
from functools import cache, partial
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from greenlet import getcurrent
from pipemesh.lab.commands.parity import BOUND, PLAIN, relative_error, sampled, stock_model
from pipemesh.parallel_runtime.attention.kernels import EXPLICIT, Kernels
from pipemesh.parallel_runtime.client.session import Like, Resident, Session
from pipemesh.parallel_runtime.comm.in_step import Expected
from pipemesh.parallel_runtime.comm.mesh import connect
from pipemesh.parallel_runtime.crossing.in_block import PatchesHere
from pipemesh.parallel_runtime.families import plan_for
from pipemesh.parallel_runtime.families.every import SAMPLES
from pipemesh.parallel_runtime.families.plan import COMPILE
from pipemesh.parallel_runtime.forward import binder, forward_name
from pipemesh.parallel_runtime.layout import Layout
from pipemesh.parallel_runtime.methods import recorded
from pipemesh.parallel_runtime.methods.factory import make_method
from pipemesh.parallel_runtime.methods.recorded import RecordedForward, Recording, Region, Unlike, when_wanted
from pipemesh.parallel_runtime.patches import Part
from pipemesh.parallel_runtime.wire.messages import Load
from pipemesh.parallel_runtime.worker.resident import ResidentModel

from .in_ranks import Crossed
from .late_device import late_device
from .late_queues import DEVICE
from .late_ranks import LateWorld, own_gpu
from .test_collectives import Rank
from .test_late_methods import on_gpu
from .test_prefix import PLAN as PROMPTED
from .test_prefix import Prompted, arguments

GIVEN = {
    PLAIN: {"x": (1, 16, 13, 12), "context": (1, 7, 64), "y": (1, 32), "guidance": (1,)},
    "qwen-image": {"x": (1, 16, 1, 13, 12), "context": (1, 7, 64)},
}


class Guarded(Rank):
    phase = "computing"

    def tick(self):
        getcurrent().gpu.require_no_recording("progress")

    def note(self, phase):
        self.phase = phase


def require_phase(rank, *_):
    assert (rank.phase == "recording") == (getcurrent().gpu.recording is not None)


def given(family, number, **shapes):
    generator = torch.Generator().manual_seed(number)
    tensors = {
        name: torch.randn(shape, generator=generator) for name, shape in {**GIVEN[family], **shapes}.items()
    }
    time = "timesteps" if family == "qwen-image" else "timestep"
    return {**tensors, time: torch.rand(1, generator=generator), "transformer_options": {}}


@cache
def stock(family):
    return stock_model(2, family=family).model.diffusion_model


class Asked(NamedTuple):
    """An evaluation. ``changed``, ``foreign``, ``graph``: of ``Expected``; ``model``: which one.
    ``run``: where it is another than before, that one has ended.
    """

    arguments: dict
    changed: bool = False
    foreign: bool = False
    model: int = 0
    attempt: int = 0
    run: int = 0
    graph: str = "record"

    @property
    def part(self):
        return Part(2 * self.run + self.model + 1, 0, attempt=self.attempt)


class UI:
    """What ComfyUI's process tells of the next evaluation, as it does."""

    def __init__(self, ranks):
        self.session = Session(
            SimpleNamespace(arena=SimpleNamespace(at_close=[]), facts=SimpleNamespace(speeds=())), Layout()
        )
        self.session.models |= {"0": Resident(), "1": Resident()}
        self.ranks, self.answers = tuple(range(ranks)), defaultdict(list)

    def expected(self, at, asked):
        """Once all have answered what was asked before."""
        while at and len(self.answers[at - 1]) < len(self.ranks):
            getcurrent().parent.switch(None)
        kind, model = self.kind_of(asked), str(asked.model)
        confirmed = self.session.known_steps(model, kind, self.ranks)
        like = Like(asked.part._replace(run=0), kind, self.ranks)
        graph = "replay" if like in self.session.models[model].recorded else asked.graph
        return Expected(kind, confirmed, graph, changed=asked.changed, foreign=asked.foreign)

    def kind_of(self, asked):
        return str([one.shape for one in asked.arguments.values() if isinstance(one, torch.Tensor)])

    def hear(self, at, asked, facts):
        self.answers[at].append(facts)
        if len(self.answers[at]) == len(self.ranks):
            kind, run = self.kind_of(asked), SimpleNamespace(model=str(asked.model))
            like = Like(asked.part._replace(run=0), kind, self.ranks)
            ticket = SimpleNamespace(run=run, like=like)
            self.session.confirm(ticket, self.answers[at])


def evaluated(
    layout,
    asked,
    models,
    *,
    plan=None,
    seed=0,
    prepare=lambda mesh, run, models, at: None,
    records="always",
    room=1 << 30,
):
    """What ranks compute of all that is asked; how often each has replayed a graph by then.
    ``room``: of what may stay from run to run.
    """
    outputs, replays, ui = {}, defaultdict(list), UI(layout.world_size)

    def work(mesh, run):
        mesh.sequence.records = records
        run.wants_stop = lambda: bool(getcurrent().gpu.require_no_recording("a flag"))
        own, methods, rank = deepcopy(models), [], Guarded([])
        for model in own:
            tokens = plan or plan_for(type(model))
            methods.append(make_method(model, tokens, mesh, rank, (), Kernels((EXPLICIT,))))
            for module in model.modules():
                module.register_forward_pre_hook(partial(require_phase, rank))
            model.to(own_gpu())
            methods[-1].attach()
        for at, one in enumerate(asked):
            prepare(mesh, run, own, at)
            model, method = own[one.model], methods[one.model]
            if at and one.run != asked[at - 1].run:
                method.end_run((), room)
            expected = ui.expected(at, one)
            method.begin(one.part, expected)
            rank.phase = "computing"
            try:
                output = method.forward(getattr(model, forward_name(model)), on_gpu(one.arguments), at + 1)
                outputs[mesh.rank, at] = output.to("cpu", non_blocking=True)
            except ZeroDivisionError:
                outputs[mesh.rank, at] = ZeroDivisionError
            replays[mesh.rank].append(run.gpu.replays)
            assert method.facts.messages_done == "all"
            ui.hear(at, one, method.facts)
        for method in methods:
            method.end_run()
            assert not method.facts.recorded

    with pytest.MonkeyPatch.context() as patch, late_device(seed) as box:
        LateWorld(layout, box, patch).run(work)
    return outputs, [replays[rank] for rank in range(layout.world_size)]


def is_right(output, model, arguments):
    with torch.inference_mode():
        truth = getattr(model, forward_name(model))(**arguments)
    return relative_error(output, truth) <= BOUND


@pytest.mark.parametrize("layout", [Layout(ulysses=2), Layout(ring=2), Layout()], ids=Layout.equation)
@pytest.mark.parametrize("family", GIVEN)
def test_from_the_second_evaluation_on_ranks_replay_and_compute_what_stock_does(family, layout):
    sent = defaultdict(list)

    def prepare(mesh, run, models, at):
        sent[mesh.rank].append(mesh.sequence.traffic.sent_bytes.total())  # before it

    asked = [Asked(given(family, number)) for number in range(3)]
    outputs, replays = evaluated(layout, asked, [stock(family)], seed=3, prepare=prepare)
    assert replays == [[0, 1, 2]] * layout.world_size
    for _, computed, replayed in sent.values():
        assert computed == replayed and (computed > 0) == (layout.world_size > 1)
    for at, one in enumerate(asked):
        assert is_right(outputs[layout.writer, at], stock(family), one.arguments), at


def test_another_shape_another_model_and_other_weights_have_no_graph_of_these():
    """Weights that change in place are read where they lie."""
    wide = {"x": (1, 16, 12, 13)}  # as many numbers, and tokens
    more = {"x": (1, 16, 15, 14)}
    asked = [
        *(Asked(given(PLAIN, 0)), Asked(given(PLAIN, 1)), Asked(given(PLAIN, 2, **wide))),
        *(Asked(given(PLAIN, 3, **more), model=1), Asked(given(PLAIN, 4, **wide))),
        *(Asked(given(PLAIN, 5, **more), model=1), Asked(given(PLAIN, 6))),
        *(Asked(given(PLAIN, 7), changed=True), Asked(given(PLAIN, 8))),
    ]
    other = deepcopy(stock(PLAIN))
    other.img_in.weight.data.mul_(-1)

    def prepare(mesh, run, models, at):
        weight = models[0].img_in.weight
        if at == 6:
            weight.mul_(2)
        if at == 7:
            models[0].img_in.weight = torch.nn.Parameter(weight * 2, requires_grad=False)

    outputs, replays = evaluated(Layout(ulysses=2), asked, [stock(PLAIN), other], prepare=prepare)
    truth = [deepcopy(stock(PLAIN)), other]
    for at, one in enumerate(asked):
        if at in (6, 7):
            truth[0].img_in.weight.data.mul_(2)
        assert is_right(outputs[0, at], truth[one.model], one.arguments), at
    assert replays == [[0, 1, 1, 1, 2, 3, 4, 4, 5]] * 2


def of_two_runs(*numbers):
    return [Asked(given(PLAIN, number), run=int(at > 2)) for at, number in enumerate(numbers)]


@pytest.mark.parametrize(("room", "later"), [(1 << 30, [3, 4]), (1 << 10, [2, 3])], ids=["room", "none"])
def test_another_run_replays_what_was_recorded_where_there_is_room_for_it(room, later):
    """Elsewhere it records anew."""
    asked = of_two_runs(0, 1, 2, 3, 4)
    outputs, replays = evaluated(Layout(ulysses=2), asked, [stock(PLAIN)], room=room)
    assert replays == [[0, 1, 2, *later]] * 2
    assert all(is_right(outputs[0, at], stock(PLAIN), one.arguments) for at, one in enumerate(asked))


def test_graphs_that_last_stay_while_they_take_no_more_than_there_is_room_for():
    lasting = Recording(None, [], None, [], {}, 7, 10, True)
    for recording, room, stays in (
        (lasting, 10, True),
        (lasting, 9, False),
        (lasting._replace(lasts=False), 99, False),
    ):
        graphs = RecordedForward()
        graphs._recordings["a"] = recording
        graphs.end_run(room)
        assert ("a" in graphs) == stays and graphs.number_of("a") == 7 * stays
        assert graphs.lacks("a") == (recording.lasts and not stays)
    graphs = RecordedForward()
    graphs._recordings["a"] = lasting._replace(lasts=False)
    graphs.end_run(-1)
    assert graphs.lacks("a"), "nothing was to stay, whatever it reads"


class Used:
    """Graphs of a model, each recorded as soon as it is worth it."""

    def __init__(self, monkeypatch):
        monkeypatch.setattr(recorded, "WORTH", 3)
        self.graphs, self.given = RecordedForward(), {"x": torch.ones(2, device=DEVICE)}

    def waited(self, key):
        """How many evaluations come before one is recorded."""
        count = 1
        while not self.graphs.pays(key):
            count += 1
        self.graphs.record(key, self.given, lambda given: given["x"] * 2, Counter(), [], 1)
        return count

    def replay(self, key, times):
        for _ in range(times):
            self.graphs.replay(key, self.given, Counter())


def test_where_graphs_go_before_they_have_paid_others_are_recorded_twice_as_late(monkeypatch):
    with late_device():
        used, waits = Used(monkeypatch), []
        for replays, end in (
            (0, used.graphs.void),
            (2, used.graphs.void),
            (3, used.graphs.void),
            (0, partial(used.graphs.end_run, 1)),
            (3, partial(used.graphs.end_run, 1)),
        ):
            waits.append(used.waited("a"))
            used.replay("a", replays)
            end()
            assert used.graphs.lacks("a")
        assert [*waits, used.waited("a")] == [3, 6, 12, 3, 6, 3]


def test_another_size_is_recorded_twice_as_late_while_the_ones_before_have_not_paid(monkeypatch):
    """Those that go together have paid together."""
    with late_device():
        used = Used(monkeypatch)
        assert [used.waited("a"), used.waited("b")] == [3, 6]
        used.replay("a", 5)
        assert used.waited("c") == 6
        used.replay("a", 4)
        assert used.waited("d") == 3
        used.replay("d", 3)
        used.graphs.void()
        assert used.waited("e") == 3


def test_what_torch_keeps_for_a_graph_is_what_it_reserved_less_the_output(monkeypatch):
    with late_device():
        given, reserved = {"x": torch.ones(2, device=DEVICE)}, iter([100, 150])
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda *_: next(reserved))
        graphs = RecordedForward()
        graphs.record("a", given, lambda given: given["x"] * 2, Counter(), [], 1)
        assert graphs.kept_bytes == 50 - 8 and graphs._recordings["a"].nbytes == 50 + 8


def test_what_a_model_keeps_for_a_run_is_in_no_graph_of_another():
    """It adds to each image what it made of the run's first."""
    first = {}

    def add_first(model, inputs):
        (image,) = inputs
        if id(model) not in first:
            first[id(model)] = image * 1.5
        return (image + first[id(model)],)

    def prepare(mesh, run, models, at):
        if at == 0:
            models[0].img_in.register_forward_pre_hook(add_first)
        if at == 3:
            del first[id(models[0].img_in)]

    asked, truth = of_two_runs(0, 1, 2, 3, 4), deepcopy(stock(PLAIN))
    outputs, replays = evaluated(Layout(ring=2), asked, [stock(PLAIN)], prepare=prepare)
    assert replays == [[0, 1, 2, 2, 2]] * 2
    truth.img_in.register_forward_pre_hook(add_first)
    for at, one in enumerate(asked):
        if at == 3:
            del first[id(truth.img_in)]
        assert is_right(outputs[0, at], truth, one.arguments), at


@pytest.mark.parametrize(
    ("seed", "is_bound", "worth"), [(0, False, 1), (1, True, 3)], ids=["by the GPU", "by the CPU"]
)
@pytest.mark.parametrize("layout", [Layout(ulysses=2), Layout(ring=2), Layout()], ids=Layout.equation)
def test_by_itself_a_rank_records_where_the_gpu_has_often_waited_for_it(
    layout, seed, is_bound, worth, monkeypatch
):
    monkeypatch.setattr(recorded, "WORTH", worth)
    asked = [Asked(given(PLAIN, number)) for number in range(7)]

    def prepare(mesh, run, models, at):
        mesh.sequence.device = own_gpu()  # as a rank over NCCL has it

    outputs, replays = evaluated(layout, asked, [stock(PLAIN)], seed=seed, records="late", prepare=prepare)
    for of_rank in replays:
        assert of_rank[2] == 0 and bool(of_rank[-1]) == is_bound
    assert all(is_right(outputs[0, at], stock(PLAIN), one.arguments) for at, one in enumerate(asked))


def pins(model, _inputs):
    torch.empty(1, pin_memory=True)


def keeps(model, inputs):
    model.kept = inputs[0] * 2


def lacks(model, inputs):
    if getcurrent().gpu.recording is not None:
        raise torch.OutOfMemoryError("no memory is left")


@pytest.mark.parametrize(
    ("does", "why"), [(pins, "pinned memory"), (keeps, "keeps 1 tensors"), (lacks, "no memory is left")]
)
def test_where_one_rank_cannot_record_no_rank_replays(caplog, does, why):
    def prepare(mesh, run, models, at):
        if mesh.rank == 1 and at == 0:
            models[0].img_in.register_forward_pre_hook(does)

    asked = [Asked(given(PLAIN, number)) for number in range(3)]
    outputs, replays = evaluated(Layout(ulysses=2), asked, [stock(PLAIN)], prepare=prepare)
    assert replays == [[0, 0, 0]] * 2
    assert all(is_right(outputs[0, at], stock(PLAIN), one.arguments) for at, one in enumerate(asked))
    (line,) = caplog.messages
    assert why in line


def test_a_model_that_keeps_its_prompt_and_one_with_code_of_nodes_are_computed(caplog):
    asked = [Asked(arguments(number, 13)) for number in (1, 2, 3)]
    outputs, replays = evaluated(Layout(ring=2), asked, [Prompted()], plan=PROMPTED)
    assert replays == [[0, 0, 0]] * 2
    kept = Prompted()
    assert all(is_right(outputs[0, at], kept, one.arguments) for at, one in enumerate(asked))
    evaluated(Layout(), [Asked(given(PLAIN, number), foreign=True) for number in range(2)], [stock(PLAIN)])
    why = "keeps tokens", "keeps tokens", "code of nodes"
    assert all(one in line for one, line in zip(why, caplog.messages, strict=True))


def test_a_rank_that_computes_or_fails_where_others_replay_leaves_none_waiting():
    """Behind a failure all record anew."""
    recordings = {}

    def fail(*_):
        raise ZeroDivisionError

    def prepare(mesh, run, models, at):
        if mesh.rank == 1:
            mesh.sequence.records = "never" if at in (2, 4) else "always"
        if mesh.rank == 1 and at == 4:
            run.failing = models[0].img_in.register_forward_pre_hook(fail)
        if mesh.rank == 1 and at == 5:
            run.failing.remove()
        recordings[mesh.rank, at] = run.gpu.recordings

    asked = [Asked(given(PLAIN, number), attempt=int(number > 4)) for number in range(7)]
    outputs, replays = evaluated(Layout(ring=2), asked, [stock(PLAIN)], prepare=prepare)
    assert outputs[1, 4] is ZeroDivisionError
    assert [recordings[0, at] for at in (5, 6)] == [1, 2]
    assert replays == [[0, 1, 2, 2, 3, 3, 4], [0, 1, 1, 1, 1, 1, 2]]
    for at in (0, 1, 2, 3, 5, 6):
        assert is_right(outputs[0, at], stock(PLAIN), asked[at].arguments), at


def test_a_log_that_keeps_what_it_is_told_keeps_nothing_of_what_could_not_be_recorded(caplog):
    made = []

    def compute(given):
        tensor = given["x"] * 2
        made.append(weakref.ref(tensor))
        raise RuntimeError("no graph for this")

    with late_device():
        given = {"x": torch.ones(2, device=DEVICE)}
        RecordedForward().record("a", given, compute, Counter(), [], 1)
    gc.collect()
    assert "no graph for this" in caplog.text and made[0]() is None


def test_a_model_gives_up_its_graphs_where_none_is_to_be_held():
    graphs = ("record", "record", "none", "record", "record")
    asked = [Asked(given(PLAIN, number), graph=graph) for number, graph in enumerate(graphs)]
    asked[2] = asked[2]._replace(arguments=given(PLAIN, 2, x=(1, 16, 12, 13)))
    seen = []
    outputs, replays = evaluated(
        Layout(),
        asked,
        [stock(PLAIN)],
        prepare=lambda mesh, run, models, at: seen.append(run.gpu.recordings),
    )
    assert replays == [[0, 1, 1, 1, 2]] and seen == [0, 1, 1, 1, 2]
    assert all(is_right(outputs[0, at], stock(PLAIN), one.arguments) for at, one in enumerate(asked))


def test_a_rank_tells_its_method_of_other_weights_and_of_nodes_code(monkeypatch):
    mesh = connect(Layout(), 0, via_cpu=False, wants_stop=lambda: False)
    rank, told = SimpleNamespace(tick=lambda: None, note=print, count=lambda *_: None), []
    resident = ResidentModel(
        stock_model(2), torch.device("cpu"), mesh, rank, Load(request=1, model="m", source=b"")
    )
    monkeypatch.setattr(resident.method, "begin", lambda _, expected: told.append(expected[-2:]))
    for number in range(4):
        if number == 2:
            resident.patch("b", {}, {}, rank)
            resident.end_run()  # of a run that ended before this rank had anything to compute
        if number == 3:
            resident._in_block = PatchesHere(methods={"blocks.0.forward": print})
        resident.begin(Part(1, 0))
    assert told == [(True, False), (False, False), (True, False), (False, True)]


@pytest.mark.parametrize(
    ("ask", "why"),
    [
        (lambda gpu: gpu.sum().item(), "reads numbers of the GPU"),
        (lambda gpu: gpu.nonzero(), "shape depends"),
        (lambda gpu: gpu.to("cpu"), "on the CPU and the GPU"),
        (lambda gpu: torch.ones(2).to(DEVICE), "on the CPU and the GPU"),
        (lambda gpu: torch.empty(2, pin_memory=True), "takes pinned memory"),
    ],
)
def test_what_a_replay_would_have_as_it_was_is_refused_by_name(ask, why):
    with late_device(), pytest.raises(Unlike, match=why), Region():
        ask(torch.ones(2, device=DEVICE))


def test_what_was_there_is_kept_and_what_outlives_a_recording_is_seen():
    with late_device():
        there, kept = torch.ones(2, device=DEVICE), []
        with Region() as region:
            kept.append(there * 2)
            output = kept[0] + there
        assert [id(one) for one in region.read.values()] == [id(there)]
        assert region.left(output) == 1
        kept.clear()
        assert region.left(output) == 0
        graphs = RecordedForward()
        graphs.record("a", {"x": output}, lambda given: given["x"] * there, Counter(), [], 1)
        assert any(one is there for one in graphs._recordings["a"].read)


def test_an_evaluation_with_code_or_on_the_cpu_has_no_graph_and_one_with_other_numbers_another(caplog):
    with late_device():
        there = torch.ones(2, device=DEVICE)
        options = {"transformer_options": {"a": [1, "b"]}}
        assert RecordedForward().key_of({"x": there, **options}) is not None
        for unlike in ({"x": torch.ones(2)}, {"patch": print}, {"transformer_options": {COMPILE: {}}}):
            assert RecordedForward().key_of({"y": there, **unlike}) is None
        numbers = [RecordedForward().key_of({"x": there, "n": number}) for number in (1, 1.0, True, 2)]
        assert len(set(numbers)) == 4
    assert len(caplog.messages) == 3


@pytest.mark.parametrize("family", GIVEN)
def test_what_a_sampler_asks_of_a_branch_is_alike_from_step_to_step(family, monkeypatch):
    patcher, asked = stock_model(2, family=family), []
    transformer = patcher.model.diffusion_model
    name = forward_name(transformer)
    compute, named = getattr(transformer, name), binder(getattr(type(transformer), name))

    def note(*args, **kwargs):
        asked.append(Crossed(patcher).arguments(named(args, kwargs)))
        return compute(*args, **kwargs)

    monkeypatch.setattr(transformer, name, note)
    sampled(patcher, SAMPLES[family], "odd", 4.0, False, "euler", 0, 3)
    graphs = RecordedForward()
    with late_device():
        keys = [graphs.key_of(on_gpu(one)) for one in asked]
    assert len(asked) == 6 and len(set(keys)) == 2 and None not in keys


def test_graphs_are_off_unless_they_are_asked_for_and_nccl_moves_messages():
    asked = [(backend, {"PIPEMESH_GRAPHS": one}) for backend in ("nccl", "gloo") for one in ("all", "1", "0")]
    assert [when_wanted(*one) for one in asked] == ["always", "late", "never", *["never"] * 3]
    assert when_wanted("nccl", {}) == "never"
