"""Sets of weight patches that come back, as those of hooks on conds do, are merged and sent once as
long as there is memory for them: on a rank's device, else in main memory.
"""

import os
from contextlib import suppress

import comfy.hooks
import comfy.utils
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pipemesh.lab.commands.parity import BOUND, conditioning, relative_error, stock_model
from pipemesh.parallel_runtime.client.remote_pool import RemotePool
from pipemesh.parallel_runtime.client.run import PooledModel
from pipemesh.parallel_runtime.crossing.source import Source, state_source
from pipemesh.parallel_runtime.errors import OutOfMemory
from pipemesh.parallel_runtime.forward import PREFIX
from pipemesh.parallel_runtime.layout import Layout
from pipemesh.parallel_runtime.planner.keeping import WHOLE
from pipemesh.parallel_runtime.weights import device_weights
from pipemesh.parallel_runtime.weights.weight_patches import pack_patches
from pipemesh.parallel_runtime.wire.arena import Arena
from pipemesh.parallel_runtime.wire.messages import DropSets, EndRun, Memory, SetWeightPatches
from pipemesh.parallel_runtime.wire.segment import Segment
from pipemesh.parallel_runtime.worker import object_patches
from pipemesh.parallel_runtime.worker.arena_io import ArenaIO
from pipemesh.parallel_runtime.worker.device_memory import DeviceMemory
from pipemesh.parallel_runtime.worker.handler import RequestHandler
from pipemesh.parallel_runtime.worker.patched_sets import SHARE_OF_SETS, PatchedSets
from pipemesh.parallel_runtime.worker.resident_model import ResidentModel
from pipemesh.pool.verdict import Facts

from ..kit.late_device import LateTensor, late_device
from ..kit.late_ranks import LateWorld, own_gpu
from ..kit.models import IdleRank, run

GPU, CPU = torch.device("cuda", 0), torch.device("cpu")
SIZES = {"a": 1, "b": 2, "c": 3, "d": 50}  # the last is larger than all the room


# -- which stay


class Bytes:
    """Weights of which only the bytes count. ``fails`` where the rank has no memory for a copy."""

    fails = False

    def __init__(self):
        self.here = {}

    def aside_bytes(self, name):
        return self.here[name]

    def aside(self, name, device):
        if self.fails:
            raise MemoryError
        return self.here[name]

    def put_back(self, name, aside):
        self.here[name] = aside


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from([GPU, CPU]),
    st.lists(st.tuples(st.sampled_from(["", *SIZES, "run", "leave", "drop"]), st.booleans()), max_size=40),
    st.tuples(st.integers(0, 60), st.integers(0, 60)),
)
def test_sets_stay_within_their_share_of_what_is_free_and_come_back_as_they_were(device, steps, totals):
    weights, total = Bytes(), dict(zip((GPU, CPU), totals, strict=True))

    def free_bytes(where):
        return total[where] - sets.nbytes(where == device)

    sets, name = PatchedSets(weights, device, free_bytes), ""
    for wanted, weights.fails in steps:
        if wanted == "run":
            sets.end_run()
        elif wanted == "leave":
            sets.leave_gpu()
        elif wanted == "drop":
            sets.drop()
        elif wanted != name:
            sets.in_place = (name,) if name else ()
            with suppress(MemoryError):
                sets.leave(name, True)
            name = wanted
            if sets.has(name):
                sets.put(name)
                assert weights.here.pop(name) == SIZES[name]
            weights.here = {name: SIZES.get(name, 0)}
        for where in {device, CPU}:
            assert sets.nbytes(where == device) <= SHARE_OF_SETS * total[where]


def test_a_set_goes_to_main_memory_where_a_device_has_no_room_and_the_last_used_stay_there():
    weights, free = Bytes(), {GPU: 4, CPU: 20}
    sets = PatchedSets(weights, GPU, lambda device: free[device] - sets.nbytes(device == GPU))
    for name in "abc":
        weights.here, sets.in_place = {name: SIZES[name]}, (name,)
        sets.leave(name, True)
    assert [(sets.has(name), sets.nbytes(True), sets.nbytes(False)) for name in "abc"] == [
        (True, 1, 5),
        (True, 1, 5),
        (True, 1, 5),
    ]
    sets.put("b")
    weights.here, sets.in_place = {"x": 2}, ("x",)
    sets.leave("x", True)
    assert [name for name in "abcx" if sets.has(name)] == ["a", "b", "x"], "c was used longest ago"
    sets.end_run()
    sets.put("b")
    sets.end_run()
    assert [name for name in "abcx" if sets.has(name)] == ["b"], "the run asked for no other"
    assert (sets.nbytes(True), sets.nbytes(False)) == (0, 2)


# -- on a GPU: merged, sent and restored


class Room(DeviceMemory):
    """``free``: on the device and in main memory."""

    free = 1 << 40, 1 << 40

    def free_on(self, device, ranks):
        return self.free[device != self._device]


