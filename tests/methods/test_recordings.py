"""Which evaluations a rank records as CUDA graphs, when, and what it tells of them."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from pipemesh.lab.commands.parity import PLAIN, stock_model
from pipemesh.parallel_runtime.comm.mesh import connect
from pipemesh.parallel_runtime.crossing.block_code import PatchesHere
from pipemesh.parallel_runtime.families.plan import COMPILE
from pipemesh.parallel_runtime.layout import Layout
from pipemesh.parallel_runtime.methods.pieces import NotRecordable, RecordedOperations, ReplayProof
from pipemesh.parallel_runtime.methods.recordings import (
    BUSY,
    FEW,
    NO_ROOM,
    SHORT,
    Recordings,
    Replays,
    tell_unrecorded,
    why_unrecorded,
)
from pipemesh.parallel_runtime.patches import Part
from pipemesh.parallel_runtime.wire.messages import Load
from pipemesh.parallel_runtime.worker.resident_model import ResidentModel, in_fp32

from ..kit.late_device import late_device
from ..kit.late_pieces import VIDEO, Used, asked_by_sampler, given
from ..kit.late_queues import DEVICE
from .test_late_methods import on_gpu

ASKED = {"PIPEMESH_GRAPHS": "1"}
OFFLOADED = torch.nn.Parameter(torch.ones(2), requires_grad=False)
TWO = {"x": torch.ones(2)}
RANK = SimpleNamespace(tick=lambda: None, note=print, count=lambda *_: None)


def resident_model(unrecorded="", shared=None, **load):
    """A rank's only model, on the CPU: recorded as if it were on a GPU, unless it says why not."""
    mesh = replace(connect(Layout(), 0, via_cpu=False, wants_stop=lambda: False), unrecorded=unrecorded)
    mesh.sequence.weights = shared
    asked = Load(request=1, model="m", source=b"", **load)
    return ResidentModel(stock_model(2), torch.device("cpu"), mesh, RANK, asked)


def draws_of(used):
    """An evaluation that cannot be recorded."""
    used.kept.evaluate(on_gpu(TWO), lambda given: torch.rand_like(given["x"]), int)


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
        assert used.kept.end_run(1 << 30) == Replays(6, 1, FEW)
        used.evaluate(2, 4)
        assert used.kept.end_run(1 << 30) == Replays(4, 4)
        used.kept.give_up()
        for _ in range(2):
            used.evaluate(2)
            assert used.kept.end_run(1 << 30) == Replays(1, 0, SHORT)
        for _ in range(2):  # it is tried once, and told of in each run
            draws_of(refused)
            assert "draws random numbers" in refused.kept.end_run(1 << 30).why
        few = Used(9)
        for times, is_wanted, room, why in ((3, True, 9, FEW), (3, False, 9, BUSY), (8, True, 0, NO_ROOM)):
            few.kept.is_wanted = is_wanted
            few.evaluate(2, times)
            assert few.kept.end_run(room << 30) == Replays(times, 0, why)
        assert not few.kept.recorded


