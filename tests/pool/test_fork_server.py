"""Ranks that are forks: what a process of its own would do, from a process that has imported once.
If that process is stopped, killed or gone, its ranks end, the next have another, and nobody waits.
"""

from __future__ import annotations

import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from pipemesh.parallel_runtime.errors import PoolFailed, RunCancelled
from pipemesh.pool import fork_server
from pipemesh.pool.fork_server import PRELOADED, ForkServer
from pipemesh.pool.fork_server_main import holds_a_gpu, open_files
from pipemesh.pool.handle import PoolHandle
from pipemesh.pool.pool import WorkerPool
from pipemesh.pool.supervisor import NEVER_STARTED, SERVER_ENDED, Command, Supervisor

from ..kit.at_once import returns
from ..kit.fake_pools import DEADLINE_S, call, cpus, fake_setup, inside, is_alive
from ..kit.holdings import NOTHING, Holdings

SCRIPTS = Path(__file__).resolve().parents[2] / "pool"


@pytest.fixture(scope="module")
def server():
    server = ForkServer(("FIXED",), preloaded=("decimal", "no_such_module"))
    yield server
    server.close()


SLEEPS = "import time; time.sleep(600)"


def rank_of(file: Path, script: str, *arguments: str, fd: int = 0, env: dict | None = None) -> Command:
    """The command of a rank that runs this script, which is written into a file."""
    file.write_text(script)
    return Command((sys.executable, str(file), *arguments), dict(os.environ) if env is None else env, fd)


@pytest.fixture
def run(server, tmp_path):
    """A script and its environment -> the supervisor of the one rank that runs it."""
    made = []

    def run(script: str, *arguments: str, **how) -> Supervisor:
        command = rank_of(tmp_path / f"{len(made)}.py", script, *arguments, **how)
        made.append(Supervisor(server.start))
        made[-1].start({0: command})
        return made[-1]

    yield run
    for supervisor in made:
        supervisor.stop(0)


def said(rank: Supervisor) -> list[str]:
    """The last lines of one that ends well."""
    assert rank.exit_of(0, DEADLINE_S) == 0
    return rank.tail(0)


@pytest.mark.parametrize(
    ("script", "status", "lines"),
    [
        ("print('fine')", 0, ["fine"]),
        ("import os; os.write(1, b'left'); os._exit(7)", 7, ["left"]),
        ("import os, signal; print('said', flush=True); os.kill(os.getpid(), signal.SIGBUS)", -7, ["said"]),
        ("def f():\n    raise ValueError('bad')\nf()", 1, ["    raise ValueError('bad')", "ValueError: bad"]),
        ("import sys; print('err', file=sys.stderr)", 0, ["err"]),
        ("raise SystemExit", 0, []),
        ("import sys; sys.exit(3)", 3, []),
        ("import sys; sys.exit('why')", 1, ["why"]),
    ],
)
def test_how_a_rank_ended_and_what_it_said_last_is_known(run, script, status, lines):
    supervisor = run(script)
    assert supervisor.exit_of(0, DEADLINE_S) == status
    assert supervisor.tail(0)[-max(1, len(lines)) :] == lines


def test_a_rank_is_a_fork_of_a_process_that_has_imported_once(server, run):
    tells = "import json, os, sys; print(json.dumps(['decimal' in sys.modules, os.getppid(), os.getpid(), sys.argv]))"
    supervisor = run(tells, "{parent}", "{me}")
    imported, parent, pid, argv = json.loads(said(supervisor)[0])
    assert imported and [parent] == server.pids and {0: pid} == supervisor.pids
    assert argv[1:] == [str(parent), "{me}"]


@pytest.mark.parametrize(
    "fixed", [{}, {"FIXED": "env"}], ids=["of a server that stands", "of a server made for it"]
)
def test_a_rank_has_its_own_environment_and_nothing_of_the_servers(server, run, monkeypatch, fixed):
    monkeypatch.setenv("OF_THE_UI", "1")
    said(run(""))
    env = {"PATH": "/bin", "LC_ALL": "C.UTF-8", "CUDA_VISIBLE_DEVICES": "GPU-3", **fixed}
    (seen,) = said(run("import json, os; print(json.dumps(dict(os.environ)))", env=env))
    assert json.loads(seen) == env
    # It would see that GPU, and no other
    assert "CUDA_VISIBLE_DEVICES" not in psutil.Process(server.pids[-1]).environ()


LISTING = """
import json, os, sys
held = {fd: f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")}
print(json.dumps({fd: os.readlink(path) for fd, path in held.items() if os.path.exists(path) or os.path.islink(path)}))
print(sys.argv[1])
"""


