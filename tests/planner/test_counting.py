"""A MODEL is counted in a process of its own: ComfyUI's, which serves meanwhile, stays as it is,
and no sampling waits for ever.
"""

import itertools
import os
import re
import select
import signal
import socket
import subprocess
import sys
import threading
import weakref
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from operator import attrgetter
from types import SimpleNamespace

import psutil
import pytest
import torch
from comfy.ldm.lightricks.model import generate_freq_grid_np
from pipemesh.lab.commands.parity import stock_model
from pipemesh.nodes.auto.layouts import require_several
from pipemesh.nodes.runtime import Runtime
from pipemesh.parallel_runtime.client.memory_needs import MemoryNeeds, Sampled
from pipemesh.parallel_runtime.client.run import PooledModel
from pipemesh.parallel_runtime.errors import LayoutError, Refused, RunCancelled
from pipemesh.parallel_runtime.families.catalogue import PLAIN, SAMPLES
from pipemesh.parallel_runtime.layout import Layout
from pipemesh.parallel_runtime.planner import counting
from pipemesh.parallel_runtime.planner.choice import plan
from pipemesh.parallel_runtime.planner.counting import whole_of
from pipemesh.parallel_runtime.planner.counts import (
    LOST_S,
    MOST,
    CounterLost,
    Counts,
    NotCounted,
    count_nothing,
    with_rounded_text,
)
from pipemesh.parallel_runtime.planner.dry_device import DeviceCounts, computing_dry
from pipemesh.parallel_runtime.planner.fake_mode import QuickFakeMode
from pipemesh.parallel_runtime.planner.job import Job
from pipemesh.parallel_runtime.planner.keeping import LEFT_FREE
from pipemesh.parallel_runtime.planner.meta_model import model_description
from pipemesh.parallel_runtime.planner.prediction import sharded_bytes
from pipemesh.parallel_runtime.wire.channel import Channel
from pipemesh.pool.counter import Counter, counting_process
from pipemesh.pool.devices import Device, Placement
from pipemesh.pool.fork_server import ForkServer
from pipemesh.pool.pool import WorkerPool
from pipemesh.pool.rank_setup import KEEP_MEMORY
from pipemesh.pool.side_process import SCRIPT, environment
from pipemesh.pool.supervisor import process_of_its_own

from ..kit.fake_pools import DEADLINE_S, fake_setup, is_alive
from ..kit.fake_pools import FAKE as FAKE_WORKER
from ..kit.foreign_pack import unet, without_plan
from ..kit.planned import box, counts
from .test_planning import OPEN, PROMPT, Planning, StepTimes, asked

SHAPE = (1, 16, 8, 8)
OF_A_RANK = (FAKE_WORKER, "{fd}", "{parent}")
FLUX = counts("flux 1024")


def cpu():
    return Device("cpu")


@pytest.fixture(scope="module")
def counter(setup):
    made = Counter(setup, cpu)
    yield made
    made.close()


@pytest.fixture(scope="module")
def model():
    return stock_model(5, family=PLAIN).model


def chooser(begin, **how):
    return Planning(StepTimes(), Counts(begin, **how))


# -- what is counted


def counted_by(monkeypatch, count, model):
    """What the process that counts answers, if a MODEL is counted so."""
    monkeypatch.setattr(counting, "count_evaluation", count)
    return whole_of(model_description(model, PROMPT, SHAPE))


def test_no_tensor_without_content_stays_in_a_cache_of_comfyuis(monkeypatch, model):
    """The next model would be counted with it."""
    size = (10000.0, 3, 96)

    def remembers(*_, **_more):
        with computing_dry(QuickFakeMode(), DeviceCounts()):
            generate_freq_grid_np(*size)
        raise RuntimeError("made")

    with pytest.raises(NotCounted, match="made"):
        counted_by(monkeypatch, remembers, model)
    assert type(generate_freq_grid_np(*size)) is torch.Tensor


def test_memory_that_runs_out_in_the_process_is_an_answer(monkeypatch, model):
    def full(*_, **_more):
        raise MemoryError

    with pytest.raises(NotCounted, match="does not run: MemoryError"):
        counted_by(monkeypatch, full, model)