class OneRank:
    """A pool of one rank, which is the product's own handler in this process; ``sent``: the bytes
    of each set that went to it. It runs out of memory while ``is_full``.
    """

    def __init__(self, mesh, device):
        self.arena, self.memory, self.idle = Arena(), [Memory(0, 0, 0)], True
        self.facts, self.layout, self.numbers = Facts((str(device),), stages=1), Layout(), 0
        self.room = Room(device, 0)
        self.handler = RequestHandler(mesh, device, self.room, ArenaIO(self.arena.segment, device))
        self.sent, self.asked, self.is_full = [], [], False

    def next_request(self):
        self.numbers += 1
        return self.numbers

    def live(self):
        return self

    def ensure(self, _interrupted):
        return self

    def ask(self, request, fds=(), _interrupted=None):
        self.asked.append(type(request))
        if isinstance(request, SetWeightPatches) and self.is_full and self.memory[0].sets:
            raise OutOfMemory("Rank 0 ran out of memory")
        segments = [Segment(os.dup(fd), os.fstat(fd).st_size) for fd in fds]
        if isinstance(request, SetWeightPatches):
            self.sent += [segment.nbytes for segment in segments]
        try:
            answer = self.handler.handle(request, segments, IdleRank())
        finally:
            for segment in segments:  # as the loop of a rank does
                segment.close()
        self.memory = [answer.memory]
        return [answer]


def patches_of(model, seed, *names):
    """Weight patches of a clone of these layers, packed, and what ComfyUI itself makes of them."""
    generator, clone = torch.Generator().manual_seed(seed), model.clone()
    keys = [key for key in clone.model_state_dict("diffusion_model.") if key.endswith(names)]
    state = clone.model_state_dict()
    diffs = {key: ("diff", (torch.randn(state[key].shape, generator=generator),)) for key in keys}
    clone.add_patches(diffs, 0.5)
    merged = {key: clone.patch_weight_to_device(key, CPU, return_weight=True) for key in keys}
    return pack_patches(clone.patches), {**dict(clone.model.named_parameters()), **merged}


class Counted:
    """A rank on a late GPU that sets are switched on, as hooks of two conds do in every step."""

    def __init__(self, mesh, monkeypatch):
        self.pool, self.counts = OneRank(mesh, own_gpu()), dict.fromkeys(("merged", "restored"), 0)
        self.client, self.stock = RemotePool(self.pool), stock_model(2)
        self.changed = {}  # weights that a node changed in place
        monkeypatch.setattr(ResidentModel, "_patched", self.counted("merged", ResidentModel._patched))
        loaded = stock_model(2)
        self.model, state = PooledModel("m", "m", users=1), lambda: state_source(loaded)
        self.client.residency.load(self.model, Source(model="m"), state, lambda: False, WHOLE)
        settled = self.counted("restored", device_weights.settled_as)
        monkeypatch.setattr(device_weights, "settled_as", settled)
        layers = ("img_mod.lin.weight", "txt_mlp.0.weight")
        self.sets = {
            "a": patches_of(self.stock, 1, *layers),
            "b": patches_of(self.stock, 2, *layers, "img_mlp.0.weight"),
            "": ({}, dict(self.stock.model.named_parameters())),
        }

    def counted(self, what, real):
        def counts(*args):
            self.counts[what] += 1
            return real(*args)

        return counts

    def switch(self, name, comes_back=True, objects=("", {})):
        """Returns what that took: weights merged, weights restored, bytes sent."""
        self.pool.sent.clear()
        before = dict(self.counts)
        patches, truth = self.sets[name]
        self.client.residency.set_weight_patches(
            self.model, f"{name}{objects[0]}", patches, objects, lambda: False, comes_back=comes_back
        )
        here = self.pool.handler.models["m"].patcher.model.named_parameters()
        for key, weight in here:
            content = weight.to("cpu") if isinstance(weight.data, LateTensor) else weight
            assert torch.equal(content, truth[key]), (name, key)
        changed = [self.counts[what] - before[what] for what in self.counts]
        return (*changed, sum(self.pool.sent) if max(self.pool.sent) > 4096 else 0)


def on_a_late_gpu(test):
    """A test of a rank that sets are switched on."""

    def run_there(monkeypatch):
        def ran(mesh, _run):
            with torch.inference_mode():
                test(Counted(mesh, monkeypatch), monkeypatch)

        with pytest.MonkeyPatch.context() as patch, late_device(0) as box:
            LateWorld(Layout(), box, patch, "nccl").run(ran)

    run_there.__name__ = test.__name__
    return run_there


