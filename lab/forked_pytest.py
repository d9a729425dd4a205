"""Pytest in a fork that has imported ComfyUI: ``forked_pytest.py FD OPTION...``. The server that it
was forked from is asked for ranks over FD.
"""

import json
import os
import signal
import sys
from pathlib import Path


def main() -> None:
    root = str(Path(__file__).resolve().parents[1])
    comfyui = json.loads(os.environ["PIPEMESH_HOST"])["comfyui"]
    # As `python -m pytest` has it: conftest.py puts ComfyUI before it
    sys.path[:] = [root, *(entry for entry in sys.path[1:] if entry != comfyui)]
    from pipemesh.pool.worker_main import die_with_parent

    die_with_parent(os.getppid())
    signal.signal(signal.SIGINT, signal.default_int_handler)
    import pytest

    control, *options = sys.argv[1:]
    own = [
        f"--forked-from={control}",
        "-W",
        "ignore:Module already imported:pytest.PytestAssertRewriteWarning",
    ]
    sys.exit(pytest.main([*own, *options]))


if __name__ == "__main__":
    main()
