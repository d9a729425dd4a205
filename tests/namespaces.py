"""Several machines on one computer: network namespaces joined by cables that can be cut."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

CLONE_NEWNET = 0x40000000


class NoNamespaces(Exception):
    """This computer does not let us make them; says why."""


def ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
    if done.returncode:
        raise NoNamespaces(f"`ip {' '.join(words)}`: {done.stderr.strip()}")


class Machines:
    """The machines of these names, each with a cable to a switch that the first one has: that is
    where ComfyUI runs. Names and addresses are this process's own, so that suites side by side do
    not meet.
    """

    def __init__(self, *names: str):
        if shutil.which("ip") is None:
            raise NoNamespaces("there is no `ip` (iproute2)")
        own = os.getpid()
        net = f"10.{64 + (own >> 8) % 64}.{own % 256}"
        self.names = names
        self.addresses = {name: f"{net}.{number}" for number, name in enumerate(names, 1)}
        self.near, *others = names
        try:
            for name in names:
                ip("netns", "add", self.of(name))
                ip("-n", self.of(name), "link", "set", "lo", "up")
            ip("-n", self.of(self.near), "link", "add", "net0", "type", "bridge")
            for number, name in enumerate(others):
                peer = f"to{number}"
                ends = (peer, "type", "veth", "peer", "name", "net0", "netns", self.of(name))
                ip("-n", self.of(self.near), "link", "add", *ends)
                ip("-n", self.of(self.near), "link", "set", peer, "master", "net0", "up")
            for name in names:
                ip("-n", self.of(name), "addr", "add", f"{self.addresses[name]}/24", "dev", "net0")
                ip("-n", self.of(name), "link", "set", "net0", "up")
        except NoNamespaces:
            self.close()
            raise

    def of(self, name: str) -> str:
        """The namespace that a machine is."""
        return f"pm{os.getpid()}{name}"

    def cable(self, name: str, state: str) -> None:
        """``down`` or ``up``. What was asked for while the cable was down is forgotten, or its
        failure would be the answer to the first who connects again.
        """
        ip("-n", self.of(name), "link", "set", "net0", state)
        for one in self.names:
            ip("-n", self.of(one), "neigh", "flush", "all")

    def pids(self, name: str) -> list[int]:
        """Of the processes on that machine."""
        done = subprocess.run(
            ["ip", "netns", "pids", self.of(name)], capture_output=True, text=True, check=True
        )
        return list(map(int, done.stdout.split()))

    def close(self) -> None:
        for name in self.names:
            subprocess.run(["ip", "netns", "del", self.of(name)], capture_output=True, check=False)

    @contextmanager
    def inside(self, name: str) -> Iterator[None]:
        """This thread, and the threads and processes it starts, are on that machine."""
        libc = ctypes.CDLL(None, use_errno=True)
        with open("/proc/thread-self/ns/net") as before, Path("/run/netns", self.of(name)).open() as there:

            def enter(namespace) -> None:
                if libc.setns(namespace.fileno(), CLONE_NEWNET):
                    raise OSError(ctypes.get_errno(), "setns")

            enter(there)
            try:
                yield
            finally:
                enter(before)
