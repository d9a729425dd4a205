"""Evaluations whose pieces are recorded as CUDA graphs and replayed are what the same ranks
compute, to the bit: late GPUs record what they are asked for, and send messages between.
"""

from copy import deepcopy

import pytest
import torch
from greenlet import getcurrent
from pipemesh.parallel_runtime.comm.traffic import Stopped
from pipemesh.parallel_runtime.errors import ModelError
from pipemesh.parallel_runtime.layout import Layout
from pipemesh.parallel_runtime.methods import recordings as module

from ..comm.test_collectives import SEQUENCES
from ..kit.late_device import Graph, late_device
from ..kit.late_pieces import (
    GIVEN,
    JOINT,
    Asked,
    Used,
    asked_by_sampler,
    assert_same,
    cond,
    evaluated,
    given,
    is_right,
    lost,
    replays,
    stale,
    stock,
)
from ..kit.late_queues import DEVICE

LAYOUTS = [Layout(ulysses=2), Layout(ring=2), Layout(ulysses=2, ring=2), Layout(ring=3), Layout()]


@pytest.fixture(autouse=True)
def nothing_told():
    module.tell_unrecorded.cache_clear()


@pytest.fixture
def proved(monkeypatch):
    """Sets which replays are held to what is computed: fewer, so that fewer evaluations will do."""
    return lambda *numbers: monkeypatch.setattr(module, "PROVED", {*numbers})


@pytest.mark.cover(4)
@pytest.mark.parametrize("layout", LAYOUTS, ids=Layout.equation)
@pytest.mark.parametrize("family", GIVEN)
def test_what_is_replayed_is_what_is_computed_to_the_bit(family, layout, proved):
    proved(1, 3)
    asked = [Asked(given(family, number)) for number in range(5)]
    replayed, seen = evaluated(layout, asked, [stock(family)], seed=3)
    computed, alone = evaluated(layout, asked, [stock(family)], seed=3, worth=99)
    assert [one.sent for one in seen] == [one.sent for one in alone], "a message is sent twice, or not at all"
    for one in seen:
        assert one.recorded[0] == one.recorded[-1] > 0 and replays(one) == [0, 1, 1, 1, 1]
    assert_same(replayed, computed)
    assert is_right(replayed[layout.writer, 4], stock(family), asked[4].arguments)


MANY = 1 << 20


# A stop amid a replay, another size, another run, other weights
HISTORY = [
    *(Asked(cond(0)), Asked(cond(1)), Asked(cond(2), stops=True), Asked(cond(3, text=2))),
    *(Asked(cond(4), run=1), Asked(cond(5), run=1), Asked(cond(6), run=1)),
]
FLIPPED = 5


@pytest.mark.cover(10)
@pytest.mark.parametrize("layout", [*SEQUENCES, Layout()], ids=Layout.equation)
def test_a_history_of_stops_sizes_runs_and_weights_is_computed_to_the_bit_in_every_layout(layout, proved):
    """The last of several ranks never records."""
    proved(1)
    kind = layout.world_size % 4  # of scheduler

    def prepare(mesh, run, models, kept, at):
        if mesh.rank and mesh.rank == layout.world_size - 1:
            kept[0].refuses = "not here"
        if at == FLIPPED:
            layer = models[0].blocks[0].qkv
            layer.weight = torch.nn.Parameter(layer.weight * 2, requires_grad=False)
            kept[0].void()

    replayed, seen = evaluated(layout, HISTORY, [JOINT], seed=kind, prepare=prepare)
    computed, alone = evaluated(layout, HISTORY, [JOINT], seed=kind, prepare=prepare, worth=99)
    assert_same(replayed, computed)
    assert [one.sent for one in seen] == [one.sent for one in alone]
    for rank, one in enumerate(seen):
        records = not rank or rank < layout.world_size - 1
        assert replays(one) == [int(records and at in (1, 2, 4, 6)) for at in range(len(HISTORY))]


# Of one stream or two, of images and films; some write positions by number
FAMILIES = ["flux", "sd3", "qwen-image", "hunyuan-video", "lumina2", "krea2", "ltxv", "pixart-sigma"]


