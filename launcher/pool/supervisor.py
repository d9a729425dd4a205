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
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

LOG_LINES = 12
LINE_CHARS = 2000
# Exit statuses that no process has: not forked; killed with the process it was forked from
NEVER_STARTED, SERVER_ENDED = 256, 257
REAP_S = 1.0
log = logging.getLogger("pipemesh")


@dataclass(frozen=True)
class Command:
    """The command line and environment of one rank. ``line`` fills ``{fd}`` and ``{parent}`` in."""

    argv: tuple[str, ...]
    env: dict[str, str]
    fd: int

    def line(self, fd: int | str, parent: int) -> list[str]:
        return [part.replace("{fd}", str(fd)).replace("{parent}", str(parent)) for part in self.argv]


class Output(Protocol):
    def fileno(self) -> int: ...
    def read(self, size: int, /) -> bytes | None: ...
    def close(self) -> None: ...


class Process(Protocol):
    """As much of ``subprocess.Popen`` as a supervisor needs."""

    @property
    def pid(self) -> int: ...
    @property
    def stdout(self) -> Output | None: ...
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


class Supervisor:
    """The processes that ``start`` makes of ``commands``, one per rank, numbered from 0 here. The
    thread ends when the last of them has.
    """

    def __init__(self, commands: Sequence[Command], start: Callable[[Command], Process] = process_of_its_own):
        self._commands = commands
        self._start = start
        self._tails: list[deque[str]] = [deque(maxlen=LOG_LINES) for _ in commands]
        self._partial = ["" for _ in commands]
        self._processes: list[Process] = []
        self._started = threading.Event()
        self._start_error: OSError | None = None
        self._exits = [threading.Event() for _ in commands]
        self._thread = threading.Thread(target=self._run, name="pipemesh-supervisor", daemon=True)

    def start(self) -> None:
        """Starts all; returns when each exists or has been asked for. Raises OSError if one could
        not be started.
        """
        self._thread.start()
        self._started.wait()
        if self._start_error is not None:
            raise self._start_error

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes]

    def tail(self, rank: int) -> list[str]:
        """Returns the last lines of the rank's log."""
        return [*self._tails[rank], *filter(None, [shown(self._partial[rank])])]

    def exit_of(self, rank: int, wait_s: float) -> int | None:
        """Returns the exit status (negative: a signal), or None if the rank still runs after
        ``wait_s``.
        """
        return self._processes[rank].returncode if self._exits[rank].wait(wait_s) else None

    def has_ended(self, rank: int) -> bool:
        return self._exits[rank].is_set()

    def stop(self, grace_s: float) -> None:
        """Waits ``grace_s`` for the ranks to leave by themselves, then kills those that have not,
        and reaps all.
        """
        for exit_event in self._exits[: len(self._processes)]:
            if not exit_event.wait(grace_s):
                grace_s = 0
        self.kill()
        self._thread.join()

    def kill(self) -> None:
        """Kills the ranks that run, and waits for none."""
        for process, exit_event in zip(self._processes, self._exits, strict=False):
            if not exit_event.is_set():
                process.kill()

    def _run(self) -> None:
        selector = selectors.DefaultSelector()
        try:
            for rank, command in enumerate(self._commands):
                process = self._start(command)
                self._processes.append(process)
                assert process.stdout is not None
                selector.register(process.stdout, selectors.EVENT_READ, (rank, process.stdout))
        except OSError as error:
            self._start_error = error
            for process in self._processes:
                process.kill()
        finally:
            self._started.set()
        while selector.get_map():
            readable = selector.select(REAP_S)
            for key, _ in readable:
                rank, output = key.data
                data = output.read(1 << 16)
                if data:
                    self._log(rank, data)
                else:
                    self._reap(selector, rank, output)
            for key in list(selector.get_map().values()) if not readable else ():
                rank, output = key.data
                if self._processes[rank].poll() is not None:  # a process it left behind holds the pipe open
                    self._reap(selector, rank, output)
        selector.close()

    def _reap(self, selector: selectors.BaseSelector, rank: int, output: Output) -> None:
        selector.unregister(output)
        output.close()
        self._processes[rank].wait()
        self._exits[rank].set()

    def _log(self, rank: int, data: bytes) -> None:
        *lines, partial = (self._partial[rank] + data.decode(errors="replace")).split("\n")
        self._partial[rank] = partial[-LINE_CHARS:]
        for line in map(shown, lines):
            self._tails[rank].append(line)
            log.debug("[rank %d] %s", rank, line)


def shown(line: str) -> str:
    """Returns the line as a terminal shows it after a progress bar has rewritten it."""
    return line.rstrip().rsplit("\r", 1)[-1][-LINE_CHARS:]
