"""Installs a ComfyUI from an archive of its tree beside the first one, with the packages that its
own requirements pin.

Its environment is laid over the first one's: what both need, torch above all, is there once, so it
costs 0.4 GB and not 6. Standard library only.
"""

from __future__ import annotations

import hashlib
import os
import re
import sys
from pathlib import Path

from ..errors import LaunchError
from .install import (
    COMFYUI_VERSION,
    LAST_STEPS,
    TORCH_PINS,
    Install,
    Recipe,
    Tools,
    Worker,
    comfyui_version,
    ensure_complete,
    ensure_installed,
    pack_requirements,
)
from .unpack import unpack_folder

NEEDED_BYTES = 2 * 10**9
BLOCK = 1 << 20


def ensure_from_archive(archive: Path, root: Path, tools: Tools, sha256: str = "") -> Install:
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
    requirements = pack_requirements(root)

    recipe = Recipe(
        title=f"the ComfyUI of {archive}",
        costs=f"About 0.4 GB, once; the rest it shares with {first.base}.",
        needed_bytes=NEEDED_BYTES,
        steps=(
            (f"ComfyUI from {archive}", lambda worker: unpack_comfyui(worker, archive)),
            (f"a Python environment over {first.base}", lambda worker: make_venv_over(worker, first)),
            (
                "the packages that this ComfyUI pins otherwise",
                lambda worker: worker.install_packages(requirements),
            ),
            *LAST_STEPS,
        ),
        stamp=(f"sha256 {digest}", archive.name, *TORCH_PINS, *requirements),
    )
    return ensure_complete(Install(first.base.with_name(f"{first.base.name}-{digest[:12]}")), recipe, tools)


def sha256_of(file: Path) -> str:
    digest = hashlib.sha256()
    with file.open("rb") as source:
        while block := source.read(BLOCK):
            digest.update(block)
    return digest.hexdigest()


def unpack_comfyui(worker: Worker, archive: Path) -> None:
    partial = worker.install.scratch / "ComfyUI"
    unpack_folder(archive, "", partial)
    if not all((partial / name).is_file() for name in ("main.py", "requirements.txt", "comfyui_version.py")):
        raise LaunchError(
            f"{archive} holds no ComfyUI: take an archive of ComfyUI's tree, with its main.py in the one"
            " folder at its top."
        )
    version = comfyui_version(partial)
    if numbers(version) < numbers(COMFYUI_VERSION):
        raise LaunchError(
            f"{archive} holds ComfyUI {version or 'too old to tell'}: take {COMFYUI_VERSION} or newer."
        )
    os.replace(partial, worker.install.comfyui)


def make_venv_over(worker: Worker, first: Install) -> None:
    """Makes an environment that finds its own packages first and those of `first` then. Its pip is
    the first one's, which leaves alone what lies outside of the environment that it runs in.
    """
    venv = worker.install.base / "venv"
    worker.must(sys.executable, "-m", "venv", "--without-pip", str(venv))
    own = site_packages(venv)
    own.mkdir(parents=True, exist_ok=True)
    below = str(site_packages(first.base / "venv"))
    (own / "below.pth").write_text(f"import site; site.addsitedir({below!r})\n", encoding="utf-8")


def site_packages(venv: Path) -> Path:
    return venv / f"lib/python{sys.version_info.major}.{sys.version_info.minor}/site-packages"


def numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version)[:3])
