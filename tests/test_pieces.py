"""Evaluations whose pieces are recorded as CUDA graphs and replayed are what the same ranks
compute, to the bit: late GPUs record what they are asked for, and send messages between.
"""

from collections import defaultdict
from copy import deepcopy
from dataclasses import replace
from functools import cache, partial
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from greenlet import getcurrent
from pipemesh.lab.commands.parity import BOUND, PLAIN, relative_error, sampled, stock_model
from pipemesh.parallel_runtime.attention.kernels import EXPLICIT, Kernels
from pipemesh.parallel_runtime.comm.exchange import StopFlag
from pipemesh.parallel_runtime.comm.mesh import connect
from pipemesh.parallel_runtime.comm.traffic import Stopped, Traffic, no_wish
from pipemesh.parallel_runtime.crossing.block_code import PatchesHere
from pipemesh.parallel_runtime.errors import ModelError
from pipemesh.parallel_runtime.families import plan_for
from pipemesh.parallel_runtime.families.catalogue import REPRESENTATIVES, SAMPLES
from pipemesh.parallel_runtime.families.plan import COMPILE
from pipemesh.parallel_runtime.forward import binder, forward_name
from pipemesh.parallel_runtime.layout import Layout
from pipemesh.parallel_runtime.methods.factory import make_method
from pipemesh.parallel_runtime.methods.pieces import NotRecordable, RecordedOperations
from pipemesh.parallel_runtime.methods.recordings import Recordings, Replays, why_not_recorded, why_unrecorded
from pipemesh.parallel_runtime.patches import Part
from pipemesh.parallel_runtime.wire.messages import Load
from pipemesh.parallel_runtime.worker.resident_model import ResidentModel

from .in_ranks import Crossed
from .late_device import late_device
from .late_queues import DEVICE
from .late_ranks import LateWorld, own_gpu
from .test_collectives import Rank
from .test_late_methods import on_gpu

VIDEO = next(name for name, one in REPRESENTATIVES.items() if one.latents["odd"][2:3] == (3,))  # frames
OFFLOADED = torch.nn.Parameter(torch.ones(2), requires_grad=False)
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


@cache
def stock(family):
    return stock_model(2, family=family).model.diffusion_model


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
    """What a rank had done behind each evaluation: graphs recorded and replayed, and messages."""

    recorded: list
    replayed: list
    sent: list


def evaluated(layout, asked, models, *, seed=0, prepare=lambda *_: None, room=1 << 30, worth=0):
    """What ranks compute of all that is asked, by rank and place, and what each has seen.
    ``room``: of what may stay from run to run.
    """
    outputs, seen = {}, defaultdict(lambda: Seen([], [], []))

    def work(mesh, run):
        stopping = [False]
        run.wants_stop = lambda: stopping[0]
        own, methods, kept, rank = deepcopy(models), [], [], Rank([])
        for model in own:
            plan = plan_for(type(model))
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
            compute = partial(method.forward, getattr(model, forward_name(model)), number=at + 1)
            try:
                output = recordings.evaluate(on_gpu(one.arguments), compute, method.forget)
                outputs[mesh.rank, at] = output.to("cpu", non_blocking=True)
            except (Stopped, ModelError) as error:
                outputs[mesh.rank, at] = error
            mesh.sequence.traffic.is_complete = True
            seen[mesh.rank].recorded.append(run.gpu.recordings)
            seen[mesh.rank].replayed.append(run.gpu.replays)
            traffic = mesh.sequence.traffic
            seen[mesh.rank].sent.append((traffic.at, dict(traffic.sent_bytes), len(run.trace)))
        for method in methods:
            method.end_run()
            method.detach()

    with pytest.MonkeyPatch.context() as patch, late_device(seed) as box:
        LateWorld(layout, box, patch).run(work)
    return outputs, [seen[rank] for rank in range(layout.world_size)]


def is_right(output, model, arguments):
    with torch.inference_mode():
        truth = getattr(model, forward_name(model))(**arguments)
    return relative_error(output, truth) <= BOUND


LAYOUTS = [Layout(ulysses=2), Layout(ring=2), Layout(ulysses=2, ring=2), Layout(ring=3), Layout()]


