"""A pool over three machines, which are network namespaces here: leaders started by torchrun,
ComfyUI's sampling in one of them.
"""

import os
import re
import select
import signal
import subprocess
import sys
import time
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path

import comfy.utils
import pytest
from comfy.model_management import InterruptProcessingException, interrupt_current_processing
from pipemesh.lab.commands.every_layout import (
    ALL_WARM,
    BLOCKS,
    HEADS,
    PATCHES,
    Asked,
    asked,
    stock_model,
)
from pipemesh.lab.commands.parity import BOUND, Bench, Case, conditioning, relative_error
from pipemesh.lab.in_process import reference
from pipemesh.parallel_runtime.client.remote_patcher import Patching, parallelize
from pipemesh.parallel_runtime.client.remote_pool import RemotePool
from pipemesh.parallel_runtime.errors import PoolFailed, Refused
from pipemesh.parallel_runtime.families.catalogue import PLAIN
from pipemesh.parallel_runtime.layout import Layout
from pipemesh.parallel_runtime.wire.messages import Forward, SetWeightPatches
from pipemesh.pool.devices import place
from pipemesh.pool.handle import PoolHandle
from pipemesh.pool.pool import WorkerPool
from pipemesh.pool.rank_setup import start_as
from pipemesh.pool.remote_machine import RemoteMachine
from pipemesh.pool.rendezvous import NODE_COMMAND, find, open_store, store_key

from ..fixtures import ALL
from ..kit.at_once import Once, in_forward
from ..kit.fake_pools import DEADLINE_S, SECRET
from ..kit.models import load, run, with_lora, write_lora, write_model
from ..kit.namespaces import Machines, ip, machines_here
from ..kit.served import AT_HAND

ROOT = Path(__file__).resolve().parents[2]
PORT = 29400  # of the rendezvous
LOST_S = 3.0  # and three beats: a machine that starts ranks beside other tests says nothing for 4 s
SENT = Case(PLAIN, "ulysses2", "odd", 5, 1.0, False, "euler")  # a MODEL without a file: its weights are sent


@pytest.fixture(scope="module")
def machines():
    with machines_here("near", "far", "third") as made:
        yield made


def rendezvous(machines: Machines) -> str:
    return f"{machines.addresses[machines.near]}:{PORT}"


def torchrun(machines: Machines, name: str, log: Path) -> subprocess.Popen:
    """The command that errors name and docs/MULTI_NODE.md explains, on one of the machines. This
    computer's name means no address, so the one that has the rendezvous is told that it is.
    """
    command = NODE_COMMAND.format(nodes=len(machines.names), rendezvous=rendezvous(machines))
    is_host = f"read_timeout=600,is_host={int(name == machines.near)}"
    variable, _torchrun, *options = command.replace("read_timeout=600", is_host).split()
    own = {"PIPEMESH_RDZV": rendezvous(machines), "PIPEMESH_SECRET": SECRET, "PIPEMESH_LOST_S": str(LOST_S)}
    env = {**os.environ, **dict([variable.split("=")]), **own, "PYTHONPATH": AT_HAND}
    there = ["ip", "netns", "exec", machines.of(name), sys.executable, "-m", "torch.distributed.run"]
    with log.open("w") as output:
        return subprocess.Popen(
            [*there, *options, "--name", name], cwd=ROOT, env=env, stdout=output, stderr=output
        )


@contextmanager
def torchrun_on_all(machines: Machines, folder: Path):
    started = [torchrun(machines, name, folder / name) for name in machines.names]
    yield
    for process in started:
        process.send_signal(signal.SIGTERM)
    for process in started:
        process.wait(DEADLINE_S)
    print(*((folder / name).read_text() for name in machines.names), sep="\n")


@pytest.fixture(scope="module")
def leaders(machines, tmp_path_factory):
    with torchrun_on_all(machines, tmp_path_factory.mktemp("leaders")):
        yield
        machines.cable("far", "up")  # torchrun tells its rendezvous that it leaves


@pytest.fixture(scope="module")
def truths(leaders, files):
    """What stock ComfyUI makes, computed while torchrun starts."""
    stock = load(files["model"])
    return run(stock, cfg=2.0), run(with_lora(stock, files, 0.7))


