"""A fork server that is stopped, killed or gone: its ranks end, the next have another, and nobody
waits for it.
"""

from __future__ import annotations

import os
import re
import select
import signal
import sys
import threading
from contextlib import contextmanager
from dataclasses import replace

import psutil
import pytest
from pipemesh.parallel_runtime.errors import PoolFailed, RunCancelled
from pipemesh.pool import fork_server
from pipemesh.pool.fork_server import ForkServer
from pipemesh.pool.pool import WorkerPool
from pipemesh.pool.supervisor import (
    NEVER_STARTED,
    SERVER_ENDED,
    Command,
    Supervisor,
)

from ..kit.fake_pools import DEADLINE_S, call, cpus, fake_setup, inside, is_alive
from ..kit.holdings import NOTHING, Holdings


@pytest.fixture
def server():
    server = ForkServer(preloaded=())
    yield server
    server.close()


def setup_of(server, *rules):
    return replace(fake_setup(*rules), start=server.start)


def stop(pid) -> None:
    """Returns when the child has stopped: the signal alone returns before."""
    os.kill(pid, signal.SIGSTOP)
    os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOWAIT)


@contextmanager
def stopped(pid):
    """It answers nothing, and lives on."""
    stop(pid)
    yield
    if is_alive(pid):
        os.kill(pid, signal.SIGCONT)


def returns(act) -> bool:
    thread = threading.Thread(target=act, daemon=True)
    thread.start()
    thread.join(DEADLINE_S / 4)
    return not thread.is_alive()


def test_a_pool_ends_although_the_server_of_its_ranks_answers_no_more(server, monkeypatch):
    monkeypatch.setattr(fork_server, "ANSWER_S", 0.5)
    pool = WorkerPool(cpus(2), setup_of(server))
    pool.start()
    pids = pool.ranks.pids
    (old,) = server.pids
    ranks = [psutil.Process(pid) for pid in pids]
    with stopped(old):
        assert returns(pool.close)
    psutil.wait_procs(ranks, DEADLINE_S)  # they die with the server, each when the system comes to it
    assert not any(map(is_alive, [*pids, old]))


def test_a_cancel_is_obeyed_while_a_stopped_server_is_to_fork(server):
    pool = WorkerPool(cpus(1), setup_of(server))
    pool.start()
    with stopped(server.pids[0]):
        other = WorkerPool(cpus(2), setup_of(server, "1:Start=gated"))

        def start():
            with pytest.raises(RunCancelled):
                other.start(lambda: True)

        assert returns(start)
    pool.close()


def test_a_killed_server_is_named_and_memory_is_not_blamed(server, caplog):
    before = set(threading.enumerate())
    pool = WorkerPool(cpus(2), setup_of(server, "*:Load=gated"))
    pool.start()
    keeper = next(
        thread
        for thread in threading.enumerate()
        if thread.name == "pipemesh-fork-server" and thread not in before
    )
    loading = inside(pool, "loading")
    sentence = (
        r"^Rank [01] on cpu ended with the process that workers are forked from \(why is in ComfyUI's log\)"
        r" while loading: run again"
    )
    with pytest.raises(PoolFailed, match=sentence):
        call(pool, "Load", lambda: loading() and bool(os.kill(server.pids[0], signal.SIGKILL)))
    keeper.join(DEADLINE_S)  # it writes the log, and may hear of the end after the pool has
    assert caplog.messages == [
        "[PipeMesh] the process that workers are forked from was killed by signal 9; the next pool has"
        " another"
    ]


@pytest.fixture
def importing(tmp_path):
    """A server that is importing, the command of a rank, and an act that lets the import end."""
    os.mkfifo(gate := tmp_path / "gate")
    (tmp_path / "slow_library.py").write_text(f"open({str(gate)!r}).read()")
    (tmp_path / "rank.py").write_text("import time; time.sleep(600)")
    server = ForkServer(preloaded=("slow_library",))
    command = Command(
        (sys.executable, str(tmp_path / "rank.py")), {**os.environ, "PYTHONPATH": str(tmp_path)}, 0
    )
    first = server.start(command)
    first.kill()
    first.wait()
    yield server, command, lambda: gate.write_text("")
    server.close()


