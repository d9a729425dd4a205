"""Starts the processes of one pool's ranks, keeps their last log lines and reaps them, in one
thread that lasts as long as they do.

The kernel sends a process its parent-death signal when the *thread* that started it ends, so no
short-lived thread may start ranks.
"""

from __future__ import annotations

import logging
import os
import selectors
import subprocess
import threading
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol

LOG_LINES = 12
LINE_CHARS = 2000
# Exit statuses that no process has: not forked; killed with the process it was forked from
NEVER_STARTED, SERVER_ENDED = 256, 257
REAP_S = 1.0
# For a killed process to end: the system frees the memory that a GPU reaches before
KILLED_S = 30.0
log = logging.getLogger("pipemesh")


@dataclass(frozen=True)
class Command:
    """The command line and environment of one rank. ``line`` fills ``{fd}`` and ``{parent}`` in."""

    argv: tuple[str, ...]
    env: dict[str, str]
    fd: int

    def line(self, fd: int | str, parent: int) -> list[str]:
        return [part.replace("{fd}", str(fd)).replace("{parent}", str(parent)) for part in self.argv]


class Process(Protocol):
    """As much of ``subprocess.Popen`` as a supervisor needs."""

    @property
    def pid(self) -> int: ...
    @property
    def stdout(self) -> Any: ...
    @property
    def returncode(self) -> int | None: ...
    def poll(self) -> int | None: ...
    def wait(self) -> int: ...
    def kill(self) -> None: ...


def process_of_its_own(command: Command) -> Process:
    """Starts a rank as a program, which imports everything for itself. Raises OSError."""
    return subprocess.Popen(
        command.line(command.fd, os.getpid()),
        env=command.env,
        pass_fds=(command.fd,),
        bufsize=0,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


class Child:
    """One process, the last lines of its output, and whether it has ended."""

    def __init__(self, process: Process):
        self.process = process
        self.ended = threading.Event()  # and has been reaped
        self._lines: deque[str] = deque(maxlen=LOG_LINES)
        self._partial = ""

    def log(self, rank: int, data: bytes) -> None:
        *lines, partial = (self._partial + data.decode(errors="replace")).split("\n")
        self._partial = partial[-LINE_CHARS:]
        for line in map(shown, lines):
            self._lines.append(line)
            log.debug("[rank %d] %s", rank, line)

    def tail(self) -> list[str]:
        return [*self._lines, *filter(None, [shown(self._partial)])]


class Supervisor:
    """The processes of ranks, which ``launch`` starts. The thread ends with the last of them."""

    def __init__(self, launch: Callable[[Command], Process] = process_of_its_own):
        self.ended: list[int] = []  # ranks whose processes have ended, the first one first
        self._launch = launch
        self._children: dict[int, Child] = {}
        self._thread: threading.Thread | None = None

    def start(self, commands: Mapping[int, Command]) -> None:
        """Starts a process for each rank; returns when each exists or has been asked for. Raises
        OSError if one could not be started.
        """
        started: Future[None] = Future()
        self._thread = threading.Thread(
            target=self._run, args=(commands, started), name="pipemesh-supervisor", daemon=True
        )
        self._thread.start()
        started.result()

    @property
    def pids(self) -> dict[int, int]:
        """Process ids by rank; empty before the start."""
        return {rank: child.process.pid for rank, child in list(self._children.items())}

    def tail(self, rank: int) -> list[str]:
        return self._children[rank].tail()

    def exit_of(self, rank: int, wait_s: float) -> int | None:
        """Returns the exit status (negative: a signal), or None if the rank still runs after
        ``wait_s``.
        """
        child = self._children[rank]
        return child.process.returncode if child.ended.wait(wait_s) else None

    def stop(self, grace_s: float) -> None:
        """Waits ``grace_s`` seconds for the ranks to leave by themselves, kills the ranks that have
        not, and reaps all. Safe if they were never started. A process that the system does not let
        end is left behind, and the log says so.
        """
        for child in list(self._children.values()):
            if not child.ended.wait(grace_s):
                grace_s = 0
        self.kill()
        if self._thread is not None:
            self._thread.join(KILLED_S)
        for rank, child in list(self._children.items()):
            if not child.ended.is_set():
                log.error(
                    "[PipeMesh] Rank %d (process %d) was killed and has not ended in %g s, as its device or a"
                    " disk does not answer: restart ComfyUI, and the machine if that changes nothing.",
                    rank,
                    child.process.pid,
                    KILLED_S,
                )

    def kill(self) -> None:
        """Kills the ranks that run, and waits for none. May be called from any thread."""
        for child in list(self._children.values()):
            if not child.ended.is_set():
                child.process.kill()

    def _run(self, commands: Mapping[int, Command], started: Future[None]) -> None:
        selector = selectors.DefaultSelector()
        try:
            for rank, command in commands.items():
                child = self._children[rank] = Child(self._launch(command))
                selector.register(child.process.stdout, selectors.EVENT_READ, (rank, child))
        except Exception as error:  # noqa: BLE001 - raised where the start is waited for
            self.kill()
            started.set_exception(error)
        else:
            started.set_result(None)
        while selector.get_map():
            readable = selector.select(REAP_S)
            for key, _ in readable:
                rank, child = key.data
                data = child.process.stdout.read(1 << 16)
                if data:
                    child.log(rank, data)
                else:
                    self._reap(selector, *key.data)
            for key in list(selector.get_map().values()) if not readable else ():
                rank, child = key.data
                if child.process.poll() is not None:  # a process it left behind holds the pipe open
                    self._reap(selector, rank, child)
        selector.close()

    def _reap(self, selector: selectors.BaseSelector, rank: int, child: Child) -> None:
        output = child.process.stdout
        selector.unregister(output)
        output.close()
        child.process.wait()
        self.ended.append(rank)  # whoever waited for the end finds it there
        child.ended.set()


def shown(line: str) -> str:
    """Returns the line as a terminal shows it after a progress bar has rewritten it."""
    return line.rstrip().rsplit("\r", 1)[-1][-LINE_CHARS:]