@pytest.fixture(scope="module")
def near_setup(setup, machines, leaders):
    """With a process of its own that ranks are forked from, on that machine."""
    with machines.forking(machines.near, setup.start) as start:
        yield replace(setup, rendezvous=rendezvous(machines), secret=SECRET, lost_s=LOST_S, start=start)


@pytest.fixture
def near_handle(near_setup, machines):
    """Layout, devices -> ComfyUI's end of a pool, on the near machine: what is called here runs in
    its namespace.
    """
    with ExitStack() as made, machines.inside(machines.near):

        def of(layout: Layout, devices: str) -> PoolHandle:
            handle = PoolHandle(place(layout, devices, "gloo", ()), near_setup)
            made.callback(handle.close)
            return handle

        yield of
        made.close()


def joined(machines: Machines):
    """The rendezvous, once the leaders have joined."""
    store = open_store(machines.addresses[machines.near].strip("[]"), PORT, DEADLINE_S)
    store.wait([store_key(name) for name in machines.names], timedelta(seconds=DEADLINE_S))
    return store


def pool_of(handle: PoolHandle, machines: Machines) -> WorkerPool:
    joined(machines)
    return handle.ensure()


def cancelled(model, happens, **how) -> None:
    cancelling = Once(happens, interrupt_current_processing)
    with pytest.raises(InterruptProcessingException):
        run(model, size=(128, 128), steps=20, **how)
    cancelling.join()


def test_two_machines_sample_as_one_and_when_one_is_cut_off_it_is_named_and_the_next_run_is_right(
    machines, files, truths, near_handle
):
    plain, patched = truths
    handle = near_handle(Layout(ulysses=2), "cpu,far/cpu")
    first = pool_of(handle, machines)
    client = RemotePool(handle)
    model = parallelize(load(files["model"]), client, holds_ui_device=False)
    assert relative_error(run(model, cfg=2.0), plain) <= BOUND
    assert relative_error(run(with_lora(model, files, 0.7)), patched) <= BOUND
    assert Bench(lambda *layout: client).error(SENT) <= BOUND

    said = listened_to(first.ranks._machines[0])
    cancelled(model, lambda: in_forward(first))
    assert handle.live() is first and first.idle
    # Of the evaluation, and of the run's end
    assert [(rank, answer.cancelled) for rank, answer in said[-2:]] == [(1, True), (1, False)]

    far_ranks = [os.pidfd_open(pid) for pid in machines.ranks("far")]
    assert len(far_ranks) == 1
    cutting = Once(lambda: in_forward(first), lambda: machines.cable("far", "down"))
    why = "Connection timed out|No route to host"
    lost = rf"^Machine far was lost while computing \(rank 1 on far/cpu; ({why})\): check that it is up"
    with pytest.raises(PoolFailed, match=lost):
        run(model, size=(128, 128), steps=20)
    cutting.join()
    assert time.monotonic() - cutting.acted_at < 6 * LOST_S
    address = re.escape(machines.addresses["far"])
    with pytest.raises(PoolFailed, match=rf"^Machine far does not answer at {address}:\d+ "):
        run(model)
    for rank in far_ranks:  # on a machine that nobody can tell
        assert select.select([rank], [], [], DEADLINE_S)[0]
        os.close(rank)

    machines.cable("far", "up")
    assert relative_error(run(model, cfg=2.0), plain) <= BOUND
    assert handle.live() is not first


def listened_to(machine: RemoteMachine) -> list:
    """What its ranks say from now on."""
    said, pump = [], machine.pump

    def heard():
        said.extend(new := pump())
        return new

    machine.pump = heard
    return said


# -- every axis between machines

