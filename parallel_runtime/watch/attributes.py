"""Plain attributes of a transformer's modules that a node changed in place: the theta of a position
embedder, a scale, a flag.

A rank builds the model anew, so what differs from a model built anew goes there as object patches.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from copy import deepcopy
from operator import itemgetter
from typing import Any, NamedTuple

import torch

from ..errors import Refused
from ..forward import PREFIX
from ..refusals import ON_ONE_GPU, patch_name
from ..wire.tree import is_plain
from .python_file import assigned_later

OF_EVERY_MODULE = frozenset(vars(torch.nn.Module())) - {"training"}
# What ComfyUI's layers note of the weights that they are given
OF_LOADERS = frozenset((
    "weight", "bias", "in_features", "out_features", "num_experts", "factory_kwargs",
    "comfy_cast_weights", "weight_function", "bias_function", "scale_weight", "scale_input",
    "tensor_class", "quant_format", "layout_type", "_full_precision_mm", "_full_precision_mm_config",
    "_orig_shape", "_resident_bank",
))  # fmt: skip
MOST = 16  # items of a row that is watched
ARCHIVED = "_comfy_model_dtype"  # the end of names under which ComfyUI notes a weight's dtype
Known = dict[str, Any]  # the attributes of a module, or of a plain object that one of them is


class ModuleAttributes(NamedTuple):
    """Attributes of one module, as they were. ``get`` returns them of ``own``, the module's
    ``vars``.
    """

    path: str
    names: tuple[str, ...]
    own: Known
    get: Callable[[Known], Any]
    before: Any

    def refusal(self) -> Refused:
        before = self.before if len(self.names) > 1 else (self.before,)
        pairs = [(name, old, self.own.get(name)) for name, old in zip(self.names, before, strict=True)]
        name, old, new = next(one for one in pairs if one[1] != one[2])
        return Refused(
            f"{self.path}.{name} of this MODEL was changed from {old} to {new} while it samples, and the"
            f" workers do not have that change: remove the node that does it, or {ON_ONE_GPU}."
        )


class Attributes:
    """The attributes that the modules of one model have by its configuration. To know them, the
    model is built once, without weights.
    """

    def __init__(self) -> None:
        self._built: dict[str, Known] = {}

    def changed(self, model: Any) -> dict[str, Any]:
        """Returns, as object patches, the attributes of a BaseModel's transformer that were changed
        in place. Raises Refused for one that is no plain data, naming it.
        """
        if not self._built:
            self._built = {path: attributes_of(module) for path, module in built_anew(model).named_modules()}
        found: dict[str, Any] = {}
        for path, module in model.diffusion_model.named_modules():
            if path in self._built:
                found |= differing(vars(module), self._built[path], f"{PREFIX}{path}." if path else PREFIX)
        return found

    def watched(self, transformer: torch.nn.Module) -> list[ModuleAttributes]:
        """Returns the attributes that are numbers, flags, texts or rows of these, with their
        present values. Attributes of layers are left out.
        """
        found = []
        for path, module in transformer.named_modules():
            if type(module).__module__.startswith("comfy.ldm."):
                place = f"{PREFIX}{path}".removesuffix(".")
                known, own = self._built.get(path, {}), vars(module)
                found += watched_of(place, known, own)
                for name, value in known.items():
                    if is_of_comfyui(value) and type(own.get(name)) is type(value):
                        found += watched_of(f"{place}.{name}", vars(value), vars(own[name]))
        return found


def watched_of(path: str, known: Known, own: Known) -> list[ModuleAttributes]:
    names = tuple(name for name, value in known.items() if is_small(value) and is_small(own.get(name)))
    if not names:
        return []
    get = itemgetter(*names)
    return [ModuleAttributes(path, names, own, get, deepcopy(get(own)))]


def is_small(value: Any) -> bool:
    scalars = (bool, int, float, str)
    return type(value) in scalars or (
        type(value) in (list, tuple) and len(value) <= MOST and all(type(one) in scalars for one in value)
    )


def built_anew(model: Any) -> torch.nn.Module:
    """Builds a BaseModel's transformer as ComfyUI does, without weights."""
    import comfy.ops

    config = model.model_config
    operations = config.custom_operations
    if operations is None:
        fp8 = config.optimizations.get("fp8", False)
        operations = comfy.ops.pick_operations(
            config.unet_config.get("dtype"),
            model.manual_cast_dtype,
            fp8_optimizations=fp8,
            model_config=config,
        )
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        made = type(model.diffusion_model)(
            **config.unet_config, device=torch.device("meta"), operations=operations
        )
    return made.eval()


def attributes_of(module: torch.nn.Module) -> Known:
    """Returns the attributes that are no weights, submodules or hooks, nor assigned as the module
    computes.
    """
    others = OF_EVERY_MODULE | OF_LOADERS | assigned_later(type(module))
    own = vars(module).items()
    return {name: value for name, value in own if name not in others and not name.endswith(ARCHIVED)}


def differing(now: Known, built: Known, path: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, before in built.items():
        value = now.get(name, before)
        if value is before or isinstance(before, torch.device) or is_unchanged(value, before):
            continue
        if type(value) is type(before) and is_of_comfyui(value):
            found |= differing(vars(value), vars(before), f"{path}{name}.")
        elif is_plain(value):
            found[path + name] = value
        else:
            raise Refused(
                f"{path}{name} of this MODEL was changed in place to {patch_name(value)}, which cannot be"
                f" sent to the pool: remove the node that does it, or {ON_ONE_GPU}."
            )
    return found


def is_of_comfyui(value: Any) -> bool:
    """True for an object of ComfyUI's that is no module."""
    return (
        hasattr(value, "__dict__")
        and type(value).__module__.startswith("comfy.")
        and not isinstance(value, torch.nn.Module)
    )


def is_unchanged(value: Any, before: Any) -> bool:
    if type(value) is not type(before):
        return False
    if isinstance(value, torch.Tensor):
        if value.shape != before.shape or before.is_meta or value.is_meta:
            return value.shape == before.shape
        return value.dtype == before.dtype and torch.equal(value.cpu(), before.cpu())
    if isinstance(value, (list, tuple)):
        return len(value) == len(before) and all(map(is_unchanged, value, before))
    if isinstance(value, dict):
        return value.keys() == before.keys() and all(is_unchanged(value[key], before[key]) for key in value)
    if isinstance(value, functools.partial):
        parts = ("func", "args", "keywords")
        return all(is_unchanged(getattr(value, part), getattr(before, part)) for part in parts)
    if callable(value) or isinstance(value, torch.nn.Module):
        codes = [getattr(one, "__code__", None) for one in (value, before)]
        return patch_name(value) == patch_name(before) and codes[0] == codes[1]
    if is_of_comfyui(value):
        return is_unchanged(vars(value), vars(before))
    return not is_plain(value) or value == before
