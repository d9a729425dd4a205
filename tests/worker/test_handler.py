"""A rank's memory, at the end of a run and after it ran out, seen with models that hold nothing."""

import sys
import weakref
from types import SimpleNamespace

import comfy.model_base
import comfy.model_management as mm
import pytest
import torch
from pipemesh.parallel_runtime.errors import NoRoom
from pipemesh.parallel_runtime.layout import Layout
from pipemesh.parallel_runtime.wire.messages import EndRun, Memory, Release, SetWeightPatches
from pipemesh.parallel_runtime.wire.tree import encode_tree
from pipemesh.parallel_runtime.worker import handler as handler_module
from pipemesh.parallel_runtime.worker.arena_io import KeptConditioning
from pipemesh.parallel_runtime.worker.device_memory import DeviceMemory
from pipemesh.parallel_runtime.worker.handler import RequestHandler, Stand
from pipemesh.parallel_runtime.worker.preparation import prepare
from pipemesh.parallel_runtime.worker.rank_loop import RankLoop
from pipemesh.pool.crew import Crew
from pipemesh.pool.devices import Device, place

from ..kit.fake_pools import fake_setup


class Counted:
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


@pytest.mark.parametrize(("layout", "keeps"), [(Layout(ulysses=2), True), (Layout(pipefusion=2), False)])
@pytest.mark.parametrize("cleared", [(), (0,), (1,)])
@pytest.mark.parametrize("is_tight", [False, True])
def test_only_stages_return_freed_memory_to_the_system_at_the_end_of_a_run(
    layout, keeps, cleared, is_tight, monkeypatch
):
    """A sequence's ranks on CPUs need it again at the next run, which would wait for the system.
    What torch caches on a GPU stays too, unless somebody else there needs it.
    """
    memory, ended, cuts = Counted(is_tight), [], []
    monkeypatch.setattr(handler_module, "give_back_freed", lambda: memory.done.append("freed"))
    handler = RequestHandler(
        SimpleNamespace(rank=0, layout=layout),
        torch.device("cpu"),
        memory,
        SimpleNamespace(conditioning=KeptConditioning(0), arena=SimpleNamespace(nbytes=512, cut=cuts.append)),
    )
    handler.models["m"] = SimpleNamespace(method=SimpleNamespace(end_run=ended.append))
    handler.handle(EndRun(request=1, model="m", cleared=cleared, arena_bytes=128), [], None)
    emptied = ["empty the GPU's cache"] if is_tight or 0 in cleared else []
    assert memory.done == [*([] if keeps else ["freed"]), *emptied]
    handler.handle(EndRun(request=2, model="m"), [], None)
    assert cuts == [128, 512], "shared memory behind what its owner names, or none of it"
    assert ended == [64, 64], "what little memory of messages may stay"


def test_shared_memory_and_prompts_are_let_go_of_though_a_node_s_cleanup_fails():
    def fail(*_):
        raise RuntimeError("no such hook")

    cuts, conditioning = [], KeptConditioning(0)
    io = SimpleNamespace(conditioning=conditioning, arena=SimpleNamespace(nbytes=512, cut=cuts.append))
    handler = RequestHandler(SimpleNamespace(rank=0, layout=Layout()), torch.device("cpu"), Counted(), io)
    handler.models["m"] = SimpleNamespace(method=SimpleNamespace(end_run=fail))
    conditioning.get(1, lambda: torch.ones(4))
    with pytest.raises(RuntimeError, match="no such hook"):
        handler.handle(EndRun(request=1, model="m", arena_bytes=128), [], None)
    assert (cuts, conditioning.nbytes) == ([128], 0)


@pytest.mark.parametrize(
    ("device", "free", "sharers", "is_tight"),
    [("cuda", 30, 1, False), ("cuda", 30, 2, True), ("cuda", 10, 1, True), ("cpu", 10, 2, False)],
    ids=["nobody", "another rank", "hardly any is free", "no GPU"],
)
def test_what_torch_caches_of_a_run_is_for_others_on_a_gpu_that_is_tight(
    monkeypatch, device, free, sharers, is_tight
):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *_: (free, 80))
    assert DeviceMemory(torch.device(device), 0, sharers).is_tight == is_tight


@pytest.mark.parametrize(("device", "times"), [("cuda", 1), ("cpu", 0)])
def test_the_cache_that_is_emptied_is_torchs(monkeypatch, device, times):
    emptied = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(1))
    DeviceMemory(torch.device(device), 0, 1).empty_cache()
    assert len(emptied) == times


def test_what_weight_patches_took_for_a_moment_goes_back_to_the_system():
    """Whole layers were patched for the sake of a part of each."""
    memory, patched = Counted(), []
    handler = RequestHandler(SimpleNamespace(rank=0, layout=Layout()), torch.device("cpu"), memory, None)
    handler.models["m"] = SimpleNamespace(
        patch=lambda patches_id, *_: patched.append((patches_id, *memory.done)) is None
    )
    payload = encode_tree({"patches": {}, "objects": {}}, None)
    handler.handle(
        SetWeightPatches(request=1, model="m", patches_id="p", payload=payload),
        [SimpleNamespace(tensor=None)],
        None,
    )
    assert (patched, memory.done) == ([("p",)], ["give back"])


def test_a_model_whose_hooks_cannot_be_taken_off_is_gone_all_the_same():
    def fail():
        raise RuntimeError("no such hook")

    memory, model = Counted(), SimpleNamespace(detach=fail, nbytes=8)
    io = SimpleNamespace(conditioning=KeptConditioning(0))
    handler = RequestHandler(SimpleNamespace(rank=0, layout=Layout()), torch.device("cpu"), memory, io)
    handler.models["m"] = model
    with pytest.raises(RuntimeError, match="no such hook"):
        handler.handle(Release(request=1, model="m"), [], None)
    assert (handler.models, memory.model_bytes, memory.done) == ({}, 0, ["give back"])


def test_memory_that_an_evaluation_ran_out_of_is_free_again_before_the_gpus_cache_is_emptied():
    """The error's traceback holds the frames, and these what was being computed."""
    alive = []

    class Watched(Counted):
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
    def fail(*_):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    for name in ("mem_get_info", "memory_reserved", "memory_allocated", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, fail)
    memory = DeviceMemory(torch.device("cuda"), 0)
    handler = SimpleNamespace(handle=fail)
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


def test_ranks_are_told_how_many_are_on_their_device():
    gpus = Device("cuda:0", "GPU-0"), Device("cuda:1", "GPU-1")
    crew = Crew(place(Layout(ulysses=3), "cuda:0,cuda:1,cuda:0", "gloo", gpus), "", fake_setup())
    assert [crew._first_message(rank, 0, None).sharers for rank in range(3)] == [2, 1, 2]


def test_stages_on_one_device_ask_for_room_one_after_the_other():
    placement = place(
        Layout(ulysses=2, pipefusion=2),
        "cuda:0,cuda:0,cuda:0,cuda:1",
        "gloo",
        (Device("cuda:0", "GPU-0"), Device("cuda:1", "GPU-1")),
    )
    assert [placement.sharers(rank) for rank in range(4)] == [2, 2, 1, 1]


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
