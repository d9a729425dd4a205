"""A pool over two machines with IPv6 addresses alone between them."""

import signal
from dataclasses import replace
from datetime import timedelta

import pytest
from pipemesh.lab.commands.parity import BOUND, relative_error
from pipemesh.parallel_runtime.client.remote_patcher import parallelize
from pipemesh.parallel_runtime.client.remote_pool import RemotePool
from pipemesh.parallel_runtime.layout import Layout
from pipemesh.pool.devices import place
from pipemesh.pool.handle import PoolHandle
from pipemesh.pool.rank_setup import start_as
from pipemesh.pool.rendezvous import find, open_store, store_key

from ..fixtures import ALL
from ..kit.models import load, run
from ..kit.namespaces import Machines, NoNamespaces, ip
from .test_machines import DEADLINE_S, LOST_S, PORT, SECRET, rendezvous, torchrun

NAMES = ("near", "far")


@pytest.fixture
def machines():
    try:
        made = Machines(*NAMES)
    except NoNamespaces as reason:
        pytest.skip(f"no network namespaces here: {reason}")
    try:
        for number, name in enumerate(NAMES, 1):
            ip("-4", "-n", made.of(name), "addr", "flush", "dev", "net0")
            ip("-n", made.of(name), "addr", "add", f"fd00::{number}/64", "dev", "net0", "nodad")
            made.addresses[name] = f"[fd00::{number}]"
        yield made
    finally:
        made.close()


@pytest.mark.skipif(not ALL, reason="starts torchrun twice; what is of IPv6 alone is in test_rendezvous.py")
def test_two_machines_that_meet_at_an_ipv6_address_sample_as_one(machines, files, setup, tmp_path):
    started = [torchrun(machines, name, tmp_path / name) for name in NAMES]
    setup = replace(setup, rendezvous=rendezvous(machines), secret=SECRET, lost_s=LOST_S, start=start_as({}))
    handle = PoolHandle(place(Layout(ulysses=2), "cpu,far/cpu", "gloo", ()), setup)
    try:
        with machines.inside("near"):
            store = open_store("fd00::1", PORT, DEADLINE_S)
            store.wait([store_key(name) for name in NAMES], timedelta(seconds=DEADLINE_S))
            assert find(store, "far").startswith("[fd00::2]:")
            pool = RemotePool(handle)
            model = parallelize(load(files["model"]), pool, holds_ui_device=False)
            assert relative_error(run(model), run(load(files["model"]))) <= BOUND
    finally:
        handle.close()
        for process in started:
            process.send_signal(signal.SIGTERM)
        for process in started:
            process.wait(DEADLINE_S)
        print(*((tmp_path / name).read_text() for name in NAMES), sep="\n")
