"""Ranks as forks of a process that has imported torch already: the second pool of a ComfyUI starts in a fraction of the first one's time.

Python's own ``multiprocessing.forkserver`` is not used: it is one for the whole process, runs ComfyUI's main.py again in every child,
listens on a socket in a folder and speaks pickle.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from .fork_server_main import WORD
from .supervisor import Command

# Most of what ComfyUI's modules take to import. None of its own: they open the GPU, and a process that has opened one cannot be forked.
PRELOADED = ("torch", "torch._dynamo", "torchvision", "transformers")
GPU = "CUDA_VISIBLE_DEVICES"  # each rank has its own, and a server none
CLOSE_S = 5.0


@dataclass(frozen=True)
class Server:
    process: subprocess.Popen
    control: socket.socket
    env: dict[str, str]


class ForkServer:
    """Starts ranks; any thread may ask. Processes are started when first needed and kept until ``close``.

    There is one for each setting of ``fixed_at_start``: variables that cannot be changed in a process that runs.
    """

    def __init__(self, fixed_at_start: Sequence[str] = (), preloaded: Sequence[str] = PRELOADED) -> None:
        self._preloaded = preloaded
        self._fixed_at_start = fixed_at_start
        self._servers: dict[tuple, Server] = {}
        self._lock = threading.Lock()
        weakref.finalize(self, end, self._servers)

    def start(self, command: Command) -> Forked:
        """Returns at once: the server may still be importing. ``argv`` of the command is a Python, a script and its arguments.

        Raises OSError.
        """
        key = command.argv[0], *map(command.env.get, self._fixed_at_start)
        with self._lock:
            if key in self._servers and self._servers[key].process.poll() is not None:  # somebody ended it
                self._servers.pop(key).control.close()
            if key not in self._servers:
                self._servers[key] = self._launch(command)
            server = self._servers[key]
            request = {
                "argv": command.line("{fd}", server.process.pid)[1:],
                "set": dict(command.env.items() - server.env.items()),
                "unset": [*(server.env.keys() - command.env.keys())],
            }
            return ask(server.control, request, command.fd)

    def _launch(self, command: Command) -> Server:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        script = str(Path(__file__).with_name("fork_server_main.py"))
        argv = [command.argv[0], script, str(theirs.fileno()), str(os.getpid()), *self._preloaded]
        env = {name: value for name, value in command.env.items() if name != GPU}
        with theirs, closed_on_error(ours):
            return Server(subprocess.Popen(argv, env=env, pass_fds=(theirs.fileno(),), stdin=subprocess.DEVNULL), ours, env)

    @property
    def pids(self) -> list[int]:
        return [server.process.pid for server in self._servers.values()]

    def close(self) -> None:
        """Ends the servers, and with them the ranks that are left."""
        with self._lock:
            end(self._servers)


def end(servers: dict[tuple, Server]) -> None:
    for server in servers.values():
        server.control.close()
        try:
            server.process.wait(CLOSE_S)
        except subprocess.TimeoutExpired:  # still importing
            server.process.kill()
            server.process.wait()
    servers.clear()


def ask(control: socket.socket, request: dict, channel: int) -> Forked:
    output, their_output = socket.socketpair()
    report, their_report = os.pipe()
    forked = Forked(output, report)
    try:
        socket.send_fds(control, [json.dumps(request).encode()], [channel, their_output.fileno(), their_report])
    except OSError:
        forked.forget()
        raise
    finally:
        their_output.close()
        os.close(their_report)
    return forked


@contextmanager
def closed_on_error(sock: socket.socket) -> Iterator[None]:
    try:
        yield
    except BaseException:
        sock.close()
        raise


class Forked:
    """A rank that a fork server was asked for: as much of ``subprocess.Popen`` as its supervisor needs."""

    def __init__(self, output: socket.socket, report: int):
        self.stdout = output.makefile("rb", buffering=0)
        self.returncode: int | None = None
        self._output = output
        self._report = report
        self._pid = 0
        self._lock = threading.Lock()

    @property
    def pid(self) -> int:
        """Waits until the rank has been forked; 0 if it never was."""
        while not self._pid and self.returncode is None:
            self._listen(None)
        return self._pid

    def poll(self) -> int | None:
        self._listen(0)
        return self.returncode

    def wait(self) -> int:
        """The exit status (negative: a signal). A rank whose server died was killed with it, or never was."""
        while self.returncode is None:
            self._listen(None)
        self.forget()
        return self.returncode

    def kill(self) -> None:
        """One that has not been forked yet is ended by its server, which finds that nobody waits for it."""
        if self.poll() is None and self._pid:
            os.kill(self._pid, signal.SIGKILL)
        elif self.returncode is None:
            self.returncode = -signal.SIGKILL
            self._output.shutdown(socket.SHUT_RD)

    def forget(self) -> None:
        self.stdout.close()
        self._output.close()
        if self._report >= 0:
            os.close(self._report)
            self._report = -1

    def _listen(self, wait_s: float | None) -> None:
        """Takes what the server has to say of this rank, if it says it within ``wait_s``. No more words: the server is gone."""
        if self.returncode is None and select.select([self._report], [], [], wait_s)[0]:
            with self._lock:
                while self.returncode is None and select.select([self._report], [], [], 0)[0]:
                    word = os.read(self._report, WORD.size)
                    if not word:
                        self.returncode = -signal.SIGKILL
                    elif self._pid:
                        (self.returncode,) = WORD.unpack(word)
                    else:
                        (self._pid,) = WORD.unpack(word)
