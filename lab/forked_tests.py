"""The script of a run of tests in a fork that has imported ComfyUI (``libraries_at_hand.py``):
``forked_tests.py PARENT FD ROOT OPTION...`` runs the tests of the checkout ROOT, with pytest's
options. FD is the way to the process that it was forked from.

The ranks of these tests are forked too, from a process that has imported this checkout's code. That
one is forked when the first rank is asked for.
"""

from __future__ import annotations

import os
import runpy
import socket
import sys
import threading
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

OF_THE_PACK = ("pipemesh", "lab", "launcher", "pool", "package", "worker_main", "fork_server_main")


def main() -> None:
    from pipemesh.lab.bench.forked import above
    from pipemesh.lab.forks import AT_HAND, hand_out
    from pipemesh.pool.supervisor import Command
    from pipemesh.pool.worker_main import die_with_parent

    parent, control, root, *options = sys.argv[1:]
    die_with_parent(int(parent))
    server = above(int(control))
    forget_the_pack()
    os.chdir(root)
    if options[:1] == ["--serve"]:
        sys.argv = [str(Path(root, "pool", "fork_server_main.py")), control, parent, AT_HAND]
        sys.path[0] = os.path.dirname(sys.argv[0])
        runpy.run_path(sys.argv[0], run_name="__main__")
        return
    sys.path[:2] = [sys.path[1], root]  # ComfyUI's folder first, which has a `nodes` too
    import pytest

    @cache  # forked once, when it is first asked for
    def ranks_server() -> tuple[int, socket.socket]:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            argv = (sys.executable, __file__, parent, "{fd}", root, "--serve")
            forked = server.fork(Command(argv, dict(os.environ), theirs.fileno()))
            return forked.pid, ours

    with TemporaryDirectory(prefix="pipemesh-tests-") as folder, socket.socket(socket.AF_UNIX) as hand:
        path = os.path.join(folder, "at_hand")
        hand.bind(path)
        hand.listen()
        threading.Thread(target=hand_out, args=(hand, ranks_server), daemon=True).start()
        code = pytest.main([*options, f"--forked-from={path}"])
    sys.exit(int(code))


def forget_the_pack() -> None:
    """The modules of the checkout that the process above was started in."""
    for name in [name for name in sys.modules if name.partition(".")[0] in OF_THE_PACK]:
        del sys.modules[name]


if __name__ == "__main__":
    main()
