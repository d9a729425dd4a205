"""The user's own ComfyUI: found, and refused in one sentence. lab/tests/test_host.py has the one
that a checkout installs.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from pipemesh.launcher.comfyui import search
from pipemesh.launcher.comfyui.host_record import ComfyInstall
from pipemesh.launcher.comfyui.search import ensure_comfyui, find_own
from pipemesh.launcher.command_line import exit_with
from pipemesh.launcher.errors import LaunchError

ROOT = Path(__file__).resolve().parents[2]


def write_tree(folder: Path, version: str = "0.30.0") -> Path:
    (folder / "custom_nodes").mkdir(parents=True)
    (folder / "main.py").write_text("")
    (folder / "comfyui_version.py").write_text(f'__version__ = "{version}"\n')
    return folder


def make_checkout(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "requirements.txt").write_text("msgspec>=0.18\nsafetensors>=0.4.2\n")
    return folder


# --- what can go wrong, each in one sentence ---


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


# --- the user's own ComfyUI ---


def own_comfyui(
    comfyui: Path, has_torch: Sequence[str], env: dict[str, str] | None = None, lacks: Sequence[str] = ()
) -> ComfyInstall:
    def missing(python: str, modules: Sequence[str]) -> tuple[str, ...] | None:
        return tuple(lacks) if python in has_torch else ("torch",)

    env = {"PIPEMESH_COMFYUI": str(comfyui), **(env or {})}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(search, "missing_modules", missing)
        return ensure_comfyui(ROOT, env)


def add_python(path: Path) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("")
    return str(path)


@pytest.mark.parametrize("place", ["venv", ".venv"])
def test_the_users_own_comfyui_runs_on_its_own_python(tmp_path: Path, place: str) -> None:
    comfyui = write_tree(tmp_path / "ComfyUI", "0.100.0")
    python = add_python(search.venv_python(comfyui / place))
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
    python = add_python(search.venv_python(comfyui / "venv"))
    wanted = says.format(python=python, current=sys.executable, comfyui=comfyui)
    with pytest.raises(LaunchError, match=re.escape(wanted)):
        own_comfyui(comfyui, [sys.executable] * has_torch, lacks=lacks)


def test_a_checkout_in_a_comfyuis_custom_nodes_runs_on_that_comfyui(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(search, "missing_modules", lambda python, modules: ())
    comfyui = write_tree(tmp_path / "ComfyUI")
    root = make_checkout(comfyui / "custom_nodes" / "pipemesh")
    made = ensure_comfyui(root, {})
    assert made == ComfyInstall(sys.executable, str(comfyui), "0.30.0", base="")


def test_missing_modules_are_found_out_without_importing_them() -> None:
    assert search.missing_modules(sys.executable, ("json", "no_such_module")) == ("no_such_module",)
    assert search.missing_modules("/no/such/python", ("json",)) is None


def test_a_linked_checkout_is_of_the_comfyui_by_whose_link_the_shell_came(tmp_path: Path) -> None:
    comfyui, root = write_tree(tmp_path / "ComfyUI", "0.100.0"), make_checkout(tmp_path / "one")
    link = comfyui / "custom_nodes" / "pipemesh"
    link.symlink_to(root)
    found = [find_own(root, {"PWD": str(place)}) for place in (link, root, link.parent, "")]
    assert found == [comfyui, None, None, None]


# --- what the pack says about itself ---


def test_comfyui_reads_the_project_file() -> None:
    parser = pytest.importorskip("comfy_config.config_parser")
    config = parser.extract_node_configuration(str(ROOT))
    assert (config.project.name, config.project.license.text) == ("pipemesh", "Apache-2.0")
    assert (config.tool_comfy.publisher_id, config.tool_comfy.display_name) == ("pipemesh", "PipeMesh")
    assert not config.tool_comfy.web, "__init__.py names it already: ComfyUI would register it twice"
    assert (ROOT / config.tool_comfy.icon.partition("/main/")[2]).is_file()
    assert config.project.supported_os and config.project.supported_accelerators
    assert config.project.supported_comfyui_version == f">={search.COMFYUI_VERSION}"


def test_the_pack_is_importable_by_its_name_without_its_entry_point(tmp_path: Path) -> None:
    (tmp_path / "__init__.py").write_text("raise AssertionError('the entry point is for ComfyUI')")
    (tmp_path / "part.py").write_text("from . import other\n")
    (tmp_path / "other.py").write_text("NAME = __name__\n")
    code = (
        "import runpy, sys; register = runpy.run_path(sys.argv[1])['register_package'];"
        " register(sys.argv[2]); register(sys.argv[2]);import pipemesh.part; print(pipemesh.part.other.NAME)"
    )
    command = [sys.executable, "-c", code, str(ROOT / "pool" / "package.py"), str(tmp_path)]
    assert subprocess.run(command, capture_output=True, text=True).stdout == "pipemesh.other\n"