def test_a_loaded_model_is_counted_at_the_true_size_without_being_computed(counter, model):
    known = Counts(counter.begin, patience_s=DEADLINE_S)
    small, large = (known.of(model, [PROMPT], (1, 16, side, side)) for side in (8, 16))
    assert len(small.block_flops) == len(small.attended_by_block) > 1
    tokens = [sum(one.tokens.values()) for one in (small, large)]
    assert tokens == [64 + 16, 64 + 64], "most texts are counted as one"
    assert large.flops > 1.3 * small.flops
    weights = sum(weight.numel() * weight.element_size() for weight in model.diffusion_model.parameters())
    assert small.weight_bytes == pytest.approx(weights, rel=0.01), "as stored, not as the meta model has them"
    assert not model.diffusion_model._forward_pre_hooks and not torch.is_inference_mode_enabled()


def test_another_process_counts_as_this_one_would(counter, model):
    asked = model_description(model, PROMPT, SHAPE)
    there, here = counter.begin(asked).result(DEADLINE_S), whole_of(asked)
    for name in ("flops", "activations.peak_bytes", "tokens", "attended"):
        assert attrgetter(name)(there) == attrgetter(name)(here)


@pytest.mark.parametrize("kind", ["SD15", "SDXL"])
def test_a_unet_is_one_block_that_no_rank_shares(kind):
    whole = whole_of(model_description(unet(kind).model, PROMPT, (1, 4, 8, 8)))
    assert (len(whole.block_flops), whole.attended_by_block) == (1, [[]])
    assert whole.block_flops[0] > 0
    layouts = [row.layout for row in plan(Job(whole=whole, branches=2), box(2), sizes=(2,)).rows]
    assert layouts == [Layout(cfg=2)]


def test_a_model_that_cannot_be_run_dry_says_why(counter, model):
    why = r"^its copy without weights does not run: .*(cross_attn|context|NoneType)"
    with pytest.raises(NotCounted, match=why):
        Counts(counter.begin, patience_s=DEADLINE_S).of(model, [{}], SHAPE)


def test_texts_of_nearly_the_same_length_are_counted_as_one():
    for tokens in (13, 64):
        rounded = with_rounded_text({"cross_attn": torch.zeros(1, tokens, 64)})
        assert rounded["cross_attn"].shape == (1, 64, 64)
    masked = {**PROMPT, "attention_mask": torch.ones(1, 13)}
    assert with_rounded_text(masked) is masked, "its mask has as many"


@pytest.mark.parametrize("family", SAMPLES)
def test_what_a_prompt_of_any_family_brings_can_be_described(family, model):
    shape = SAMPLES[family].latents["even"]
    # Or of several together
    extras = SAMPLES[family].extras(torch.zeros(shape if isinstance(shape[0], int) else shape[0]))
    model_description(model, {**PROMPT, **extras}, SHAPE)


def test_what_is_no_plain_data_is_not_counted_and_named(model):
    with pytest.raises(NotCounted, match=r"cannot be described: cond/theirs is a builtins\.object"):
        Counts(count_nothing).of(model, [{**PROMPT, "theirs": object()}], SHAPE)
    with pytest.raises(NotCounted, match="Unplanned has no token plan"):
        Counts(count_nothing).of(without_plan(stock_model(5)).model, [PROMPT], SHAPE)


# -- how often


def done(whole=FLUX):
    future = Future()
    future.set_result(whole)
    return future


def test_an_evaluation_is_counted_once_for_each_size_class_and_configuration(model):
    begun, other = [], without_plan(stock_model(5)).model
    known = Counts(lambda asked: begun.append(asked) or done())
    for shape in (SHAPE, SHAPE, (1, 16, 8, 10)):
        assert known.of(model, [PROMPT], shape).flops == FLUX.flops
    assert len(begun) == 2 == len({*begun})
    assert model_description(other, PROMPT, SHAPE) != model_description(stock_model(5).model, PROMPT, SHAPE)