@pytest.mark.parametrize("layout", LAYOUTS, ids=Layout.equation)
@pytest.mark.parametrize("family", GIVEN)
def test_what_is_replayed_is_what_is_computed_to_the_bit(family, layout):
    asked = [Asked(given(family, number)) for number in range(11)]
    replayed, seen = evaluated(layout, asked, [stock(family)], seed=3)
    computed, alone = evaluated(layout, asked, [stock(family)], seed=3, worth=99)
    assert [one.sent for one in seen] == [one.sent for one in alone], "a message is sent twice, or not at all"
    for one in seen:
        assert one.recorded[0] == one.recorded[-1] > 0 and one.replayed[0] == 0
        assert [a < b for a, b in zip(one.replayed, one.replayed[1:], strict=False)] == [True] * 10
    for key, output in computed.items():
        assert torch.equal(replayed[key], output), key
    assert is_right(replayed[layout.writer, 5], stock(family), asked[5].arguments)


def test_another_shape_another_model_and_other_weights_have_no_graph_of_these():
    """Weights that change in place are read where they lie."""
    wide = {"x": (1, 16, 12, 13)}  # as many numbers, and tokens
    more = {"x": (1, 16, 15, 14)}  # outgrows the memory of messages
    asked = [
        *(Asked(given(PLAIN, 0)), Asked(given(PLAIN, 1)), Asked(given(PLAIN, 2, **wide))),
        *(Asked(given(PLAIN, 3, **more), model=1), Asked(given(PLAIN, 4, **wide))),
        *(Asked(given(PLAIN, 5, **more), model=1), Asked(given(PLAIN, 6))),
        *(Asked(given(PLAIN, 7)), Asked(given(PLAIN, 8)), Asked(given(PLAIN, 9))),
    ]
    other = deepcopy(stock(PLAIN))
    other.img_in.weight.data.mul_(-1)

    def prepare(mesh, run, models, kept, at):
        weight = models[0].img_in.weight
        if at == 6:
            weight.mul_(2)
        if at == 7:
            models[0].img_in.weight = torch.nn.Parameter(weight * 2, requires_grad=False)
            kept[0].void()

    outputs, seen = evaluated(Layout(ulysses=2), asked, [stock(PLAIN), other], prepare=prepare)
    truth = [deepcopy(stock(PLAIN)), other]
    for at, one in enumerate(asked):
        if at in (6, 7):
            truth[0].img_in.weight.data.mul_(2)
        assert is_right(outputs[0, at], truth[one.model], one.arguments), at
    for one in seen:
        assert replays(one) == [0, 1, 0, 0, 1, 1, 1, 0, 1, 1]


def replays(seen):
    """Whether each evaluation was replayed."""
    return [int(b > a) for a, b in zip([0, *seen.replayed], seen.replayed, strict=False)]


def of_two_runs(*numbers):
    return [Asked(given(PLAIN, number), run=int(at > 2)) for at, number in enumerate(numbers)]


@pytest.mark.parametrize(("room", "later"), [(1 << 30, [1, 1]), (1 << 10, [0, 1])], ids=["room", "none"])
def test_another_run_replays_what_was_recorded_if_there_is_room_for_it(room, later):
    """Else it records anew. Ranks of a new run compare their tokens before they replay."""
    asked = of_two_runs(0, 1, 2, 3, 4)
    outputs, seen = evaluated(Layout(ulysses=2), asked, [stock(PLAIN)], room=room)
    assert [replays(one) for one in seen] == [[0, 1, 1, *later]] * 2
    assert all(is_right(outputs[0, at], stock(PLAIN), one.arguments) for at, one in enumerate(asked))


def test_what_a_model_keeps_for_a_run_is_in_no_graph_of_another():
    """It adds to each image what it made of the run's first."""
    first = {}

    def add_first(model, inputs):
        (image,) = inputs
        if id(model) not in first:
            first[id(model)] = image * 1.5
        return (image + first[id(model)],)

    def prepare(mesh, run, models, kept, at):
        if at == 0:
            models[0].img_in.register_forward_pre_hook(add_first)
        if at == 3:
            del first[id(models[0].img_in)]

    asked, truth = of_two_runs(0, 1, 2, 3, 4), deepcopy(stock(PLAIN))
    outputs, seen = evaluated(Layout(ring=2), asked, [stock(PLAIN)], prepare=prepare)
    assert [replays(one) for one in seen] == [[0, 1, 1, 0, 0]] * 2
    truth.img_in.register_forward_pre_hook(add_first)
    for at, one in enumerate(asked):
        if at == 3:
            del first[id(truth.img_in)]
        assert is_right(outputs[0, at], truth, one.arguments), at


