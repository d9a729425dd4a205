"""The pack's name and version. Makes the checkout importable under that name, whatever its folder
is called: ComfyUI names a pack by its path; commands, tests and worker processes say `pipemesh`.

Standard library only.
"""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from importlib.util import module_from_spec
from pathlib import Path

NAME = "pipemesh"
# Pyproject.toml repeats it, because ComfyUI's registry reads it there; a test compares them
VERSION = "0.3.0"


def register_package(root: str | Path) -> None:
    """Puts the package `pipemesh` into `sys.modules`, without running the pack's own __init__.py:
    that is ComfyUI's entry.
    """
    if NAME not in sys.modules:
        spec = ModuleSpec(NAME, None, is_package=True)
        spec.submodule_search_locations = [str(root)]
        sys.modules[NAME] = module_from_spec(spec)