def test_a_rank_that_is_not_forked_yet_can_be_ended_at_once_and_is_never_seen(importing):
    server, command, end_import = importing
    before = Holdings.now()
    supervisor = Supervisor(server.start)
    supervisor.start({0: command})
    supervisor.stop(0)
    assert supervisor.exit_of(0, 0) == -signal.SIGKILL
    forked = server.start(command)
    forked.kill()
    assert select.select([forked.stdout], [], [], DEADLINE_S)[0]  # its supervisor looks up at once
    assert forked.wait() == -signal.SIGKILL
    assert Holdings.now().since(before) == NOTHING
    end_import()
    last = server.start(command)
    assert last.pid
    children = psutil.Process(*server.pids).children()
    psutil.wait_procs([child for child in children if child.pid != last.pid], DEADLINE_S)
    assert [child.pid for child in psutil.Process(*server.pids).children()] == [last.pid]
    last.kill()
    last.wait()


@pytest.mark.parametrize("is_killed", [True, False])
def test_a_server_that_dies_or_imports_for_too_long_is_no_lack_of_memory_and_is_replaced(
    importing, monkeypatch, caplog, is_killed
):
    server, command, _ = importing
    (old,) = server.pids
    supervisor = Supervisor(server.start)
    supervisor.start({0: command})
    monkeypatch.setattr(fork_server, "ANSWER_S", 0.0)
    waiting = server.start(command)
    assert waiting.poll() is None and not caplog.messages, "it imports"
    waiting.kill()
    waiting.wait()
    if is_killed:
        os.kill(old, signal.SIGKILL)
    else:
        monkeypatch.setattr(fork_server, "IMPORT_S", 0.0)
    assert supervisor.exit_of(0, DEADLINE_S) == NEVER_STARTED
    assert supervisor.pids == {0: 0}
    supervisor.stop(0)
    server.start(command).kill()
    assert server.pids != [old]


def test_a_server_that_imports_for_ever_is_replaced_though_no_rank_waited_for_it_so_long(
    importing, monkeypatch
):
    """The ranks that waited were ended before, by Stop."""
    server, command, _ = importing
    (old,) = server.pids
    server.start(command).kill()
    assert server.pids == [old]
    monkeypatch.setattr(fork_server, "IMPORT_S", 0.0)
    server.start(command).kill()
    assert server.pids != [old]


HANGS = """
import os
os.register_at_fork(before=lambda: os.path.exists({gate!r}) and open({gate!r}).read())
"""


def test_a_server_that_forks_no_more_is_ended_and_the_next_ranks_have_another(tmp_path, monkeypatch):
    """As where a library's handler hangs at the next fork."""
    gate = tmp_path / "gate"
    (tmp_path / "hanging_library.py").write_text(HANGS.format(gate=str(gate)))
    (tmp_path / "rank.py").write_text("import time; time.sleep(600)")
    command = Command(
        (sys.executable, str(tmp_path / "rank.py")), {**os.environ, "PYTHONPATH": str(tmp_path)}, 0
    )
    server = ForkServer(preloaded=("hanging_library",))
    first = server.start(command)
    assert first.pid
    os.mkfifo(gate)
    monkeypatch.setattr(fork_server, "ANSWER_S", 0.5)
    assert server.start(command).wait() == NEVER_STARTED
    assert first.wait() == SERVER_ENDED
    os.kill(first.pid, signal.SIGKILL)  # it has not asked to end with its server
    gate.unlink()
    last = server.start(command)
    assert last.pid
    last.kill()
    assert last.wait() == -signal.SIGKILL
    server.close()


def test_a_restart_at_once_after_the_server_was_killed_works_or_names_a_rank(server):
    for _ in range(8):
        pool = WorkerPool(cpus(2), setup_of(server))
        try:
            pool.start()
        except PoolFailed as error:
            assert re.match(r"Rank [01] on cpu could not be forked \(why is in ComfyUI's log", str(error))
        for pid in server.pids:
            os.kill(pid, signal.SIGKILL)
        pool.close()
