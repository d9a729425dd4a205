"""Knows by its name what an attention function of ComfyUI or of a node computes: exact attention up
to rounding, as torch's kernels do, or a result of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from ..layout import THAT_MERGE, listed

SAGE = "attention_sage"
EXACT = frozenset((
    "attention_basic", "attention_flash", "attention_pytorch", "attention_split", "attention_sub_quad",
    "attention_xformers",
))  # fmt: skip
# What a user does where ranks have no kernel for one of which parts can be merged
NO_PARTS = f"set {listed(THAT_MERGE)} to 1, or choose another attention function"


def inexact(attention: Any, options: Mapping[str, Any], is_masked: bool) -> str:
    """Return the name of the inexact function by which a call of ``attention`` with these options
    computes; empty for exact attention. ComfyUI's SageAttention is exact if the model asks for
    that, and under masks that the package does not know.
    """
    if isinstance(attention, partial):  # a node's override of a function
        return _name(attention.func)
    name = _name(attention)
    if name == SAGE:
        takes_masks = getattr(attention, "__globals__", {}).get("SAGE_ATTENTION_SUPPORTS_MASK", True)
        is_exact = options.get("low_precision_attention", True) is False or (is_masked and not takes_masks)
        return "" if is_exact else SAGE
    return "" if name in EXACT else name


def _name(attention: Any) -> str:
    return getattr(attention, "__name__", "") or type(attention).__name__
