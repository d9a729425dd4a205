"""Checks what PipeMesh needs of the system, of ComfyUI and of its Python, before anything else of
the pack is imported.

Imports the standard library alone, and torch, which ComfyUI has imported by then.
"""

from __future__ import annotations

import re
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

COMFYUI = (0, 30, 0)
SYSTEMS = {"win32": "Windows", "cygwin": "Windows", "darwin": "macOS"}
# That Linux has
CALLS = (("os", "memfd_create"), ("os", "posix_fallocate"), ("fcntl", "ioctl"), ("socket", "send_fds"))
PACKAGES = ("greenlet", "msgspec")


def lack() -> str:
    """Return a sentence that names what PipeMesh lacks here, with the next move; empty if it lacks
    nothing.
    """
    if sys.platform != "linux":
        system = SYSTEMS.get(sys.platform, sys.platform)
        return (
            f"PipeMesh runs on Linux, and this is {system}: run ComfyUI on Linux, or remove this folder from"
            " custom_nodes."
        )
    if find_spec("comfyui_version") is None:
        return "PipeMesh runs inside ComfyUI: put this folder into ComfyUI's custom_nodes and start ComfyUI."
    from comfyui_version import __version__ as version

    if tuple(map(int, re.findall(r"\d+", version)[:3])) < COMFYUI[: version.count(".") + 1]:
        return (
            f"PipeMesh needs ComfyUI {'.'.join(map(str, COMFYUI))} or newer and this is {version}: update"
            " ComfyUI."
        )
    return lacking_calls() or lacking_packages() or lacking_torch()


def lacking_calls() -> str:
    lacking = [
        f"{module}.{call}"
        for module, call in CALLS
        if find_spec(module) is None or not hasattr(import_module(module), call)
    ]
    if not lacking:
        return ""
    version = sys.version.split()[0]
    return (
        f"PipeMesh needs {' and '.join(lacking)}, which this Python {version} is built without: run ComfyUI"
        " with another Python."
    )


def lacking_packages() -> str:
    lacking = [name for name in PACKAGES if find_spec(name) is None]
    requirements = Path(__file__).with_name("requirements.txt")
    if not lacking:
        return ""
    return (
        f"PipeMesh needs {' and '.join(lacking)}, missing here: run `python -m pip install -r {requirements}`"
        " with ComfyUI's python."
    )


def lacking_torch() -> str:
    import torch
    from torch import distributed

    if distributed.is_available() and distributed.is_gloo_available():
        return ""
    return (
        f"PipeMesh needs torch.distributed with gloo, which torch {torch.__version__} is built without:"
        " install a torch that has it."
    )


def calls_entry_points() -> bool:
    """Return whether ComfyUI asks packs for their extension. An older one says only that it asked
    for something else.
    """
    return find_spec("comfy_api") is not None and find_spec("comfy_api.latest") is not None
