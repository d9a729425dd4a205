"""Helps all nodes of the pack: their texts, their category, the type of a pool, and the check of
sockets that take nothing but a link.
"""

from __future__ import annotations

from reprlib import repr as short
from typing import Any

from comfy_api.latest import io

from ..parallel_runtime.texts import english

UNTRIED = True  # nodes are experimental until lab/docs/CUDA.md has a run on several GPUs
PoolSocket = io.Custom("PIPEMESH_POOL")
# Which node makes what a socket takes; else "the node that makes it"
FROM = {"pool": "PipeMesh Pool", "model": "a loader or PipeMesh Parallelize", "vae": "a loader"}


def schema(node: str, inputs: list[io.Input], outputs: list[io.Output], **more: Any) -> io.Schema:
    """Make the schema of a node, with the texts of ``locales/en/nodeDefs.json``. An input that has
    none there, as a newer ComfyUI's sampler may have, keeps its own.
    """
    texts = english("nodeDefs")[node]
    for one in inputs:
        said = texts["inputs"].get(one.id)
        if said is None:
            continue
        one.tooltip = said["tooltip"]
        one.display_name = said["name"] if said["name"] != one.id else None
    for index, one in enumerate(outputs):
        said = texts["outputs"][str(index)]
        one.tooltip, one.display_name = said["tooltip"], said.get("name")
    return io.Schema(
        node_id=node,
        display_name=texts["display_name"],
        description=texts["description"],
        category="PipeMesh",
        is_experimental=UNTRIED,
        inputs=inputs,
        outputs=outputs,
        **more,
    )


def require_links(**given: Any) -> bool | str:
    """Check sockets when a prompt is queued: True, or the sentence that names the socket that has
    a value in place of a link. A linked socket is None here, as is an open one.
    """
    for name, value in given.items():
        if value is not None:
            return (
                f"{name} is {short(value)}, but takes only a link: connect {name} of"
                f" {FROM.get(name, 'the node that makes it')}."
            )
    return True
