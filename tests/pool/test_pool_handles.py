"""Handles on pools and their keeper, asked by several threads at once, and as ComfyUI ends."""

import threading
from types import SimpleNamespace

import pytest
from pipemesh.parallel_runtime.errors import RunCancelled
from pipemesh.pool import handle as handles
from pipemesh.pool.devices import Placement
from pipemesh.pool.handle import PoolHandle, PoolKeeper

from ..kit.fake_pools import DEADLINE_S, call, cpus, fake_setup, inside, is_alive


class Threads:
    """Calls on threads of their own; ``ended`` has what each raised, or None."""

    def __init__(self):
        self.ended = []
        self._made = []

    def __call__(self, act):
        def run():
            try:
                act()
            except Exception as error:  # noqa: BLE001 - a test looks at it
                self.ended.append(error)
            else:
                self.ended.append(None)

        self._made.append(threading.Thread(target=run, daemon=True))
        self._made[-1].start()

    def join(self):
        for thread in self._made:
            thread.join(DEADLINE_S)
            assert not thread.is_alive()


@pytest.fixture
def threads():
    return Threads()


class SlowPool:
    """A pool without ranks that is up once ``go`` is set. ``said``: what became of all of them."""

    ranks = SimpleNamespace(kill=lambda: None)
    fault = ""

    def __init__(self, placement: Placement, setup):
        self.name, self.said, self.go, self.has_begun = (
            placement.layout.equation(),
            setup.said,
            setup.go,
            setup.has_begun,
        )
        self.state = "starting"

    @property
    def is_whole(self):
        return self.state == "ready"

    def start(self, interrupted):
        self.said.append(f"{self.name} starts")
        self.has_begun.set()
        assert self.go.wait(DEADLINE_S)
        self.state = "ready"
        self.said.append(f"{self.name} is up")

    def close(self):
        self.state = "closed"
        self.said.append(f"{self.name} is closed")


@pytest.fixture
def slow(monkeypatch):
    monkeypatch.setattr(handles, "WorkerPool", SlowPool)
    return SimpleNamespace(said=[], go=threading.Event(), has_begun=threading.Event())


def test_of_two_pools_that_need_one_device_the_second_starts_when_the_first_has_made_room(slow, threads):
    keeper = PoolKeeper(slow)
    threads(keeper.handle(cpus(1)).ensure)
    assert slow.has_begun.wait(DEADLINE_S)
    slow.has_begun.clear()
    waits = slow.has_begun  # set by whoever waits for a turn, and by a second start that does not wait

    def is_asked():
        waits.set()
        return False

    threads(lambda: keeper.handle(cpus(2)).ensure(is_asked))
    assert waits.wait(DEADLINE_S)
    slow.go.set()
    threads.join()
    one, two = "ulysses 1 = 1 rank", "ulysses 2 = 2 ranks"
    assert threads.ended == [None, None]
    assert slow.said == [f"{one} starts", f"{one} is up", f"{one} is closed", f"{two} starts", f"{two} is up"]


def test_who_waits_for_another_threads_start_can_be_cancelled(slow, threads):
    keeper = PoolKeeper(slow)
    threads(keeper.handle(cpus(1)).ensure)
    assert slow.has_begun.wait(DEADLINE_S)
    for ranks in (1, 2):
        with pytest.raises(RunCancelled):
            keeper.handle(cpus(ranks)).ensure(lambda: True)
    slow.go.set()
    threads.join()
    assert keeper.handle(cpus(1)).ensure().state == "ready"


def test_handles_may_be_asked_for_while_another_pool_makes_room(slow):
    slow.go.set()
    keeper = PoolKeeper(slow, lambda old, new: keeper.handle(cpus(3)))
    for ranks in (1, 2):
        keeper.handle(cpus(ranks)).ensure()
    assert [handle.state for handle in keeper.handles()] == ["closed", "ready", "closed"]


def test_all_threads_get_the_same_handle(monkeypatch, slow):
    """The second asks at the moment when the first makes one."""
    keeper, others = PoolKeeper(slow), []
    real = handles.PoolHandle

    def asked_for_meanwhile(*args):
        monkeypatch.setattr(handles, "PoolHandle", real)
        others.append(keeper.handle(cpus(1)))
        return real(*args)

    monkeypatch.setattr(handles, "PoolHandle", asked_for_meanwhile)
    assert [keeper.handle(cpus(1))] == others == keeper.handles()


@pytest.mark.parametrize("reads", range(4))
@pytest.mark.parametrize("ask", ["state", "holds_devices", "fault", "live"])
def test_a_pool_that_another_thread_closes_meanwhile_is_no_error(slow, ask, reads):
    class Leaving(PoolHandle):
        """After so many looks there is no pool any more."""

        looks = 0

        @property
        def _pool(self):
            self.looks += 1
            return there if self.looks <= reads else None

        @_pool.setter
        def _pool(self, pool):
            assert pool is None

    there = SlowPool(cpus(1), slow)
    found = getattr(Leaving(cpus(1), slow), ask)
    assert (found() if callable(found) else found) in ("starting", "closed", False, "", None)


# -- the end of ComfyUI


def killed(keeper: PoolKeeper) -> None:
    """As at the end of the process, by the function that is called then."""
    handles.kill_all(keeper._handles, keeper._starts)


@pytest.mark.parametrize(
    ("kind", "rule", "phase"), [("Forward", "hang", "computing"), ("Load", "gated", "loading")]
)
def test_at_the_end_of_comfyui_ranks_are_ended_first_and_who_waits_for_them_is_cancelled(
    threads, kind, rule, phase
):
    keeper = PoolKeeper(fake_setup(f"*:{kind}={rule}"))
    pool = keeper.handle(cpus(2)).ensure()
    pids, at_work = pool.ranks.pids, threading.Event()
    busy = inside(pool, phase)
    threads(lambda: call(pool, kind, lambda: bool(busy() and at_work.set())))
    assert at_work.wait(DEADLINE_S)
    killed(keeper)
    threads.join()
    (error,) = threads.ended
    assert isinstance(error, RunCancelled), (
        "no failure: auto mode would start another pool, and ComfyUI would show a traceback"
    )
    assert not any(map(is_alive, pids)) and pool.state == "closed"
    with pytest.raises(RunCancelled, match=r"^ComfyUI ends\.$"):
        keeper.handle(cpus(1)).ensure()


def test_a_pool_that_is_starting_ends_with_comfyui_too(threads):
    keeper = PoolKeeper(fake_setup("1:Start=gated"))
    handle, at_work = keeper.handle(cpus(2)), threading.Event()

    def asked():
        pool = handle._pool
        if pool is not None and pool.arena.board.phase(1) == "importing":
            at_work.set()
        return False

    threads(lambda: handle.ensure(asked))
    assert at_work.wait(DEADLINE_S)
    killed(keeper)
    threads.join()
    assert [type(error) for error in threads.ended] == [RunCancelled]
