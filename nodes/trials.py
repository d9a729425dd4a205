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
from ..launcher.trial.host_trials import VERDICTS, HostTrials, Trials, VerdictFile
from ..launcher.trial.process import try_in_process
from .notices import Notices


def host_trials(
    setup: RankSetup, device: Callable[[], Device], notices: Notices, tell: Callable[[Told], None]
) -> HostTrials:
    return HostTrials(
        Path(setup.comfyui),
        Trials(
            comfyui_version.__version__,
            partial(try_in_process, setup, device),
            VerdictFile(cache_folder(os.environ) / VERDICTS),
            lambda text: tell(Told(text)),
        ),
        is_on=setup.tries_hosts and bool(setup.comfyui),
        notice=lambda text: notices.tell(text, one_gpu=False),
    )
