"""What this process holds: descriptors, shared memory, threads and processes below it."""

from __future__ import annotations

import gc
import os
import threading
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import psutil


@dataclass(frozen=True)
class Holdings:
    """Descriptors and threads are told apart by number and name. What another thread reads of /proc
    just now is not counted.
    """

    descriptors: frozenset[str] = frozenset()
    mappings: tuple[str, ...] = ()
    threads: frozenset[str] = frozenset()
    children: frozenset[int] = frozenset()

    @classmethod
    def now(cls) -> Holdings:
        gc.collect()
        links = {fd: link(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")}
        mappings = [
            line.split()[-2]
            for line in Path("/proc/self/maps").read_text().splitlines()
            if "memfd:pipemesh" in line
        ]
        return cls(
            descriptors=frozenset(
                f"{fd} {target}" for fd, target in links.items() if target and not target.startswith("/proc/")
            ),
            mappings=tuple(sorted(mappings)),
            threads=frozenset(f"{thread.name} {thread.native_id}" for thread in threading.enumerate()),
            children=frozenset(child.pid for child in psutil.Process().children(recursive=True)),
        )

    def since(self, before: Holdings) -> Holdings:
        """What was not held before. What has gone is no concern: errors that earlier tests have
        caught are let go at any time, with all that their frames hold.
        """
        mappings = Counter(self.mappings) - Counter(before.mappings)
        return Holdings(
            descriptors=self.descriptors - before.descriptors,
            mappings=tuple(sorted(mappings.elements())),
            threads=self.threads - before.threads,
            children=self.children - before.children,
        )


NOTHING = Holdings()


def link(path: str) -> str:
    try:
        return os.readlink(path)
    except FileNotFoundError:  # the descriptor that listed the folder
        return ""
