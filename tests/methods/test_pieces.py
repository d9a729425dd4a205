"""Evaluations whose pieces are recorded as CUDA graphs and replayed are what the same ranks
compute, to the bit: late GPUs record what they are asked for, and send messages between.
"""

from copy import deepcopy
from itertools import product

import pytest
import torch
from greenlet import getcurrent
from pipemesh.parallel_runtime.comm.traffic import Stopped
from pipemesh.parallel_runtime.errors import ModelError
from pipemesh.parallel_runtime.layout import Layout
from pipemesh.parallel_runtime.methods import recordings as module

from ..comm.test_collectives import SEQUENCES
from ..fixtures import ALL
from ..kit.late_device import Graph, late_device
from ..kit.late_pieces import (
    JOINT,
    PLAIN,
    VIDEO,
    Asked,
    Used,
    asked_by_sampler,
    assert_same,
    cond,
    evaluated,
    is_right,
    lost,
    replays,
    stale,
)
from ..kit.late_queues import DEVICE

TWO = Layout(ulysses=2)
LAYOUTS = [TWO, Layout(ring=2), Layout(ulysses=2, ring=2)]


@pytest.fixture(autouse=True)
def nothing_told():
    module.tell_unrecorded.cache_clear()


@pytest.fixture
def proved(monkeypatch):
    """Sets which replays are held to what is computed: fewer, so that fewer evaluations will do."""
    return lambda *numbers: monkeypatch.setattr(module, "PROVED", {*numbers})


