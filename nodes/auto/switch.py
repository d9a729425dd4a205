"""The switch of auto mode: a setting of ComfyUI's, or an environment variable if there is no
browser.

ComfyUI writes settings to a file and tells nobody, so the file is read when a sampler asks. A
change holds from the next sampling on; a restart is not needed.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ...parallel_runtime.texts import Text

SETTING, QUEUE = "PipeMesh.Auto", "PipeMesh.Queue"
ALL_SOONEST, FIRST_SOONEST = "all soonest", "first image soonest"  # what QUEUE may be
VARIABLE = "PIPEMESH_AUTO"
FILE = "comfy.settings.json"
log = logging.getLogger("pipemesh")


class Switch:
    """Tells whether every sampler is to run in the pool. ``settings``: the file of ComfyUI's
    settings; None if every user has their own settings, because a prompt does not say whose it is.
    """

    def __init__(self, environ: Mapping[str, str], settings: Callable[[], Path | None]):
        self._settings = settings
        self._last: dict[str, Any] = {}
        text = environ.get(VARIABLE, "")
        self.fixed = {"1": True, "0": False}.get(text)  # by the variable, whatever the setting says
        if text and self.fixed is None:
            log.error("[PipeMesh] PIPEMESH_AUTO is %s: set it to 1 or 0.", text)

    @property
    def overruled(self) -> Text | None:
        """Returns why the setting has no effect; None if it has an effect."""
        if self.fixed is not None:
            return Text("unavailable_variable", (str(int(self.fixed)),))
        return Text("unavailable_multi_user") if self._settings() is None else None

    @property
    def queue_overruled(self) -> Text | None:
        """Returns why the setting for queues has no effect; None if it has an effect."""
        return Text("queue_multi_user") if self._settings() is None else None

    def is_on(self) -> bool:
        return self._read().get(SETTING) is True if self.fixed is None else self.fixed

    def looks_ahead(self) -> bool:
        """Tells whether prompts of a queue may be sampled at once."""
        return self._read().get(QUEUE) != FIRST_SOONEST

    def _read(self) -> dict[str, Any]:
        """Reads the settings. While ComfyUI writes the file, they are what they were."""
        file = self._settings()
        try:
            read = json.loads(file.read_text(encoding="utf-8")) if file is not None else {}
            self._last = read if isinstance(read, dict) else self._last
        except FileNotFoundError:
            self._last = {}
        except (OSError, ValueError):
            pass
        return self._last