@pytest.mark.parametrize("layout", LAYOUTS[:3], ids=Layout.equation)
@pytest.mark.parametrize("computing", [(), (1,)], ids=["all replay", "one computes"])
def test_a_stop_amid_a_replay_leaves_all_ranks_at_one_message_and_the_next_image_right(layout, computing):
    """Also beside a rank that has recorded nothing."""
    at, asked = [], [Asked(given(PLAIN, number), stops=number == 4) for number in range(7)]

    def prepare(mesh, run, models, kept, number):
        kept[0].refuses = "not here" if mesh.rank in computing else ""
        if number == 5:
            at.append(mesh.sequence.traffic.at)

    outputs, seen = evaluated(layout, asked, [stock(PLAIN)], seed=2, prepare=prepare)
    assert all(isinstance(outputs[rank, 4], Stopped) for rank in range(layout.world_size))
    assert len({*at}) == 1 and None not in at
    for rank, one in enumerate(seen):
        assert replays(one) == ([0] * 7 if rank in computing else [0, *[1] * 6])
    for number in (3, 5, 6):
        assert is_right(outputs[layout.writer, number], stock(PLAIN), asked[number].arguments)


def pins(model, _inputs):
    torch.empty(1, pin_memory=True)


def brings(model, inputs):
    return (inputs[0] + torch.arange(inputs[0].shape[-1]).to(inputs[0].device),)


def fills(model, inputs):
    return (inputs[0].new_empty(inputs[0].shape).copy_(torch.ones(inputs[0].shape)) + inputs[0],)


@pytest.mark.parametrize("does", [pins, brings, fills])
def test_what_a_model_brings_from_the_cpu_is_brought_once(does):
    def prepare(mesh, run, models, kept, at):
        if at == 0:
            models[0].img_in.register_forward_pre_hook(does)

    asked, truth = [Asked(given(PLAIN, number)) for number in range(4)], deepcopy(stock(PLAIN))
    outputs, seen = evaluated(Layout(ulysses=2), asked, [stock(PLAIN)], prepare=prepare)
    assert [replays(one) for one in seen] == [[0, 1, 1, 1]] * 2
    if does is not pins:
        truth.img_in.register_forward_pre_hook(does)
    assert all(is_right(outputs[0, at], truth, one.arguments) for at, one in enumerate(asked))


def draws(model, inputs):
    return (inputs[0] + 0 * torch.rand_like(inputs[0]),)


def reads(model, inputs):
    float(inputs[0].sum())


def keeps(model, inputs):
    model.kept = inputs[0] * 2


def lacks(model, inputs):
    if getcurrent().gpu.current.recording is not None:
        raise torch.OutOfMemoryError("no memory is left")


@pytest.mark.parametrize(
    ("does", "why"),
    [
        (draws, "draws random numbers"),
        (reads, "reads numbers of the GPU"),
        (keeps, "keeps 1 tensors"),
        (lacks, "no memory is left"),
    ],
)
def test_a_rank_that_cannot_record_says_why_and_computes_beside_the_ranks_that_replay(caplog, does, why):
    def prepare(mesh, run, models, kept, at):
        if mesh.rank == 1 and at == 0:
            models[0].img_in.register_forward_pre_hook(does)

    asked = [Asked(given(PLAIN, number)) for number in range(4)]
    outputs, seen = evaluated(Layout(ulysses=2), asked, [stock(PLAIN)], prepare=prepare)
    assert [replays(one) for one in seen] == [[0, 1, 1, 1], [0, 0, 0, 0]]
    assert all(is_right(outputs[0, at], stock(PLAIN), one.arguments) for at, one in enumerate(asked))
    (line,) = caplog.messages
    assert why in line


def test_nothing_is_recorded_unless_a_gpu_has_waited_often():
    asked = [Asked(given(PLAIN, number), is_wanted=number != 2) for number in range(6)]
    _, seen = evaluated(Layout(ulysses=2), asked, [stock(PLAIN)], worth=3)
    assert [replays(one) for one in seen] == [[0, 0, 0, 0, 1, 1]] * 2


