"""Installs a ComfyUI from an archive of its tree beside the first one, with the packages that its
own requirements pin.

Its environment is laid over the first one's: what both need, torch above all, is there once, so it
costs 0.4 GB and not 6. Standard library only.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from ..errors import LaunchError
from .host_record import ComfyInstall
from .install import (
    COMFYUI_VERSION,
    LAST_STEPS,
    Install,
    Recipe,
    Tools,
    Worker,
    comfyui_version,
    ensure_complete,
    ensure_installed,
    is_too_old,
    pack_requirements,
)
from .registry import sha256_of
from .unpack import unpack_folder

NEEDED_BYTES = 2 * 10**9


def ensure_from_archive(archive: Path, root: Path, tools: Tools, sha256: str = "") -> ComfyInstall:
    """The install of that very archive (its content, not its name) for the checkout `root`, made
    first where it is missing. Raises LaunchError, also where the archive has not the digest
    `sha256`, if that is given.
    """
    try:
        digest = sha256_of(archive)
    except OSError as error:
        raise LaunchError(
            f"{archive} cannot be read ({error.strerror or error}): name an archive of ComfyUI's tree."
        ) from error
    if sha256 and digest != sha256.lower():
        raise LaunchError(
            f"{archive} has the sha256 {digest}, not {sha256}: download it again, or ask whoever gave you the"
            " digest."
        )
    first = ensure_installed(root, tools)
    recipe = Recipe(
        title=f"the ComfyUI of {archive}",
        costs=f"About 0.4 GB, once; the rest it shares with {first.base}.",
        needed_bytes=NEEDED_BYTES,
        requirements=pack_requirements(root),
        steps=(
            (f"ComfyUI from {archive}", lambda worker: unpack_comfyui(worker, archive)),
            (f"a Python environment over {first.base}", lambda worker: make_venv_over(worker, first)),
            ("the packages that this ComfyUI pins otherwise", Worker.install_packages),
            *LAST_STEPS,
        ),
    )
    return ensure_complete(Install(Path(f"{first.base}-{digest[:12]}")), recipe, tools)


def unpack_comfyui(worker: Worker, archive: Path) -> None:
    partial = worker.install.scratch / "ComfyUI"
    unpack_folder(archive, "", partial)
    if not all((partial / name).is_file() for name in ("main.py", "requirements.txt", "comfyui_version.py")):
        raise LaunchError(
            f"{archive} holds no ComfyUI: take an archive of ComfyUI's tree, with its main.py in the one"
            " folder at its top."
        )
    version = comfyui_version(partial)
    if is_too_old(version):
        raise LaunchError(
            f"{archive} holds ComfyUI {version or 'too old to tell'}: take {COMFYUI_VERSION} or newer."
        )
    os.replace(partial, worker.install.comfyui)


def make_venv_over(worker: Worker, first: ComfyInstall) -> None:
    """Makes an environment that finds its own packages first and those of `first` then. Its pip is
    the first one's, which leaves alone what lies outside of the environment that it runs in.
    """
    venv = worker.install.base / "venv"
    worker.must(sys.executable, "-m", "venv", "--without-pip", str(venv))
    own = site_packages(venv)
    own.mkdir(parents=True, exist_ok=True)
    below = str(site_packages(Path(first.base) / "venv"))
    (own / "below.pth").write_text(f"import site; site.addsitedir({below!r})\n", encoding="utf-8")


def site_packages(venv: Path) -> Path:
    return venv / f"lib/python{sys.version_info.major}.{sys.version_info.minor}/site-packages"
