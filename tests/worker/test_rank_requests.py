"""What a rank does for each request, in this process: a rank alone, with real models."""

import re
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from pipemesh.lab.commands.parity import stock_model
from pipemesh.parallel_runtime.comm.mesh import SequenceComm, connect
from pipemesh.parallel_runtime.comm.traffic import Stopped
from pipemesh.parallel_runtime.crossing.source import state_source
from pipemesh.parallel_runtime.errors import Refused
from pipemesh.parallel_runtime.layout import Layout
from pipemesh.parallel_runtime.patches import Part
from pipemesh.parallel_runtime.weights.device_weights import DeviceWeights
from pipemesh.parallel_runtime.wire.arena import Arena
from pipemesh.parallel_runtime.wire.messages import (
    EndRun,
    Forward,
    Load,
    ReadWeights,
    Recorded,
    Release,
    SetWeightPatches,
)
from pipemesh.parallel_runtime.wire.parcel import Parcel
from pipemesh.parallel_runtime.worker import handler as handler_module
from pipemesh.parallel_runtime.worker.arena_io import ArenaIO
from pipemesh.parallel_runtime.worker.device_memory import DeviceMemory
from pipemesh.parallel_runtime.worker.handler import RequestHandler
from pipemesh.parallel_runtime.worker.rank_loop import RankLoop

from ..kit.fake_pools import OUT
from ..kit.models import IdleRank

CPU = torch.device("cpu")


class Rank:
    """A rank's handler, and what is asked of it."""

    def __init__(self):
        self._arena, self._attempt = Arena(), 0
        mesh = connect(Layout(), 0, via_cpu=False, wants_stop=lambda: False)
        self.handler = RequestHandler(mesh, CPU, DeviceMemory(CPU, 0), ArenaIO(self._arena.segment, CPU))

    def ask(self, kind, model, tree=None, **fields):
        if tree is None:
            return self.handler.handle(kind(request=1, model=model, **fields), [], IdleRank())
        parcel = Parcel(tree)
        fields["source" if kind is Load else "payload"] = parcel.tree
        try:
            return self.handler.handle(kind(request=1, model=model, **fields), [parcel.segment], IdleRank())
        finally:
            parcel.segment.close()

    def load(self, model, heads):
        return self.ask(Load, model, state_source(stock_model(heads)))

    def patch(self, model, patches_id):
        return self.ask(SetWeightPatches, model, {"patches": {}, "objects": {}}, patches_id=patches_id)

    def evaluate(self, model, patches_id, **fields):
        self._attempt += 1
        return self.ask(
            Forward,
            model,
            **fields,
            patches_id=patches_id,
            arguments=b"",
            out=OUT,
            part=Part(1, 0, attempt=self._attempt),
        )

    def close(self):
        self._arena.close()


@pytest.fixture
def rank():
    rank = Rank()
    yield rank
    rank.close()


def test_an_evaluation_under_weight_patches_that_the_rank_does_not_have_is_refused(rank):
    rank.load("m", 2)
    rank.patch("m", "ours")
    for wanted in ("theirs", ""):
        sentence = f"Rank 0 holds weight patches 'ours', the run wants {wanted!r}: run again."
        with pytest.raises(Refused, match=f"^{re.escape(sentence)}$"):
            rank.evaluate("m", wanted)
    rank.patch("m", "theirs")
    with pytest.raises(Exception, match=r"^(?!Rank 0 holds)"):  # of the missing arguments
        rank.evaluate("m", "theirs")


def test_a_model_whose_weights_a_rank_could_not_read_goes_from_that_rank_and_from_the_others(
    rank, monkeypatch
):
    for error in (OSError, Stopped):
        rank.load("m", 2)
        monkeypatch.setattr(DeviceWeights, "read", lambda _self, _tell, error=error: raise_(error))
        with pytest.raises(error):
            rank.ask(ReadWeights, "m")
        assert not rank.handler.models and rank.ask(Release, "m").memory.model == 0


def raise_(error):
    raise error


def test_as_many_groups_share_an_evaluation_as_its_request_says(rank, monkeypatch):
    widths = []
    monkeypatch.setattr(SequenceComm, "use", lambda _self, width: widths.append(width))
    rank.load("m", 2)
    with pytest.raises(Exception, match="truncated"):  # its arguments are
        rank.evaluate("m", "", width=3)
    assert widths[-1] == 3


def test_the_next_part_is_of_the_model_at_hand():
    def forward(model):
        return Forward(request=1, model=model, patches_id="", arguments=b"", out=OUT, part=Part(1, 0))

    def next_part(now, arrived):
        return RankLoop.next_part(SimpleNamespace(_request=forward(now), _arrived=lambda: forward(arrived)))

    assert (next_part("one", "one"), next_part("one", "other")) == (Part(1, 0), None)


def test_a_rank_tells_what_the_models_that_it_still_holds_take(rank):
    one = rank.load("one", 2).memory.model
    both = rank.load("other", 4).memory.model
    assert 0 < one < both
    assert rank.load("one", 2).memory.model == both, "it is there already"
    assert rank.ask(EndRun, "one").memory.model == both
    assert rank.ask(Release, "one").memory.model == both - one
    assert rank.ask(Release, "one").memory.model == both - one
    assert rank.ask(Release, "other").memory.model == 0


def test_a_rank_with_a_gpu_tells_at_a_runs_end_what_it_replayed_and_why_not_all(rank):
    rank.load("never", 2)
    rank.handler._mesh = replace(rank.handler._mesh, unrecorded="")
    rank.load("recorded", 2)
    recordings = rank.handler.models["recorded"].recordings
    assert rank.ask(EndRun, "recorded").recorded is None, "it has no GPU"
    for model in rank.handler.models.values():
        model.device = torch.device("cuda")
    recordings.evaluate({"x": torch.ones(2)}, lambda given: given, int)
    assert rank.ask(EndRun, "recorded").recorded == Recorded(
        1, 0, "an argument is a Tensor, not a number or on the GPU"
    )
    assert rank.ask(EndRun, "never").recorded == Recorded(0, 0, "nobody asked for it")
    assert rank.ask(EndRun, "released").recorded is None


def test_on_another_machine_the_checkpoint_is_the_one_that_lies_there(monkeypatch):
    looked = []
    monkeypatch.setattr(handler_module, "find_here", lambda path: "/there/model.safetensors")
    monkeypatch.setattr(handler_module, "check_copy", lambda *args: looked.append(args))
    args = RequestHandler._checked(
        SimpleNamespace(_machines=(0, 1), _mesh=SimpleNamespace(rank=1)),
        ("/here/model.safetensors", 1),
        ("/here/model.safetensors", 5),
        b"ends",
    )
    assert args == ("/there/model.safetensors", 1)
    assert looked == [("/there/model.safetensors", ("/here/model.safetensors", 5), b"ends")]


def test_a_load_that_only_checks_the_file_builds_nothing():
    rank, of_none = Rank(), {"factory": "none:none", "args": (), "file": None, "ends": b"", "index": None}
    assert not rank.ask(Load, "m", of_none, checks=True).unread
    assert not rank.handler.models