BESIDE = "cpu,cpu,far/cpu,far/cpu"
EVERY = {  # devices -> the layouts there; a machine may have no rank, also ComfyUI's
    "far/cpu,third/cpu": (Layout(cfg=2), Layout(data=2), Layout(pipefusion=2), Layout(ring=2)),
    "far/cpu,far/cpu": (Layout(ulysses=2), Layout(cfg=2)),
    "cpu,far/cpu": (Layout(cfg=2), Layout(data=2), Layout(pipefusion=2)),
    "third/cpu,cpu": (Layout(ulysses=2), Layout(pipefusion=2)),
    BESIDE: (
        Layout(ulysses=2, cfg=2),
        Layout(ulysses=2, data=2),
        Layout(ulysses=2, pipefusion=2),
        Layout(pipefusion=2, cfg=2),
    ),
    "cpu,far/cpu,third/cpu": (Layout(cfg=3), Layout(pipefusion=3), Layout(ulysses=3)),
    "cpu,far/cpu,third/cpu,third/cpu": (Layout(pipefusion=2, cfg=2), Layout(ulysses=2, cfg=2)),
}
UNEQUAL = Asked(4.0, (13, 7), 3)  # of both prompts, and with several images
CASES = [(devices, layout) for devices, layouts in EVERY.items() for layout in layouts]
FEW = [("cpu,far/cpu,third/cpu,third/cpu", Layout(pipefusion=2, cfg=2)), ("far/cpu,third/cpu", Layout(cfg=2))]


@pytest.fixture(scope="module")
def stock():
    return stock_model()


@pytest.mark.parametrize(("devices", "layout"), CASES if ALL else FEW, ids=str)
def test_every_layout_over_machines_samples_as_stock_does_and_leaves_early(
    machines, near_handle, stock, devices, layout
):
    handle = near_handle(layout, devices)
    pool = pool_of(handle, machines)
    client, stages = RemotePool(handle), layout.stages > 1
    for one in asked() if ALL else [UNEQUAL]:
        model = parallelize(
            stock, client, 0.0, Patching(PATCHES, ALL_WARM) if stages else None, can_join=False
        )
        apart = one.cfg == 1.0 or one.texts[0] != one.texts[1]  # stock computes equal prompts together
        to_the_bit = ALL and stages and apart and layout.sequence_size == layout.data == 1
        assert relative_error(one(model), one(stock)) <= (0.0 if to_the_bit else BOUND)
        if stages:
            stale = parallelize(stock, client, 0.0, Patching(PATCHES, 1))
            assert relative_error(one(stale), one(reference(stock_model(), PATCHES, 1))) <= BOUND

    far = pool.ranks._machines
    said = [listened_to(machine) for machine in far]
    ranks = [rank for one in far for rank in one.ranks]
    cancelled(model, lambda: any(pool.arena.board.phase(rank) == "computing" for rank in ranks), cfg=2.0)
    assert handle.live() is pool
    pool.settle()
    assert any(getattr(answer, "cancelled", False) for one in said for _rank, answer in one)
    assert relative_error(UNEQUAL(model), UNEQUAL(stock)) <= BOUND


@pytest.fixture(scope="module")
def two_models(tmp_path_factory):
    """Files of equal size whose models every layout computes, and a LoRA of the first."""
    folder = tmp_path_factory.mktemp("two")
    model, other = (
        str(write_model(folder / f"{seed}.safetensors", heads=HEADS, blocks=BLOCKS, seed=seed))
        for seed in (1, 2)
    )
    return {"model": model, "other": other, "lora": str(write_lora(folder / "lora.safetensors", model))}


TURNS = (0.7, None, -0.4, 0.0, None, 0.7)  # strengths of the LoRA; None: the other model


@pytest.mark.parametrize(
    ("devices", "layout"), CASES if ALL else [("far/cpu,far/cpu", Layout(cfg=2))], ids=str
)
def test_models_and_loras_take_turns_in_sight_and_each_lora_goes_once_to_a_machine(
    machines, near_handle, two_models, devices, layout
):
    """Both prompts, and several images for groups of them; previews are of every step."""
    handle = near_handle(layout, devices)
    far = pool_of(handle, machines).ranks._machines
    client, patching = RemotePool(handle), Patching(PATCHES, ALL_WARM)
    names = "model", "other"
    stock = [load(two_models[name]) for name in names]
    ours = [
        parallelize(one, client, 0.0, patching if layout.stages > 1 else None, can_join=False)
        for one in (load(two_models[name]) for name in names)
    ]
    if "far" in devices:
        differs = r"^The checkpoint (\S+) on machine \S+ differs from \1 of ComfyUI's"
        other = has_instead(machines, "far", *(two_models[name] for name in names))
        with other, pytest.raises(Refused, match=differs):
            run(ours[0])
        assert client.sessions.live.loads == 0
    sent = [bytes_sent(machine, SetWeightPatches) for machine in far]
    for strength in TURNS:
        truths, came = (
            watched(turn(strength, *models, two_models), cfg=4.0, batch=layout.data)
            for models in (stock, ours)
        )
        assert len(truths) == len(came)
        assert all(map(is_close, came, truths)), strength
    lora = comfy.utils.load_torch_file(two_models["lora"])
    due = sum(tensor.nbytes for name, tensor in lora.items() if not name.endswith(".alpha"))
    for one in sent:
        assert [nbytes >= due for nbytes in one] == [True, True, False, True]
        assert sum(one) <= 1.05 * 3 * due, (one, due)


