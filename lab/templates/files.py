"""The workflow templates that are installed with ComfyUI, their prompts, and which of them sample a
Diffusion Transformer for images or video on this machine.

That is a rule about the graph, not a list of names: a node turns a MODEL into a LATENT, no file
that the MODEL is loaded from holds a UNet, and nodes turn that LATENT into an IMAGE. It leaves out
those that call paid APIs, UNets, audio, 3D, and those that sample nothing.
"""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...launcher.comfyui.host_record import ComfyInstall
from ...launcher.errors import LaunchError
from ..comfyui.page import ComfyPage
from ..comfyui.server import ComfyServer
from .cut import Graph
from .surgery import Info, declared, links, outputs

# As ComfyUI itself finds them (app/frontend_management.py@0.30.0), in whatever folders they lie
ASKED = """
from comfyui_workflow_templates import get_asset_path, iter_templates
for template in iter_templates():
    for asset in template.assets:
        if asset.filename.endswith(".json"):
            print(get_asset_path(template.template_id, asset.filename))
"""
# Names of files, up to Stable Diffusion 2 and XL
UNETS = re.compile(r"(?i)(v1-5|v2-1|dreamshaper|sd_?xl|svd|lotus)")
OTHER_PACKS = {"foreign_pack.py": Path(__file__).with_name("stand_ins") / "foreign_pack.py"}
OF_ANY_TYPE = ("*", "COMFY_MATCHTYPE_V3")  # inputs and outputs of switches and the like
LATENTS = ("LATENT", *OF_ANY_TYPE)
MODELS = ("MODEL", "GUIDER", *OF_ANY_TYPE)


@dataclass(frozen=True)
class Template:
    name: str
    path: Path

    def workflow(self) -> Any:
        return json.loads(self.path.read_text(encoding="utf-8"))


def installed(host: ComfyInstall) -> list[Template]:
    """Every template of the packages that ComfyUI's python has, by name. Raises LaunchError."""
    asked = subprocess.run([host.python, "-c", ASKED], capture_output=True, text=True, check=False)
    if asked.returncode:
        why = asked.stderr.strip().rpartition("\n")[2]
        raise LaunchError(
            f"{host.python} gives no workflow templates ({why}): run {host.python} -m pip install -r"
            f" {host.comfyui}/requirements.txt"
        )
    paths = map(Path, asked.stdout.splitlines())
    return sorted((Template(path.stem, path) for path in paths), key=lambda template: template.name)


def prompts(host: ComfyInstall, is_wanted: Callable[[str], bool] = lambda _name: True) -> dict[str, Graph]:
    """Returns the prompt that ComfyUI's own page makes of each wanted template that samples a
    Diffusion Transformer for images or video. Raises LaunchError if the page cannot be opened.
    """
    found = {}
    with (
        ComfyServer(host, custom_nodes=OTHER_PACKS, api_nodes=True) as server,
        ComfyPage(server.address) as page,
    ):
        info = server.get("/object_info")
        for template in installed(host):
            if is_wanted(template.name) and may_sample(workflow := template.workflow()):
                prompt = page.prompt(workflow)
                if samples_transformer(prompt, info):
                    found[template.name] = prompt
    return found


def may_sample(workflow: Any) -> bool:
    """Whether a node of the workflow or of its subgraphs gives a LATENT. It spares the page what
    cannot sample.
    """
    if not isinstance(workflow, dict) or "nodes" not in workflow:
        return False
    subgraphs = (workflow.get("definitions") or {}).get("subgraphs") or ()
    return any(
        output["type"] == "LATENT"
        for graph in (workflow, *subgraphs)
        for node in graph["nodes"]
        for output in node.get("outputs") or ()
    )


def samples_transformer(prompt: Graph, info: Info) -> bool:
    for key, node in prompt.items():
        if "LATENT" in outputs(info, node) and takes_model(info, node):
            loaders = list(_loaders(prompt, info, key))
            if loaders and not any(map(_holds_unet, loaders)) and _is_decoded(prompt, info, key):
                return True
    return False


def takes_model(info: Info, node: dict[str, Any]) -> bool:
    return any(declared(info, node["class_type"], name) in MODELS[:2] for name, _link in links(node))


def _sources(prompt: Graph, info: Info, key: str, types: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    """The nodes that give an input of one of the types its value, each with its output's type."""
    for name, (origin, slot) in links(prompt[key]):
        kinds = outputs(info, prompt[origin])
        if declared(info, prompt[key].get("class_type", ""), name) in types:
            yield origin, kinds[slot] if slot < len(kinds) else ""


def _loaders(prompt: Graph, info: Info, key: str) -> Iterator[dict[str, Any]]:
    """The nodes that the models of a sampler come from."""
    for origin, kind in _sources(prompt, info, key, MODELS):
        inner = list(_loaders(prompt, info, origin))
        yield from inner or ([prompt[origin]] if kind == "MODEL" else [])


def _holds_unet(loader: dict[str, Any]) -> bool:
    first = next(iter(loader["inputs"].values()), None)
    return isinstance(first, str) and UNETS.match(Path(first).name) is not None


def _is_decoded(prompt: Graph, info: Info, key: str) -> bool:
    """True if a node turns its latent, or what others made of it, into an image."""
    reached = [key]
    for latent in reached:  # grows meanwhile
        for other, node in prompt.items():
            sources = _sources(prompt, info, other, LATENTS)
            if other not in reached and any(origin == latent and kind in LATENTS for origin, kind in sources):
                if "IMAGE" in outputs(info, node):
                    return True
                if {*LATENTS} & {*outputs(info, node)}:
                    reached.append(other)
    return False