def planted(fault, before, layout=LAYOUTS[0], ranks=(0,), count=12):
    """Runs with a recording that has a ``fault`` from evaluation ``before`` on."""

    def prepare(mesh, run, models, kept, at):
        if at == before and mesh.rank in ranks:
            (key,) = kept[0].recorded
            kept[0]._known[key] = fault(kept[0]._known[key])

    asked = [Asked(given(PLAIN, number)) for number in range(count)]
    outputs, seen = evaluated(layout, asked, [stock(PLAIN)], prepare=prepare)
    return asked, outputs, [replays(one) for one in seen]


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


def recorded(layout=LAYOUTS[0]):
    found = []
    planted(lambda recording: found.append(recording) or recording, 1, layout, count=2)
    return found[0]


@pytest.mark.parametrize("place", [0, 1, 2, 4])  # this model reads no guidance
def test_a_proof_finds_each_input_that_is_not_copied_and_the_image_is_right(place, caplog):
    asked, outputs, (ours, others) = planted(stale(place), 1)
    assert ours == [0, 1, *[0] * 10] and others == [0, *[1] * 11]
    assert all(is_right(outputs[0, at], stock(PLAIN), one.arguments) for at, one in enumerate(asked))
    assert "computed other numbers" in caplog.text and "The image is right" in caplog.text


