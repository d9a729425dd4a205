"""The switch of auto mode: a setting of ComfyUI's, or an environment variable where there is no
browser.

ComfyUI writes settings to a file and tells nobody, so the file is read when a sampler asks: what
was switched holds from the next sampling on, and a restart changes nothing.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from pathlib import Path

from ...parallel_runtime.texts import Text

SETTING = "PipeMesh.Auto"
VARIABLE = "PIPEMESH_AUTO"
FILE = "comfy.settings.json"
log = logging.getLogger("pipemesh")


class Switch:
    """Tells whether every sampler is to run in the pool. ``settings``: the file of ComfyUI's
    settings; None where every user has settings of their own, for a prompt does not say whose it
    is.
    """

    def __init__(self, environ: Mapping[str, str], settings: Callable[[], Path | None]):
        self._settings = settings
        self._last = False
        text = environ.get(VARIABLE, "")
        self.fixed = {"1": True, "0": False}.get(text)  # by the variable, whatever the setting says
        if text and self.fixed is None:
            log.error("[PipeMesh] PIPEMESH_AUTO is %s: set it to 1 or 0.", text)

    @property
    def overruled(self) -> Text | None:
        """Returns why the setting has no effect; None where it has."""
        if self.fixed is not None:
            return Text("unavailable_variable", (str(int(self.fixed)),))
        return Text("unavailable_multi_user") if self._settings() is None else None

    def is_on(self) -> bool:
        return self._setting() if self.fixed is None else self.fixed

    def _setting(self) -> bool:
        """Reads the setting. While ComfyUI writes the file, it is what it was."""
        file = self._settings()
        try:
            self._last = (
                file is not None and json.loads(file.read_text(encoding="utf-8")).get(SETTING) is True
            )
        except FileNotFoundError:
            self._last = False
        except (OSError, ValueError, AttributeError):
            pass
        return self._last
