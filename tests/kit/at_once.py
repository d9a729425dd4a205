"""Calls that run at once, on threads that give way to each other as often as Python lets them, and
acts that wait for their moment.
"""

import sys
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor, wait

import psutil

DEADLINE_S = 60.0  # only ever reached by a test that fails


def at_once(*calls):
    """What they return; the first error of one is raised."""
    together, before = threading.Barrier(len(calls)), sys.getswitchinterval()

    def run(call):
        together.wait()
        return call()

    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(len(calls)) as threads:
            return [one.result() for one in [threads.submit(run, call) for call in calls]]
    finally:
        sys.setswitchinterval(before)


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


def returns(act, within_s=15.0):
    """Whether it ends by itself, and that before a limit of the product's ends it. Raises what it
    raised.
    """
    ended = Future()

    def run():
        try:
            ended.set_result(act())
        except BaseException as error:  # noqa: BLE001 - pytest's own among them
            ended.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    if not wait([ended], within_s).done:
        return False
    ended.result()
    return True


class Once(threading.Thread):
    """Acts the moment ``happens()``: what a test does to a rank while its own thread waits for that
    rank.
    """

    def __init__(self, happens, act):
        super().__init__(daemon=True)
        self._happens, self._act = happens, act
        self.acted = False
        self.start()

    def run(self):
        deadline = time.monotonic() + DEADLINE_S
        while time.monotonic() < deadline:
            if self._happens():
                self._act()
                self.acted, self.acted_at = True, time.monotonic()
                return
            time.sleep(0.0005)  # shared memory has no event to wait for


def in_forward(pool, rank=0, ticks=6):
    """Whether a rank is some blocks deep: every request starts the counter at a multiple of
    2^32.
    """
    board = pool.arena.board
    return board.phase(rank) == "computing" and board.progress(rank) % (1 << 32) >= ticks


def kill(pool, rank):
    psutil.Process(pool.ranks.pids[rank]).kill()