@pytest.mark.cover(4)
@pytest.mark.parametrize("layout", [Layout(ulysses=2), Layout(ring=2)], ids=Layout.equation)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_is_replayed_to_the_bit_in_the_next_run_too(family, layout, proved, caplog):
    proved(2)
    transformer, asked = asked_by_sampler(family, 4)
    given = [Asked(one, run=int(at > 2)) for at, one in enumerate(asked)]
    replayed, seen = evaluated(layout, given, [transformer], seed=1)
    computed, _ = evaluated(layout, given, [transformer], seed=3, worth=99)
    assert_same(replayed, computed)
    assert [replays(one) for one in seen] == [[0, 1, 1, 1]] * 2
    assert not caplog.messages


def test_messages_whose_memory_a_later_one_outgrows_are_recorded_when_all_have_their_places(caplog):
    """Of sound, which comes first, and film."""
    transformer, asked = asked_by_sampler("ltx2", 3)
    _, seen = evaluated(LAYOUTS[0], [Asked(one) for one in asked], [transformer])
    assert [replays(one) for one in seen] == [[0, 0, 1]] * 2
    assert not caplog.messages


@pytest.mark.cover(2)
@pytest.mark.parametrize(
    ("family", "why"),
    [
        ("hidream-i1", "aten::index reads numbers of the GPU"),
        ("hunyuan-image", "aten::where reads numbers of the GPU"),
        ("cosmos-predict2", "the model keeps tensors of an evaluation (2)"),
        ("hidream-o1", "the model keeps tokens from one evaluation to the next"),
    ],
)
def test_a_family_that_is_not_recorded_says_why(family, why, caplog):
    transformer, asked = asked_by_sampler(family, 2)
    _, (seen, _) = evaluated(LAYOUTS[0], [Asked(one) for one in asked], [transformer])
    assert replays(seen) == [0, 0] and why in caplog.text


def test_another_shape_another_model_and_other_weights_have_no_graph_of_these(caplog):
    """Weights that change in place are read where they lie."""
    less, more = {"text": 2}, {"text": 40}  # outgrows the memory of messages
    asked = [
        *(Asked(cond(0)), Asked(cond(1)), Asked(cond(2, **less))),
        *(Asked(cond(3, **more), model=1), Asked(cond(4, **less))),
        *(Asked(cond(5, **more), model=1), Asked(cond(6))),
        *(Asked(cond(7)), Asked(cond(8)), Asked(cond(9))),
    ]
    other = deepcopy(JOINT)
    other.blocks[0].qkv.weight.data.mul_(-1)

    def prepare(mesh, run, models, kept, at):
        weight = models[0].blocks[0].qkv.weight
        if at == 6:
            weight.mul_(2)
        if at == 7:
            models[0].blocks[0].qkv.weight = torch.nn.Parameter(weight * 2, requires_grad=False)
            kept[0].void()

    outputs, seen = evaluated(Layout(ulysses=2), asked, [JOINT, other], prepare=prepare)
    truth = [deepcopy(JOINT), other]
    for at, one in enumerate(asked):
        if at in (6, 7):
            truth[0].blocks[0].qkv.weight.data.mul_(2)
        assert is_right(outputs[0, at], truth[one.model], one.arguments), at
    for one in seen:
        assert replays(one) == [0, 1, 0, 0, 1, 0, 1, 0, 1, 1]
    assert not caplog.messages  # proofs read what came where pieces do


def of_two_runs(*numbers):
    return [Asked(cond(number), run=int(at > 2)) for at, number in enumerate(numbers)]


@pytest.mark.parametrize(("room", "later"), [(1 << 30, [1, 1]), (1, [0, 1])], ids=["room", "none"])
def test_another_run_replays_what_was_recorded_if_there_is_room_for_it(room, later):
    """Else it records anew. Ranks of a new run compare their tokens before they replay."""
    asked = of_two_runs(0, 1, 2, 3, 4)
    outputs, seen = evaluated(Layout(ulysses=2), asked, [JOINT], room=room)
    assert [replays(one) for one in seen] == [[0, 1, 1, *later]] * 2
    assert all(is_right(outputs[0, at], JOINT, one.arguments) for at, one in enumerate(asked))


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
            models[0].blocks[0].qkv.register_forward_pre_hook(add_first)
        if at == 3:
            del first[id(models[0].blocks[0].qkv)]

    asked, truth = of_two_runs(0, 1, 2, 3, 4), deepcopy(JOINT)
    outputs, seen = evaluated(Layout(ring=2), asked, [JOINT], prepare=prepare)
    assert [replays(one) for one in seen] == [[0, 1, 1, 0, 0]] * 2
    truth.blocks[0].qkv.register_forward_pre_hook(add_first)
    for at, one in enumerate(asked):
        if at == 3:
            del first[id(truth.blocks[0].qkv)]
        assert is_right(outputs[0, at], truth, one.arguments), at


