"""The product's fixtures, and one of the laboratory's own."""

import os
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "pool"))
from package import register_package  # noqa: E402

sys.path.pop(0)
register_package(ROOT)


def pytest_addoption(pluginmanager):
    pluginmanager.import_plugin("pipemesh.tests.fixtures")


@pytest.fixture(scope="session")
def command(host):
    """(a command of ``python3 -m lab``, its options; variables) -> its process, which is forked
    from one that has imported ComfyUI.
    """
    from pipemesh.lab.bench.forked import imported_at_hand
    from pipemesh.pool.supervisor import Command

    script = str(ROOT / "lab" / "forked_command.py")

    def started(*words, **variables):
        argv = (sys.executable, script, "{parent}", "{fd}", *words)
        return server.fork(Command(argv, {**os.environ, **variables}, server.control.fileno()))

    with imported_at_hand(host) as server:
        yield started
