"""Ranks as forks of a process that has imported torch already: the second pool of a ComfyUI starts
in a fraction of the first one's time.

Python's own ``multiprocessing.forkserver`` is not used: it is one for the whole process, runs
ComfyUI's main.py again in every child, listens on a socket in a folder and speaks pickle.
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
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from .fork_server_main import REQUEST_BYTES, WORD
from .supervisor import NEVER_STARTED, Command

# Most of what ComfyUI's modules take to import. None of its own: they open the GPU, and a process
# that has opened one cannot be forked.
PRELOADED = ("torch", "torch._dynamo", "torchvision", "transformers")
GPU = "CUDA_VISIBLE_DEVICES"  # each rank has its own, and a server none
LISTEN_MS = 200


@dataclass(frozen=True)
class Server:
    process: subprocess.Popen
    control: socket.socket
    env: dict[str, str]
    ranks: list[Forked] = field(default_factory=list)

    def end(self) -> None:
        """And with it the ranks that are left."""
        self.control.close()
        self.process.kill()
        self.process.wait()


class ForkServer:
    """Starts ranks; any thread may ask. The process they are forked from is started when first
    needed and kept until ``close``.

    Ranks that differ in ``fixed_at_start``, variables that cannot be changed in a process that
    runs, are forked from another; one that has no ranks then is ended.
    """

    def __init__(self, fixed_at_start: Sequence[str] = (), preloaded: Sequence[str] = PRELOADED) -> None:
        self._preloaded = preloaded
        self._fixed_at_start = fixed_at_start
        self._servers: dict[tuple, Server] = {}
        self._lock = threading.Lock()
        weakref.finalize(self, end, self._servers)

    def start(self, command: Command) -> Forked:
        """Returns at once: the server may still be importing. ``argv`` of the command is a Python,
        a script and its arguments.

        Raises OSError.
        """
        key = command.argv[0], *map(command.env.get, self._fixed_at_start)
        with self._lock:
            for other, server in list(self._servers.items()):
                unused = other != key and all(rank.poll() is not None for rank in server.ranks)
                if unused or server.process.poll() is not None:  # or somebody ended it
                    self._servers.pop(other).end()
            if key not in self._servers:
                self._servers[key] = self._launch(command)
            server = self._servers[key]
            request = {
                "argv": command.line("{fd}", server.process.pid)[1:],
                "set": dict(command.env.items() - server.env.items()),
                "unset": [*(server.env.keys() - command.env.keys())],
            }
            forked = ask(server.control, request, command.fd)
            server.ranks[:] = [rank for rank in server.ranks if rank.returncode is None] + [forked]
            return forked

    def _launch(self, command: Command) -> Server:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, REQUEST_BYTES // 4)  # the system doubles it; what is longer is refused here
        script = str(Path(__file__).with_name("fork_server_main.py"))
        argv = [command.argv[0], script, str(theirs.fileno()), str(os.getpid()), *self._preloaded]
        env = {name: value for name, value in command.env.items() if name != GPU}
        with theirs:
            try:
                process = subprocess.Popen(argv, env=env, pass_fds=(theirs.fileno(),), stdin=subprocess.DEVNULL)
            except OSError:
                ours.close()
                raise
        return Server(process, ours, env)

    @property
    def pids(self) -> list[int]:
        return [server.process.pid for server in self._servers.values()]

    def close(self) -> None:
        """Ends the processes, and with them the ranks that are left."""
        with self._lock:
            end(self._servers)


def end(servers: dict[tuple, Server]) -> None:
    for server in servers.values():
        server.end()
    servers.clear()


def ask(control: socket.socket, request: dict, channel: int) -> Forked:
    output, their_output = socket.socketpair()
    report, their_report = os.pipe()
    forked = Forked(output, report)
    try:
        with suppress(BrokenPipeError, ConnectionResetError):  # the server has just ended: the rank is one that was never started
            socket.send_fds(control, [json.dumps(request).encode()], [channel, their_output.fileno(), their_report])
    except OSError:
        forked.forget()
        raise
    finally:
        their_output.close()
        os.close(their_report)
    return forked


class Forked:
    """A rank that a fork server was asked for: as much of ``subprocess.Popen`` as its supervisor
    needs.
    """

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
            self._listen(wait=True)
        return self._pid

    def poll(self) -> int | None:
        self._listen(wait=False)
        return self.returncode

    def wait(self) -> int:
        """The exit status (negative: a signal). A rank whose server died was killed with it, or was
        NEVER_STARTED.
        """
        while self.returncode is None:
            self._listen(wait=True)
        self.forget()
        return self.returncode

    def kill(self) -> None:
        """One that has not been forked yet is ended by its server, which finds that nobody waits
        for it.
        """
        self._listen(wait=False)
        with self._lock, suppress(OSError):  # it has just been reaped
            if self._pid and self.returncode is None:
                os.kill(self._pid, signal.SIGKILL)
            elif self.returncode is None:
                self.returncode = -signal.SIGKILL
                self._output.shutdown(socket.SHUT_RD)

    def forget(self) -> None:
        with self._lock:
            self.stdout.close()
            self._output.close()
            if self._report >= 0:
                os.close(self._report)
                self._report = -1

    def _listen(self, wait: bool) -> None:
        """Takes what the server has to say of this rank, or waits a moment for it. No more words:
        the server is gone.
        """
        poller = select.poll()
        with self._lock:
            if self.returncode is not None:
                return
            poller.register(self._report, select.POLLIN)
        if poller.poll(LISTEN_MS if wait else 0):  # another thread may have taken the word by then
            with self._lock:
                while self.returncode is None and poller.poll(0):
                    word = os.read(self._report, WORD.size)
                    if not word:
                        self.returncode = -signal.SIGKILL if self._pid else NEVER_STARTED
                    elif self._pid:
                        (self.returncode,) = WORD.unpack(word)
                    else:
                        (self._pid,) = WORD.unpack(word)