@pytest.mark.parametrize("by_layer", [False, True])
def test_weights_that_are_stored_in_half_the_bytes_take_half_the_room_shared_out_too(by_layer):
    model = stock_model(5).model
    known = Counts(lambda asked: done())
    whole = known.of(model, [PROMPT], SHAPE)
    model.diffusion_model.half()
    half = known.of(model, [PROMPT], SHAPE)
    assert (half.weight_bytes, half.flops) == (whole.weight_bytes // 2, FLUX.flops)
    blocks = 0, len(whole.block_weight_bytes)
    room, halved = (sharded_bytes(one, Layout(ulysses=2), blocks, by_layer) for one in (whole, half))
    assert halved == pytest.approx(room / 2, rel=1e-3)


# -- while it is counted


def functions():
    """Every function and class of modules that ComfyUI's process calls, and the methods of those
    classes.
    """
    found = {}
    for called, module in list(sys.modules.items()):
        if called.partition(".")[0] == "comfy" or called in ("torch", "torch.cuda"):
            found |= {(called, name): value for name, value in list(vars(module).items())}
    classes = [(place, one) for place, one in found.items() if isinstance(one, type)]
    for place, one in classes:
        if one.__module__.startswith("comfy."):
            found |= {(*place, name): method for name, method in vars(one).items()}
    return {place: value for place, value in found.items() if callable(value)}


def test_no_function_of_comfyuis_or_torchs_is_another_while_a_layout_is_chosen(counter, model):
    before, over, replaced, looked = functions(), threading.Event(), set(), []

    def look():
        while not over.is_set():
            now = functions()
            replaced.update(place for place, value in before.items() if now.get(place) is not value)
            looked.append(1)

    looking = threading.Thread(target=look)
    looking.start()
    planned = chooser(counter.begin, patience_s=DEADLINE_S).choose(model, OPEN, asked(), ())
    over.set()
    looking.join()
    assert planned.plan is not None, planned.why
    assert looked and not replaced


def test_a_sampling_waits_no_longer_than_its_patience_and_the_next_of_its_kind_has_the_count(model):
    """A node's has the layout of a pool that is up, or that of its place; auto mode's runs on one
    GPU where none is up.
    """
    counting, begun = Future(), []
    made = chooser(lambda asked: begun.append(asked) or counting, patience_s=0.0)
    shared, groups = Layout(ulysses=2), Layout(cfg=2)
    waiting = [made.choose(model, OPEN, asked(), running) for running in ((), (groups,), (Layout(ring=2),))]
    assert [(one.layout, one.awaits) for one in waiting] == [(shared, True), (groups, False), (shared, True)]
    why = "not know yet which layout is the fastest, because the cost of an evaluation was not counted within"
    with pytest.raises(Refused, match=rf"{why} 0 s\.$"):
        require_several(waiting[0], None, OPEN)
    counting.set_result(FLUX)
    assert made.choose(model, OPEN, asked(), ()).plan is not None
    assert len(begun) == 1


def test_stop_ends_the_wait(model):
    with pytest.raises(RunCancelled):
        chooser(lambda _: Future(), interrupted=lambda: True).choose(model, OPEN, asked(), ())


def hurried(step_s=2.5):
    """A clock that goes on by so much when it is looked at."""
    times = itertools.count(step=step_s)
    return lambda: next(times)


def test_a_sampling_waits_a_moment_where_a_pool_that_suits_it_is_up_and_not_long_where_none_is(model):
    for running, awaits, waited in (((Layout(cfg=2),), False, 5), ((), True, 60)):
        planned = chooser(lambda _: Future(), clock=hurried()).choose(model, OPEN, asked(), running)
        assert planned.awaits == awaits
        assert planned.why == f"the cost of an evaluation was not counted within {waited} s"


def test_a_pool_by_hand_goes_on_where_nothing_is_counted_yet_and_at_once_with_weights_that_are_loaded(
    model, caplog
):
    caplog.set_level("INFO", "pipemesh")
    sampled = Sampled(weakref.ref(model), SHAPE, {"positive": [PROMPT]})
    pooled = PooledModel("model", "model")
    for held, waited in (({}, 60), ({pooled: object()}, 5)):
        sessions = SimpleNamespace(live=SimpleNamespace(models=held))
        beside = MemoryNeeds(sessions, None, Counts(lambda _: Future(), clock=hurried()))
        assert beside.left_free(pooled, sampled) == LEFT_FREE
        assert f"was not counted within {waited} s" in caplog.records[-1].getMessage()


def test_a_count_that_was_lost_is_begun_again_after_a_while(model):
    begun, now, lost, tried = [], [0.0], Future(), []
    lost.set_exception(CounterLost("the process that counts was killed (signal 9)"))
    known = Counts(lambda _: begun.append(1) or lost, clock=lambda: now[0])
    for now[0] in (0.0, 0.0, LOST_S - 1, LOST_S, LOST_S, LOST_S):
        with pytest.raises(NotCounted, match="was killed"):
            known.of(model, [PROMPT], SHAPE)
        tried.append(len(begun))
    assert tried == [1, 1, 1, 2, 2, 2]


# -- a process that does not answer


FAKE = """
import os, signal, socket, struct, sys, time, msgspec
sock = socket.socket(fileno=int(sys.argv[1]))

def take():
    head = sock.recv(5, socket.MSG_WAITALL)
    if not head:
        os._exit(0)
    return sock.recv(struct.unpack("<IB", head)[0], socket.MSG_WAITALL)

def say(body):
    sock.sendall(struct.pack("<IB", len(body), 0) + body)

take()
while True:
    take()
    {act}
"""


def tells(what):
    return f'say(msgspec.msgpack.encode({{"type": "Uncounted", "why": str({what})}}))'


def said_by(counter):
    return str(counter.begin(b"").exception(DEADLINE_S))


REFUSES = tells("os.getpid()")
ACTS = {
    "os.kill(os.getpid(), signal.SIGKILL)": r"was killed \(signal 9; ",
    "sys.exit('ComfyUI is not here')": "ended with exit status 1: ComfyUI is not here",
    "os._exit(0)": "ended with exit status 0",
    "say(b'junk')": "could not be asked",
    "time.sleep(600)": "took longer than 0.5 s and was ended",
}


@pytest.fixture
def faked(tmp_path):
    """A counter whose process acts so when it is asked."""
    made = []

    def fake(act, device=cpu, setup=None, **how):
        script = tmp_path / f"{len(made)}.py"
        script.write_text(FAKE.replace("{act}", act))
        made.append(Counter(setup or fake_setup(), device, (str(script), "{fd}"), **how))
        return made[-1]

    yield fake
    for one in made:
        one.close()


@pytest.mark.parametrize("act", ACTS)
def test_a_process_that_is_lost_costs_a_sentence_and_the_layout_of_the_place(faked, model, act):
    counter, begun = faked(act, **({"limit_s": 0.5} if "sleep" in act else {})), []
    made = chooser(lambda asked: begun.append(1) or counter.begin(asked))
    for _ in range(2):
        planned = made.choose(model, OPEN, asked(), ())
        assert (planned.layout, planned.plan, planned.awaits) == (Layout(ulysses=2), None, False)
        with pytest.raises(NotCounted, match=f"^the process that counts {ACTS[act]}"):
            made.counts.of(model, [PROMPT], (1, 16, 8, 10))
    assert len(begun) == 1
    assert counter._work.process is None, "the next count has a fresh process"


def not_started(command):
    raise OSError(12, "Cannot allocate memory")


CANNOT = "could not be asked ([Errno 12] Cannot allocate memory)"


def test_a_process_that_cannot_be_started_is_said_to_be(model):
    setup = SimpleNamespace(argv=("python",), comfyui="", comfy_args={}, start=not_started)
    counter = Counter(setup, cpu)
    lost = counter.begin(b"").exception(DEADLINE_S)
    assert isinstance(lost, CounterLost) and str(lost) == f"the process that counts {CANNOT}"


def test_where_no_rank_computes_on_comfyuis_device_the_cpu_counts(monkeypatch, model):
    monkeypatch.setattr("pipemesh.nodes.local_devices.own_device", lambda: "xpu:0")
    made = Runtime(replace(fake_setup(), start=not_started))
    with pytest.raises(LayoutError):
        made.default_choice()
    with pytest.raises(NotCounted, match=re.escape(CANNOT)):
        made.planning.counts.of(model, [PROMPT], SHAPE)


def test_whatever_goes_wrong_with_one_count_the_next_one_is_counted(faked):
    def no_device():
        raise LookupError("no such thing")

    devices = iter((no_device, cpu))
    counter = faked(REFUSES, device=lambda: next(devices)())
    assert said_by(counter) == "the process that counts could not be asked (no such thing)"
    assert said_by(counter).isdigit()


def open_files() -> set[str]:
    """Each socket and pipe with its inode: a number of a closed one, given anew, is another."""
    found = set()
    for fd in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # the folder's own
            found.add(os.readlink(f"/proc/self/fd/{fd}"))
    return found


def test_a_process_whose_start_fails_leaves_no_socket_and_no_process(monkeypatch):
    started, setup, open_before = [], fake_setup(), open_files()

    def fail(*_):
        raise OSError("no buffer")

    setup = replace(setup, start=lambda command: started.append(process_of_its_own(command)) or started[-1])
    with pytest.raises(AttributeError) as _held:  # with all that its frames hold
        counting_process(setup, None, OF_A_RANK)
    assert not open_files() - open_before
    monkeypatch.setattr(Channel, "send", fail)
    with pytest.raises(OSError, match="no buffer") as _held_too:
        counting_process(setup, cpu(), OF_A_RANK)
    assert len(started) == 1 and not is_alive(started[0].pid)
    assert not open_files() - open_before


def test_one_process_counts_all_and_ends_when_nobody_asks(faked):
    counter = faked(REFUSES)
    pids = {said_by(counter) for _ in range(2)}
    assert len(pids) == 1
    counter.close()
    idle = faked(REFUSES, idle_s=0.0)
    pids |= {said_by(idle) for _ in range(2)}
    for pid in map(int, pids):
        with suppress(ProcessLookupError):
            ended = os.pidfd_open(pid)
            assert select.select([ended], [], [], DEADLINE_S)[0], "it waits for questions"
            os.close(ended)
    assert isinstance(counter.begin(b"").exception(DEADLINE_S), CounterLost)


def test_without_a_fork_server_it_is_a_program_of_its_own_that_sees_no_gpu(faked, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-7")
    program = faked(tells('(os.environ["CUDA_VISIBLE_DEVICES"], os.getppid())'))
    assert said_by(program) == repr(("", os.getpid()))


@pytest.mark.cover(2)
@pytest.mark.parametrize("device", [Device("cpu"), Device("cuda:0", "GPU-0")], ids=["cpu", "gpu"])
def test_it_is_a_fork_of_the_server_that_ranks_on_the_same_devices_are_forked_from(faked, device):
    server = ForkServer(tuple(KEEP_MEMORY), preloaded=())
    setup = replace(fake_setup(), start=server.start)
    pool = WorkerPool(Placement(layout=Layout(), devices=(device,), backend="gloo"), setup)
    try:
        pool.start()
        of_ranks = server.pids
        parent = said_by(faked(tells("os.getppid()"), device=lambda: device, setup=setup))
        assert [str(pid) for pid in of_ranks] == [parent] and server.pids == of_ranks
        assert {psutil.Process(rank).ppid() for rank in pool.ranks.pids} == {*of_ranks}
    finally:
        pool.close()
        server.close()


def test_it_sees_no_gpu_that_ranks_see():
    ours = environment(Device("cuda:0", "GPU-0"))
    assert ours["CUDA_VISIBLE_DEVICES"] == ours["HIP_VISIBLE_DEVICES"] == ""


def test_it_ends_with_the_process_that_started_it():
    """However that ends."""
    ours, theirs = socket.socketpair()
    fd = theirs.fileno()
    parent = (
        f"import os, subprocess, sys, time\nchild = subprocess.Popen([sys.executable, {SCRIPT!r},"
        f" '{fd}', str(os.getpid()), 'counter'], pass_fds=[{fd}])\nprint(child.pid, flush=True)\ntime.sleep(600)\n"
    )
    starts = {"args": [sys.executable, "-c", parent], "pass_fds": [fd], "stdout": subprocess.PIPE}
    with ours, theirs, subprocess.Popen(**starts) as process:
        child = int(process.stdout.readline())
        assert is_alive(child)
        os.kill(process.pid, signal.SIGKILL)
        theirs.close()
        ours.settimeout(DEADLINE_S)
        assert ours.recv(1) == b"", "nobody holds its end any more"


def test_the_counts_of_so_many_kinds_of_evaluations_are_kept_and_no_more():
    kept = Counts(lambda asked: done())
    for number in range(MOST + 2):
        kept._awaited(str(number).encode(), 0.0)
    assert len(kept._begun) == MOST
