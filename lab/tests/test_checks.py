"""How all tests run: checks side by side, by commands that stand for them; workers, of which one
hangs or is lost; and the process that they ask for ranks.
"""

import importlib
import os
import subprocess
import sys
from contextlib import nullcontext, suppress
from types import SimpleNamespace

import pytest
from pipemesh.lab.bench.forked import above
from pipemesh.lab.forks import comfyui_shared, handed_out
from pipemesh.pool.supervisor import Command
from pipemesh.tests.fixtures import ROOT, all_said_by, pytest_xdist_make_scheduler


@pytest.fixture(scope="module")
def checks():
    """lab/checks.py as `python3 -m lab check` imports it: `lab` and `launcher` have no parent."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [*sys.path, str(ROOT)])
        yield importlib.import_module("lab.checks")


MEETS = """
import os, sys
name = sys.argv[2]
for mode in ("w", "r") if name == "one" else ("r", "w"):  # opened once the other has its end
    open(sys.argv[1], mode).close()
print("..... [ 50%]")
print(name, "has ended")
sys.exit(name == os.environ["FAILS"])
"""


@pytest.mark.parametrize("fails", ["neither", "one", "two"])
def test_checks_run_at_once_and_what_fails_is_the_result_and_printed_last(checks, tmp_path, capfd, fails):
    os.mkfifo(meeting := tmp_path / "meeting")
    commands = {name: [sys.executable, "-c", MEETS, str(meeting), name] for name in ("one", "two")}
    assert checks.run_side_by_side(commands, {**os.environ, "FAILS": fails}) == (fails != "neither")
    lines = capfd.readouterr().out.splitlines()
    assert sorted(line.split()[0] for line in lines[:4]) == ["one", "one", "two", "two"]
    order = ["two", "one"] if fails == "one" else ["one", "two"]
    said = [line for name in order for line in (f"== {name}", f"{name} has ended")]
    assert lines[4:] == said + [f"== failed: {fails}"] * (fails != "neither")


@pytest.mark.parametrize(
    ("options", "workers"),
    [
        ("", "-n3"),
        ("-q -x --durations=30 --tb=short", "-n3"),
        ("-q tests/client/test_waist.py", ""),
        ("-k lora", ""),
        ("tests -n2", "-n2"),
        ("--lf", ""),
    ],
)
def test_what_chooses_tests_is_one_process(checks, monkeypatch, options, workers):
    ran = []
    monkeypatch.setattr(checks, "prepared_for_tests", lambda: ("python", {}))
    monkeypatch.setattr(checks, "comfyui_shared", lambda *_: nullcontext("path"))
    monkeypatch.setattr(checks, "replace_process", lambda command, _: sys.exit(ran.append(command)))
    done = SimpleNamespace(returncode=0)
    monkeypatch.setattr(checks.subprocess, "run", lambda command, **_: ran.append(command) or done)
    with suppress(SystemExit):
        checks.run_tests("tests", options.split())
    (command,) = ran
    assert [word for word in command if word.startswith("-n")] == workers.split()


def test_a_host_without_what_runs_the_tests_gets_it_and_a_users_own_is_told(checks, monkeypatch):
    """One of the cache, which may be of a checkout that needed less."""
    added = []
    monkeypatch.setattr(checks, "missing_modules", lambda *_: ("xdist", "pytest_timeout"))
    monkeypatch.setattr(checks, "add_test_tools", lambda host, root: added.append(host.base))
    for base in ("/cache", ""):
        host = SimpleNamespace(python="python", base=base, to_json=lambda: "{}")
        monkeypatch.setattr(checks, "ensure_comfyui", lambda host=host: host)
        if base:
            assert checks.prepared_for_tests()[0] == "python" and added == [base]
    with pytest.raises(checks.LaunchError, match=r"run python -m pip install pytest-xdist pytest-timeout$"):
        checks.prepared_for_tests()


HEADER = "import os, signal, threading\ndef test_it():\n    "
WAITS = "threading.Event().wait()"
FILES = {
    "passes": f"{HEADER}pass",
    "hangs": f"{HEADER}{WAITS}",
    "hears_no_signal": f"{HEADER}signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM])\n    {WAITS}",
    "ends": f"{HEADER}os._exit(0)",
    "ends_early": "import os\nif os.environ['PYTEST_XDIST_WORKER'] == 'gw1': os._exit(0)\n",
    "ends_late": "import os\nclass Ends:\n    def pytest_sessionfinish(self): os._exit(9)\n"
    "def test_it(request): request.config.pluginmanager.register(Ends())",
    "is_not_imported": "import no_such_module",
    "is_lost": "import os\nif os.environ['PYTEST_XDIST_WORKER'] == 'gw0':\n    def test_it(): pass",
}


@pytest.fixture
def tests_ended(checks, tmp_path):
    """Names in FILES -> the exit status and words of a pytest with workers, as pyproject.toml has
    it, of these files and of one that passes.
    """

    def run(name):
        for one in ("passes", name):
            (tmp_path / f"test_{one}.py").write_text(FILES[one])
        words = f"-m pytest --noconftest -c {ROOT / 'pyproject.toml'} --rootdir {tmp_path} --dist=loadfile"
        limits = "-o timeout=1 -o faulthandler_timeout=2"
        command = [
            sys.executable,
            *words.split(),
            *limits.split(),
            *checks.workers(2, "")[:-1],
            str(tmp_path),
        ]
        env = {
            **os.environ,
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
            "PYTEST_PLUGINS": "xdist.plugin,pytest_timeout",
            "PYTHONPATH": str(ROOT),
        }
        done = subprocess.run(
            command, cwd=tmp_path, env=env, capture_output=True, text=True, stdin=subprocess.DEVNULL
        )
        return done.returncode, done.stdout

    return run


BY_NAME = "crashed while running 'test_{}.py::test_it'"


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("hangs", "FAILED test_{}.py::test_it - Failed: Timeout (>1.0s)"),
        ("hears_no_signal", BY_NAME),
        ("ends", BY_NAME),
        ("ends_early", "A worker has ended"),
        ("ends_late", "A worker has ended"),
        ("is_not_imported", "ERROR test_{}.py"),
        ("is_lost", "Different tests"),
    ],
)
def test_a_test_a_worker_or_a_file_that_hangs_ends_or_is_lost_fails_the_run_by_its_name(
    tests_ended, name, says
):
    code, said = tests_ended(name)
    assert code and says.format(name) in said, said
    if "::" in says:
        assert code == 1 and "1 failed, 1 passed" in said, said


def test_files_that_share_a_server_go_to_one_worker():
    one = SimpleNamespace(getvalue=lambda _: ["popen"])
    scope = pytest_xdist_make_scheduler(one, None)._split_scope
    names = ("server/test_end_to_end", "server/test_end_to_end_the_end", "wire/test_arena", "wire/test_wire")
    assert [scope(f"tests/{name}.py::test_it[a::b]") for name in names] == [
        *("server", "server"),
        *("tests/wire/test_arena.py", "tests/wire/test_wire.py"),
    ]


FORK = "import imported_once, sys\nprint('forked', *sys.argv[1:])"


def test_processes_ask_one_that_has_imported_for_forks(tmp_path):
    """What it has imported is not there any more."""
    (tmp_path / "imported_once.py").touch()
    (script := tmp_path / "script.py").write_text(FORK)
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    with comfyui_shared(sys.executable, env, "imported_once") as shared:
        for number in ("first", "second"):
            server = above(*handed_out(shared))
            fork = server.fork(Command((sys.executable, str(script), number), env, 0))
            assert all_said_by(fork) == f"forked {number}\n" and fork.wait() == 0
            (tmp_path / "imported_once.py").unlink(missing_ok=True)
    assert not os.path.exists(shared)
