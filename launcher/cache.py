"""The user's cache folder. Standard library only."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path


def cache_folder(env: Mapping[str, str]) -> Path:
    """Returns PIPEMESH_CACHE, or `pipemesh` in the user's cache folder of this platform."""
    if env.get("PIPEMESH_CACHE"):
        return Path(env["PIPEMESH_CACHE"]).expanduser().absolute()
    if env.get("XDG_CACHE_HOME"):
        return Path(env["XDG_CACHE_HOME"]) / "pipemesh"
    if sys.platform == "win32":
        return Path(env.get("LOCALAPPDATA") or Path.home() / "AppData/Local") / "pipemesh"
    return Path.home() / ("Library/Caches" if sys.platform == "darwin" else ".cache") / "pipemesh"
