"""PipeMesh: one image or video from all your GPUs, inside your own ComfyUI workflow."""

import re

WEB_DIRECTORY = "./web"
NEEDS_COMFYUI = (0, 30, 0)


def check_host() -> None:
    """Raises ImportError with the next move when this ComfyUI is too old or a dependency is
    missing.
    """
    from importlib.util import find_spec
    from pathlib import Path

    if find_spec("comfyui_version") is None:
        raise ImportError("PipeMesh runs inside ComfyUI: put this folder into ComfyUI's custom_nodes and start ComfyUI.")
    from comfyui_version import __version__ as version

    if tuple(map(int, re.findall(r"\d+", version)[:3])) < NEEDS_COMFYUI[: version.count(".") + 1]:
        needed = ".".join(map(str, NEEDS_COMFYUI))
        raise ImportError(f"PipeMesh needs ComfyUI {needed} or newer and this is {version}: update ComfyUI.")
    missing = [name for name in ("greenlet", "msgspec") if find_spec(name) is None]
    if missing:
        requirements, names = Path(__file__).with_name("requirements.txt"), " and ".join(missing)
        raise ImportError(f"PipeMesh needs {names}, missing here: run `python -m pip install -r {requirements}` with ComfyUI's python.")


async def comfy_entrypoint():
    """ComfyUI's way in: the extension with its nodes."""
    check_host()
    from .nodes.extension import PipeMeshExtension

    return PipeMeshExtension()
