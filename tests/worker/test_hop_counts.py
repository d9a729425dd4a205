"""What an evaluation's way to a rank and back asks of GPUs that are not there: copies, and waits;
with the arena pinned, and where it cannot be.
"""

import logging
import os
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from pipemesh.parallel_runtime.client.branch import Branch, Origin
from pipemesh.parallel_runtime.client.conditioning import ConditioningCache
from pipemesh.parallel_runtime.client.evaluations import own_tensors, write_arguments
from pipemesh.parallel_runtime.comm.device_copies import Reached
from pipemesh.parallel_runtime.wire.arena import ROOM, Arena
from pipemesh.parallel_runtime.wire.segment import Segment, TensorRef
from pipemesh.parallel_runtime.wire.tree import decode_tree, encode_tree
from pipemesh.parallel_runtime.worker import rank_loop
from pipemesh.parallel_runtime.worker.arena_io import ArenaIO
from pipemesh.parallel_runtime.worker.rank_loop import LOOK_S, PAUSE, SLACK_S, SPIN_S, RankLoop
from torch.utils._python_dispatch import TorchDispatchMode

from ..kit import late_device

GPU = torch.device("cuda", 0)
CPU = torch.device("cpu")
COPIES = {torch.ops.aten.copy_.default, torch.ops.aten._to_copy.default, torch.ops.aten.clone.default}


class Driver:
    """Registers memory, unless it says why not, and counts what it is asked for."""

    def __init__(self, error=0):
        self.error, self.registered, self.counts = error, {}, Counter()

    def cudaHostRegister(self, address, nbytes, flags):
        assert flags == 1 and address not in self.registered
        if not self.error:
            self.registered[address] = nbytes
        return self.error

    def cudaHostUnregister(self, address):
        del self.registered[address]
        return 0

    def synchronize(self, *_):
        self.counts["waits"] += 1


@pytest.fixture
def driver(monkeypatch):
    made = Driver()
    monkeypatch.setattr(torch.cuda, "_lazy_init", lambda: None)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: made)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: made)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: made.synchronize())
    monkeypatch.setattr(
        torch.cuda, "Event", lambda: SimpleNamespace(record=lambda: None, synchronize=made.synchronize)
    )
    return made


@pytest.fixture
def late():
    """A GPU that comes to nothing before it is waited for."""
    with late_device.late_device() as box:
        yield box


