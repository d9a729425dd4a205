"""Show the progress of a long command on the screen, and write its output into a log. Standard
library only.
"""

from __future__ import annotations

import queue
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path


class Console:
    """Lines that stay, and one live line that is rewritten in place on a terminal (elsewhere it
    shows at most every 15 s).
    """

    def __init__(
        self,
        write: Callable[[str], object],
        *,
        terminal: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.write = write
        self.terminal = terminal
        self.clock = clock
        self.last_live_s = clock()

    def say(self, line: str) -> None:
        self.write(f"{self._wipe()}{line}\n")

    def live(self, line: str) -> None:
        if self.terminal:
            width = shutil.get_terminal_size().columns - 1
            self.write(f"{self._wipe()}{line[:width]}")
        elif self.clock() - self.last_live_s >= 15:
            self.last_live_s = self.clock()
            self.write(f"{line[:200]}\n")

    def _wipe(self) -> str:
        return "\r\x1b[K" if self.terminal else ""


def stderr_console() -> Console:
    def write(text: str) -> None:
        sys.stderr.write(text)
        sys.stderr.flush()

    return Console(write, terminal=sys.stderr.isatty())


def run_logged(
    command: Sequence[str], log: Path, live: Callable[[str], None], env: Mapping[str, str], keep_open: int
) -> int:
    """Runs `command`, its output into `log`; `live` gets the last line at every line and every
    second. Returns the exit status.

    The child keeps the descriptor `keep_open` (the install's lock), so that an orphan of a killed
    install still counts as installing.
    """
    lines: queue.Queue[str | None] = queue.Queue()
    with log.open("a", encoding="utf-8", buffering=1) as out:
        out.write(f"$ {' '.join(command)}\n")
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=dict(env),
            encoding="utf-8",
            errors="replace",
            pass_fds=(keep_open,),
        )
        reader = threading.Thread(target=_read_lines, args=(process, lines), daemon=True)
        reader.start()
        try:
            last = ""
            while True:
                try:
                    line = lines.get(timeout=1)
                except queue.Empty:
                    live(last)
                    continue
                if line is None:
                    return process.wait()
                out.write(line)
                last = line.strip()
                live(last)
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait()
            reader.join()


def _read_lines(process: subprocess.Popen[str], lines: queue.Queue[str | None]) -> None:
    assert process.stdout is not None
    with process.stdout:
        for line in process.stdout:
            lines.put(line)
    lines.put(None)
