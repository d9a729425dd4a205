"""A process beside the ranks: started as they are, and sees no GPU. It ends with ComfyUI."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..parallel_runtime.wire.channel import Channel, ChannelClosed
from ..parallel_runtime.wire.messages import CountLike
from ..parallel_runtime.wire.tree import encode_plain
from .crew import rank_environment
from .devices import CUDA_VARIABLE, HIP_VARIABLE, Device
from .rank_setup import RankSetup
from .supervisor import Command, Supervisor
from .verdict import cause_of_end

SCRIPT = str(Path(__file__).with_name("worker_main.py"))
REAP_S = 5.0


class SideProcess:
    """One such process of a ComfyUI with ``comfy_args``; ``answers``: the messages that come from
    it. Raises OSError if it cannot be started.
    """

    def __init__(
        self,
        setup: RankSetup,
        device: Device,
        argv: Sequence[str],
        answers: Any,
        comfy_args: Mapping[str, Any],
    ):
        self._received: deque[Any] = deque()
        ours, theirs = socket.socketpair()
        with contextlib.ExitStack() as undo:
            undo.callback(ours.close)
            self.channel = Channel(ours, answers)
            with theirs:
                command = Command((setup.argv[0], *argv), environment(device), theirs.fileno())
                self._supervisor = Supervisor(setup.start)
                self._supervisor.start({0: command})
            undo.callback(self._supervisor.stop, 0)
            with contextlib.suppress(ChannelClosed):  # it has ended: the next question finds that
                self.channel.send(CountLike(comfyui=setup.comfyui, comfy_args=encode_plain(dict(comfy_args))))
            undo.pop_all()

    def receive(self, until: float) -> Any:
        """Returns its next message. Raises ChannelClosed if it has ended, TimeoutError."""
        poller = select.poll()
        poller.register(self.channel.fileno(), select.POLLIN)
        while not self._received:
            if not poller.poll(max(0.0, 1e3 * (until - time.monotonic()))):
                raise TimeoutError
            self._received += [message for message, _ in self.channel.pump()]
        return self._received.popleft()

    def kill(self) -> None:
        self._supervisor.stop(0)

    def end(self) -> str:
        """Ends it; returns how it had ended by itself, in words."""
        poller = select.poll()
        poller.register(self.channel.fileno(), select.POLLHUP)
        status = self._supervisor.exit_of(0, REAP_S if poller.poll(0) else 0)
        self._supervisor.stop(0)
        self.channel.close()
        last = (self._supervisor.tail(0) or [""])[-1]
        return f"{cause_of_end(status)}{f': {last}' if last and (status or 0) > 0 else ''}"


def environment(device: Device) -> dict[str, str]:
    """Return a rank's environment without a GPU. Variables that are fixed at a process's start are
    those of ranks on ``device``, so that both can be forks of one server.
    """
    return {**rank_environment(device, "gloo", dict(os.environ)), CUDA_VARIABLE: "", HIP_VARIABLE: ""}
