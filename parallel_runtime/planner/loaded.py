"""Count what one evaluation of a loaded MODEL costs at a request's true size, without computing it:
its twin runs dry.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from ..comfy_bridge.quantised import stored_bytes
from ..comfy_bridge.released_model import called_with, conds_of, forget_tensors, kernels_that_count, prompt_of, twin_of
from ..families import plan_or_whole
from .dry_device import DEVICE, dry_device
from .dry_run import counted
from .figures import Whole
from .quick_fake import QuickFakeMode

TEXT = 64  # tokens by which texts are counted


class NotCounted(Exception):
    """A MODEL cannot be run dry, for the reason given."""


def whole_of(model: Any, cond: Mapping[str, Any], shape: tuple[int, ...]) -> Whole:
    """Count one evaluation of ``model``, a BaseModel, for one cond of ComfyUI's and one latent of
    ``shape`` (1, C, ...). Raises NotCounted.

    Weights are as large as they are stored, which for quantised ones is smaller than the twin's.
    """
    plan = plan_or_whole(type(model.diffusion_model))
    if plan is None:
        raise NotCounted(f"{type(model.diffusion_model).__name__} has no token plan")
    mode = QuickFakeMode()
    try:
        with kernels_that_count() as attention:
            with dry_device(mode):
                twin = twin_of(model, torch.bfloat16, DEVICE)
                arguments = called_with(twin, conds_of(twin, prompt_of(cond), [shape], DEVICE), [shape], DEVICE)
            whole = counted(twin, plan, arguments, mode, attention=attention)
    except Exception as error:  # whatever a model does with tensors that have no content, its run goes on without counts
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise NotCounted(f"its twin without weights does not run: {reason}") from error
    finally:
        forget_tensors()
    stored = stored_bytes(model.diffusion_model.parameters()) / max(1, whole.weight_bytes)
    of = whole.shareable
    sizes = {name: round(stored * size) for name, size in of._asdict().items() if isinstance(size, int)}
    return replace(
        whole,
        weight_bytes=round(stored * whole.weight_bytes),
        block_weight_bytes=[round(stored * nbytes) for nbytes in whole.block_weight_bytes],
        shareable=of._replace(blocks=[round(stored * one) for one in of.blocks], layers=(), **sizes),
    )


def longest(conds: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """Return the cond with most text: an evaluation of it takes longest."""
    return max(conds, key=lambda cond: cond["cross_attn"].shape[1] if cond.get("cross_attn") is not None else 0)


def rounded(cond: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a cond with a few tokens more of text, so that most prompts are counted as one."""
    text = cond.get("cross_attn")
    if not isinstance(text, torch.Tensor) or text.dim() != 3 or "attention_mask" in cond:
        return cond
    tokens = -(-text.shape[1] // TEXT) * TEXT
    return {**cond, "cross_attn": torch.empty(text.shape[0], tokens, text.shape[2], dtype=text.dtype, device="meta")}