def turn(strength, first, second, files):
    if strength is None:
        return second
    return with_lora(first, files, strength) if strength else first


def watched(model, **how) -> list:
    """Every preview of a sampling, and what it makes."""
    seen = []
    made = run(model, callback=lambda _step, x0, *_: seen.append(x0.clone()), **how)
    return [*seen, made]


def is_close(one, truth) -> bool:
    return relative_error(one, truth) <= BOUND


@contextmanager
def has_instead(machines: Machines, name: str, path: str, other: str):
    """A machine has another file at a path."""
    enter = ("nsenter", f"--mount=/proc/{machines.pids(name)[0]}/ns/mnt")
    subprocess.run([*enter, "mount", "--bind", other, path], check=True)
    try:
        yield
    finally:
        subprocess.run([*enter, "umount", path], check=True)


def bytes_sent(machine: RemoteMachine, kind: type) -> list[int]:
    """Beside each request of this kind that goes to a machine from now on."""
    sent, send = [], machine.link.send

    def counting(message, fds=(), before_piece=lambda: None, ranges=()):
        if isinstance(getattr(message, "request", None), kind):
            sent.append(sum(os.fstat(fd).st_size for fd in fds) + sum(nbytes for *_, nbytes in ranges))
        send(message, fds, before_piece, ranges)

    machine.link.send = counting
    return sent


def test_a_group_on_another_machine_is_sent_its_prompt_once_and_its_latent_each_time(
    machines, near_handle, stock
):
    handle = near_handle(Layout(cfg=2), "cpu,far/cpu")
    (far,) = pool_of(handle, machines).ranks._machines
    sent = bytes_sent(far, Forward)
    texts = {"positive": conditioning(1, 512), "negative": conditioning(2, 512)}
    of = partial(run, steps=3, size=(32, 32), cfg=4.0, **texts)
    assert relative_error(of(parallelize(stock, RemotePool(handle), 0.0)), of(stock)) <= BOUND
    ((text, extras),) = texts["negative"]
    due = 3 * 4 * 16 * 32 * 32 + text.nbytes + extras["pooled_output"].nbytes
    assert due <= sum(sent) <= 1.02 * due


# -- over IPv6


@pytest.mark.skipif(not ALL, reason="starts torchrun twice; what is of IPv6 alone is in test_rendezvous.py")
def test_two_machines_with_ipv6_addresses_alone_between_them_sample_as_one(files, setup, tmp_path):
    with machines_here("near", "far") as pair:
        for number, name in enumerate(pair.names, 1):
            ip("-4", "-n", pair.of(name), "addr", "flush", "dev", "net0")
            ip("-n", pair.of(name), "addr", "add", f"fd00::{number}/64", "dev", "net0", "nodad")
            pair.addresses[name] = f"[fd00::{number}]"
        there = {"rendezvous": rendezvous(pair), "secret": SECRET, "lost_s": LOST_S, "start": start_as({})}
        handle = PoolHandle(place(Layout(ulysses=2), "cpu,far/cpu", "gloo", ()), replace(setup, **there))
        with torchrun_on_all(pair, tmp_path), closing(handle), pair.inside("near"):
            assert find(joined(pair), "far").startswith("[fd00::2]:")
            model = parallelize(load(files["model"]), RemotePool(handle), holds_ui_device=False)
            assert relative_error(run(model), run(load(files["model"]))) <= BOUND