@pytest.mark.parametrize("layout", [LAYOUTS[0], LAYOUTS[3]], ids=Layout.equation)
def test_a_proof_names_the_piece_that_is_not_what_is_computed(layout, caplog):
    whole = recorded(layout)
    places = [place for place, one in enumerate(whole.pieces) if one.graph is not None]
    assert len(places) > 8
    for place in places[:: len(places) // 4]:
        caplog.clear()
        shown = next(
            later for later, one in enumerate(whole.pieces) if later >= place and (one.sent or not one.move)
        )
        asked, outputs, _ = planted(lost(place), 1, layout, count=4)
        assert f"piece {shown + 1} of {len(whole.pieces)}" in caplog.text
        assert all(is_right(outputs[0, at], stock(PLAIN), one.arguments) for at, one in enumerate(asked))


def test_a_fault_that_shows_late_ends_the_run_with_a_sentence():
    """The replays before its proof were nobody's to see."""
    _, outputs, (ours,) = planted(stale(0), 4, LAYOUTS[4])
    (error,) = [one for one in outputs.values() if isinstance(one, ModelError)]
    assert "Up to 7 steps of this image may be off: queue again" in str(error)
    assert ours == [0, *[1] * 8, 0, 0, 0]


def test_recordings_that_are_given_up_stay_so_and_the_log_says_why(caplog):
    def prepare(mesh, run, models, kept, at):
        if at == 2:
            kept[0].give_up()

    _, seen = evaluated(
        Layout(), [Asked(given(PLAIN, number)) for number in range(5)], [stock(PLAIN)], prepare=prepare
    )
    assert replays(seen[0]) == [0, 1, 0, 0, 0] and "memory is short beside them" in caplog.text


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


def test_what_is_voided_before_it_has_paid_is_recorded_twice_as_late():
    with late_device():
        used, waits = Used(3), []
        for replayed in (0, 2, 3, 0, 3):
            waits.append(used.waited(2))
            used.evaluate(2, replayed)
            used.kept.void()
        assert [*waits, used.waited(2)] == [3, 6, 12, 3, 6, 3]


def test_a_run_ends_with_what_was_replayed_and_why_not_all():
    """What is computed beside a replay as its proof is not counted."""
    with late_device():
        used, refused = Used(3), Used(1)
        used.evaluate(2, 6)
        assert used.kept.end_run(1 << 30) == Replays(6, 1)
        used.evaluate(2, 4)
        assert used.kept.end_run(1 << 30) == Replays(4, 4)
        used.kept.give_up()
        for _ in range(2):
            used.evaluate(2)
            assert used.kept.end_run(1 << 30) == Replays(1, 0, "memory is short beside them")
        given = {"x": torch.ones(2, device=DEVICE)}
        for _ in range(2):  # it is tried once, and told of in each run
            refused.kept.evaluate(given, lambda given: torch.rand_like(given["x"]), int)
            assert "draws random numbers" in refused.kept.end_run(1 << 30).why


@pytest.mark.parametrize(
    ("ask", "why"),
    [
        (lambda gpu: gpu.sum().item(), "reads numbers of the GPU"),
        (lambda gpu: gpu.nonzero(), "shape depends"),
        (lambda gpu: gpu.to("cpu"), "reads numbers of the GPU"),
        (lambda gpu: torch.empty(2).copy_(gpu), "reads numbers of the GPU"),
        (lambda gpu: torch.nn.functional.dropout(gpu, 0.5, True), "draws random numbers"),
        (lambda gpu: torch.randn(2), "draws random numbers"),
        (lambda gpu: OFFLOADED.to(gpu.device), "a weight lies in main memory"),
        (lambda gpu: gpu.copy_(OFFLOADED), "a weight lies in main memory"),
    ],
)
def test_what_a_replay_would_have_as_it_was_is_refused_by_name(ask, why):
    with late_device(), pytest.raises(NotRecordable, match=why), RecordedOperations(torch.cuda.Stream()):
        ask(torch.ones(2, device=DEVICE))


def test_what_was_there_is_kept_and_what_outlives_a_recording_is_seen():
    with late_device():
        there, kept = torch.ones(2, device=DEVICE), []
        with RecordedOperations(torch.cuda.Stream()) as region:
            kept.append(there * 2)
            output = kept[0] + there
        assert [id(one) for one in region.read.values()] == [id(there)]
        assert region.left(output) == 1
        kept.clear()
        assert region.left(output) == 0


def test_an_evaluation_with_code_or_on_the_cpu_is_not_recorded_and_one_with_other_numbers_is_another(caplog):
    with late_device():
        there, used = torch.ones(2, device=DEVICE), Used(1)
        options = {"transformer_options": {"a": [1, "b"]}}
        assert used.kept._key_of({"x": there, **options}) is not None
        for unlike in ({"x": torch.ones(2)}, {"patch": print}, {"transformer_options": {COMPILE: {}}}):
            assert Used(1).kept._key_of({"y": there, **unlike}) is None
        numbers = [used.kept._key_of({"x": there, "n": number}) for number in (1, 1.0, True, 2)]
        assert len({*numbers}) == 4
    assert len(caplog.messages) == 3


@pytest.mark.parametrize("family", [PLAIN, VIDEO])
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
    with late_device():
        keys = [Used(1).kept._key_of(on_gpu(one)) for one in asked]
    assert len(asked) == 6 and len({*keys}) == 2 and None not in keys


def test_graphs_are_recorded_where_they_are_turned_on_on_nvidias_gpus_whose_messages_lie_there(monkeypatch):
    asked = {"PIPEMESH_GRAPHS": "1"}
    assert why_unrecorded(DEVICE, asked) == why_unrecorded(DEVICE, {"PIPEMESH_GRAPHS": "all"}) == ""
    for off in ({}, *({"PIPEMESH_GRAPHS": one} for one in ("0", "", "yes"))):
        assert why_unrecorded(DEVICE, off) == "PIPEMESH_GRAPHS is not 1"
    assert "main memory" in why_unrecorded(torch.device("cpu"), asked)
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert "AMD" in why_unrecorded(DEVICE, asked)


def test_weights_or_code_that_change_void_what_a_rank_has_recorded(monkeypatch):
    mesh = replace(connect(Layout(), 0, via_cpu=False, wants_stop=lambda: False), unrecorded="")
    rank = SimpleNamespace(tick=lambda: None, note=print, count=lambda *_: None)
    load = Load(request=1, model="m", source=b"")
    resident, voided = ResidentModel(stock_model(2), torch.device("cpu"), mesh, rank, load), []
    monkeypatch.setattr(resident.recordings, "void", lambda: voided.append(resident.recordings.refuses))
    resident.patch("a", {}, {}, rank)
    assert {*voided} == {""}
    resident._objects.in_block = PatchesHere(methods={"blocks.0.forward": print})
    resident.patch("b", {}, None, rank)
    assert voided[-1] == "nodes' code is in its blocks"
    before = len(voided)
    resident.detach()
    assert len(voided) > before
