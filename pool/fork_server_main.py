"""The script of a fork server: ``fork_server_main.py CONTROL_FD PARENT_PID MODULE...``. Imports the
modules once, then forks itself for every rank.

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
from collections.abc import Iterable
from importlib import import_module

WORD = struct.Struct("<i")  # of a report: a rank's pid when it is forked, its exit status when it has ended
REQUEST_BYTES = 1 << 18
GPU_FILES = ("/dev/nvidia", "/dev/kfd", "/dev/dri", "/dev/dxg")  # the last is WSL's


def main() -> None:
    # Ctrl-C goes to the whole terminal group: the UI decides when ranks end
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    from worker_main import die_with_parent, make_pack_importable  # of this script's folder

    make_pack_importable()
    control, parent, *modules = sys.argv[1:]
    die_with_parent(int(parent))  # even where it is stopped
    if modules and (not preload(modules) or holds_a_gpu(open_files())):
        cause = "importing opened a GPU" if holds_a_gpu(open_files()) else "a library could not be imported"
        print(
            f"[PipeMesh] {cause} in the process that workers are forked from: each worker imports for itself"
            " and starts more slowly",
            file=sys.stderr,
        )
        sys.stderr.flush()
        # Afresh, with nothing imported: every rank imports for itself
        os.execv(sys.executable, [sys.executable, *sys.argv[:3]])
    if holds_a_gpu(open_files()):
        sys.exit(
            "PipeMesh cannot fork workers here, as Python holds a GPU from its start: set PIPEMESH_FORK=0 in"
            " ComfyUI's environment."
        )
    # A collection in a rank would touch, and so copy, every page that it shares with this process
    gc.freeze()
    Server(socket.socket(fileno=int(control))).serve()
    os._exit(0)  # the kernel ends the ranks that are left: this is their parent


def preload(modules: Iterable[str]) -> bool:
    """Imports the modules that are installed. False if one is broken: then a rank that needs it
    fails with its own error, whose last lines are shown.
    """
    try:
        for name in modules:
            try:
                import_module(name)
            except ModuleNotFoundError as error:
                if error.name != name.partition(".")[0]:
                    return False
    except Exception:  # noqa: BLE001 - whatever a library may raise when it is imported
        return False
    return True


def holds_a_gpu(files: Iterable[str]) -> bool:
    """True if a GPU is among the open files. A process that has opened one cannot be forked: no
    rank of it would get its own.
    """
    return any(file.startswith(GPU_FILES) for file in files)


def open_files() -> list[str]:
    descriptors = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
    return [os.readlink(path) for path in descriptors if os.path.islink(path)]


class Server:
    """Forks ranks as the UI asks over ``control``, and reports each one's pid and exit status."""

    def __init__(self, control: socket.socket):
        self._control = control
        self._reports: dict[int, int] = {}  # pid -> the descriptor that takes its exit status
        self._child_ended, self._wake = os.pipe()
        os.set_blocking(self._wake, False)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        signal.set_wakeup_fd(self._wake, warn_on_full_buffer=False)
        self._poll = select.poll()
        self._poll.register(self._control, select.POLLIN)
        self._poll.register(self._child_ended, select.POLLIN)

    def serve(self) -> None:
        """Forks ranks, and tells of their ends, until the UI closes its end."""
        while True:
            ready = {fd for fd, _event in self._poll.poll()}
            for pid in [pid for pid, report in self._reports.items() if report in ready]:
                self._poll.unregister(self._reports[pid])
                os.kill(pid, signal.SIGKILL)  # nobody waits for it any more
            if self._child_ended in ready:
                os.read(self._child_ended, 1 << 12)
                self._reap()
            if self._control.fileno() in ready:
                data, fds, _flags, _address = socket.recv_fds(self._control, REQUEST_BYTES, 3)
                if not data:
                    return
                try:
                    self._fork(json.loads(data), *fds)
                except (
                    OSError,
                    TypeError,
                    ValueError,
                ) as error:  # no process or descriptor is left: that rank's end, not this one's
                    with contextlib.suppress(OSError):
                        print(f"PipeMesh could not fork a worker: {error}", file=sys.stderr)
                finally:
                    for fd in fds:
                        if fd not in self._reports.values():
                            os.close(fd)

    def _reap(self) -> None:
        for pid in list(self._reports):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                report = self._reports.pop(pid)
                with contextlib.suppress(KeyError):
                    self._poll.unregister(report)
                report_word(report, os.waitstatus_to_exitcode(status))
                os.close(report)

    def _fork(self, request: dict, channel: int, output: int, report: int) -> None:
        pid = os.fork()
        if not pid:
            self._control.close()
            for fd in (self._child_ended, self._wake, report, *self._reports.values()):
                os.close(fd)
            become(request, channel, output)
        self._reports[pid] = report
        self._poll.register(report, 0)  # which still tells that nobody reads it
        report_word(report, pid)


def report_word(report: int, word: int) -> None:
    with contextlib.suppress(BrokenPipeError):
        os.write(report, WORD.pack(word))


def become(request: dict, channel: int, output: int) -> None:
    """Runs a rank's script in the fork, as if Python had just been started with it. Never
    returns.
    """
    status = 1
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for stream in (1, 2):
            os.dup2(output, stream)
        os.close(output)
        sys.stdout, sys.stderr = (
            os.fdopen(stream, "w", buffering=1, errors="backslashreplace", closefd=False) for stream in (1, 2)
        )
        os.environ.update(request["set"])
        for name in request["unset"]:
            os.environ.pop(name, None)
        sys.argv = [part.replace("{fd}", str(channel)) for part in request["argv"]]
        sys.path.insert(0, os.path.dirname(sys.argv[0]))
        runpy.run_path(sys.argv[0], run_name="__main__")
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
        if not isinstance(end.code, int | None):
            print(end.code, file=sys.stderr)
    except:  # noqa: E722 - as at the top of any script: whatever ends it is told of
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    main()