@pytest.mark.parametrize("layout", LAYOUTS[:3], ids=Layout.equation)
@pytest.mark.parametrize("computing", [(), (1,)], ids=["all replay", "one computes"])
def test_a_stop_amid_a_replay_leaves_all_ranks_at_one_message_and_the_next_image_right(layout, computing):
    """Also beside a rank that has recorded nothing."""
    at, asked = [], [Asked(cond(number), stops=number == 4) for number in range(7)]

    def prepare(mesh, run, models, kept, number):
        kept[0].refuses = "not here" if mesh.rank in computing else ""
        if number == 5:
            at.append(mesh.sequence.traffic.at)

    outputs, seen = evaluated(layout, asked, [JOINT], seed=2, prepare=prepare)
    assert all(isinstance(outputs[rank, 4], Stopped) for rank in range(layout.world_size))
    assert len({*at}) == 1 and None not in at
    for rank, one in enumerate(seen):
        assert replays(one) == ([0] * 7 if rank in computing else [0, *[1] * 6])
    for number in (3, 5, 6):
        assert is_right(outputs[layout.writer, number], JOINT, asked[number].arguments)


def pins(model, _inputs):
    torch.empty(1, pin_memory=True)


def brings(model, inputs):
    return (inputs[0] + torch.arange(inputs[0].shape[-1]).to(inputs[0].device),)


def adds(model, inputs):
    """It writes into what it brought."""
    return (inputs[0] + torch.arange(inputs[0].shape[-1]).to(inputs[0].device).add_(1),)


def fills(model, inputs):
    return (inputs[0].new_empty(inputs[0].shape).copy_(torch.ones(inputs[0].shape)) + inputs[0],)


@pytest.mark.parametrize("does", [pins, brings, adds, fills])
def test_what_a_model_brings_from_the_cpu_is_brought_once(does):
    def prepare(mesh, run, models, kept, at):
        if at == 0:
            models[0].blocks[0].qkv.register_forward_pre_hook(does)

    asked, truth = [Asked(cond(number)) for number in range(4)], deepcopy(JOINT)
    outputs, seen = evaluated(Layout(ulysses=2), asked, [JOINT], prepare=prepare)
    assert [replays(one) for one in seen] == [[0, 1, 1, 1]] * 2
    if does is not pins:
        truth.blocks[0].qkv.register_forward_pre_hook(does)
    assert all(is_right(outputs[0, at], truth, one.arguments) for at, one in enumerate(asked))


def draws(model, inputs):
    return (inputs[0] + 0 * torch.rand_like(inputs[0]),)


def reads(model, inputs):
    float(inputs[0].sum())


def keeps(model, inputs):
    model.kept = inputs[0] * 2


def catches(model, inputs):
    try:
        return draws(model, inputs)
    except Exception:  # noqa: BLE001 as code around attention does
        return (inputs[0] * 1,)


def waits(model, inputs):
    torch.cuda.synchronize()


def lacks(model, inputs):
    if getcurrent().gpu.current.recording is not None:
        raise torch.OutOfMemoryError("no memory is left")


@pytest.mark.parametrize(
    ("does", "why"),
    [
        (draws, "draws random numbers"),
        (reads, "reads numbers of the GPU"),
        (keeps, "keeps tensors of an evaluation (1)"),
        (catches, "draws random numbers"),
        (waits, "synchronize while a graph is recorded"),
        (lacks, "no memory is left"),
    ],
)
def test_a_rank_that_cannot_record_says_why_and_computes_beside_the_ranks_that_replay(caplog, does, why):
    def prepare(mesh, run, models, kept, at):
        assert all(stream.queue.recording is None for stream in kept[0]._streams)
        if mesh.rank == 1 and at == 0:
            models[0].blocks[0].qkv.register_forward_pre_hook(does)

    asked = [Asked(cond(number)) for number in range(4)]
    outputs, seen = evaluated(Layout(ulysses=2), asked, [JOINT], prepare=prepare)
    assert [replays(one) for one in seen] == [[0, 1, 1, 1], [0, 0, 0, 0]]
    assert all(is_right(outputs[0, at], JOINT, one.arguments) for at, one in enumerate(asked))
    (line,) = caplog.messages
    assert why in line


