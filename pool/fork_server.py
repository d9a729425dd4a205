"""Fork ranks from a process that has imported torch already: the second pool of a ComfyUI starts
in a fraction of the first one's time.

Python's own ``multiprocessing.forkserver`` is not used: it is one for the whole process, runs
ComfyUI's main.py again in every child, listens on a socket in a folder and speaks pickle.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import select
import signal
import socket
import subprocess
import threading
import time
import weakref
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path

from .devices import CUDA_VARIABLE, HIP_VARIABLE
from .fork_server_main import REQUEST_BYTES, WORD
from .supervisor import NEVER_STARTED, SERVER_ENDED, Command

# Most of what ComfyUI's modules take to import, and a rank's of the pack. None of ComfyUI's: they
# open the GPU, and a process that has opened one cannot be forked.
LIBRARIES = ("torch", "torch._dynamo", "torchvision", "transformers")
OWN = ("pipemesh.parallel_runtime.worker.rank_loop", "pipemesh.parallel_runtime.attention.trial")
PRELOADED = (*LIBRARIES, *OWN)
GPUS = (CUDA_VARIABLE, HIP_VARIABLE)  # each rank has its own, and a server none
LISTEN_MS = 200
ANSWER_S = 30.0  # a server that has imported answers within milliseconds; beside much else, in seconds
IMPORT_S = 240.0  # and one that imports, from a slow disk, within that
ENDED = ("Z", "X", "")
log = logging.getLogger("pipemesh")


class ForkServer:
    """Starts ranks as forks of one process; any thread may ask. That process is started when it is
    first needed and kept until ``close``; one that does not answer is killed, with its ranks, and
    replaced.

    Ranks whose ``fixed_at_start`` variables differ, which cannot be changed in a running process,
    are forked from another server process; the first one is ended if it has no ranks.
    """

    def __init__(self, fixed_at_start: Sequence[str] = (), preloaded: Sequence[str] = PRELOADED) -> None:
        self._preloaded = preloaded
        self._fixed_at_start = fixed_at_start
        self._servers: dict[tuple, ServerProcess] = {}
        self._lock = threading.Lock()
        weakref.finalize(self, end, self._servers)

    def start(self, command: Command) -> Forked:
        """Forks a rank. Returns at once: the server may still be importing. ``argv`` of the
        command is a Python, a script and its arguments.

        Raises OSError.
        """
        key = command.argv[0], *map(command.env.get, self._fixed_at_start)
        with self._lock:
            for other, server in list(self._servers.items()):
                is_over = server.process.poll() is not None or server.imports_for_ever
                if is_over or (other != key and server.has_no_ranks):
                    self._servers.pop(other).end()
            try:
                return self._server(key, command).fork(command)
            except (BrokenPipeError, ConnectionResetError, TimeoutError):  # it was killed a moment ago
                self._servers.pop(key).end()
                return self._server(key, command).fork(command)

    def _server(self, key: tuple, command: Command) -> ServerProcess:
        if key not in self._servers:
            self._servers[key] = launch(command, self._preloaded)
        return self._servers[key]

    @property
    def pids(self) -> list[int]:
        return [server.process.pid for server in self._servers.values()]

    def close(self) -> None:
        """Ends the processes, and with them the ranks that are left."""
        with self._lock:
            end(self._servers)


def end(servers: dict[tuple, ServerProcess]) -> None:
    for server in servers.values():
        server.end()
    servers.clear()


def launch(command: Command, preloaded: Sequence[str]) -> ServerProcess:
    """Starts a server for ranks such as this one. Raises OSError."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    # The system doubles it; what is longer is refused here
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, REQUEST_BYTES // 4)
    ours.settimeout(ANSWER_S)
    script = str(Path(__file__).with_name("fork_server_main.py"))
    argv = [command.argv[0], script, str(theirs.fileno()), str(os.getpid()), *preloaded]
    env = {name: value for name, value in command.env.items() if name not in GPUS}
    started: Future[subprocess.Popen] = Future()
    expected = threading.Event()
    keeper = threading.Thread(
        target=keep,
        args=(argv, env, theirs.fileno(), started, expected),
        name="pipemesh-fork-server",
        daemon=True,
    )
    with theirs:
        try:
            try:
                keeper.start()
            except RuntimeError as error:  # no thread is left
                raise OSError(errno.EAGAIN, str(error)) from error
            return ServerProcess(started.result(), ours, env, expected)
        except BaseException:
            ours.close()
            raise


def keep(
    argv: list[str],
    env: dict[str, str],
    control: int,
    started: Future[subprocess.Popen],
    expected: threading.Event,
) -> None:
    """Starts a process and waits until it ends, in a thread of its own. The kernel ends a process
    with the thread that started it, so this thread lasts as long. An end that is not ``expected``
    is told in the log.
    """
    try:
        process = subprocess.Popen(argv, env=env, pass_fds=(control,), stdin=subprocess.DEVNULL)
    except BaseException as error:  # noqa: BLE001 - the thread that waits raises it
        started.set_exception(error)
        return
    started.set_result(process)
    status = process.wait()
    if not expected.is_set():
        how = f"was killed by signal {-status}" if status < 0 else f"ended with exit status {status}"
        log.warning("[PipeMesh] the process that workers are forked from %s; the next pool has another", how)


