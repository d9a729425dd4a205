"""The host: found, installed, repaired, shared, and refused in one sentence. No network: pip, venv
and git are played by a fake.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from pipemesh.launcher.comfyui import find, install
from pipemesh.launcher.comfyui.console import Console, run_logged
from pipemesh.launcher.comfyui.find import ensure_comfyui, find_own, link_checkout
from pipemesh.launcher.comfyui.host_record import ComfyInstall
from pipemesh.launcher.comfyui.install import Tools
from pipemesh.launcher.command_line import exit_with
from pipemesh.launcher.errors import LaunchError

from .fake_installs import STEPS, Desk, make_checkout, write_tree

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    return Desk(tmp_path)


def refuse_to_run(*_: object) -> int:
    raise AssertionError("nothing is installed, and nothing into a user's own ComfyUI")


# --- the host installed here ---


def test_the_first_use_installs_in_one_call_of_pip_and_says_what_it_costs(desk: Desk) -> None:
    made = desk.ensure()
    comfyui = Path(made.comfyui)
    assert desk.commands.ran == [*STEPS.values()]
    assert made.version == "0.30.0" and Path(made.python).exists()
    assert {path.name for path in comfyui.iterdir()} == {"comfyui_version.py", "main.py", "requirements.txt"}
    assert "About 6 GB and 3 minutes" in desk.screen[0]
    assert [line[:5] for line in desk.screen[1:6]] == [f"[{step}/5]" for step in range(1, 6)]
    (call,) = (command for command in desk.commands.commands if "install" in command)
    ours = (*install.TORCH_PINS, *install.pack_requirements(ROOT), str(comfyui / "requirements.txt"))
    assert {*ours} <= {*call}, "so that the torch pins hold against everything else"


def test_checkouts_with_the_same_requirements_share_a_host_and_others_get_one_of_their_own(
    desk: Desk,
) -> None:
    first = desk.ensure(make_checkout(desk.folder / "one"))
    assert desk.ensure(make_checkout(desk.folder / "two")) == first
    assert desk.commands.ran == [*STEPS.values()]
    other = desk.ensure(make_checkout(desk.folder / "three", "msgspec>=0.19"))
    assert find.other_installs(other) == (first.base,)


@pytest.mark.parametrize("step", ["venv", "compileall"])
def test_an_install_that_was_interrupted_or_lost_its_python_repairs_itself(desk: Desk, step: str) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    desk.commands.before[step] = interrupt
    with pytest.raises(KeyboardInterrupt):
        desk.ensure()
    desk.commands.before.clear()
    for _ in range(2):
        desk.commands.ran.clear()
        python = Path(desk.ensure().python)
        assert desk.commands.ran == [*STEPS.values()]
        assert any("Repairing an unfinished install" in line for line in desk.screen)
        python.unlink()  # so that the next one is repaired too


def test_a_second_install_at_once_says_that_it_waits_and_then_installs_nothing(desk: Desk) -> None:
    first_is_busy, second_waits = threading.Event(), threading.Event()

    def hold() -> None:
        first_is_busy.set()
        assert second_waits.wait(30)

    def write(text: str) -> None:
        screen.append(text)
        second_waits.set()

    screen: list[str] = []
    desk.commands.before["install"] = hold
    with ThreadPoolExecutor() as pool:
        first = pool.submit(desk.ensure)
        assert first_is_busy.wait(30)
        second = ensure_comfyui(ROOT, Tools(console=Console(write), run=refuse_to_run, env=desk.env))
        assert first.result(30) == second
    assert len(screen) == 1 and "Another install is under way" in screen[0]


# --- what can go wrong, each in one sentence ---

NO_PLACE = "No place of the package registry has x.tar.gz with the sha256 de5d"


@pytest.mark.parametrize(
    "step, output, says",
    [
        ("download", "NewConnectionError: failure in name resolution", "registry did not answer: check the"),
        ("install", "pip._vendor.urllib3.ReadTimeoutError: Read timed out.", "registry did not answer"),
        ("install", "OSError: [Errno 28] No space left on device", "is too full"),
        ("venv", "not created successfully because ensurepip is not available.", "install python3-venv"),
        ("install", "No matching distribution found for torch==2.11.0", "has no torch==2.11.0 for Python 3."),
        ("download", f"ERROR: {NO_PLACE}", f"{NO_PLACE}: point PIPEMESH_COMFYUI to"),
        ("check", "Traceback\nImportError: libfoo.so.1: no\n", "stopped with `ImportError: libfoo.so.1: no`"),
    ],
)
def test_a_step_that_fails_is_one_sentence_with_the_log(
    desk: Desk, step: str, output: str, says: str
) -> None:
    desk.commands.fail[step] = output
    message = desk.refusal()
    assert says in message
    assert Path(re.search(r"\(log: (.*)\)", message)[1]).read_text() == output


def test_a_disk_too_small_is_one_sentence_before_anything_runs(desk: Desk) -> None:
    desk.free = 3 * 10**9
    message = desk.refusal()
    assert "needs 10 GB while it installs and 3.0 GB are free" in message and "PIPEMESH_CACHE" in message
    assert desk.commands.ran == []


def test_a_disk_that_fills_up_under_our_own_files_is_one_sentence(desk: Desk) -> None:
    def fill_up() -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    desk.commands.before["check"] = fill_up
    assert "is too full" in desk.refusal()


def test_a_cache_folder_that_cannot_be_made_is_one_sentence(desk: Desk) -> None:
    (desk.folder / "cache").write_text("a file")
    assert "make that folder writable or point PIPEMESH_CACHE to another one" in desk.refusal()


def test_a_command_that_cannot_run_prints_one_line_and_no_traceback(tmp_path: Path) -> None:
    env = {**os.environ, "PIPEMESH_HOST": "", "PIPEMESH_COMFYUI": str(tmp_path)}
    command = [sys.executable, "-m", "launcher", "doctor"]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (1, "")
    says = "holds no ComfyUI: point it to the folder that has ComfyUI's main.py."
    assert done.stderr == f"pipemesh: PIPEMESH_COMFYUI={tmp_path} {says}\n"


def test_a_command_on_another_system_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(SystemExit, match="PipeMesh runs on Linux, and this is darwin: run the command on L"):
        exit_with(lambda argv: 0)


# --- the commands an install runs ---


def run_python(code: str, log: Path, live: Callable[[str], None]) -> int:
    with log.with_suffix(".lock").open("w") as lock:
        return run_logged([sys.executable, "-c", code], log, live, os.environ, lock.fileno())


def test_a_commands_output_goes_to_the_log_and_its_last_line_to_the_screen(tmp_path: Path) -> None:
    lines: list[str] = []
    code = "import sys; print('one', flush=True); print('two', file=sys.stderr); sys.exit(3)"
    assert run_python(code, tmp_path / "log", lines.append) == 3
    assert (tmp_path / "log").read_text().splitlines()[-2:] == ["one", "two"]
    assert lines[-1] == "two"


def test_an_interrupt_ends_the_command_that_was_running(tmp_path: Path) -> None:
    pids: list[int] = []

    def interrupt(line: str) -> None:
        if line:
            pids.append(int(line))
            raise KeyboardInterrupt

    code = "import os, signal; print(os.getpid(), flush=True); signal.pause()"
    with pytest.raises(KeyboardInterrupt):
        run_python(code, tmp_path / "log", interrupt)
    with pytest.raises(ProcessLookupError):
        os.kill(pids[0], 0)


def test_off_a_terminal_the_live_line_shows_every_15_s_and_on_one_it_stays_in_place() -> None:
    times = iter([0.0, 5.0, 16.0, 16.0, 20.0])
    written: list[str] = []
    console = Console(written.append, clock=lambda: next(times))
    for text in ("at 5", "at 16", "at 20"):
        console.live(text)
    assert written == ["at 16\n"]
    console = Console(written.append, terminal=True)
    console.live("x" * 10_000)
    assert written[-1].startswith("\r\x1b[Kxxx") and "\n" not in written[-1] and len(written[-1]) < 1_000


def test_an_install_whose_launcher_was_killed_still_counts_as_under_way_until_its_pip_ends(
    tmp_path: Path,
) -> None:
    lock = (tmp_path / "host.lock").open("w")
    fcntl.flock(lock, fcntl.LOCK_EX)
    held: list[str] = []

    def look(line: str) -> None:
        if held:  # told once more, when pip may have ended
            return
        lock.close()  # as when the launcher dies
        with (tmp_path / "host.lock").open("w") as other, pytest.raises(BlockingIOError):
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        held.append(line)
        seen.open("w").close()

    seen = tmp_path / "seen"
    os.mkfifo(seen)
    waits = f"print('under way', flush=True); open({str(seen)!r}).read()"  # until look has looked
    assert run_logged([sys.executable, "-c", waits], tmp_path / "log", look, os.environ, lock.fileno()) == 0
    assert held


# --- the user's own ComfyUI ---


def own_comfyui(
    comfyui: Path, has_torch: Sequence[str], env: dict[str, str] | None = None, lacks: Sequence[str] = ()
) -> ComfyInstall:
    def missing(python: str, modules: Sequence[str]) -> tuple[str, ...] | None:
        return tuple(lacks) if python in has_torch else ("torch",)

    env = {"PIPEMESH_COMFYUI": str(comfyui), **(env or {})}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(find, "missing_modules", missing)
        return ensure_comfyui(ROOT, Tools(run=refuse_to_run, env=env))


def add_python(path: Path) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("")
    return str(path)


@pytest.mark.parametrize("place", ["venv", ".venv"])
def test_the_users_own_comfyui_runs_on_its_own_python(tmp_path: Path, place: str) -> None:
    comfyui = write_tree(tmp_path / "ComfyUI", "0.100.0")
    python = add_python(install.venv_python(comfyui / place))
    made = own_comfyui(comfyui, [python, sys.executable])
    assert made == ComfyInstall(python, str(comfyui), "0.100.0", base="")
    named = own_comfyui(comfyui, ["/opt/python"], {"PIPEMESH_PYTHON": "/opt/python"})
    assert named.python == "/opt/python", "a named one settles it"


@pytest.mark.parametrize(
    "version, has_torch, lacks, says",
    [
        ("0.30.0", False, (), "(looked at {python}, {current}): set PIPEMESH_PYTHON"),
        (
            "0.30.0",
            True,
            ["msgspec"],
            "{current} of ComfyUI in {comfyui} has no msgspec: run {current} -m pip",
        ),
        ("0.29.7", True, (), "is 0.29.7: update it to 0.30.0 or newer"),
        ("0.4.0", True, (), "is 0.4.0: update it to 0.30.0 or newer"),
        ("", True, (), "is too old to tell: update it to 0.30.0 or newer"),
    ],
)
def test_an_own_comfyui_that_will_not_do_is_one_sentence(
    tmp_path: Path, version: str, has_torch: bool, lacks: Sequence[str], says: str
) -> None:
    comfyui = write_tree(tmp_path, version)
    python = add_python(install.venv_python(comfyui / "venv"))
    wanted = says.format(python=python, current=sys.executable, comfyui=comfyui)
    with pytest.raises(LaunchError, match=re.escape(wanted)):
        own_comfyui(comfyui, [sys.executable] * has_torch, lacks=lacks)


def test_a_checkout_in_a_comfyuis_custom_nodes_runs_on_that_comfyui(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(find, "missing_modules", lambda python, modules: ())
    comfyui = write_tree(tmp_path / "ComfyUI")
    root = make_checkout(comfyui / "custom_nodes" / "pipemesh")
    made = ensure_comfyui(root, Tools(run=refuse_to_run, env={}))
    assert made == ComfyInstall(sys.executable, str(comfyui), "0.30.0", base="")


def test_missing_modules_are_found_out_without_importing_them() -> None:
    assert find.missing_modules(sys.executable, ("json", "no_such_module")) == ("no_such_module",)
    assert find.missing_modules("/no/such/python", ("json",)) is None


# --- the link into custom_nodes ---


def test_the_checkout_is_linked_once_and_a_link_that_led_elsewhere_is_switched_aloud(tmp_path: Path) -> None:
    comfyui = write_tree(tmp_path / "ComfyUI")
    link, (one, two) = comfyui / "custom_nodes" / "pipemesh", (tmp_path / "one", tmp_path / "two")
    link.symlink_to(tmp_path / "deleted")
    assert "which is gone" in link_checkout(comfyui, make_checkout(one))
    assert link.resolve() == one and "already" in link_checkout(comfyui, one)
    assert f"It led to {one}, which is another checkout." in link_checkout(comfyui, make_checkout(two))
    assert link.resolve() == two


def test_a_linked_checkout_is_of_the_comfyui_by_whose_link_the_shell_came(tmp_path: Path) -> None:
    comfyui, root = write_tree(tmp_path / "ComfyUI", "0.100.0"), make_checkout(tmp_path / "one")
    link_checkout(comfyui, root)
    link = comfyui / "custom_nodes" / "pipemesh"
    found = [find_own(root, {"PWD": str(place)}) for place in (link, root, link.parent, "")]
    assert found == [comfyui, None, None, None]


def test_a_folder_in_the_links_place_is_left_alone_and_named(tmp_path: Path) -> None:
    (write_tree(tmp_path / "ComfyUI") / "custom_nodes" / "pipemesh").mkdir()
    with pytest.raises(LaunchError, match="is in the way and is no link: move it elsewhere"):
        link_checkout(tmp_path / "ComfyUI", make_checkout(tmp_path / "one"))


# --- what the pack says about itself ---


def test_the_requirements_and_the_project_file_agree() -> None:
    tomllib = pytest.importorskip("tomllib")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    told = (*project["dependencies"], *project["optional-dependencies"]["test"])
    assert install.pack_requirements(ROOT) == told


def test_comfyui_reads_the_project_file() -> None:
    parser = pytest.importorskip("comfy_config.config_parser")
    config = parser.extract_node_configuration(str(ROOT))
    assert (config.project.name, config.project.license.text) == ("pipemesh", "Apache-2.0")
    assert (config.tool_comfy.publisher_id, config.tool_comfy.display_name) == ("pipemesh", "PipeMesh")
    assert not config.tool_comfy.web, "__init__.py names it already: ComfyUI would register it twice"
    assert (ROOT / config.tool_comfy.icon.partition("/main/")[2]).is_file()
    assert config.project.supported_os and config.project.supported_accelerators
    assert config.project.supported_comfyui_version == f">={install.COMFYUI_VERSION}"


def test_the_pack_is_importable_by_its_name_without_its_entry_point(tmp_path: Path) -> None:
    (tmp_path / "__init__.py").write_text("raise AssertionError('the entry point is for ComfyUI')")
    (tmp_path / "part.py").write_text("from . import other\n")
    (tmp_path / "other.py").write_text("NAME = __name__\n")
    code = (
        "import runpy, sys; register = runpy.run_path(sys.argv[1])['register_package'];"
        " register(sys.argv[2]); register(sys.argv[2]);import pipemesh.part; print(pipemesh.part.other.NAME)"
    )
    command = [sys.executable, "-c", code, str(ROOT / "launcher" / "package.py"), str(tmp_path)]
    assert subprocess.run(command, capture_output=True, text=True).stdout == "pipemesh.other\n"
