"""The host trials of this ComfyUI."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

import comfyui_version

from ..launcher.cache import cache_folder
from ..launcher.pool.devices import Device
from ..launcher.pool.progress import Told
from ..launcher.pool.rank_setup import RankSetup
from ..launcher.trial.host_trials import FOLDER, HostTrials, Progress, Trials, Verdicts
from ..launcher.trial.process import try_in_process
from .notices import Notices


def host_trials(setup: RankSetup, device: Callable[[], Device], notices: Notices) -> HostTrials:
    return HostTrials(
        Path(setup.comfyui),
        Trials(
            comfyui_version.__version__,
            partial(try_in_process, setup, device),
            Verdicts(cache_folder(os.environ) / FOLDER),
        ),
        is_on=setup.tries_hosts and bool(setup.comfyui),
        notice=lambda text: notices.tell(text, one_gpu=False),
    )


def compared(now: Progress) -> Told:
    """Says what a pool by hand waits for."""
    return Told(
        f"PipeMesh: this ComfyUI's model is compared with stock on the CPU, once ({now.text})",
        now.done,
        now.total,
    )