class HostCopies(TorchDispatchMode):
    """Counts copies within main memory."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        if func in COPIES:
            source, into = (args[1], args[0]) if func is torch.ops.aten.copy_.default else (args[0], made)
            self.count += source.device == into.device == CPU
        return made


# By the way of copying: of the UI, and of one rank that has the output
COUNTS = {
    "straight": ({"copy": 5, "waits": 2}, {"copy": 5}),
    "through other memory": ({"copy": 5, "waits": 5}, {"copy": 5, "host copy": 5}),
}


@pytest.mark.parametrize("way", COUNTS)
def test_all_is_there_when_ranks_may_read_it_with_so_many_copies_and_waits(late, way):
    """The second of a run: the first uploads conditioning. The waits of a rank are its events."""
    late.registers = way == "straight"
    arena, text, gpu = Arena(), torch.ones(1, 4, 8), late.gpu
    session = SimpleNamespace(
        pool=SimpleNamespace(arena=arena), tickets=[], conditioning=ConditioningCache(arena)
    )
    branch = Branch(("cond",), origins=(Origin([text]),))
    there = Segment(os.dup(arena.segment.fd), arena.nbytes, ROOM)
    there.pin(GPU)
    io, x = ArenaIO(there, GPU), torch.ones(1, 4, 6, 6, device=GPU) * 3
    arguments = {"x": x, "timestep": x[:, 0, 0, 0] * 2, "context": text.to(GPU)}
    options = {"sigmas": x[0, 0, 0] * 4, "sample_sigmas": torch.ones(5, device=GPU)}
    arguments["transformer_options"] = options
    with HostCopies() as host:

        def took():
            """What was asked for since this was last called."""
            counts = {"copy": gpu.launches["copy"], "host copy": host.count, "waits": gpu.waits.total()}
            host.count = 0
            gpu.launches.clear(), gpu.waits.clear()
            return Counter(counts)

        for _ in range(2):
            took()
            written = write_arguments(session, arguments, branch, True)
            assert written.is_right()
            of_ui = took()
            tree = decode_tree(written.tree, arena.segment.tensor)
            assert tree["x"].eq(3).all() and tree["timestep"].tolist() == [6]
            assert tree["transformer_options"]["sigmas"].tolist() == [12] * 6
            took()
            out = written.frame.blank(1024)
            finish = io.write(io.read(written.tree)["x"] + 1, out)
            of_rank = took()
            Reached(GPU).wait()
            took()
            answer = finish()
            of_rank += took()
            ours = own_tensors(arena.segment, answer.tree, GPU)
            of_ui += took()
            arena.segment.tensor(out).zero_()
            assert ours.eq(4).all()
            written.frame.release()
    assert (dict(of_ui), dict(of_rank)) == COUNTS[way]
    arena.close()


def test_on_a_late_gpu_what_a_failed_evaluation_was_to_read_may_be_written_over_then(late):
    arena = Arena()
    arena.segment.pin(GPU)
    with arena.frame() as frame:
        tree = encode_tree({"x": torch.ones(8)}, lambda path, tensor: frame.put(tensor))
        io = ArenaIO(arena.segment, GPU)
        io.settle()
        assert not late.gpu.waits, "nothing was read"
        read = io.read(tree)["x"]
        io.settle()
    arena.segment.tensor(TensorRef(0, (4096,), "float32")).zero_()
    assert read.tolist() == [1] * 8
    arena.close()


# -- pinned


def test_only_what_memory_was_extended_by_is_registered_and_what_is_cut_off_is_no_more(driver):
    ours = Segment.create("pinned", 1 << 16, ROOM)
    ours.pin(GPU)
    view = ours.tensor(TensorRef(0, (16,), "float32"))
    ours.pin(GPU)
    ours.grow(1 << 18)
    ours.grow(1 << 20)
    start = view.data_ptr()
    pieces = {start: 1 << 16, start + (1 << 16): 3 << 16, start + (1 << 18): 3 << 18}
    assert driver.registered == pieces and ours.is_pinned and ours.registered_bytes == 1 << 20
    for end, left in ((3 << 18, 1 << 19), (1 << 18, 0)):
        ours.shrink(end)
        assert driver.registered == {
            **dict(list(pieces.items())[:2]),
            **({start + (1 << 18): left} if left else {}),
        }
        assert os.fstat(ours.fd).st_size == ours.nbytes == ours.registered_bytes == end
    assert driver.counts["waits"] == 2, "for what a GPU may still copy"
    ours.grow(1 << 20)
    assert ours.registered_bytes == 1 << 20
    ours.close()
    ours.unmap()
    assert not driver.registered and not ours.is_pinned and not ours.registered_bytes


@pytest.mark.parametrize("at", ["once", "where it is extended"])
def test_where_memory_cannot_be_registered_the_log_says_so_once_and_copies_go_the_old_way(driver, caplog, at):
    ours = Segment.create("pinned", 1 << 16, ROOM)
    driver.error = 2 if at == "once" else 0
    with caplog.at_level(logging.WARNING):
        ours.pin(GPU)
        driver.error = 2
        ours.grow(1 << 18)
        ours.grow(1 << 20)
        ours.pin(GPU)
        ref = ours.put(0, torch.ones(4), later=True)
    assert not ours.is_pinned and ours.tensor(ref).sum() == 4
    assert [record.message for record in caplog.records if "error 2" in record.message] == [
        "[PipeMesh] cuda:0 cannot copy from shared memory itself (error 2 of cudaHostRegister): its copies go"
        " through other memory, a little slower."
    ]
    ours.close()
    assert not driver.registered


def test_memory_that_could_not_be_extended_is_pinned_again_once_that_is_cut_off(driver, caplog):
    ours = Segment.create("pinned", 1 << 16, ROOM)
    ours.pin(GPU)
    for _ in range(2):
        driver.error = 2
        ours.grow(1 << 18)
        assert not ours.is_pinned
        driver.error = 0
        ours.shrink(1 << 17)
        assert not ours.is_pinned, "what is left reaches beyond what is registered"
        ours.shrink(1 << 16)
        assert ours.is_pinned and ours.registered_bytes == 1 << 16
    assert caplog.text.count("cannot copy") == 1
    ours.close()


def test_ranks_on_the_cpu_register_nothing(driver):
    ours = Segment.create("pinned", 1 << 16, ROOM)
    ours.pin(CPU)
    assert not driver.registered and not ours.is_pinned
    ours.close()


# -- looking


class Looks:
    """A clock that goes on with each look, and the pauses that were made."""

    def __init__(self, patch, step_s=1e-4, until=lambda now: False):
        self.now, self.pauses = 0.0, []
        patch.setattr(rank_loop.time, "perf_counter", lambda: self.now)

        def select(read, write, other, pause_s):
            self.now += step_s + pause_s
            if pause_s:
                self.pauses.append(pause_s)
            return read if until(self.now) else [], [], []

        patch.setattr(rank_loop.select, "select", select)


class Idle(Exception):
    pass


def loop(device, spins):
    def pump():
        raise Idle

    board = SimpleNamespace(enter=lambda *_: None)
    return RankLoop(SimpleNamespace(pump=pump), board, 0, None, device, spins)


@pytest.mark.parametrize(("device", "spins"), [(GPU, True), (GPU, False), (CPU, True)])
def test_a_rank_beside_a_gpu_looks_for_a_request_for_a_millisecond_before_it_sleeps(
    monkeypatch, device, spins
):
    seen = Looks(monkeypatch)
    with pytest.raises(Idle):
        loop(device, spins).serve(None)
    assert not seen.pauses
    assert SPIN_S <= seen.now <= SPIN_S + 2e-4 if spins and device == GPU else seen.now == 0


@pytest.mark.parametrize("spins", [True, False])
def test_the_longer_a_gpu_takes_the_longer_a_rank_pauses_between_two_looks(monkeypatch, spins):
    seen, ends_s = Looks(monkeypatch), 2.0
    rank = loop(GPU, spins)
    rank._enqueued.append((None, None))
    monkeypatch.setattr(rank, "_is_first_over", lambda: seen.now > ends_s)
    monkeypatch.setattr(rank, "_send_first", rank._enqueued.clear)
    rank._send_what_is_computed()
    if not spins:
        assert set(seen.pauses) == {LOOK_S}
        return
    assert seen.now - ends_s <= PAUSE * seen.now + 2e-4, "noticed late"
    assert min(seen.pauses) > SLACK_S and sorted(seen.pauses) == seen.pauses
    assert max(seen.pauses) > LOOK_S, "a long evaluation takes as many looks as a short one"
