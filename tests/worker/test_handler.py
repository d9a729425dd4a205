"""What a rank does for each request, in this process: with real models, and as to its memory with
such as hold nothing.
"""

import re
import sys
import weakref
from dataclasses import replace
from types import SimpleNamespace

import comfy.model_base
import comfy.model_management as mm
import pytest
import torch
from pipemesh.lab.commands.parity import stock_model
from pipemesh.parallel_runtime.comm.mesh import SequenceComm, connect
from pipemesh.parallel_runtime.comm.traffic import Stopped
from pipemesh.parallel_runtime.crossing.source import state_source
from pipemesh.parallel_runtime.errors import NoRoom, Refused
from pipemesh.parallel_runtime.layout import Layout
from pipemesh.parallel_runtime.patches import Part
from pipemesh.parallel_runtime.weights.device_weights import DeviceWeights
from pipemesh.parallel_runtime.wire.arena import Arena
from pipemesh.parallel_runtime.wire.messages import (
    EndRun,
    Forward,
    Load,
    Memory,
    ReadWeights,
    Recorded,
    Release,
    SetWeightPatches,
)
from pipemesh.parallel_runtime.wire.parcel import Parcel
from pipemesh.parallel_runtime.wire.tree import encode_tree
from pipemesh.parallel_runtime.worker import handler as handler_module
from pipemesh.parallel_runtime.worker.arena_io import ArenaIO, KeptConditioning
from pipemesh.parallel_runtime.worker.device_memory import DeviceMemory
from pipemesh.parallel_runtime.worker.handler import RequestHandler, Stand
from pipemesh.parallel_runtime.worker.preparation import prepare
from pipemesh.parallel_runtime.worker.rank_loop import RankLoop
from pipemesh.pool.crew import Crew
from pipemesh.pool.devices import Device, place

from ..kit.fake_pools import MAKE, OUT, fake_setup
from ..kit.models import IdleRank


class CountingMemory:
    """A rank's memory that counts what it is asked for."""

    def __init__(self, is_tight=False):
        self.done, self.is_tight = [], is_tight

    def give_back(self):
        self.done.append("give back")

    def empty_cache(self):
        self.done.append("empty the GPU's cache")

    def now(self):
        return Memory(0, 0, 0)

    def little(self):
        return 64


def no_such_hook(*_):
    raise RuntimeError("no such hook")


def holding(memory=None, layout=Layout(), **model):  # noqa: B008 it is frozen
    """A handler that holds a model ``m`` of these doubles, and what it cut off of its arena."""
    cuts = []
    io = SimpleNamespace(conditioning=KeptConditioning(0), arena=SimpleNamespace(nbytes=512, cut=cuts.append))
    mesh = SimpleNamespace(rank=0, layout=layout)
    made = RequestHandler(mesh, torch.device("cpu"), memory or CountingMemory(), io)
    made.models["m"] = SimpleNamespace(**model)
    return made, io.conditioning, cuts


@pytest.mark.parametrize(("layout", "keeps"), [(Layout(ulysses=2), True), (Layout(pipefusion=2), False)])
@pytest.mark.parametrize("cleared", [(), (0,), (1,)])
@pytest.mark.parametrize("is_tight", [False, True])
def test_only_stages_return_freed_memory_to_the_system_at_the_end_of_a_run(
    layout, keeps, cleared, is_tight, monkeypatch
):
    """A sequence's ranks on CPUs need it again at the next run, which would wait for the system.
    What torch caches on a GPU stays too, unless somebody else there needs it.
    """
    memory, ended = CountingMemory(is_tight), []
    monkeypatch.setattr(handler_module, "give_back_freed", lambda: memory.done.append("freed"))
    handler, _, cuts = holding(memory, layout, method=SimpleNamespace(end_run=ended.append))
    handler.handle(EndRun(request=1, model="m", cleared=cleared, arena_bytes=128), [], None)
    emptied = ["empty the GPU's cache"] if is_tight or 0 in cleared else []
    assert memory.done == [*([] if keeps else ["freed"]), *emptied]
    handler.handle(EndRun(request=2, model="m"), [], None)
    assert cuts == [128, 512], "shared memory behind what its owner names, or none of it"
    assert ended == [64, 64], "what little memory of messages may stay"


