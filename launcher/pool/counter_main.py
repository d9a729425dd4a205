"""The script of the process that counts: ``counter_main.py SOCKET_FD PARENT_PID``. Dies with its
parent, as a rank does, and sees no GPU.
"""

import os
import signal
import socket
import sys


def main() -> None:
    from worker_main import die_with_parent, make_importable  # of this script's folder

    die_with_parent(int(sys.argv[2]))
    # Ctrl-C goes to the whole terminal group: the UI decides when it ends
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    make_importable()
    from pipemesh.parallel_runtime.planner.counting import run
    from pipemesh.parallel_runtime.wire.channel import Channel
    from pipemesh.parallel_runtime.wire.messages import ToCounter

    run(Channel(socket.socket(fileno=int(sys.argv[1])), ToCounter))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
