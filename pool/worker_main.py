"""The script of a rank: ``worker_main.py SOCKET_FD PARENT_PID``; with ``counter`` behind these, of
the process that counts, and with ``trial``, of the one that tries a host. Dies with its parent, and
imports the pack as ``pipemesh``.
"""

import ctypes
import os
import signal
import socket
import sys
from pathlib import Path

PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int) -> None:
    """Has the kernel kill this process when the thread that started it ends, stopped or not."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the line above
        os._exit(1)


def make_pack_importable() -> None:
    """Has the pack importable as ``pipemesh``, and no library found in its folders."""
    root = Path(__file__).resolve().parents[1]
    own = str(root / "pool")  # the folder of package.py, and this script's
    sys.path.insert(0, own)
    from package import register_package

    register_package(root)
    sys.path[:] = [entry for entry in sys.path if str(Path(entry or ".").resolve()) != own]


def main() -> None:
    die_with_parent(int(sys.argv[2]))
    # Ctrl-C goes to the whole terminal group: the UI decides when ranks end
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    make_pack_importable()
    from pipemesh.parallel_runtime.wire.channel import Channel

    sock = socket.socket(fileno=int(sys.argv[1]))
    if sys.argv[3:] == ["counter"]:
        from pipemesh.parallel_runtime.planner.counting import answer_all
        from pipemesh.parallel_runtime.wire.messages import ToCounter

        answer_all(Channel(sock, ToCounter))
    elif sys.argv[3:] == ["trial"]:
        from pipemesh.parallel_runtime.wire.messages import ToTrial
        from pipemesh.pool.trial.comparisons import run_trial

        run_trial(Channel(sock, ToTrial))
    else:
        from pipemesh.parallel_runtime.wire.messages import ToRank
        from pipemesh.parallel_runtime.worker.main import run_rank

        run_rank(Channel(sock, ToRank))
    sys.stdout.flush()
    sys.stderr.flush()
    # Nothing of value is left, and tearing down an interpreter full of extensions takes longer than
    # starting over
    os._exit(0)


if __name__ == "__main__":
    main()