def test_what_a_rank_keeps_is_let_go_of_though_a_hook_fails():
    """Shared memory and prompts at a run's end, a model when it is released."""
    ending, conditioning, cuts = holding(method=SimpleNamespace(end_run=no_such_hook))
    conditioning.get(1, lambda: torch.ones(4))
    with pytest.raises(RuntimeError, match="no such hook"):
        ending.handle(EndRun(request=1, model="m", arena_bytes=128), [], None)
    assert (cuts, conditioning.nbytes) == ([128], 0)
    memory = CountingMemory()
    releasing, *_ = holding(memory, detach=no_such_hook, nbytes=8)
    with pytest.raises(RuntimeError, match="no such hook"):
        releasing.handle(Release(request=1, model="m"), [], None)
    assert (releasing.models, memory.model_bytes, memory.done) == ({}, 0, ["give back"])


@pytest.mark.parametrize(
    ("device", "free", "sharers", "is_tight"),
    [("cuda", 30, 1, False), ("cuda", 30, 2, True), ("cuda", 10, 1, True), ("cpu", 10, 2, False)],
    ids=["nobody", "another rank", "hardly any is free", "no GPU"],
)
def test_what_torch_caches_of_a_run_is_for_others_on_a_gpu_that_is_tight(
    monkeypatch, device, free, sharers, is_tight
):
    emptied = []
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *_: (free, 80))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(device))
    memory = DeviceMemory(torch.device(device), 0, sharers)
    assert memory.is_tight == is_tight
    memory.empty_cache()
    assert emptied == ["cuda"] * (device == "cuda")


def test_what_weight_patches_took_for_a_moment_goes_back_to_the_system():
    """Whole layers were patched for the sake of a part of each."""
    memory, patched = CountingMemory(), []
    handler, *_ = holding(
        memory, patch=lambda patches_id, *_: patched.append((patches_id, *memory.done)) is None
    )
    payload = encode_tree({"patches": {}, "objects": {}}, None)
    handler.handle(
        SetWeightPatches(request=1, model="m", patches_id="p", payload=payload),
        [SimpleNamespace(tensor=None)],
        None,
    )
    assert (patched, memory.done) == ([("p",)], ["give back"])


def test_memory_that_an_evaluation_ran_out_of_is_free_again_before_the_gpus_cache_is_emptied():
    """The error's traceback holds the frames, and these what was being computed."""
    alive = []

    class Watched(CountingMemory):
        def is_dead(self, error):
            return False

        def empty_cache(self):
            alive.append(activations())

    def evaluate(*_):
        nonlocal activations
        tensor = torch.zeros(8)
        activations = weakref.ref(tensor)
        try:
            raise MemoryError("no room")
        except MemoryError as error:
            raise torch.OutOfMemoryError("out of memory") from error

    activations = weakref.ref(evaluate)
    loop = RankLoop(SimpleNamespace(send=lambda answer: None), None, 0, Watched())
    handler = SimpleNamespace(handle=evaluate)
    request = EndRun(request=1, model="m")
    answer = loop._answered(request, lambda: loop._handle(handler, request, []), Stand)
    loop._send(answer)
    assert (answer.kind, answer.text) == ("memory", "out of memory")
    assert alive == [None]


def test_a_gpu_that_repeats_an_error_does_not_hide_the_errors_own_sentence(monkeypatch):
    def illegal(*_):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    for name in ("mem_get_info", "memory_reserved", "memory_allocated", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, illegal)
    memory = DeviceMemory(torch.device("cuda"), 0)
    handler = SimpleNamespace(handle=illegal)
    loop, request = RankLoop(None, None, 0, memory), EndRun(request=1, model="m")
    answer = loop._answered(request, lambda: loop._handle(handler, request, []), Stand)
    assert answer.text == "RuntimeError: CUDA error: an illegal memory access was encountered"
    memory.empty_cache()


def test_ranks_on_one_device_each_count_their_share_of_what_is_free(monkeypatch):
    monkeypatch.setattr(DeviceMemory, "_measure", lambda memory: Memory(10 << 20, 20 << 20, 0))
    DeviceMemory(torch.device("cpu"), 0).reserve(10 << 20)
    DeviceMemory(torch.device("cpu"), 1, sharers=2).reserve(5 << 20)
    with pytest.raises(NoRoom, match=r"Rank 1 needs 6\.0 MiB .* and 5\.0 MiB are free"):
        DeviceMemory(torch.device("cpu"), 1, sharers=2).reserve(6 << 20)


