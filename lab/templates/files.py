"""The workflow templates that are installed with ComfyUI, and which of them sample a Diffusion
Transformer for images or video on this machine.

That is a rule about the graph, not a list of names: an active node turns a MODEL into a LATENT, no
file that the MODEL is loaded from holds a UNet, and nodes turn that LATENT into an IMAGE. It leaves
out those that call paid APIs, UNets, audio, 3D, and those that sample nothing.
"""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...launcher.comfyui.host_record import ComfyInstall
from .graph import Flat, Output, flattened
from .promoted import promoted
from .workflow import Node, read

PACKAGES = "comfyui_workflow_templates*"
PURELIB = "import sysconfig; print(sysconfig.get_paths()['purelib'])"
# Names of files, up to Stable Diffusion 2 and XL
UNETS = re.compile(r"(?i)(v1-5|v2-1|dreamshaper|sd_?xl|svd|lotus)")
CARRY_MODELS = ("MODEL", "GUIDER")


@dataclass(frozen=True)
class Template:
    name: str
    path: Path

    def workflow(self) -> dict[str, Any]:
        return json.loads(self.path.read_text(encoding="utf-8"))


def templates(host: ComfyInstall) -> list[Template]:
    """Those that sample a Diffusion Transformer for images or video on this machine, by name."""
    return [template for template in installed(host) if samples_transformer(template.workflow())]


def installed(host: ComfyInstall) -> list[Template]:
    """Every file of the template packages of ComfyUI's python, by name; indexes among them."""
    asked = subprocess.run([host.python, "-c", PURELIB], capture_output=True, text=True, check=True)
    paths = Path(asked.stdout.strip()).glob(f"{PACKAGES}/templates/*.json")
    return sorted((Template(path.stem, path) for path in paths), key=lambda template: template.name)


def samples_transformer(workflow: Any) -> bool:
    if not isinstance(workflow, dict) or "nodes" not in workflow:
        return False
    flat = flattened(promoted(read(workflow)))
    for id, placed in flat.placed.items():
        if not flat.is_left_out(placed.node) and is_sampler(placed.node):
            loaders = list(_loaders(flat, id))
            if loaders and not any(_holds_unet(loader) for loader in loaders) and _is_decoded(flat, id):
                return True
    return False


def is_sampler(node: Node) -> bool:
    return "LATENT" in node.outputs and any(slot.type in CARRY_MODELS for slot in node.inputs)


def _loaders(flat: Flat, id: str) -> Iterator[Node]:
    """The nodes that the models of a sampler come from."""
    for index, slot in enumerate(flat.placed[id].node.inputs):
        if slot.type in (*CARRY_MODELS, "*") and isinstance(source := flat.source(id, index), Output):
            node = flat.placed[source.id].node
            inner = list(_loaders(flat, source.id))
            yield from inner or ([node] if node.outputs[source.slot] == "MODEL" else [])


def _holds_unet(loader: Node) -> bool:
    values = loader.saved.get("widgets_values")
    return isinstance(values, list) and any(
        isinstance(value, str) and UNETS.match(Path(value).name) for value in values[:1]
    )


def _is_decoded(flat: Flat, id: str) -> bool:
    """True if a node turns its latent, or what others made of it, into an image."""
    reached = [id]
    for latent in reached:  # grows meanwhile
        for other, placed in flat.placed.items():
            if flat.is_left_out(placed.node) or other in reached:
                continue
            if any(_gets_latent(flat, other, index, latent) for index in range(len(placed.node.inputs))):
                if "IMAGE" in placed.node.outputs:
                    return True
                if "LATENT" in placed.node.outputs:
                    reached.append(other)
    return False


def _gets_latent(flat: Flat, id: str, slot: int, origin: str) -> bool:
    source = flat.source(id, slot) if flat.placed[id].node.inputs[slot].type in ("LATENT", "*") else None
    return (
        isinstance(source, Output)
        and source.id == origin
        and flat.placed[origin].node.outputs[source.slot] == "LATENT"
    )