def test_a_rank_holds_its_channel_and_no_other_descriptor_of_the_server(run):
    waiting = run(SLEEPS)  # its report is open in the server meanwhile
    assert waiting.pids[0]
    with open(os.devnull) as file:
        held, channel = map(json.loads, said(run(LISTING, "{fd}", fd=file.fileno())))
    assert {int(fd) for fd, target in held.items() if target == os.devnull} == {0, channel}
    assert {int(fd) for fd, target in held.items() if target.startswith(("socket:", "pipe:"))} == {1, 2}


def test_ranks_that_differ_in_what_is_fixed_at_start_come_from_different_servers(server, run):
    """And one that has no ranks any more is ended then."""
    waiting = run(SLEEPS)
    assert waiting.pids[0]
    before = server.pids
    for own, servers in (({"OTHER": "1"}, 1), ({"FIXED": "1"}, 2)):
        said(run("", env={**os.environ, **own}))
        assert len(server.pids) == servers and server.pids[:1] == before
    waiting.stop(0)
    said(run("", env={**os.environ, "FIXED": "2"}))
    assert len(server.pids) == 1
    assert not any(map(is_alive, before))


def has_imported_fractions(folder: Path, library: str) -> bool:
    """Whether a rank of a server that also imports ``library``, which lies in ``folder``, is a fork
    of a process that has.
    """
    server = ForkServer(preloaded=(library, "fractions"))
    supervisor = Supervisor(server.start)
    env = {**os.environ, "PYTHONPATH": str(folder)}
    tells = "import sys; print('fractions' in sys.modules)"
    supervisor.start({0: rank_of(folder / "script.py", tells, env=env)})
    (is_there,) = said(supervisor)
    server.close()
    return is_there == "True"


@pytest.mark.parametrize(
    ("library", "is_forked"),
    [
        ("raise RuntimeError('no operator')", False),
        ("raise OSError('libfoo.so: cannot open')", False),
        ("import no_such", False),
        ("", True),
    ],
    ids=["it fails", "the system's part fails", "it needs another", "not installed at all"],
)
def test_a_library_that_cannot_be_imported_stops_no_rank(tmp_path, library, is_forked):
    """A rank that needs it says so itself, and one without it works."""
    if library:
        (tmp_path / "broken_library.py").write_text(library)
    assert has_imported_fractions(tmp_path, "broken_library") is is_forked


def test_a_request_that_cannot_be_met_ends_one_rank_and_not_the_others(server, run):
    other = run(SLEEPS)
    assert other.pids[0]
    with pytest.raises(OSError, match="Message too long"):
        run("", env={**os.environ, "LONG": "x" * 300_000})
    ours = server._servers[sys.executable, None]
    held = psutil.Process(ours.process.pid).num_fds()
    for request in (b"{}", b"not json"):
        socket.send_fds(ours.control, [request], [0])  # as where descriptors ran out on the way
    said(run(""))
    begun = time.monotonic()
    # It closes what it had of a rank after it has told of its end
    while psutil.Process(ours.process.pid).num_fds() > held:
        assert time.monotonic() < begun + DEADLINE_S, "descriptors of requests that could not be met are kept"
        time.sleep(0.01)
    assert other.exit_of(0, 0) is None


def test_a_process_that_holds_a_gpu_is_not_forked_and_says_so(tmp_path, capfd):
    """It starts afresh without what opened it, and its ranks import for themselves."""
    assert holds_a_gpu(["/dev/null", "/dev/nvidiactl"])
    assert holds_a_gpu(["/dev/kfd"]) and holds_a_gpu(["/dev/dxg"])
    assert not holds_a_gpu(["/dev/null", "pipe:[7]", "/opt/nvidia"])
    with open(os.devnull):
        assert os.devnull in open_files()
    (tmp_path / "opens_a_gpu.py").write_text('__import__("__main__").holds_a_gpu = lambda files: True')
    assert has_imported_fractions(tmp_path, "opens_a_gpu") is False
    told = "[PipeMesh] importing opened a GPU in the process that workers are forked from"
    assert told in capfd.readouterr().err


def test_ranks_share_the_memory_of_what_their_server_has_imported(setup):
    """Both of one pool and those of the next, with torch among it."""
    servers, shared = set(), []
    for _ in range(2):
        handle = PoolHandle(cpus(2), setup)
        for pid in handle.ensure().ranks.pids:
            servers.add(psutil.Process(pid).ppid())
            shared.append(shared_dirty_bytes(pid))
        handle.close()
    (server,) = servers
    assert server != os.getpid()
    assert min(shared) > 0.5 * psutil.Process(server).memory_full_info().uss


def shared_dirty_bytes(pid: int) -> int:
    """What a process would have to itself had it been started as a program."""
    rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
    return 1024 * int(re.search(r"^Shared_Dirty:\s+(\d+) kB", rollup, re.MULTILINE)[1])


