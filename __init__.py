"""PipeMesh: one image or video from all your GPUs, inside your own ComfyUI workflow."""

import logging

from .needs import calls_entry_points, lack

LACK = lack()
WEB_DIRECTORY = None if LACK else "./web"  # nothing on the page of a ComfyUI that gets no nodes
if LACK and not calls_entry_points():
    logging.getLogger("pipemesh").error("[PipeMesh] %s", LACK)


async def comfy_entrypoint():
    """ComfyUI's way in: the extension with its nodes. Raises ImportError with the next move if
    something is missing.
    """
    if LACK:
        raise ImportError(LACK)
    from .nodes.extension import PipeMeshExtension

    return PipeMeshExtension()
