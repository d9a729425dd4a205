"""A process that ranks are forked from, on the machine that a network namespace is: a fork of the
one that other ranks are forked from, so ComfyUI is imported. ``forks_there.py CONTROL_FD PARENT_PID
NAMESPACE``.
"""

import ctypes
import os
import socket
import sys

from pipemesh.pool.fork_server_main import Server
from pipemesh.pool.worker_main import die_with_parent

CLONE_NEWNET = 0x40000000


def main():
    control, parent, namespace = sys.argv[1:]
    die_with_parent(int(parent))
    with open(namespace) as there:
        if ctypes.CDLL(None, use_errno=True).setns(there.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "setns")
    control = socket.socket(fileno=int(control))
    control.send(b"there")
    Server(control).serve()
    os._exit(0)


if __name__ == "__main__":
    main()
