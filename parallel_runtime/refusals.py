"""Helps every refusal: names the refused object, and says whether a model has a token plan."""

from __future__ import annotations

import sys
from typing import Any

import torch

from .errors import Refused
from .families import plan_or_whole
from .families.plan import TokenPlan
from .families.unplanned_models import class_path, why_no_plan
from .layout import OF_A_GROUP, OF_THE_POOL, Layout, listed

ON_ONE_GPU = "run this sampler on one GPU (bypass PipeMesh Parallelize and turn auto mode off)"


def require_plan(diffusion_model: torch.nn.Module) -> TokenPlan:
    """Returns the token plan of a transformer; one without blocks of a UNet that ranks compute
    whole. Raises Refused if there is none.
    """
    plan = plan_or_whole(type(diffusion_model))
    if plan is None:
        raise Refused(f"{no_plan(diffusion_model)}: {ON_ONE_GPU}.")
    return plan


def require_whole_groups(diffusion_model: torch.nn.Module, layout: Layout) -> None:
    """Raises Refused if the ranks of a group would share a forward that cannot be cut."""
    if not require_plan(diffusion_model).blocks and layout.group_size > 1:
        raise Refused(
            f"{no_plan(diffusion_model)}: set {listed(OF_A_GROUP)} to 1 and share prompts and images"
            f" out by {listed(OF_THE_POOL)}, or {ON_ONE_GPU}."
        )


def no_plan(diffusion_model: torch.nn.Module) -> str:
    kind = type(diffusion_model)
    why = why_no_plan(class_path(kind)) if kind.__module__.startswith("comfy.") else of_a_pack(kind)
    known = "docs/FAMILIES.md of the repository lists the models that have one"
    return f"{kind.__name__} has no token plan ({why}; {known})"


def of_a_pack(model_class: type) -> str:
    """Says whose class it is that has been put in the place of one of ComfyUI's, which may have the
    same name.
    """
    file = getattr(sys.modules.get(model_class.__module__), "__file__", None) or ""
    path = file.replace("\\", "/")
    where = path[path.find("custom_nodes/") :] if "custom_nodes/" in path else path
    return (
        f"it is {patch_name(model_class)}{f' in {where}' * bool(where)}, of another pack, not ComfyUI's own"
    )


def patch_name(value: Any) -> str:
    """Returns module and name of a function, or of an object's class, for an error message. ComfyUI
    imports a pack under the path of its folder, of which the folder's own name is enough.
    """
    kind = value if hasattr(value, "__qualname__") else type(value)
    return f"{getattr(kind, '__module__', '?').rpartition('/')[2]}.{kind.__qualname__}"
