"""What of ``transformer_options`` crosses to the ranks with every evaluation."""

from __future__ import annotations

from typing import Any

from ..wire.tree import is_plain
from .guard import refuse_in_block_patches

STAYS_IN_THE_UI = frozenset({"wrappers", "callbacks", "patches", "patches_replace", "prefetch_dynamic_vbars"})


def plain_options(transformer_options: dict[str, Any]) -> dict[str, Any]:
    """The options that are plain data. Raises Refused for in-block patches.

    Other callables and objects stay in the UI: no code in a rank could read them.
    """
    refuse_in_block_patches(transformer_options)
    return {key: value for key, value in transformer_options.items() if key not in STAYS_IN_THE_UI and is_plain(value)}