def test_a_rank_that_ends_amid_a_recording_leaves_no_other_waiting():
    def ends(model, inputs):
        if getcurrent().gpu.current.recording is not None:
            raise SystemExit

    def prepare(mesh, run, models, kept, at):
        if mesh.rank == 1:
            models[0].blocks[1].register_forward_pre_hook(ends)

    outputs, _ = evaluated(Layout(ulysses=3), [Asked(cond(0))], [JOINT], prepare=prepare)
    assert isinstance(outputs[1, 0], SystemExit)
    assert is_right(outputs[0, 0], JOINT, cond(0)) and isinstance(outputs[2, 0], list)


@pytest.mark.parametrize(
    ("what", "layout"), [("recording", LAYOUTS[0]), ("replay", LAYOUTS[0]), ("proof", Layout())]
)
def test_where_memory_lacks_an_evaluation_is_computed_or_fails_and_what_comes_next_is_right(
    what, layout, proved
):
    """A rank that has none to record computes on. All ranks fail alike where all replay."""
    proved(2)
    failing = ["recording", "replay", "proof"].index(what)
    left, asked = [], [Asked(cond(number)) for number in range(4)]

    def tried(places):
        def lacks(gpu):
            if what != "recording" or gpu.current.recording is not None:
                gpu.places = places

        def prepare(mesh, run, models, kept, at):
            if at == failing + 1 and mesh.rank == 0:
                left.append(run.gpu.places)
            run.gpu.places = None
            if at == failing == 0 and mesh.rank == 0:
                models[0].blocks[0].register_forward_pre_hook(lambda *_: lacks(run.gpu))
            elif at == failing > 0:
                lacks(run.gpu)

        outputs, seen = evaluated(layout, asked, [JOINT], prepare=prepare)
        for at, one in enumerate(asked):
            if what != "recording" and at == failing and places < MANY:
                assert all(isinstance(outputs[rank, at], torch.OutOfMemoryError) for rank in range(len(seen)))
            else:
                assert is_right(outputs[0, at], JOINT, one.arguments), (places, at)
        return [sum(replays(one)) for one in seen]

    assert tried(MANY) == [3] * layout.world_size
    whole = MANY - left[0]
    for places in range(0, whole, -(-whole // 6)):
        assert (tried(places)[0] == 0) == (what == "recording")


def test_nothing_is_recorded_unless_a_gpu_has_waited_often():
    asked = [Asked(cond(number), is_wanted=number != 2) for number in range(6)]
    _, seen = evaluated(Layout(ulysses=2), asked, [JOINT], worth=3)
    assert [replays(one) for one in seen] == [[0, 0, 0, 0, 1, 1]] * 2


def planted(fault, before, layout=LAYOUTS[0], ranks=(0,), count=12):
    """Runs with a recording that has a ``fault`` from evaluation ``before`` on."""

    def prepare(mesh, run, models, kept, at):
        if at == before and mesh.rank in ranks:
            (key,) = kept[0].recorded
            kept[0]._known[key] = fault(kept[0]._known[key])

    asked = [Asked(cond(number, mask=True)) for number in range(count)]
    outputs, seen = evaluated(layout, asked, [JOINT], prepare=prepare)
    return asked, outputs, [replays(one) for one in seen]


def recorded(layout=LAYOUTS[0]):
    found = []
    planted(lambda recording: found.append(recording) or recording, 1, layout, count=2)
    return found[0]


@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_proof_finds_each_input_that_is_not_copied_and_the_image_is_right(place, caplog):
    asked, outputs, (ours, others) = planted(stale(place), 1)
    assert ours == [0, 1, *[0] * 10] and others == [0, *[1] * 11]
    assert all(is_right(outputs[0, at], JOINT, one.arguments) for at, one in enumerate(asked))
    assert "computed other numbers" in caplog.text and "The image is right" in caplog.text


@pytest.mark.cover(2)
@pytest.mark.parametrize("layout", [LAYOUTS[0], LAYOUTS[3]], ids=Layout.equation)
def test_a_proof_names_the_piece_that_is_not_what_is_computed(layout, caplog):
    whole = recorded(layout)
    places = [place for place, one in enumerate(whole.pieces) if one.graph is not None]
    assert len(places) > 5
    for place in places:
        caplog.clear()
        shown = next(
            later for later, one in enumerate(whole.pieces) if later >= place and (one.sent or not one.move)
        )
        asked, outputs, _ = planted(lost(place), 1, layout, count=4)
        assert f"piece {shown + 1} of {len(whole.pieces)}" in caplog.text
        assert all(is_right(outputs[0, at], JOINT, one.arguments) for at, one in enumerate(asked))


def test_a_fault_that_shows_late_ends_the_run_with_a_sentence():
    """The replays before its proof were nobody's to see."""
    _, outputs, (ours,) = planted(stale(0), 4, LAYOUTS[4])
    (error,) = [one for one in outputs.values() if isinstance(one, ModelError)]
    assert "Up to 7 evaluations before it, of this image or of earlier ones" in str(error)
    assert ours == [0, *[1] * 8, 0, 0, 0]
    asked, outputs, _ = planted(stale(0), 4)
    assert [place for place, one in outputs.items() if isinstance(one, ModelError)] == [(0, 9)]
    last = len(asked) - 1
    assert is_right(outputs[0, last], JOINT, asked[last].arguments), "no rank was left waiting"


def test_a_proof_that_a_stop_leaves_is_due_again(proved, caplog):
    proved(1)

    def prepare(mesh, run, models, kept, at):
        if at == 1:
            (key,) = kept[0].recorded
            stale(1)(kept[0].recorded[key])

    asked = [Asked(cond(number), stops=number == 1) for number in range(4)]
    outputs, _ = evaluated(LAYOUTS[0], asked, [JOINT], prepare=prepare)
    assert isinstance(outputs[0, 1], Stopped) and "The image is right" in caplog.text
    for at in (2, 3):
        assert is_right(outputs[0, at], JOINT, asked[at].arguments)


def test_a_fault_that_shows_at_the_end_of_a_run_is_told_then_and_not_of_the_next_image(proved, caplog):
    proved(3)

    def prepare(mesh, run, models, kept, at):
        torch.cuda.synchronize()
        if at == 1:
            (key,) = kept[0].recorded
            stale(1)(kept[0].recorded[key])

    asked = [Asked(cond(number), run=int(number > 3)) for number in range(5)]
    outputs, _ = evaluated(Layout(), asked, [JOINT], prepare=prepare)
    assert is_right(outputs[0, 4], JOINT, asked[4].arguments)
    assert "Up to 2 evaluations before it" in caplog.text


def test_each_piece_is_replayed_once_and_progress_is_counted_as_by_computing(proved):
    proved()
    asked = [Asked(cond(number)) for number in range(3)]
    for one in evaluated(LAYOUTS[3], asked, [JOINT])[1]:
        pieces = one.replayed[1]
        assert one.recorded[0] - 1 <= pieces <= one.recorded[0] and one.replayed[2] == 2 * pieces
        assert one.ticks[2] - one.ticks[1] == one.ticks[1] - one.ticks[0] == one.ticks[0] + 1 > 1


def test_an_output_stays_as_it_is_when_the_next_is_replayed(proved):
    proved()
    with late_device():
        kept = Used(0).kept
        outputs = [
            kept.evaluate({"x": torch.full((2,), number, device=DEVICE)}, lambda given: given["x"] * 2, int)
            for number in range(4)
        ]
        assert [one.tolist() for one in outputs] == [[2 * number] * 2 for number in range(4)]


def test_memory_that_torch_keeps_for_later_is_given_back_before_a_recording(monkeypatch):
    """A graph's memory is the driver's: what else torch has kept would be lacking."""
    begin, order = Graph.capture_begin, []
    with late_device():
        monkeypatch.setattr(torch.cuda, "empty_cache", lambda: order.append("given back"))
        monkeypatch.setattr(
            Graph, "capture_begin", lambda *given, **how: (order.append("begins"), begin(*given, **how))
        )
        Used(1).evaluate(2)
    assert order == ["given back", "begins"]


def test_recordings_that_are_given_up_stay_so_and_the_log_says_why(caplog):
    def prepare(mesh, run, models, kept, at):
        if at == 2:
            kept[0].give_up()

    _, seen = evaluated(Layout(), [Asked(cond(number)) for number in range(5)], [JOINT], prepare=prepare)
    assert replays(seen[0]) == [0, 1, 0, 0, 0] and "memory was short" in caplog.text