@pytest.mark.parametrize(
    ("ask", "why"),
    [
        (lambda gpu: gpu.sum().item(), "reads numbers of the GPU"),
        (lambda gpu: gpu.nonzero(), "shape depends"),
        (lambda gpu: gpu.nonzero(as_tuple=True), "reads numbers of the GPU"),
        (lambda gpu: torch.where(gpu == 1), "reads numbers of the GPU"),
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
    tell_unrecorded.cache_clear()
    with late_device():
        there, used = torch.ones(2, device=DEVICE), Used(1)
        options = {"transformer_options": {"a": [1, "b"]}}
        assert used.kept._key_of({"x": there, **options}) is not None
        for unlike in ({"x": torch.ones(2)}, {"patch": print}, {"transformer_options": {COMPILE: {}}}):
            assert Used(1).kept._key_of({"y": there, **unlike}) is None
        more = {"x": there, "transformer_options": {**options["transformer_options"], "patches": {}}}
        assert used.kept._key_of(more) != used.kept._key_of({"x": there, **options})
        numbers = [used.kept._key_of({"x": there, "n": number}) for number in (1, 1.0, True, 2)]
        assert len({*numbers}) == 4
    assert len(caplog.messages) == 3


@pytest.mark.parametrize("family", [PLAIN, VIDEO])
def test_what_a_sampler_asks_of_a_branch_is_alike_from_step_to_step(family):
    asked = asked_by_sampler(family, 3, cfg=4.0)[1]
    with late_device():
        keys = [Used(1).kept._key_of(on_gpu(one)) for one in asked]
    assert len(asked) == 6 and len({*keys}) == 2 and None not in keys


def test_without_cuda_nothing_of_this_is_made(monkeypatch):
    made = []
    monkeypatch.setattr(Recordings, "__init__", lambda *given: made.append(given))
    resident = resident_model(why_unrecorded(torch.device("cpu"), ASKED))
    resident.method.begin(Part(1, 0))
    with torch.inference_mode():
        resident.on_rank(given(PLAIN, 0), 1)
    resident.end_run()
    assert not made and resident.recordings is None


def test_graphs_are_recorded_where_they_are_turned_on_on_nvidias_gpus_whose_messages_lie_there(monkeypatch):
    assert why_unrecorded(DEVICE, ASKED) == why_unrecorded(DEVICE, {"PIPEMESH_GRAPHS": "all"}) == ""
    for off in ({}, *({"PIPEMESH_GRAPHS": one} for one in ("0", "", "yes"))):
        assert why_unrecorded(DEVICE, off) == "PIPEMESH_GRAPHS is not 1"
    assert "main memory" in why_unrecorded(torch.device("cpu"), ASKED)
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert "AMD" in why_unrecorded(DEVICE, ASKED)


def test_weights_or_code_that_change_void_what_a_rank_has_recorded(monkeypatch):
    resident, voided = resident_model(), []
    monkeypatch.setattr(resident.recordings, "void", lambda: voided.append(resident.recordings.refuses))
    resident.patch("a", {}, {}, RANK)
    assert {*voided} == {""}
    resident._objects.in_block = PatchesHere(methods={"blocks.0.forward": print})
    resident.patch("b", {}, None, RANK)
    assert voided[-1] == "nodes' code is in its blocks"
    before = len(voided)
    resident.detach()
    assert len(voided) > before


def test_an_evaluation_in_fp32_is_computed(monkeypatch):
    """It is the truth that others are held to."""
    resident, asked = resident_model(), []
    monkeypatch.setattr(resident.recordings, "evaluate", lambda *given: asked.append(given))
    resident.method.begin(Part(1, 0))
    with torch.inference_mode():
        assert in_fp32(resident, given(PLAIN, 0), 1) is not None and not asked
        resident.on_rank(given(PLAIN, 0), 2)
    assert len(asked) == 1


def test_the_first_second_eighth_and_64th_replay_are_proven(monkeypatch):
    proven, real = [], ReplayProof.compute
    monkeypatch.setattr(
        ReplayProof,
        "compute",
        lambda self, *given: proven.append(used.kept._worth.counts.total()) or real(self, *given),
    )
    with late_device():
        used = Used(1)
        used.evaluate(2, 70)
        ended = used.kept.end_run(1 << 30)
    assert [one + 1 for one in proven] == [1, 2, 8, 64]
    assert ended == Replays(70, 65, FEW)


def test_a_model_has_eight_recordings_and_counts_few_kinds(caplog):
    with late_device():
        used = Used(0)
        for size in range(1, 10):
            used.evaluate(size)
        assert len(used.kept.recorded) == 8 and "the model has 8 recordings already" in caplog.text
        many = Used(99)
        for size in range(1, 150):
            many.evaluate(size)
        assert len(many.kept._worth.counts) <= 65


def test_another_kind_is_recorded_twice_as_late_while_the_first_has_not_paid():
    with late_device():
        used = Used(3)
        used.evaluate(2, 3)
        assert len(used.kept.recorded) == 1
        used.evaluate(4, 5)
        assert len(used.kept.recorded) == 1
        used.evaluate(4)
        assert len(used.kept.recorded) == 2


def test_behind_a_recording_that_could_not_be_ended_none_is_begun_and_what_is_refused_stays_so():
    def waits(given):
        torch.cuda.synchronize()
        return given["x"] * 2

    with late_device() as box:
        draws, broken = Used(0), Used(0)
        for _ in range(2):
            draws_of(draws)
            draws.kept.void()
        assert box.gpu.recordings == 1
        draws.evaluate(4)
        assert box.gpu.recordings == 2 and draws.kept.recorded
        broken.kept.evaluate(on_gpu(TWO), waits, int)
        broken.evaluate(4, 2)
        assert box.gpu.recordings == 3 and not broken.kept.recorded


def test_a_replay_says_nothing_of_whether_its_gpu_was_idle():
    given = SimpleNamespace(is_over=lambda: True)
    with late_device():
        used, said = Used(0), []
        for _ in range(4):
            used.evaluate(2)
            said.append(used.kept.after(given))
    assert said == [True, True, True, None], "computed, twice proven, replayed"


def test_how_a_model_keeps_its_own_weights_decides_not_what_others_of_the_pool_do():
    sharded = SimpleNamespace(width=1)  # of another model
    for how, why in (({}, ""), ({"weights": "offloaded", "budget": 0}, "weights lie partly in main memory")):
        assert resident_model(shared=sharded, **how).recordings.refuses == why