class ServerProcess:
    """A process that ranks are forked from, and its ranks that have not ended.

    ``env`` is the environment that it was started with. ``expected`` is set before it is ended on
    purpose.
    """

    def __init__(
        self,
        process: subprocess.Popen,
        control: socket.socket,
        env: dict[str, str],
        expected: threading.Event,
    ):
        self.process = process
        self.has_forked = False
        self._launched_s = time.monotonic()
        self.control = control
        self._env = env
        self._expected = expected
        self._ranks: list[Forked] = []

    @property
    def imports_for_ever(self) -> bool:
        """Whether it has forked no rank since it was launched, for ``IMPORT_S``."""
        return not self.has_forked and time.monotonic() - self._launched_s > IMPORT_S

    @property
    def has_no_ranks(self) -> bool:
        return all(rank.poll() is not None for rank in self._ranks)

    def fork(self, command: Command) -> Forked:
        """Asks for a rank, without waiting for it. Raises OSError if the process has ended, the
        request is too long, or descriptors are missing.
        """
        request = {
            "argv": command.line("{fd}", self.process.pid)[1:],
            "set": dict(command.env.items() - self._env.items()),
            "unset": [*(self._env.keys() - command.env.keys())],
        }
        output, their_output = socket.socketpair()
        report, their_report = os.pipe()
        forked = Forked(self, output, report)
        try:
            socket.send_fds(
                self.control,
                [json.dumps(request).encode()],
                [command.fd, their_output.fileno(), their_report],
            )
        except OSError:
            forked.forget()
            raise
        finally:
            their_output.close()
            os.close(their_report)
        self._ranks[:] = [rank for rank in self._ranks if rank.returncode is None] + [forked]
        return forked

    def end_if_it_does_not_answer(self, owing_since: float) -> None:
        """Kills the process if it has owed a word about a rank for ``ANSWER_S``, or ``IMPORT_S``
        while it imports. Its ranks and their reports end with it, so nobody waits any longer.
        """
        limit_s = ANSWER_S if self.has_forked else IMPORT_S
        if time.monotonic() - owing_since > limit_s and not self._expected.is_set():
            log.warning(
                "[PipeMesh] the process that workers are forked from does not answer and is ended; the"
                " next pool has another"
            )
            self._expected.set()
            self.process.kill()

    def end(self) -> None:
        """Ends it, and the ranks that are left."""
        self._expected.set()
        self.control.close()
        self.process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):  # its keeper waits on
            self.process.wait(ANSWER_S)


def state_of(pid: int) -> str:
    """Returns the state of a process as the kernel's letter: Z ended and not yet waited for. Empty
    if there is none.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    return stat.rpartition(")")[2].split()[0]


class Forked:
    """A rank that a fork server was asked for: as much of ``subprocess.Popen`` as its supervisor
    needs.
    """

    def __init__(self, server: ServerProcess, output: socket.socket, report: int):
        self.stdout = output.makefile("rb", buffering=0)
        self.returncode: int | None = None
        self._server = server
        self._output = output
        self._report = report
        self._pid = 0
        self._owing_since: float | None = time.monotonic()  # the server a word about this rank
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
        """Returns the exit status (negative: a signal), NEVER_STARTED or SERVER_ENDED."""
        while self.returncode is None:
            self._listen(wait=True)
        self.forget()
        return self.returncode

    def kill(self) -> None:
        """Kills the rank. One that has not been forked yet is ended by its server, which finds that
        nobody waits for it.
        """
        self._listen(wait=False)
        with self._lock, contextlib.suppress(OSError):  # it has just been reaped
            if self._pid and self.returncode is None:
                os.kill(self._pid, signal.SIGKILL)
            elif self.returncode is None:
                self.returncode = -signal.SIGKILL
                self._output.shutdown(socket.SHUT_RD)

    def forget(self) -> None:
        """Closes this process's descriptors of the rank."""
        with self._lock:
            self.stdout.close()
            self._output.close()
            if self._report >= 0:
                os.close(self._report)
                self._report = -1

    def _listen(self, wait: bool) -> None:
        """Takes the server's report on this rank, or waits a moment for it. The end of the report
        says that a server that did not answer was ended.
        """
        poller = select.poll()
        with self._lock:
            if self.returncode is not None:
                return
            poller.register(self._report, select.POLLIN)
        if poller.poll(LISTEN_MS if wait else 0):  # another thread may have taken the word by then
            with self._lock:
                while self.returncode is None and poller.poll(0):
                    self._take(os.read(self._report, WORD.size))
        with self._lock:
            if self.returncode is None:
                self._check_server()

    def _take(self, word: bytes) -> None:
        """The rank's pid first, its exit status then; nothing more: the server has ended."""
        if not word:
            self.returncode = SERVER_ENDED if self._pid else NEVER_STARTED
        elif self._pid:
            (self.returncode,) = WORD.unpack(word)
        else:
            (self._pid,) = WORD.unpack(word)
            self._server.has_forked, self._owing_since = True, None

    def _check_server(self) -> None:
        """Ends the server if its report on this rank is long overdue."""
        if self._pid and self._owing_since is None and state_of(self._pid) in ENDED:
            self._owing_since = time.monotonic()
        if self._owing_since is not None:
            self._server.end_if_it_does_not_answer(self._owing_since)
