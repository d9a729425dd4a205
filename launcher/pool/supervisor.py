"""The processes of one pool, looked after by one thread that lives as long as they do.

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
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

LOG_LINES = 12
LINE_CHARS = 2000
NEVER_STARTED, SERVER_ENDED = 256, 257  # exit statuses that no process has: not forked; killed with the process it was forked from
REAP_S = 1.0
log = logging.getLogger("pipemesh")


@dataclass(frozen=True)
class Command:
    """How to start one rank. ``{fd}`` and ``{parent}`` in ``argv`` are filled in."""

    argv: tuple[str, ...]
    env: dict[str, str]
    fd: int

    def line(self, fd: int | str, parent: int) -> list[str]:
        return [part.replace("{fd}", str(fd)).replace("{parent}", str(parent)) for part in self.argv]


def process_of_its_own(command: Command) -> subprocess.Popen:
    streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    argv = command.line(command.fd, os.getpid())
    return subprocess.Popen(argv, env=command.env, pass_fds=(command.fd,), bufsize=0, **streams)


class Supervisor:
    """Starts every rank, keeps their last log lines, reaps them. The thread ends when the last rank
    has.

    ``start`` gives a ``subprocess.Popen``, or what does as one.
    """

    def __init__(self, commands: Sequence[Command], start: Callable[[Command], Any] = process_of_its_own):
        self._commands = commands
        self._start = start
        self._tails = [deque(maxlen=LOG_LINES) for _ in commands]
        self._partial = ["" for _ in commands]
        self._processes: list[Any] = []
        self._started = threading.Event()
        self._start_error: OSError | None = None
        self._exits = [threading.Event() for _ in commands]
        self._thread = threading.Thread(target=self._run, name="pipemesh-supervisor", daemon=True)

    def start(self) -> None:
        """Returns when every rank's process exists or has been asked for. Raises OSError if one
        could not be started.
        """
        self._thread.start()
        self._started.wait()
        if self._start_error is not None:
            raise self._start_error

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes]

    def tail(self, rank: int) -> list[str]:
        return [*self._tails[rank], *filter(None, [shown(self._partial[rank])])]

    def exit_of(self, rank: int, wait_s: float) -> int | None:
        """The exit status (negative: a signal), or None if the rank still runs after ``wait_s``."""
        return self._processes[rank].returncode if self._exits[rank].wait(wait_s) else None

    def ended(self, rank: int) -> bool:
        return self._exits[rank].is_set()

    def stop(self, grace_s: float) -> None:
        """Waits ``grace_s`` for the ranks to leave by themselves, then kills those that have not,
        and reaps all.
        """
        for exit_event in self._exits[: len(self._processes)]:
            if not exit_event.wait(grace_s):
                grace_s = 0
        for process, exit_event in zip(self._processes, self._exits, strict=False):
            if not exit_event.is_set():
                process.kill()
        self._thread.join()

    def _run(self) -> None:
        selector = selectors.DefaultSelector()
        try:
            for rank, command in enumerate(self._commands):
                process = self._start(command)
                self._processes.append(process)
                selector.register(process.stdout, selectors.EVENT_READ, rank)
        except OSError as error:
            self._start_error = error
            for process in self._processes:
                process.kill()
        finally:
            self._started.set()
        while selector.get_map():
            readable = selector.select(REAP_S)
            for key, _ in readable:
                data = key.fileobj.read(1 << 16)
                if data:
                    self._log(key.data, data)
                else:
                    self._reap(selector, key)
            for key in list(selector.get_map().values()) if not readable else ():
                if self._processes[key.data].poll() is not None:  # a process it left behind holds the pipe open
                    self._reap(selector, key)
        selector.close()

    def _reap(self, selector: selectors.BaseSelector, key: selectors.SelectorKey) -> None:
        selector.unregister(key.fileobj)
        key.fileobj.close()
        self._processes[key.data].wait()
        self._exits[key.data].set()

    def _log(self, rank: int, data: bytes) -> None:
        *lines, partial = (self._partial[rank] + data.decode(errors="replace")).split("\n")
        self._partial[rank] = partial[-LINE_CHARS:]
        for line in map(shown, lines):
            self._tails[rank].append(line)
            log.debug("[rank %d] %s", rank, line)


def shown(line: str) -> str:
    """What a terminal shows of a line that a progress bar has rewritten."""
    return line.rstrip().rsplit("\r", 1)[-1][-LINE_CHARS:]
