"""Runs one host trial in a process that is started for it, and ends with it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from ...parallel_runtime.wire.channel import ChannelClosed
from ...parallel_runtime.wire.messages import FromTrial, TrialStep, Tried, Try
from ..devices import Device
from ..rank_setup import RankSetup
from ..side_process import SCRIPT, SideProcess
from .host_trials import TrialLost

LIMIT_S = 600.0  # of one class, with the start of its ranks


def try_in_process(
    setup: RankSetup,
    device: Callable[[], Device],
    kind: str,
    tell: Callable[[TrialStep], None],
    argv: Sequence[str] = (SCRIPT, "{fd}", "{parent}", "trial"),
    limit_s: float = LIMIT_S,
) -> tuple[bool, str]:
    """Compares a class, ``module:Class``, with stock. Returns whether ranks compute the same, and
    the reason. The user's own arguments of ComfyUI are not used. Raises TrialLost.
    """
    until = time.monotonic() + limit_s
    try:
        process = SideProcess(setup, device(), argv, FromTrial, {"cpu": True})
    except OSError as error:
        raise TrialLost(f"its process could not be started: {error}") from error
    try:
        process.channel.send(Try(kind=kind))
        while not isinstance(message := process.receive(until), Tried):
            tell(message)
        return message.is_same, message.says
    except ChannelClosed:
        raise TrialLost(f"its process {process.end()}") from None
    except TimeoutError:
        raise TrialLost(f"it took longer than {limit_s:g} s") from None
    finally:
        process.kill()
        process.channel.close()
