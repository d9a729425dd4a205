"""How a script of the tests is a rank: the pack is `pipemesh` in it, and then it goes on as the
product's worker does. Scripts of this folder import it by its own name.
"""

import runpy
import sys
from pathlib import Path

POOL = Path(__file__).resolve().parents[2] / "pool"


def register():
    """Makes the pack importable, as a worker's script does."""
    sys.path.insert(0, str(POOL))
    from package import register_package

    register_package(POOL.parent)


def run_worker():
    """Runs the worker's script with this process's arguments, SOCKET_FD and PARENT_PID."""
    sys.argv[0] = str(POOL / "worker_main.py")
    runpy.run_path(sys.argv[0], run_name="__main__")
