"""Finds the ComfyUI that the commands run on: the user's own, or one installed into the cache;
from an archive where PIPEMESH_COMFYUI names one. Standard library only.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from ..command_line import ROOT
from ..errors import LaunchError
from ..package import NAME
from .beside import ensure_from_archive
from .host_record import ComfyInstall
from .install import (
    COMFYUI_VERSION,
    Tools,
    comfyui_version,
    ensure_installed,
    install_of,
    is_too_old,
    own_requirements,
    venv_python,
)

FIND_MODULES = "import sys, importlib.util as u; print(*(m for m in sys.argv[1:] if u.find_spec(m) is None))"


def missing_modules(python: str, modules: Sequence[str]) -> tuple[str, ...] | None:
    """Those of `modules` that this python does not find; None where it does not run at all."""
    try:
        command = [python, "-c", FIND_MODULES, *modules]
        found = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True, cwd=os.sep)
    except (OSError, subprocess.SubprocessError):
        return None
    return tuple(found.stdout.split())


def ensure_comfyui(root: Path = ROOT, tools: Tools | None = None) -> ComfyInstall:
    """The ComfyUI of the checkout `root`: the user's own where there is one, else the cached one,
    of an archive where PIPEMESH_COMFYUI names a file, installed first where it is missing. Raises
    LaunchError.
    """
    tools = tools or Tools()
    own = find_own(root, tools.env)
    if own is None:
        return ensure_installed(root, tools)
    return ensure_from_archive(own, root, tools) if own.is_file() else own_comfyui(own, root, tools.env)


def is_installed(root: Path, env: Mapping[str, str]) -> bool:
    """True if there is a ComfyUI, so that `ensure_comfyui` installs nothing large."""
    own = find_own(root, env)
    return (own is not None and own.is_dir()) or install_of(root, env).is_complete


def find_own(root: Path, env: Mapping[str, str]) -> Path | None:
    """PIPEMESH_COMFYUI's folder or archive, or the ComfyUI in whose custom_nodes the checkout lies,
    or the link to it by which the shell came. Raises LaunchError where the folder holds none.
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
    """The user's ComfyUI with the first of its pythons that has torch and what the pack requires.
    Raises LaunchError with the next move.
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


def link_checkout(comfyui: Path, root: Path) -> str:
    """Makes `root` the pack custom_nodes/pipemesh of that ComfyUI; returns what was done. Raises
    LaunchError.
    """
    nodes = comfyui / "custom_nodes"
    link = nodes / NAME
    if root.parent == nodes.resolve() or (link.is_symlink() and link.resolve() == root):
        return f"{root} is in its custom_nodes already."
    done = f"{link} leads to {root}."
    if link.is_symlink():
        before = Path(os.readlink(link))
        done += f" It led to {before}, which {'is another checkout' if before.exists() else 'is gone'}."
        link.unlink()
    elif link.exists():
        raise LaunchError(
            f"{link} is in the way and is no link: move it elsewhere, then run this command again."
        )
    try:
        link.symlink_to(root, target_is_directory=True)
    except OSError as error:
        raise LaunchError(
            f"{link} cannot be made ({error.strerror or error}): link or copy {root} there by hand."
        ) from error
    return done


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m launcher host", description="Finds or installs the ComfyUI that the commands run on."
    )
    parser.add_argument(
        "--link", action="store_true", help="link this checkout into your own ComfyUI's custom_nodes too"
    )
    parser.add_argument(
        "--json", action="store_true", help="print where ComfyUI is as JSON, and link nothing"
    )
    parser.add_argument(
        "--from",
        dest="archive",
        type=Path,
        metavar="ARCHIVE",
        help="install the ComfyUI of this tar archive beside the first",
    )
    parser.add_argument("--sha256", default="", metavar="HEX", help="the digest that the archive must have")
    options = parser.parse_args(argv)
    if options.sha256 and not options.archive:
        parser.error("--sha256 is the digest of an archive: name it with --from")
    if options.archive:
        archive = options.archive.expanduser().absolute()
        host = ensure_from_archive(archive, ROOT, Tools(), options.sha256)
    else:
        host = ensure_comfyui()
    if options.json:
        print(host.to_json())
        return 0
    print(f"ComfyUI {host.version}  {host.comfyui}\nPython         {host.python}")
    if host.base or options.link:
        print(link_checkout(Path(host.comfyui), ROOT))
    else:
        print("Nothing was linked into your own ComfyUI; add --link to do so.")
    start = shlex.join([host.python, str(Path(host.comfyui) / "main.py")])
    print(f"\nStart it with (add --cpu where there is no GPU):\n  {start}")
    if others := other_installs(host):
        print(
            "\nOther ComfyUIs in this cache, for other requirements or of archives; delete those that no"
            " checkout needs:\n  " + "\n  ".join(others)
        )
    return 0


def other_installs(host: ComfyInstall) -> tuple[str, ...]:
    """The folders of the other ComfyUIs in this cache, without the one that `host` lies over."""
    if not host.base:
        return ()
    own = Path(host.base)
    others = (path for path in own.parent.iterdir() if not f"{own.name}-".startswith(f"{path.name}-"))
    return tuple(sorted(str(path) for path in others if path.is_dir()))
