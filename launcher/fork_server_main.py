"""The script a fork server starts as: ``fork_server_main.py CONTROL_FD PARENT_PID MODULE...``. Imports once, then every rank is a fork.

One thread, no event loop: nothing else may run when it forks.
"""

import contextlib
import gc
import json
import os
import runpy
import select
import signal
import socket
import struct
import sys
import traceback
from importlib import import_module

WORD = struct.Struct("<i")  # of a report: a rank's pid when it is forked, its exit status when it has ended
REQUEST_BYTES = 1 << 16
PARENT_POLL_S = 1.0


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the whole terminal group: the UI decides when ranks end
    for name in sys.argv[3:]:
        with contextlib.suppress(ImportError):
            import_module(name)
    gc.freeze()  # a collection in a rank would touch, and so copy, every page that it shares with this process
    Server(socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2])).serve()
    os._exit(0)  # the kernel ends the ranks that are left: this is their parent


class Server:
    def __init__(self, control: socket.socket, parent: int):
        self._control = control
        self._parent = parent
        self._reports: dict[int, int] = {}  # pid -> the descriptor that takes its exit status
        self._child_ended, self._wake = os.pipe()
        os.set_blocking(self._wake, False)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        signal.set_wakeup_fd(self._wake, warn_on_full_buffer=False)

    def serve(self) -> None:
        """Until the UI closes its end, or is gone while another process of its holds that end open."""
        while os.getppid() == self._parent:
            readable, _, _ = select.select([self._control, self._child_ended], [], [], PARENT_POLL_S)
            if self._child_ended in readable:
                os.read(self._child_ended, 1 << 12)
                self._reap()
            if self._control in readable:
                data, fds, _flags, _address = socket.recv_fds(self._control, REQUEST_BYTES, 3)
                if not data:
                    return
                self._fork(json.loads(data), *fds)

    def _reap(self) -> None:
        for pid in list(self._reports):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                self._tell(pid, os.waitstatus_to_exitcode(status))
                os.close(self._reports.pop(pid))

    def _fork(self, request: dict, channel: int, output: int, report: int) -> None:
        pid = os.fork()
        if not pid:
            self._control.close()
            for fd in (self._child_ended, self._wake, report, *self._reports.values()):
                os.close(fd)
            become(request, channel, output)
        self._reports[pid] = report
        os.close(channel)
        os.close(output)
        self._tell(pid, pid)

    def _tell(self, pid: int, word: int) -> None:
        """A rank that nobody waits for any more is ended."""
        try:
            os.write(self._reports[pid], WORD.pack(word))
        except BrokenPipeError:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def become(request: dict, channel: int, output: int) -> None:
    """The rest of a rank's life: its script, as if Python had just been started with it. Never returns."""
    status = 1
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for stream in (1, 2):
            os.dup2(output, stream)
        os.close(output)
        sys.stdout.reconfigure(line_buffering=True)
        os.environ.update(request["set"])
        for name in request["unset"]:
            del os.environ[name]
        sys.argv = [part.replace("{fd}", str(channel)) for part in request["argv"]]
        sys.path[0] = os.path.dirname(sys.argv[0])
        runpy.run_path(sys.argv[0], run_name="__main__")
        status = 0
    except:  # noqa: E722 - as at the top of any script: whatever ends it is told of
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    main()
