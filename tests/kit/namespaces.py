"""Several machines on one computer: network namespaces joined by cables that can be cut."""

from __future__ import annotations

import ctypes
import os
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from pipemesh.pool.fork_server import ServerProcess
from pipemesh.pool.supervisor import Command

from .forks_there import CLONE_NEWNET


class NoNamespaces(Exception):
    """This computer does not let us make them; says why."""


def ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
    if done.returncode:
        raise NoNamespaces(f"`ip {' '.join(words)}`: {done.stderr.strip()}")


@contextmanager
def machines_here(*names: str) -> Iterator[Machines]:
    """Yields the machines of these names; skips a test if this computer does not let us make
    them.
    """
    try:
        made = Machines(*names)
    except NoNamespaces as reason:
        pytest.skip(f"no network namespaces here: {reason}")
    try:
        yield made
    finally:
        made.close()


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

    def path(self, name: str) -> Path:
        """The file that its namespace is."""
        return Path("/run/netns", self.of(name))

    @contextmanager
    def forking(self, name: str, start: Callable[[Command], Any]) -> Iterator[Callable[[Command], Any]]:
        """Yields what starts ranks on that machine, as ``start`` does here."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        script = str(Path(__file__).with_name("forks_there.py"))
        argv = (sys.executable, script, "{fd}", "{parent}", str(self.path(name)))
        with ours, theirs:
            process = start(Command(argv, dict(os.environ), theirs.fileno()))
            theirs.close()
            assert ours.recv(16) == b"there"  # from then on it is one of that machine's processes
            yield ServerProcess(process, ours, {}, threading.Event()).fork
            process.kill()
            process.wait()

    def pids(self, name: str) -> list[int]:
        """Of the processes on that machine."""
        done = subprocess.run(
            ["ip", "netns", "pids", self.of(name)], capture_output=True, text=True, check=True
        )
        return list(map(int, done.stdout.split()))

    def ranks(self, name: str) -> list[int]:
        """Of those, the forks of a fork server that is on that machine too."""
        there = {pid: psutil.Process(pid) for pid in self.pids(name)}
        return [
            pid
            for pid, one in there.items()
            if (above := there.get(one.ppid())) and "fork_server_main.py" in " ".join(above.cmdline())
        ]

    def close(self) -> None:
        for name in self.names:
            subprocess.run(["ip", "netns", "del", self.of(name)], capture_output=True, check=False)

    @contextmanager
    def inside(self, name: str) -> Iterator[None]:
        """This thread, and the threads and processes it starts, are on that machine."""
        libc = ctypes.CDLL(None, use_errno=True)
        with open("/proc/thread-self/ns/net") as before, self.path(name).open() as there:

            def enter(namespace) -> None:
                if libc.setns(namespace.fileno(), CLONE_NEWNET):
                    raise OSError(ctypes.get_errno(), "setns")

            enter(there)
            try:
                yield
            finally:
                enter(before)
