"""A plugin of pytest: a worker of pytest-xdist that ends by itself fails the run, also while it
collects tests or after its last one. pytest-xdist 3.8 may count such a run as passed.
"""

import pytest

LOST = pytest.StashKey[list[str]]()


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node, error):
    if error:
        node.config.stash.setdefault(LOST, []).append(f"{node.gateway.id}: {error}")


def pytest_sessionfinish(session):
    if LOST in session.config.stash:
        session.exitstatus = session.exitstatus or pytest.ExitCode.INTERNAL_ERROR


def pytest_terminal_summary(terminalreporter, config):
    for lost in config.stash.get(LOST, ()):
        terminalreporter.write_line(f"A worker has ended before its tests were done, or badly: {lost}")