@on_a_late_gpu
def test_on_a_gpu_sets_that_take_turns_are_merged_sent_and_restored_once(rank, monkeypatch):
    first = [rank.switch(name) for name in ("a", "b")]
    assert all(merged and sent for merged, _restored, sent in first)
    for _step in range(10):
        assert [rank.switch(name) for name in ("a", "b", "", "b", "")] == [(0, 0, 0)] * 5
    held = rank.pool.memory[0]
    assert held.sets and not held.sets_in_main
    rank.pool.ask(EndRun(request=99, model="m", cleared=(0,)))
    assert not rank.pool.memory[0].sets, "ComfyUI needs the memory of this GPU"
    merged, _restored, sent = rank.switch("a")
    assert merged and sent


@on_a_late_gpu
def test_a_gpu_without_room_keeps_them_in_main_memory_and_without_that_merges_them_anew(rank, monkeypatch):
    rank.pool.room.free = 0, 1 << 40
    for name in ("a", "b"):
        rank.switch(name)
    for _step in range(3):
        turns = [rank.switch(name) for name in ("a", "b")]
        assert [(merged, sent) for merged, _restored, sent in turns] == [(0, 0)] * 2
    held = rank.pool.memory[0]
    assert held.sets_in_main and not held.sets
    rank.pool.ask(DropSets(request=99))
    rank.pool.room.free = 0, 0
    for _step in range(2):
        assert all(merged and sent for merged, _restored, sent in map(rank.switch, ("a", "b")))
    assert rank.pool.memory[0].sets == rank.pool.memory[0].sets_in_main == 0


@on_a_late_gpu
def test_sets_that_are_kept_go_first_where_memory_lacks_and_models_after_them(rank, monkeypatch):
    for name in ("a", "b"):
        rank.switch(name)
    rank.pool.is_full, rank.pool.asked = True, []
    assert rank.switch("a")[0]
    assert DropSets in rank.pool.asked and [*rank.client.sessions.live.models] == [rank.model]
    make_room = rank.client.residency.make_room
    assert make_room(rank.model) and not make_room(rank.model), "b was kept, and nothing is any more"


@on_a_late_gpu
def test_objects_of_all_sets_are_sent_and_put_once_and_weights_among_them_are_in_every_set(rank, monkeypatch):
    put, name = [], f"{PREFIX}double_blocks.0.txt_mlp.0.weight"
    monkeypatch.setattr(object_patches, "put_object", lambda *asked: put.append(asked[1]))

    model = rank.stock.model
    plain, other = dict(rank.sets), torch.full_like(model.state_dict()[name], 3.0)
    objects = "|changed", {name: other, f"{PREFIX}scale": torch.ones(1 << 16)}
    for key, (patches, truth) in plain.items():
        merged = other + 0.5 * patches[name][0][1][1][1][0] if patches else other
        rank.sets[key] = patches, {**truth, name: merged}
    first, *others = [rank.switch(key, objects=objects) for key in ("a", "b", "", "a", "b", "")]
    assert put == [f"{PREFIX}scale"] and first[2] > 4 << 16 > max(sent for *_, sent in others)
    assert [merged for merged, *_ in others[2:]] == [0, 0, 0]
    rank.sets = plain
    assert [rank.switch(key)[0] > 0 for key in ("", "a", "b", "", "a")] == [False, True, True] + [False] * 2


@on_a_late_gpu
def test_a_set_that_does_not_come_back_is_not_kept(rank, monkeypatch):
    for name in ("a", "", "b", "a"):
        rank.switch(name, comes_back=False)
    assert rank.pool.memory[0].sets == rank.pool.memory[0].sets_in_main == 0


# -- whole runs


def test_lora_hooks_that_take_turns_are_sent_once_each_and_the_image_is_stocks(
    pair, files, client, requests, monkeypatch
):
    def hooked(seed, strength):
        hooks = comfy.hooks.create_hook_lora(comfy.utils.load_torch_file(files["lora"]), strength, 0.0)
        return [[tensor, {**extras, "hooks": hooks}] for tensor, extras in conditioning(seed, 13)]

    def patched(model, *strengths):
        requests.clear()
        image = run(
            model, positive=hooked(1, strengths[0]), negative=hooked(2, strengths[1]), cfg=2.0, steps=3
        )
        return image, requests["SetWeightPatches"]

    stock, parallel = pair
    truth, other = (patched(stock, *strengths)[0] for strengths in ((0.8, -0.5), (0.8, 0.8)))
    assert relative_error(other, truth) > 100 * BOUND, "the second hook does nothing"
    asked = []
    for is_new in (True, False, True):  # another test may have left the model with its weights shared out
        if is_new:
            client.residency.release(parallel.remote.model)
        ours, switches = patched(parallel, 0.8, -0.5)
        assert relative_error(ours, truth) <= BOUND and switches >= 2 * 3 - 1
        asked.append(switches)
    assert asked == [8, 7, 8], (
        "six switches, from the model's own weights at first; two are sent when asked for"
    )
    assert all(memory.sets for memory in client.sessions.live.pool.memory)
