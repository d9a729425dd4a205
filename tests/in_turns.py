"""Processes that share out the tests among themselves while they run them."""

from collections.abc import Iterable, Iterator
from pathlib import Path

# What these fixtures start is started once, in the process that takes all tests that ask for one
TOGETHER = ({"clients", "broken", "bench"}, {"server"})


def handed_out(items: Iterable, taken: Path) -> Iterator:
    """Yields the tests that no other process takes in this folder: those that share pools or a
    server, then file by file.
    """
    units = {f"together{number}": [] for number in range(len(TOGETHER))}
    for item in items:
        units.setdefault(unit_of(item), []).append(item)
    for name, tests in units.items():
        if tests and takes(taken / name):
            yield from tests


def unit_of(item) -> str:
    shared = (number for number, names in enumerate(TOGETHER) if names & set(item.fixturenames))
    return next((f"together{number}" for number in shared), item.path.stem)


def takes(mark: Path) -> bool:
    """Return whether this process is the first that makes the mark."""
    try:
        mark.touch(exist_ok=False)
    except FileExistsError:
        return False
    return True
