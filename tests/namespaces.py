"""Two machines on one computer: network namespaces joined by a cable that can be cut."""

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


class TwoMachines:
    """``near`` has ComfyUI, ``far`` one rank. Names and addresses are this process's own, so that
    suites side by side do not meet.
    """

    def __init__(self):
        if shutil.which("ip") is None:
            raise NoNamespaces("there is no `ip` (iproute2)")
        own = os.getpid()
        net = f"10.{64 + (own >> 8) % 64}.{own % 256}"
        self.near, self.far = f"pm{own}near", f"pm{own}far"
        self.near_address, self.far_address = f"{net}.1", f"{net}.2"
        try:
            for name in (self.near, self.far):
                ip("netns", "add", name)
                ip("-n", name, "link", "set", "lo", "up")
            ip(
                "-n",
                self.near,
                "link",
                "add",
                "near0",
                "type",
                "veth",
                "peer",
                "name",
                "far0",
                "netns",
                self.far,
            )
            for name, device, address in (
                (self.near, "near0", self.near_address),
                (self.far, "far0", self.far_address),
            ):
                ip("-n", name, "addr", "add", f"{address}/24", "dev", device)
                ip("-n", name, "link", "set", device, "up")
        except NoNamespaces:
            self.close()
            raise

    def cable(self, state: str) -> None:
        """``down`` or ``up``. What was asked for while the cable was down is forgotten, or its
        failure would be the answer to the first who connects again.
        """
        ip("-n", self.far, "link", "set", "far0", state)
        for name in (self.near, self.far):
            ip("-n", name, "neigh", "flush", "all")

    def pids(self, name: str) -> list[int]:
        """Of the processes on that machine."""
        done = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True, check=True)
        return list(map(int, done.stdout.split()))

    def close(self) -> None:
        for name in (self.near, self.far):
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


@contextmanager
def inside(name: str) -> Iterator[None]:
    """This thread, and the threads and processes it starts, are on that machine."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open("/proc/thread-self/ns/net") as before, Path("/run/netns", name).open() as there:

        def enter(namespace) -> None:
            if libc.setns(namespace.fileno(), CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), "setns")

        enter(there)
        try:
            yield
        finally:
            enter(before)
