"""The nodes of demo and test workflows beyond stock ones; a pack of its own, loaded by the demo's
and the tests' ComfyUI only. Its captions are used without ComfyUI too, so nodes come on request.
"""

from __future__ import annotations

from typing import Any


async def comfy_entrypoint() -> Any:
    from .demo_nodes import DemoExtension

    return DemoExtension()
