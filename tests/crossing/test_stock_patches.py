"""ComfyUI's own nodes that put code inside a model's blocks: each stands in docs/MODEL_PATCHES.md,
as honoured or as refused, and a refusal names it.
"""

import ast
import re
from importlib import import_module
from pathlib import Path

import pytest
import torch
from pipemesh.lab.commands.parity import stock_model
from pipemesh.parallel_runtime.errors import Refused
from pipemesh.parallel_runtime.families.catalogue import FAMILIES
from pipemesh.parallel_runtime.layout import Layout

from ..fixtures import COMFYUI, ROOT
from ..kit.foreign_pack import unet
from ..kit.in_groups import in_groups
from ..kit.models import run

pytestmark = pytest.mark.host
PAGE = (ROOT / "docs" / "MODEL_PATCHES.md").read_text(encoding="utf-8")
REFUSED = PAGE.partition("## Refused by name")[2]
PATCHING = re.compile(
    r"set_model_(options_)?(patch|attn|input|output|middle|double|emb|forward|post_input|noise)\w*\("
    r"|_patch': \[|patch\.register\("
)
SHOWN = re.compile(r"(?:node_id|display_name)='([^']+)'")
# Names on the page, with the modules in comfy_extras, and what the nodes are given beside the MODEL
BY_NAME = {
    "Normalized Attention Guidance": ("nag.NAGuidance", {"nag_scale": 5.0, "nag_alpha": 0.5, "nag_tau": 1.5}),
    "PerturbedAttentionGuidance": ("pag.PerturbedAttentionGuidance", {"scale": 3.0}),
    "Self-Attention Guidance": ("sag.SelfAttentionGuidance", {"scale": 0.5, "blur_sigma": 2.0}),
    "FreeU": ("freelunch.FreeU", {"b1": 1.1, "b2": 1.2, "s1": 0.9, "s2": 0.2}),
    "FreeU_V2": ("freelunch.FreeU_V2", {"b1": 1.3, "b2": 1.4, "s1": 0.9, "s2": 0.2}),
    "HyperTile": (
        "hypertile.HyperTile",
        {"tile_size": 256, "swap_size": 2, "max_depth": 0, "scale_depth": False},
    ),
    "TomePatchModel": ("tomesd.TomePatchModel", {"ratio": 0.3}),
}


def patching_nodes():
    """The names of each such node: of its class, its id and the one that users see."""
    for file in sorted(Path(COMFYUI, "comfy_extras").glob("nodes_*.py")):
        source = file.read_text(encoding="utf-8")
        for node in ast.parse(source).body if PATCHING.search(source.replace('"', "'")) else ():
            text = ast.unparse(node) if isinstance(node, ast.ClassDef) else ""
            if ("Model.Input(" in text or "('MODEL'," in text) and PATCHING.search(text):
                shown = SHOWN.findall(text.partition("outputs=")[0])
                yield {node.name, *shown, *re.findall(rf'"{node.name}": "([^"]+)"', source)}


def patched(name, model):
    path, given = BY_NAME[name]
    module, _, kind = path.partition(".")
    made = getattr(import_module(f"comfy_extras.nodes_{module}"), kind).execute(model, **given)
    return made[0] if isinstance(made, tuple) else made.result[0]


def test_each_node_of_comfyuis_that_patches_blocks_is_on_the_page():
    found = list(patching_nodes())
    assert len(found) > 15
    assert [names for names in found if not any(name in PAGE for name in names)] == []


@pytest.mark.parametrize("family", [family.samples[0].name for family in FAMILIES[::12]])
def test_normalized_attention_guidance_is_refused_by_its_name_on_transformers(family):
    ours, _ = in_groups(Layout(cfg=2), stock_model(4, family=family))
    says = r"The patch .*NAGuidance\..* \(patches/attn1_output_patch\).*: remove the node"
    with pytest.raises(Refused, match=says):
        patched("Normalized Attention Guidance", ours).partially_load(torch.device("cpu"))


@pytest.mark.parametrize("name", BY_NAME)
def test_what_the_page_says_is_refused_is_refused_by_the_nodes_name(name):
    ours, _ = in_groups(Layout(cfg=2), unet())
    kind = BY_NAME[name][0].partition(".")[2]
    assert name in REFUSED
    with pytest.raises(Refused, match=rf"The patch .*\.{kind}\..* runs inside .*: remove the node"):
        run(patched(name, ours), cfg=3.0, latent=torch.zeros(1, 4, 16, 16))
