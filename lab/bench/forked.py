"""Fork a bench's processes from one that has imported ComfyUI. That is for smallest cases: most of
their time would be the import, for each process of a bench and each rank of its pools.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ...pool.fork_server import ANSWER_S, ServerProcess, launch
from ...pool.rank_setup import KEEP_MEMORY
from ...pool.supervisor import Command

if TYPE_CHECKING:
    from ...launcher.comfyui.host_record import ComfyInstall

AT_HAND = "pipemesh.lab.bench.comfyui_at_hand"


@contextmanager
def imported_at_hand(host: ComfyInstall, module: str = AT_HAND) -> Iterator[ServerProcess]:
    """Yield a process that has imported ComfyUI, by the module, and forks others on demand."""
    env = {**os.environ, **KEEP_MEMORY, "OMP_NUM_THREADS": "1", "PIPEMESH_HOST": host.to_json()}
    server = launch(Command((sys.executable,), env, -1), (module,))
    try:
        yield server
    finally:
        server.end()


class Above:
    """A process that this one has not started, as much of ``subprocess.Popen`` as is needed."""

    def __init__(self, pid: int) -> None:
        self.pid = pid


def above(control: int, pid: int | None = None) -> ServerProcess:
    """Return the server that is asked over ``control``: the process ``pid``, or else the one that
    this process was forked from.
    """
    asked = socket.socket(fileno=control)
    asked.settimeout(ANSWER_S)
    process: Any = Above(pid or os.getppid())
    return ServerProcess(process, asked, {}, threading.Event())
