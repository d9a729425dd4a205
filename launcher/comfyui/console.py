"""Show the progress of a long command on the screen, and write its output into a log. Standard
library only.
"""

from __future__ import annotations

import os
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

BLOCK = 1 << 16


@dataclass
class Console:
    """Lines that stay, and one live line that is rewritten in place on a terminal (elsewhere it
    shows at most every 15 s).
    """

    write: Callable[[str], object]
    terminal: bool = False
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self.last_live_s = self.clock()
        self.wipe = "\r\x1b[K" if self.terminal else ""

    def say(self, line: str) -> None:
        self.write(f"{self.wipe}{line}\n")

    def live(self, line: str) -> None:
        if self.terminal:
            width = shutil.get_terminal_size().columns - 1
            self.write(f"{self.wipe}{line[:width]}")
        elif self.clock() - self.last_live_s >= 15:
            self.last_live_s = self.clock()
            self.write(f"{line[:200]}\n")


def stderr_console() -> Console:
    def write(text: str) -> None:
        print(text, end="", file=sys.stderr, flush=True)

    return Console(write, terminal=sys.stderr.isatty())


def run_logged(
    command: Sequence[str], log: Path, live: Callable[[str], None], env: Mapping[str, str], keep_open: int
) -> int:
    """Runs `command`, its output into `log`; `live` gets the last line whenever there is more of it
    and every second. Returns the exit status.

    The child keeps the descriptor `keep_open` (the install's lock), so that an orphan of a killed
    install still counts as installing.
    """
    with (
        log.open("ab", buffering=0) as out,
        subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=dict(env),
            pass_fds=(keep_open,),
        ) as process,
    ):
        assert process.stdout is not None
        out.write(f"$ {' '.join(command)}\n".encode())
        last = ""
        try:
            while True:
                if select.select([process.stdout], [], [], 1)[0]:
                    if not (block := os.read(process.stdout.fileno(), BLOCK)):
                        return process.wait()
                    out.write(block)
                    last = block.decode(errors="replace").strip().rpartition("\n")[2] or last
                live(last)
        finally:
            process.terminate()  # does nothing where it has ended
            process.wait()
