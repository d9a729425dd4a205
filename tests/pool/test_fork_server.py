"""Ranks that are forks: what a process of its own would do, from a process that has imported
once.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from pipemesh.pool.fork_server import PRELOADED, ForkServer
from pipemesh.pool.fork_server_main import holds_a_gpu, open_files
from pipemesh.pool.handle import PoolHandle
from pipemesh.pool.supervisor import SERVER_ENDED, Command, Supervisor

from ..kit.fake_pools import DEADLINE_S, cpus, is_alive

SCRIPTS = Path(__file__).resolve().parents[2] / "pool"


@pytest.fixture(scope="module")
def server():
    server = ForkServer(("FIXED",), preloaded=("decimal", "no_such_module"))
    yield server
    server.close()


@pytest.fixture
def run(server, tmp_path):
    """A script and its environment -> the supervisor of the one rank that runs it."""
    made = []

    def run(script: str, *arguments: str, fd: int = 0, env: dict[str, str] | None = None) -> Supervisor:
        file = tmp_path / f"{len(made)}.py"
        file.write_text(script)
        command = Command(
            (sys.executable, str(file), *arguments), dict(os.environ) if env is None else env, fd
        )
        made.append(Supervisor(server.start))
        made[-1].start({0: command})
        return made[-1]

    yield run
    for supervisor in made:
        supervisor.stop(0)


@pytest.mark.parametrize(
    ("script", "status", "lines"),
    [
        ("print('fine')", 0, ["fine"]),
        ("import os; os.write(1, b'left'); os._exit(7)", 7, ["left"]),
        (
            "import os, signal; print('said', flush=True); os.kill(os.getpid(), signal.SIGBUS)",
            -signal.SIGBUS,
            ["said"],
        ),
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
    supervisor = run(
        "import json, os, sys; print(json.dumps(['decimal' in sys.modules, os.getppid(), os.getpid(),"
        " sys.argv]))",
        "{parent}",
        "{me}",
    )
    assert supervisor.exit_of(0, DEADLINE_S) == 0
    imported, parent, pid, argv = json.loads(supervisor.tail(0)[0])
    assert imported
    assert [parent] == server.pids
    assert {0: pid} == supervisor.pids
    assert argv[1:] == [str(parent), "{me}"]


@pytest.mark.parametrize(
    "fixed", [{}, {"FIXED": "env"}], ids=["of a server that stands", "of a server made for it"]
)
def test_a_rank_has_its_own_environment_and_nothing_of_the_servers(server, run, monkeypatch, fixed):
    monkeypatch.setenv("OF_THE_UI", "1")
    assert run("").exit_of(0, DEADLINE_S) == 0
    env = {"PATH": "/bin", "LC_ALL": "C.UTF-8", "CUDA_VISIBLE_DEVICES": "GPU-3", **fixed}
    supervisor = run("import json, os; print(json.dumps(dict(os.environ)))", env=env)
    assert supervisor.exit_of(0, DEADLINE_S) == 0
    assert json.loads(supervisor.tail(0)[0]) == env
    # It would see that GPU, and no other
    assert "CUDA_VISIBLE_DEVICES" not in psutil.Process(server.pids[-1]).environ()


LISTING = """
import json, os, sys
held = {fd: f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")}
print(json.dumps({fd: os.readlink(path) for fd, path in held.items() if os.path.exists(path) or os.path.islink(path)}))
print(sys.argv[1])
"""


def test_a_rank_holds_its_channel_and_no_other_descriptor_of_the_server(run):
    waiting = run("import time; time.sleep(600)")  # its report is open in the server meanwhile
    assert waiting.pids[0]
    with open(os.devnull) as file:
        supervisor = run(LISTING, "{fd}", fd=file.fileno())
        assert supervisor.exit_of(0, DEADLINE_S) == 0
    held, channel = map(json.loads, supervisor.tail(0))
    assert {int(fd) for fd, target in held.items() if target == os.devnull} == {0, channel}
    assert {int(fd) for fd, target in held.items() if target.startswith(("socket:", "pipe:"))} == {1, 2}


def test_ranks_that_differ_in_what_is_fixed_at_start_come_from_different_servers(server, run):
    """And one that has no ranks any more is ended then."""
    waiting = run("import time; time.sleep(600)")
    assert waiting.pids[0]
    before = server.pids
    assert run("", env={**os.environ, "OTHER": "1"}).exit_of(0, DEADLINE_S) == 0
    assert server.pids == before
    assert run("", env={**os.environ, "FIXED": "1"}).exit_of(0, DEADLINE_S) == 0
    assert len(server.pids) == 2
    waiting.stop(0)
    assert run("", env={**os.environ, "FIXED": "2"}).exit_of(0, DEADLINE_S) == 0
    assert len(server.pids) == 1
    assert not any(map(is_alive, before))


DIE_WITH_PARENT = f"""
import socket, sys, threading
sys.path.insert(0, {str(SCRIPTS)!r})
from worker_main import die_with_parent
die_with_parent(int(sys.argv[1]))
socket.socket(fileno=int(sys.argv[2])).send(b"x")
threading.Event().wait()
"""


def test_ranks_end_with_their_server_and_the_next_has_another(server, run):
    ours, theirs = socket.socketpair()
    with ours:
        with theirs:
            supervisor = run(DIE_WITH_PARENT, "{parent}", "{fd}", fd=theirs.fileno())
        assert ours.recv(1) == b"x", supervisor.tail(0)
        rank = psutil.Process(supervisor.pids[0])
    old = rank.ppid()
    assert old in server.pids
    os.kill(old, signal.SIGKILL)
    assert supervisor.exit_of(0, DEADLINE_S) == SERVER_ENDED
    psutil.wait_procs([rank], DEADLINE_S)
    assert not is_alive(rank.pid)
    assert run("").exit_of(0, DEADLINE_S) == 0
    assert old not in server.pids


def has_imported_fractions(folder: Path, library: str) -> bool:
    """Whether a rank of a server that also imports ``library``, which lies in ``folder``, is a fork
    of a process that has.
    """
    server = ForkServer(preloaded=(library, "fractions"))
    (folder / "script.py").write_text("import sys; print('fractions' in sys.modules)")
    env = {**os.environ, "PYTHONPATH": str(folder)}
    supervisor = Supervisor(server.start)
    supervisor.start({0: Command((sys.executable, str(folder / "script.py")), env, 0)})
    assert supervisor.exit_of(0, DEADLINE_S) == 0
    server.close()
    return supervisor.tail(0) == ["True"]


@pytest.mark.parametrize(
    "broken",
    ["raise RuntimeError('no operator')", "raise OSError('libfoo.so: cannot open')", "import no_such"],
)
def test_a_library_that_cannot_be_imported_stops_no_rank(tmp_path, broken):
    """A rank that needs it says so itself, and one without it works."""
    (tmp_path / "broken_library.py").write_text(broken)
    assert has_imported_fractions(tmp_path, "broken_library") is False
    assert has_imported_fractions(tmp_path, "not_installed_at_all") is True


def test_a_request_that_cannot_be_met_ends_one_rank_and_not_the_others(server, run):
    other = run("import time; time.sleep(600)")
    assert other.pids[0]
    with pytest.raises(OSError, match="Message too long"):
        run("", env={**os.environ, "LONG": "x" * 300_000})
    ours = server._servers[sys.executable, None]
    held = psutil.Process(ours.process.pid).num_fds()
    for request in (b"{}", b"not json"):
        socket.send_fds(ours.control, [request], [0])  # as where descriptors ran out on the way
    assert run("").exit_of(0, DEADLINE_S) == 0
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
    assert (
        "[PipeMesh] importing opened a GPU in the process that workers are forked from"
        in capfd.readouterr().err
    )


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
