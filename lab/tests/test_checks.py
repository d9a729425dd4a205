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
    assert lines[4:] == [
        *(line for name in order for line in (f"== {name}", f"{name} has ended")),
        *([] if fails == "neither" else [f"== failed: {fails}"]),
    ]


@pytest.mark.parametrize(
    ("options", "workers"),
    [
        ("", ["-n3"]),
        ("-q -x --durations=30 --tb=short", ["-n3"]),
        ("-q tests/client/test_waist.py", []),
        ("-k lora", []),
        ("tests -n2", ["-n2"]),
        ("--lf", []),
    ],
)
def test_what_chooses_tests_is_one_process(checks, monkeypatch, options, workers):
    ran = []
    monkeypatch.setattr(checks, "prepared_for_tests", lambda: ("python", {}))
    monkeypatch.setattr(checks, "comfyui_shared", lambda *_: nullcontext("path"))
    monkeypatch.setattr(checks, "replace_process", lambda command, _: sys.exit(ran.append(command)))
    monkeypatch.setattr(
        checks.subprocess, "run", lambda command, **_: ran.append(command) or SimpleNamespace(returncode=0)
    )
    with suppress(SystemExit):
        checks.run_tests("tests", options.split())
    (command,) = ran
    assert [word for word in command if word.startswith("-n")] == workers


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
}


@pytest.fixture
def ended(checks, tmp_path):
    """Files -> the exit status and words of a pytest with workers, as pyproject.toml has it."""

    def run(**files):
        for name, text in files.items():
            (tmp_path / f"test_{name}.py").write_text(text)
        options = (
            "--noconftest",
            "-c",
            str(ROOT / "pyproject.toml"),
            "--rootdir",
            str(tmp_path),
            "--dist=loadfile",
        )
        limits = ("-o", "timeout=1", "-o", "faulthandler_timeout=2")
        command = [
            sys.executable,
            "-m",
            "pytest",
            *options,
            *limits,
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


@pytest.mark.parametrize("name", ["hangs", "hears_no_signal", "ends"])
def test_a_test_that_hangs_or_ends_its_process_fails_by_its_name(ended, name):
    code, said = ended(**{"passes": FILES["passes"], name: FILES[name]})
    assert code == 1 and "1 failed, 1 passed" in said, said
    how = "FAILED {} - Failed: Timeout (>1.0s)" if name == "hangs" else "crashed while running '{}'"
    assert how.format(f"test_{name}.py::test_it") in said, said


@pytest.mark.parametrize("name", ["ends_early", "ends_late"])
def test_a_worker_that_ends_while_it_runs_no_test_fails_the_run(ended, name):
    code, said = ended(**{"passes": FILES["passes"], name: FILES[name]})
    assert code and "A worker has ended" in said, said


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("import no_such_module", "ERROR test_fails.py"),
        (
            "import os\nif os.environ['PYTEST_XDIST_WORKER'] == 'gw0':\n    def test_it(): pass",
            "Different tests",
        ),
    ],
)
def test_a_file_that_is_not_imported_or_is_lost_fails_the_run(ended, text, says):
    code, said = ended(passes=FILES["passes"], fails=text)
    assert code and says in said, said


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
