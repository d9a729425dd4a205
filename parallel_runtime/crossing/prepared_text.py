"""The text that some transformers prepare themselves: ComfyUI calls ``preprocess_text_embeds`` in
its own process, before it samples.

The UI's weights stay on the CPU, without weight patches. For that one call they are cast to the
text's device and patched on their way, as ComfyUI does it for models that do not fit its GPU.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from ..errors import Refused
from ..forward import PREFIX
from ..refusals import require_plan
from ..weights.quantisation import is_quantised

METHOD = "preprocess_text_embeds"


def text_patch(patcher: Any) -> dict[str, Any]:
    """Returns the object patch of a transformer that prepares its text, by its name."""
    prepares = hasattr(type(patcher.model.diffusion_model), METHOD)
    return {PREFIX + METHOD: PreparedText(patcher)} if prepares else {}


class PreparedText:
    """Replaces the transformer's ``preprocess_text_embeds``."""

    def __init__(self, patcher: Any):
        self._patcher = weakref.ref(patcher)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        patcher = self._patcher()
        if patcher is None:
            raise RuntimeError(
                "The parallelized MODEL is gone while its text is still to be prepared: run the workflow"
                " again."
            )
        transformer = patcher.model.diffusion_model
        name_dtype(transformer, patcher.model.get_dtype_inference())
        with cast_and_patched(transformer, patcher.patches):
            return getattr(type(transformer), METHOD)(transformer, *args, **kwargs)


def name_dtype(transformer: torch.nn.Module, dtype: torch.dtype) -> None:
    """Tells quantised weights their dtype for dequantising if their loader left it open, as ComfyUI
    does when it loads the model; the UI's weights are never loaded.
    """
    for weight in transformer.parameters():
        if is_quantised(weight) and weight._params.orig_dtype is None:  # pyright: ignore[reportAttributeAccessIssue]
            weight._params = replace(weight._params, orig_dtype=dtype)  # pyright: ignore[reportAttributeAccessIssue]


@contextmanager
def cast_and_patched(transformer: torch.nn.Module, patches: dict[str, Any]) -> Iterator[None]:
    """Lets the modules outside the blocks cast and patch their weights as they use them. Raises
    Refused if a patched weight is of a module that cannot.
    """
    from comfy.model_patcher import LowVramPatch, wipe_lowvram_weight

    blocks = tuple(f"{group.path}." for group in require_plan(transformer).blocks)
    outside = [
        (name, module) for name, module in transformer.named_modules() if not f"{name}.".startswith(blocks)
    ]
    casting = [(name, module) for name, module in outside if hasattr(module, "comfy_cast_weights")]
    kinds = ("weight", "bias")
    served = {f"{PREFIX}{name}.{kind}" for name, _ in casting for kind in kinds}
    for name, module in outside:
        for kind, _ in module.named_parameters(recurse=False):
            if (key := f"{PREFIX}{name}.{kind}" if name else PREFIX + kind) in patches and key not in served:
                raise Refused(
                    f"{key} is patched and ComfyUI may read it to prepare the text: remove that weight"
                    " patch, or bypass PipeMesh Parallelize."
                )
    try:
        for name, module in casting:
            vars(module)["prev_comfy_cast_weights"] = module.comfy_cast_weights
            vars(module)["comfy_cast_weights"] = True
            for kind in kinds:
                key = f"{PREFIX}{name}.{kind}"
                setattr(module, f"{kind}_function", [LowVramPatch(key, patches)] if key in patches else [])
        yield
    finally:
        for _, module in casting:
            wipe_lowvram_weight(module)
