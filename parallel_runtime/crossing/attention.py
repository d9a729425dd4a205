"""Finds the attention function that a MODEL uses, as its nodes, ComfyUI's command line and its
layers choose it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ..attention.hosts import NO_PARTS, inexact
from ..errors import Refused
from ..layout import Layout
from ..refusals import patch_name
from .named_code import OVERRIDE, attention_backend

OF_A_LAYER = "ComfyAttention"  # the class of what says which function a layer prefers


def require_parts(patcher: Any, layout: Layout) -> None:
    """Raises Refused if this layout has ranks attend to parts of the keys, and the MODEL's
    attention cannot be merged from parts.
    """
    if layout.merges_parts and (name := why_no_parts(patcher)):
        raise Refused(f"This MODEL attends by {name}, which ranks cannot compute in parts: {NO_PARTS}.")


def why_no_parts(patcher: Any) -> str:
    """Names the MODEL's attention function if it is not exact attention, whose parts ranks can
    merge; empty if it is.
    """
    override = patcher.model_options.get("transformer_options", {}).get(OVERRIDE)
    if override is not None and attention_backend(override) is None:
        return patch_name(override)
    names = (inexact(function, {}, False) for function in _functions(patcher, override))
    return next(filter(None, names), "")


def _functions(patcher: Any, override: Any) -> Iterator[Any]:
    import comfy.ldm.modules.attention as attention

    if override is not None:
        yield attention.REGISTERED_ATTENTION_FUNCTIONS[attention_backend(override)]
        return
    yield attention.optimized_attention
    for module in patcher.model.diffusion_model.modules():
        if type(module).__name__ == OF_A_LAYER and module.function is not None:
            yield module.function
