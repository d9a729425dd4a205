"""Refuse, by name and with the next move, what the pool cannot honour of a MODEL."""

from __future__ import annotations

from typing import Any, Protocol

from ..errors import Refused
from ..refusals import patch_name
from ..weights.bypass import adapters_of
from ..weights.gguf import described_operations
from ..wire.tree import is_plain
from .by_name import OVERRIDE, attention_backend, does_as, leave_out


class Holding(Protocol):
    def holds(self, patch: Any) -> bool:
        """Returns whether ranks get this patch by reference to code of theirs."""
        ...


def refuse_in_block_patches(transformer_options: dict[str, Any], in_block: Holding | None = None) -> None:
    """Raises Refused for callables that must run inside the transformer, naming the first, but for
    those that ranks know by name, and those that ``in_block`` holds.
    """
    patches, replacements = (
        transformer_options.get("patches", {}),
        transformer_options.get("patches_replace", {}),
    )
    found = [
        (f"patches/{kind}", patch)
        for kind, items in patches.items()
        for patch in items
        if in_block is None or not in_block.holds(patch)
    ]
    for kind, blocks in replacements.items():
        found += [
            (f"patches_replace/{kind}", patch)
            for patch in blocks.values()
            if kind != "dit" or not does_as(patch, leave_out)
        ]
    if OVERRIDE in transformer_options and attention_backend(transformer_options) is None:
        found.append((OVERRIDE, transformer_options[OVERRIDE]))
    if found:
        kind, patch = found[0]
        raise Refused(
            f"The patch {patch_name(patch)} ({kind}) runs inside the model's blocks and cannot run in the"
            " pool: remove the node that adds it, or PipeMesh."
        )


def refuse_foreign_levers(patcher: Any) -> None:
    """Raises Refused for settings of other nodes on a MODEL beside patches and options, naming
    them.
    """
    foreign = [one for items in patcher.injections.values() for one in items if adapters_of(one) is None]
    found = {
        (
            "injections"
            if not foreign
            else f"the injection {patch_name(getattr(foreign[0], 'inject', foreign[0]))}"
        ): foreign,
        "weight wrappers": patcher.weight_wrapper_patches,
        "MultiGPU CFG Split clones": patcher.additional_models.get("multigpu"),
    }
    for what, content in found.items():
        if content:
            raise Refused(
                f"This MODEL carries {what}, which the pool cannot honour: remove the node that adds them, or"
                " PipeMesh."
            )


def refuse_state(patcher: Any) -> None:
    """Raises Refused for a model that cannot be rebuilt from its configuration and state dict."""
    config = patcher.model.model_config
    described_operations(config.custom_operations)
    if not is_plain(config.unet_config) or not is_plain(config.quant_config):
        name = type(patcher.model.diffusion_model).__name__
        raise Refused(
            f"{name} from this loader cannot be sent to the pool (its configuration is no plain data): "
            "load it with a stock loader, or leave PipeMesh Parallelize out."
        )