ASKS_NO_DEVICE = """
import sys, torch
from worker_main import make_pack_importable
make_pack_importable()
def asked(*_): raise SystemExit("asked for a device")
torch.version.cuda = torch.version.cuda or "13.0"
torch.cuda._is_compiled = lambda: True
for name in ("_lazy_init", "is_available", "device_count", "current_device", "get_device_properties", "get_device_capability"):
    setattr(torch.cuda, name, asked)
torch._C._cuda_getDeviceCount = asked
for name in sys.argv[1:]:
    __import__(name)
"""


def test_what_a_fork_server_imports_asks_torch_for_no_device(tmp_path):
    """A process that has asked once cannot be forked: its ranks would not get their GPU."""
    (tmp_path / "asks.py").write_text(
        "import torch; print('imported', flush=True); torch.cuda.is_available()"
    )
    command = [sys.executable, "-c", ASKS_NO_DEVICE, *PRELOADED, "asks"]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(SCRIPTS)])}
    asked = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, env=env)
    assert (asked.stdout, asked.stderr) == ("imported\n", "asked for a device\n"), "only the last one does"


# -- a server that is stopped, killed or gone


@pytest.fixture
def own_server():
    """One that may come to harm."""
    server = ForkServer(preloaded=())
    yield server
    server.close()


def pool_by(server, ranks, *rules) -> WorkerPool:
    return WorkerPool(cpus(ranks), replace(fake_setup(*rules), start=server.start))


@contextmanager
def stopped(pid):
    """It answers nothing, and lives on."""
    os.kill(pid, signal.SIGSTOP)
    os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOWAIT)  # the signal alone returns before
    yield
    if is_alive(pid):
        os.kill(pid, signal.SIGCONT)


def test_a_pool_ends_although_the_server_of_its_ranks_answers_no_more(own_server, monkeypatch):
    monkeypatch.setattr(fork_server, "ANSWER_S", 0.5)
    pool = pool_by(own_server, 2)
    pool.start()
    pids, (old,) = pool.ranks.pids, own_server.pids
    ranks = [psutil.Process(pid) for pid in pids]
    with stopped(old):
        assert returns(lambda: pool.close(grace_s=0.5))
    psutil.wait_procs(ranks, DEADLINE_S)  # they die with the server, each when the system comes to it
    assert not any(map(is_alive, [*pids, old]))


def test_a_cancel_is_obeyed_while_a_stopped_server_is_to_fork(own_server):
    pool, other = pool_by(own_server, 1), pool_by(own_server, 2, "1:Start=gated")
    pool.start()

    def start():
        with pytest.raises(RunCancelled):
            other.start(lambda: True)

    with stopped(own_server.pids[0]):
        assert returns(start)
    pool.close()


def test_a_killed_server_is_named_and_memory_is_not_blamed(own_server, caplog):
    before = set(threading.enumerate())
    pool = pool_by(own_server, 2, "*:Load=gated")
    pool.start()
    (keeper,) = (one for one in {*threading.enumerate()} - before if one.name == "pipemesh-fork-server")
    loading = inside(pool, "loading")
    sentence = (
        r"^Rank [01] on cpu ended with the process that workers are forked from \(why is in ComfyUI's log\)"
        r" while loading: run again"
    )
    with pytest.raises(PoolFailed, match=sentence):
        call(pool, "Load", lambda: loading() and bool(os.kill(own_server.pids[0], signal.SIGKILL)))
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
    server = ForkServer(preloaded=("slow_library",))
    command = rank_of(tmp_path / "rank.py", SLEEPS, env={**os.environ, "PYTHONPATH": str(tmp_path)})
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


def test_a_server_that_was_killed_a_moment_ago_is_replaced_before_the_system_tells_of_its_end(
    own_server, tmp_path, monkeypatch
):
    command = rank_of(tmp_path / "rank.py", SLEEPS)
    first = own_server.start(command)
    assert first.pid
    first.kill()
    first.wait()
    (old,), (killed,) = own_server.pids, own_server._servers.values()
    os.kill(old, signal.SIGKILL)
    killed.process.wait()
    monkeypatch.setattr(killed.process, "poll", lambda: None)
    last = own_server.start(command)
    assert last.pid and own_server.pids != [old]
    last.kill()
    last.wait()


HANGS = """
import os
os.register_at_fork(before=lambda: os.path.exists({gate!r}) and open({gate!r}).read())
"""


def test_a_server_that_forks_no_more_is_ended_and_the_next_ranks_have_another(tmp_path, monkeypatch):
    """As where a library's handler hangs at the next fork."""
    gate = tmp_path / "gate"
    (tmp_path / "hanging_library.py").write_text(HANGS.format(gate=str(gate)))
    command = rank_of(tmp_path / "rank.py", SLEEPS, env={**os.environ, "PYTHONPATH": str(tmp_path)})
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
