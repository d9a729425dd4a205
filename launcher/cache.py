"""The user's cache folder. Standard library only."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path


def cache_folder(env: Mapping[str, str]) -> Path:
    """Returns PIPEMESH_CACHE, or `pipemesh` in the user's cache folder."""
    if env.get("PIPEMESH_CACHE"):
        return Path(env["PIPEMESH_CACHE"]).expanduser().absolute()
    return Path(env.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pipemesh"
