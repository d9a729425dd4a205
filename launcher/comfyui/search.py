"""Finds the ComfyUI that the commands run on: the user's own; in a checkout of the repository, else
one that lab/host.py installs. Standard library only.
"""

from __future__ import annotations

import importlib
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from ..checkout import ROOT
from ..errors import LaunchError
from .host_record import ComfyInstall

COMFYUI_VERSION = "0.30.0"  # the least that will do
INSTALLER = Path("lab/host.py")
FIND_MODULES = "import sys, importlib.util as u; print(*(m for m in sys.argv[1:] if u.find_spec(m) is None))"


def missing_modules(python: str, modules: Sequence[str]) -> tuple[str, ...] | None:
    """Returns the modules among `modules` that this python does not find; None if it does not run
    at all.
    """
    try:
        command = [python, "-c", FIND_MODULES, *modules]
        found = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True, cwd=os.sep)
    except (OSError, subprocess.SubprocessError):
        return None
    return tuple(found.stdout.split())


def ensure_comfyui(root: Path = ROOT, env: Mapping[str, str] = os.environ) -> ComfyInstall:
    """The ComfyUI of the checkout or pack `root`: the user's own if there is one; else the one in
    the cache, or of the archive that PIPEMESH_COMFYUI names, installed first if it is missing.
    Raises LaunchError.
    """
    own = find_own(root, env)
    if own is not None and own.is_dir():
        return own_comfyui(own, root, env)
    if not (ROOT / INSTALLER).is_file():
        raise LaunchError(
            "There is no ComfyUI for this command: put PipeMesh's folder into ComfyUI's custom_nodes, or"
            " point PIPEMESH_COMFYUI to the folder that has ComfyUI's main.py."
        )
    return importlib.import_module("lab.host").ensure_installed(root, env, own)


def is_installed(root: Path, env: Mapping[str, str]) -> bool:
    """True if there is a ComfyUI, so that `ensure_comfyui` installs nothing large."""
    if (own := find_own(root, env)) is not None and own.is_dir():
        return True
    return (ROOT / INSTALLER).is_file() and importlib.import_module("lab.host").install_of(
        root, env
    ).is_complete


def find_own(root: Path, env: Mapping[str, str]) -> Path | None:
    """PIPEMESH_COMFYUI's folder or archive, or the ComfyUI in whose custom_nodes the checkout lies,
    or the link to it by which the shell came. Raises LaunchError if the folder holds none.
    """
    if env.get("PIPEMESH_COMFYUI"):
        own = Path(env["PIPEMESH_COMFYUI"]).expanduser().absolute()
        if not own.is_file() and not (own / "main.py").exists():
            raise LaunchError(
                f"PIPEMESH_COMFYUI={own} holds no ComfyUI: point it to the folder that has ComfyUI's main.py."
            )
        return own
    came_by = Path(env.get("PWD", ""))
    places = [root, came_by] if came_by.is_absolute() and came_by.resolve() == root else [root]
    packs = [place for place in places if place.parent.name == "custom_nodes"]
    return next((pack.parent.parent for pack in packs if comfyui_version(pack.parent.parent)), None)


def own_comfyui(comfyui: Path, root: Path, env: Mapping[str, str]) -> ComfyInstall:
    """Returns the user's ComfyUI with the first of its pythons that has torch and the pack's
    requirements. Raises LaunchError with the next move.
    """
    version = comfyui_version(comfyui)
    if is_too_old(version):
        raise LaunchError(
            f"ComfyUI in {comfyui} is {version or 'too old to tell'}: update it to {COMFYUI_VERSION} or"
            " newer."
        )
    names = [re.split(r"[^\w.-]", one)[0].replace("-", "_") for one in own_requirements(root)]
    candidates = own_pythons(comfyui, env)
    for python in candidates:
        lacking = missing_modules(python, ("torch", *names))
        if lacking == ():
            return ComfyInstall(python, str(comfyui), version, base="")
        if lacking and "torch" not in lacking:
            command = shlex.join([python, "-m", "pip", "install", "-r", str(root / "requirements.txt")])
            raise LaunchError(
                f"{python} of ComfyUI in {comfyui} has no {' and no '.join(lacking)}: run {command}"
            )
    raise LaunchError(
        f"No Python with torch was found for ComfyUI in {comfyui} (looked at {', '.join(candidates)}): "
        "set PIPEMESH_PYTHON to the python that runs it."
    )


def own_pythons(comfyui: Path, env: Mapping[str, str]) -> tuple[str, ...]:
    """The pythons that may run a user's ComfyUI, likeliest first; PIPEMESH_PYTHON settles it."""
    if env.get("PIPEMESH_PYTHON"):
        named = os.path.expanduser(env["PIPEMESH_PYTHON"])
        return (shutil.which(named) or named,)
    places = [venv_python(comfyui / name) for name in ("venv", ".venv")]
    return (*(str(place) for place in places if place.exists()), sys.executable)


def venv_python(venv: Path) -> Path:
    return venv / "bin" / "python"


def own_requirements(root: Path) -> list[str]:
    """Returns the packages of requirements.txt."""
    lines = [line.strip() for line in (root / "requirements.txt").read_text(encoding="utf-8").splitlines()]
    return [line for line in lines if line and not line.startswith("#")]


def comfyui_version(comfyui: Path) -> str:
    """Returns the version in comfyui_version.py of that tree; empty if there is none."""
    file = comfyui / "comfyui_version.py"
    match = re.search(r'__version__ = "([^"]+)"', file.read_text(encoding="utf-8")) if file.exists() else None
    return match[1] if match else ""


def is_too_old(version: str) -> bool:
    """True for a ComfyUI before COMFYUI_VERSION, and for one that says no version."""
    ours, least = ([int(part) for part in re.findall(r"\d+", one)[:3]] for one in (version, COMFYUI_VERSION))
    return ours < least