def test_what_torch_caches_counts_as_free(monkeypatch):
    for name, value in (("mem_get_info", (10, 80)), ("memory_reserved", 40), ("memory_allocated", 20)):
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    assert DeviceMemory(torch.device("cuda"), 0).now().free == 10 + 20


def test_ranks_are_told_how_many_are_on_their_device_and_its_stages_ask_for_room_one_after_the_other():
    gpus = Device("cuda:0", "GPU-0"), Device("cuda:1", "GPU-1")
    crew = Crew(place(Layout(ulysses=3), "cuda:0,cuda:1,cuda:0", "gloo", gpus), "", fake_setup())
    assert [crew._first_message(rank, 0, None).sharers for rank in range(3)] == [2, 1, 2]
    stages = place(Layout(ulysses=2, pipefusion=2), "cuda:0,cuda:0,cuda:0,cuda:1", "gloo", gpus)
    assert [stages.sharers(rank) for rank in range(4)] == [2, 2, 1, 1]


@pytest.fixture
def restored_host(monkeypatch):
    """What ``prepare`` changes in this process is as before after the test."""
    for name in ("unet_inital_load_device", "unet_offload_device", "MAX_PINNED_MEMORY"):
        monkeypatch.setattr(mm, name, getattr(mm, name))
    monkeypatch.setattr(
        comfy.model_base.BaseModel, "load_model_weights", comfy.model_base.BaseModel.load_model_weights
    )
    monkeypatch.setattr(sys, "path", [*sys.path])


def test_under_highvram_a_rank_loads_no_whole_model_onto_its_gpu_before_a_stage_leaves_blocks_out(
    restored_host, monkeypatch
):
    prepare("", {})
    monkeypatch.setattr(mm, "vram_state", mm.VRAMState.HIGH_VRAM)
    monkeypatch.setattr(mm, "get_torch_device", lambda: torch.device("meta"))
    assert {mm.unet_offload_device(), mm.unet_inital_load_device(1, torch.float16)} == {torch.device("cpu")}


def test_a_rank_takes_its_gpu_before_comfyui_is_imported_and_comfyui_computes_there(
    restored_host, monkeypatch
):
    order = []
    monkeypatch.setattr(torch.cuda, "set_device", order.append)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: order[0].index)
    monkeypatch.setattr(
        "pipemesh.parallel_runtime.worker.preparation.make_comfyui_importable",
        lambda *_: order.append("ComfyUI"),
    )
    prepare("", {}, 2, torch.device("cuda", 3))
    assert order == [torch.device("cuda", 3), "ComfyUI"]
    monkeypatch.setattr(mm, "cpu_state", mm.CPUState.GPU)
    assert mm.get_torch_device() == torch.device("cuda", 3)


def test_ranks_together_lock_half_of_what_comfyui_would(restored_host, monkeypatch):
    """Each pins pages of the file that it brings to its GPU, and a pinned page is its own copy."""
    for most, of_each in ((80.0, 10.0), (-1, -1)):
        monkeypatch.setattr(mm, "MAX_PINNED_MEMORY", most)
        prepare("", {}, ranks=4)
        assert of_each == mm.MAX_PINNED_MEMORY


CPU = torch.device("cpu")


class AskedRank:
    """A rank's handler, and what is asked of it."""

    def __init__(self):
        self.arena, self._attempt = Arena(), 0
        mesh = connect(Layout(), 0, via_cpu=False, wants_stop=lambda: False)
        self.handler = RequestHandler(mesh, CPU, DeviceMemory(CPU, 0), ArenaIO(self.arena.segment, CPU))

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
        fields |= {"arguments": b"", "out": OUT, "part": Part(1, 0, attempt=self._attempt)}
        return self.ask(Forward, model, patches_id=patches_id, **fields)


@pytest.fixture
def rank():
    made = AskedRank()
    yield made
    made.arena.close()


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
    def next_part(now, arrived):
        now, arrived = (MAKE["Forward"](1, model) for model in (now, arrived))
        return RankLoop.next_part(SimpleNamespace(_request=now, _arrived=lambda: arrived))

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


def test_a_load_that_only_checks_the_file_builds_nothing(rank):
    of_none = {"factory": "none:none", "args": (), "file": None, "ends": b"", "index": None}
    assert not rank.ask(Load, "m", of_none, checks=True).unread
    assert not rank.handler.models
