"""A headless ComfyUI of one's own: a process on a loopback port with its own base directory.

with ComfyServer(host) as server:
    result = server.run(graph)
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from .api import ComfyApi, ServerError

if TYPE_CHECKING:
    from ...launcher.comfyui.host_record import ComfyInstall

ROOT = Path(__file__).resolve().parents[2]
CUSTOM_NODES = {"pipemesh": ROOT, "pipemesh_demo": ROOT / "lab" / "demo_nodes"}
BASE_FOLDERS = ("custom_nodes", "input", "output", "user", "models/diffusion_models", "models/loras")
LOG_LINES = 30
ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


class ComfyServer(ComfyApi):
    """Starts ComfyUI on entering and stops it on leaving. `base` is kept when given, else a
    temporary folder that goes with the server.
    """

    def __init__(
        self,
        host: ComfyInstall,
        *,
        base: Path | None = None,
        log: Path | None = None,
        cpu: bool = True,
        env: Mapping[str, str] | None = None,
        args: Sequence[str] = (),
        custom_nodes: Mapping[str, Path] | None = None,
        api_nodes: bool = False,
        start_timeout_s: float = 120.0,
    ):
        self._host = host
        self._own_base = base is None
        self.base = base if base is not None else Path(tempfile.mkdtemp(prefix="pipemesh-comfyui-"))
        self.log = log if log is not None else self.base / "comfyui.log"
        self._args = [*(["--cpu"] if cpu else []), *([] if api_nodes else ["--disable-api-nodes"]), *args]
        self._env = {**os.environ, **(env or {})}
        self._custom_nodes = CUSTOM_NODES if custom_nodes is None else custom_nodes
        self._start_timeout_s = start_timeout_s
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def models(self) -> Path:
        return self.base / "models"

    @property
    def output(self) -> Path:
        return self.base / "output"

    @property
    def pid(self) -> int:
        return self._running.pid

    @property
    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            raise ServerError("ComfyUI is not running: use the server inside its `with` block")
        return self._process

    def __enter__(self) -> ComfyServer:
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        for folder in BASE_FOLDERS:
            (self.base / folder).mkdir(parents=True, exist_ok=True)
        for name, target in self._custom_nodes.items():
            link = self.base / "custom_nodes" / name
            if not link.is_symlink():
                link.symlink_to(target, target_is_directory=True)
        port = _free_port()
        self.address = f"127.0.0.1:{port}"
        options = {
            "--listen": "127.0.0.1",
            "--port": str(port),
            "--base-directory": str(self.base),
            "--database-url": "sqlite:///:memory:",
            "--preview-method": "latent2rgb",
        }
        command = [self._host.python, str(Path(self._host.comfyui) / "main.py"), *chain(*options.items())]
        command += ["--disable-auto-launch", *self._args]
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                command,
                cwd=self._host.comfyui,
                env=self._env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        self._await_ready()

    def stop(self) -> None:
        if self._process is not None:
            self._process.terminate()
            try:
                self._process.wait(10)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            self._process = None
        if self._own_base:
            shutil.rmtree(self.base, ignore_errors=True)

    def _await_ready(self) -> None:
        deadline = time.monotonic() + self._start_timeout_s
        while time.monotonic() < deadline:
            try:
                self.get("/system_stats")
                return
            except OSError:
                pass
            try:
                # The pause between two attempts ends early if the process does
                code = self._running.wait(0.02)
            except subprocess.TimeoutExpired:
                continue
            raise ServerError(
                f"ComfyUI exited with {code} while starting; its last lines:\n{self.log_tail()}"
            )
        raise ServerError(
            f"ComfyUI did not answer within {self._start_timeout_s:.0f} s of its start; its last"
            f" lines:\n{self.log_tail()}"
        )

    def log_tail(self) -> str:
        return "\n".join(self.log.read_text(encoding="utf-8", errors="replace").splitlines()[-LOG_LINES:])


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
