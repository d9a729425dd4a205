"""Commands that are forks of one process, which has imported what all of them need: ``forks.py
CONTROL_FD SCRIPT ARGUMENT...`` runs a script in such a fork, and ends as it does.

Standard library only.
"""

from __future__ import annotations

import json
import os
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
WORD = struct.Struct("<i")  # of a report: the fork's pid, then its exit status


@contextmanager
def forking(python: str, env: Mapping[str, str], *modules: str) -> Iterator[int]:
    """Yields the descriptor over which a process that has imported the modules is asked for forks
    (pool/fork_server_main.py).
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        script = str(ROOT / "pool" / "fork_server_main.py")
        server = subprocess.Popen(
            [python, script, str(theirs.fileno()), str(os.getpid()), *modules],
            env=env,
            cwd=ROOT,
            pass_fds=(theirs.fileno(),),
            stdin=subprocess.DEVNULL,
        )
        theirs.close()
        try:
            yield ours.fileno()
        finally:
            server.kill()
            server.wait()


def in_a_fork(control: int, script: str | Path, *arguments: str) -> list[str]:
    """Returns the command that runs a script in a fork. ``{fd}`` in an argument becomes the
    descriptor over which the fork asks for forks too.
    """
    return [sys.executable, __file__, str(control), str(script), *arguments]


def main() -> int:
    control = int(sys.argv[1])
    report, theirs = os.pipe()
    request = {"argv": sys.argv[2:], "set": {}, "unset": []}
    with socket.socket(fileno=control) as asked:
        socket.send_fds(asked, [json.dumps(request).encode()], [control, sys.stdout.fileno(), theirs])
    os.close(theirs)
    with os.fdopen(report, "rb") as words:
        said = words.read()  # until the fork has ended; it is killed where this process ends first
    if len(said) < 2 * WORD.size:
        sys.exit("The process that this one would be forked from has ended.")
    (status,) = WORD.unpack(said[WORD.size :])
    return abs(status)  # of a signal too


if __name__ == "__main__":
    sys.exit(main())
