"""A rank that dies while nobody runs anything, and a load that is cancelled: neither may cost the
user a run.
"""

import psutil
import pytest
from pipemesh.lab.commands.parity import BOUND, Bench, Case
from pipemesh.launcher.pool.devices import place
from pipemesh.launcher.pool.handle import PoolHandle
from pipemesh.parallel_runtime.client.remote_pool import RemotePool
from pipemesh.parallel_runtime.families.every import PLAIN
from pipemesh.parallel_runtime.layout import Layout

CASE = Case(PLAIN, "ulysses2", "odd", 5, 1.0, False, "euler")


@pytest.fixture(scope="module")
def client(setup):
    """One pool for all of these: each leaves it fit for the next."""
    handle = PoolHandle(place(Layout(ulysses=2), "cpu", "gloo", ()), setup)
    yield RemotePool(handle, shares_weights=True)
    handle.close()


def kill_an_idle_rank(client):
    pool = client.session.pool
    psutil.Process(pool.ranks.pids[1]).kill()
    assert pool.ranks._crew.supervisor.exit_of(1, wait_s=20) == -9


def test_the_run_after_an_idle_rank_died_is_right_at_once_and_unloading_models_raises_nothing(client):
    import comfy.model_management as mm

    bench = Bench(lambda *layout: client)
    assert bench.error(CASE) <= BOUND
    kill_an_idle_rank(client)
    assert bench.error(CASE) <= BOUND
    kill_an_idle_rank(client)
    mm.unload_all_models()
    assert bench.error(CASE) <= BOUND
