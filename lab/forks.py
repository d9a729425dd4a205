"""One process that has imported ComfyUI, of which the tests' processes ask for their ranks.

Standard library only.
"""

from __future__ import annotations

import os
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).resolve().parents[1]
AT_HAND = "pipemesh.tests.kit.comfyui_at_hand"  # to import it takes six seconds


@contextmanager
def comfyui_shared(python: str, env: Mapping[str, str], module: str = AT_HAND) -> Iterator[str]:
    """Yields the path at which other processes get their way to one that has imported ComfyUI by
    the module (pool/fork_server_main.py): ``handed_out``.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with (
        ours,
        theirs,
        TemporaryDirectory(prefix="pipemesh-tests-") as folder,
        socket.socket(socket.AF_UNIX) as hand,
    ):
        path = os.path.join(folder, "at_hand")
        hand.bind(path)
        hand.listen()
        script = str(ROOT / "pool" / "fork_server_main.py")
        server = subprocess.Popen(
            [python, script, str(theirs.fileno()), str(os.getpid()), module],
            env=env,
            cwd=ROOT,
            pass_fds=(theirs.fileno(),),
            stdin=subprocess.DEVNULL,
        )
        theirs.close()
        threading.Thread(target=hand_out, args=(hand, lambda: (server.pid, ours)), daemon=True).start()
        try:
            yield path
        finally:
            server.kill()
            server.wait()
            hand.shutdown(socket.SHUT_RDWR)  # so hand_out returns


def hand_out(hand: socket.socket, way: Callable[[], tuple[int, socket.socket]]) -> None:
    """Tells who asks at ``hand`` the ``way`` to a process: its pid, and the socket over which it is
    asked for forks.
    """
    while True:
        try:
            asks, _address = hand.accept()
        except OSError:
            return
        with asks:
            pid, control = way()
            socket.send_fds(asks, [str(pid).encode()], [control.fileno()])


def handed_out(path: str) -> tuple[int, int]:
    """Returns the descriptor over which the process is asked for forks, and its pid."""
    with socket.socket(socket.AF_UNIX) as asks:
        asks.connect(path)
        pid, (control,), _flags, _address = socket.recv_fds(asks, 32, 1)
    return control, int(pid)