# Of one stream or two, of images and films; some write positions by number
FAMILIES = [PLAIN, "sd3", "qwen-image", "hunyuan-video", "lumina2", "krea2", "ltxv", "pixart-sigma", VIDEO]
EVERYWHERE = [(PLAIN, Layout()), *((one, LAYOUTS[at // 2 % 2]) for at, one in enumerate(FAMILIES[1:]))]


@pytest.mark.cover(2)
@pytest.mark.parametrize(
    ("family", "layout"), [*product(FAMILIES, [*LAYOUTS, Layout()])] if ALL else EVERYWHERE, ids=str
)
def test_what_is_replayed_is_what_is_computed_to_the_bit_in_the_next_run_too(family, layout, proved, caplog):
    proved(1, 3)
    transformer, given = asked_by_sampler(family, 5)
    asked = [Asked(one, run=int(at > 2)) for at, one in enumerate(given)]
    replayed, seen = evaluated(layout, asked, [transformer], seed=3)
    computed, alone = evaluated(layout, asked, [transformer], seed=1, worth=99)
    assert [one.sent for one in seen] == [one.sent for one in alone], "a message is sent twice, or not at all"
    for one in seen:
        assert one.recorded[0] == one.recorded[-1] > 0 and replays(one) == [0, 1, 1, 1, 1]
    assert_same(replayed, computed)
    assert not caplog.messages


MANY = 1 << 20


# A stop amid a replay, another size, another run, other weights
HISTORY = [
    *(Asked(cond(0)), Asked(cond(1)), Asked(cond(2), stops=True), Asked(cond(3, text=2))),
    *(Asked(cond(4), run=1), Asked(cond(5), run=1), Asked(cond(6), run=1)),
]
FLIPPED = 5


@pytest.mark.cover(4)
@pytest.mark.parametrize(
    "layout", [Layout(), *(one for one in SEQUENCES if ALL or one.world_size < 5)], ids=Layout.equation
)
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


def test_messages_whose_memory_a_later_one_outgrows_are_recorded_when_all_have_their_places(caplog):
    """Of sound, which comes first, and film."""
    transformer, asked = asked_by_sampler("ltx2", 3)
    _, seen = evaluated(TWO, [Asked(one) for one in asked], [transformer])
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
    _, (seen, _) = evaluated(TWO, [Asked(one) for one in asked], [transformer])
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

    outputs, seen = evaluated(TWO, asked, [JOINT, other], prepare=prepare)
    truth = [deepcopy(JOINT), other]
    for at, one in enumerate(asked):
        if at in (6, 7):
            truth[0].blocks[0].qkv.weight.data.mul_(2)
        assert is_right(outputs[0, at], truth[one.model], one.arguments), at
    for one in seen:
        assert replays(one) == [0, 1, 0, 0, 1, 0, 1, 0, 1, 1]
    assert not caplog.messages  # proofs read what came where pieces do


def asked_for(count, *, stops=-1, second_run=99, mask=False):
    """Evaluations of so many images; at which one is stopped, from which one on is another run."""
    return [
        Asked(cond(number, mask=mask), run=int(number >= second_run), stops=number == stops)
        for number in range(count)
    ]


def assert_right(outputs, asked, model=JOINT, places=None):
    """What rank 0 computed, of all places or of some, is what the model computes."""
    for at in range(len(asked)) if places is None else places:
        assert is_right(outputs[0, at], model, asked[at].arguments), at


def hooked(does, ranks=(0, 1)):
    """Prepares ranks whose model does something odd in its first block."""

    def prepare(mesh, run, models, kept, at):
        assert all(stream.queue.recording is None for stream in kept[0]._streams)
        if mesh.rank in ranks and at == 0:
            models[0].blocks[0].qkv.register_forward_pre_hook(does)

    return prepare


def test_another_run_records_anew_if_there_is_no_room_for_what_was_recorded():
    asked = asked_for(5, second_run=3)
    outputs, seen = evaluated(TWO, asked, [JOINT], room=1)
    assert [replays(one) for one in seen] == [[0, 1, 1, 0, 1]] * 2
    assert_right(outputs, asked)


def test_what_a_model_keeps_for_a_run_is_in_no_graph_of_another():
    """It adds to each image what it made of the run's first."""
    first = {}

    def add_first(model, inputs):
        (image,) = inputs
        return (image + first.setdefault(id(model), image * 1.5),)

    def prepare(mesh, run, models, kept, at):
        if at == 0:
            models[0].blocks[0].qkv.register_forward_pre_hook(add_first)
        if at == 3:
            del first[id(models[0].blocks[0].qkv)]

    asked, truth = asked_for(5, second_run=3), deepcopy(JOINT)
    outputs, seen = evaluated(Layout(ring=2), asked, [JOINT], prepare=prepare)
    assert [replays(one) for one in seen] == [[0, 1, 1, 0, 0]] * 2
    truth.blocks[0].qkv.register_forward_pre_hook(add_first)
    assert_right(outputs, asked, truth, range(3))
    first.clear()
    assert_right(outputs, asked, truth, range(3, 5))


@pytest.mark.parametrize("layout", LAYOUTS, ids=Layout.equation)
@pytest.mark.parametrize("computing", [(), (1,)], ids=["all replay", "one computes"])
def test_a_stop_amid_a_replay_leaves_all_ranks_at_one_message_and_the_next_image_right(layout, computing):
    """Also beside a rank that has recorded nothing."""
    at, asked = [], asked_for(7, stops=4)

    def prepare(mesh, run, models, kept, number):
        kept[0].refuses = "not here" if mesh.rank in computing else ""
        if number == 5:
            at.append(mesh.sequence.traffic.at)

    outputs, seen = evaluated(layout, asked, [JOINT], seed=2, prepare=prepare)
    assert all(isinstance(outputs[rank, 4], Stopped) for rank in range(layout.world_size))
    assert len({*at}) == 1 and None not in at
    for rank, one in enumerate(seen):
        assert replays(one) == ([0] * 7 if rank in computing else [0, *[1] * 6])
    assert_right(outputs, asked, places=(3, 5, 6))


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
    asked, truth = asked_for(4), deepcopy(JOINT)
    outputs, seen = evaluated(TWO, asked, [JOINT], prepare=hooked(does))
    assert [replays(one) for one in seen] == [[0, 1, 1, 1]] * 2
    if does is not pins:
        truth.blocks[0].qkv.register_forward_pre_hook(does)
    assert_right(outputs, asked, truth)


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
    asked = asked_for(4)
    outputs, seen = evaluated(TWO, asked, [JOINT], prepare=hooked(does, [1]))
    assert [replays(one) for one in seen] == [[0, 1, 1, 1], [0, 0, 0, 0]]
    assert_right(outputs, asked)
    (line,) = caplog.messages
    assert why in line


def test_a_rank_that_ends_amid_a_recording_leaves_no_other_waiting():
    def ends(model, inputs):
        if getcurrent().gpu.current.recording is not None:
            raise SystemExit

    outputs, _ = evaluated(Layout(ulysses=3), asked_for(1), [JOINT], prepare=hooked(ends, [1]))
    assert isinstance(outputs[1, 0], SystemExit)
    assert is_right(outputs[0, 0], JOINT, cond(0)) and isinstance(outputs[2, 0], list)


@pytest.mark.parametrize(("what", "layout"), [("recording", TWO), ("replay", TWO), ("proof", Layout())])
def test_where_memory_lacks_an_evaluation_is_computed_or_fails_and_what_comes_next_is_right(
    what, layout, proved
):
    """A rank that has none to record computes on. All ranks fail alike where all replay."""
    proved(2)
    failing = ["recording", "replay", "proof"].index(what)
    left, asked = [], asked_for(4)

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


def planted(fault, before, layout=TWO, count=12, **more):
    """Runs with a recording of rank 0's that has a ``fault`` from evaluation ``before`` on."""

    def prepare(mesh, run, models, kept, at):
        torch.cuda.synchronize()
        if at == before and mesh.rank == 0:
            (key,) = kept[0].recorded
            kept[0]._known[key] = fault(kept[0]._known[key])

    asked = asked_for(count, mask=True, **more)
    outputs, seen = evaluated(layout, asked, [JOINT], prepare=prepare)
    return asked, outputs, [replays(one) for one in seen]


@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_proof_finds_each_input_that_is_not_copied_and_the_image_is_right(place, caplog):
    asked, outputs, (ours, others) = planted(stale(place), 1)
    assert ours == [0, 1, *[0] * 10] and others == [0, *[1] * 11]
    assert_right(outputs, asked)
    assert "computed other numbers" in caplog.text and "The image is right" in caplog.text


def test_a_proof_names_the_piece_that_is_not_what_is_computed(caplog):
    found = []
    planted(lambda recording: found.append(recording) or recording, 1, count=2)
    pieces = found[0].pieces
    places = [place for place, one in enumerate(pieces) if one.graph is not None]
    assert len(places) > 5
    for place in places:
        caplog.clear()
        shown = next(at for at, one in enumerate(pieces) if at >= place and (one.sent or not one.move))
        asked, outputs, _ = planted(lost(place), 1, count=4)
        assert f"piece {shown + 1} of {len(pieces)}" in caplog.text
        assert_right(outputs, asked)


def test_a_fault_that_shows_late_ends_the_run_with_a_sentence():
    """The replays before its proof were nobody's to see."""
    _, outputs, (ours,) = planted(stale(0), 4, Layout())
    (error,) = [one for one in outputs.values() if isinstance(one, ModelError)]
    assert "Up to 7 evaluations before it, of this image or of earlier ones" in str(error)
    assert ours == [0, *[1] * 8, 0, 0, 0]
    asked, outputs, _ = planted(stale(0), 4)
    assert [place for place, one in outputs.items() if isinstance(one, ModelError)] == [(0, 9)]
    assert_right(outputs, asked, places=[11])  # no rank was left waiting


def test_a_proof_that_a_stop_leaves_is_due_again(proved, caplog):
    proved(1)
    asked, outputs, _ = planted(stale(1), 1, count=4, stops=1)
    assert isinstance(outputs[0, 1], Stopped) and "The image is right" in caplog.text
    assert_right(outputs, asked, places=(2, 3))


def test_a_fault_that_shows_at_the_end_of_a_run_is_told_then_and_not_of_the_next_image(proved, caplog):
    proved(3)
    asked, outputs, _ = planted(stale(1), 1, Layout(), count=5, second_run=4)
    assert_right(outputs, asked, places=[4])
    assert "Up to 2 evaluations before it" in caplog.text


def test_each_piece_is_replayed_once_and_progress_is_counted_as_by_computing(proved):
    proved()
    for one in evaluated(Layout(ring=3), asked_for(3), [JOINT])[1]:
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
