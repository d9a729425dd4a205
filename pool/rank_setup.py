"""Set up the ranks of a ComfyUI, or of a leader, from the variables named below."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..parallel_runtime.errors import LayoutError
from .devices import Placement
from .fork_server import ForkServer
from .progress import Told
from .supervisor import Command, Process, process_of_its_own

FORK_VARIABLE, STALL_VARIABLE = "PIPEMESH_FORK", "PIPEMESH_STALL_S"
TRIAL_VARIABLE = "PIPEMESH_TRIAL"
RENDEZVOUS_VARIABLE, SECRET_VARIABLE, LOST_VARIABLE = "PIPEMESH_RDZV", "PIPEMESH_SECRET", "PIPEMESH_LOST_S"
DEFAULT_STALL_S, DEFAULT_LOST_S = 300.0, 5.0
# Hangs are judged by progress counters; a collective's own clock would end slow, healthy runs
COLLECTIVE_TIMEOUT_S = 24 * 3600.0
STALL_S_RANGE = (1.0, COLLECTIVE_TIMEOUT_S)
LOST_S_RANGE = (2.0, 120.0)  # the kernel counts up to 127 unanswered probes, one a second
ALLOCATOR = "PYTORCH_CUDA_ALLOC_CONF"  # torch reads it when it is imported
KEEP_MEMORY = {"MALLOC_TRIM_THRESHOLD_": str(1 << 30), "MALLOC_MMAP_THRESHOLD_": str(1 << 30)}


def start_as(environ: Mapping[str, str]) -> Callable[[Command], Process]:
    """Returns the function that starts a rank: it forks, unless PIPEMESH_FORK says 0."""
    return (
        process_of_its_own
        if environ.get(FORK_VARIABLE) == "0"
        else ForkServer((*KEEP_MEMORY, ALLOCATOR)).start
    )


@dataclass(frozen=True, kw_only=True)
class RankSetup:
    """The settings by which a rank computes as this ComfyUI does, and by which it is watched.

    ``start`` starts ``argv`` (tests put fakes here). ``stall_s``: without progress, a rank hangs.
    ``tell`` takes what is waited for, to show it to the user.
    ``rendezvous`` (ADDRESS:PORT, torchrun's), ``secret`` and ``lost_s``, the silence after which a
    machine is lost, are for pools over several machines. ``times_links`` says whether ranks of
    these devices are to time how fast they exchange.
    """

    comfyui: str
    comfy_args: dict[str, Any] = field(default_factory=dict)
    stall_s: float = DEFAULT_STALL_S
    rendezvous: str = ""
    secret: str = field(default="", repr=False)
    lost_s: float = DEFAULT_LOST_S
    argv: tuple[str, ...] = (
        sys.executable,
        str(Path(__file__).with_name("worker_main.py")),
        "{fd}",
        "{parent}",
    )
    start: Callable[[Command], Process] = field(default_factory=lambda: start_as(os.environ))
    tell: Callable[[Told], None] = lambda told: None
    times_links: Callable[[Placement], bool] = lambda placement: False


def tries_hosts(environ: Mapping[str, str]) -> bool:
    """Returns whether classes that differ from those of the ComfyUI that was tested are compared
    with stock before ranks compute them.
    """
    return environ.get(TRIAL_VARIABLE) != "0"


def rank_setup_from(
    environ: Mapping[str, str], comfyui: str, comfy_args: dict[str, Any] | None = None
) -> RankSetup:
    """Returns the setup that the PIPEMESH_ variables ask for. Raises LayoutError, which names the
    variable that cannot be read.
    """
    return RankSetup(
        comfyui=comfyui,
        comfy_args=comfy_args or {},
        stall_s=seconds(environ, STALL_VARIABLE, DEFAULT_STALL_S, STALL_S_RANGE),
        rendezvous=environ.get(RENDEZVOUS_VARIABLE, ""),
        secret=environ.get(SECRET_VARIABLE, ""),
        lost_s=seconds(environ, LOST_VARIABLE, DEFAULT_LOST_S, LOST_S_RANGE),
        start=start_as(environ),
    )


def seconds(environ: Mapping[str, str], variable: str, default: float, allowed: tuple[float, float]) -> float:
    """Returns the variable as a number of seconds. Raises LayoutError."""
    text, (least, most) = environ.get(variable) or str(default), allowed
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not least <= number <= most:
        raise LayoutError(f"{variable} is {text}: set it to a number of seconds from {least:g} to {most:g}.")
    return number
