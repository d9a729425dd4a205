"""Weight patches and object patches of a MODEL: packed as plain data in the UI, put into place in
a rank.

Read: comfy/model_patcher.py (add_patches, patch_model, set_model_compute_dtype), comfy/lora.py
(calculate_weight), comfy/ops.py (CastWeightBiasOp) @ ComfyUI 0.30.0.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from ..errors import Refused
from ..forward import PREFIX
from ..refusals import ON_ONE_GPU, patch_name
from ..wire.segment import TensorRef, dtype_name
from ..wire.tree import encode_tree, is_plain
from .bypass import BYPASS, put_bypass

# Of weight patches that are no adapters: what calculate_weight knows
TYPES = ("diff", "set", "model_as_lora")


def pack_patches(patches: Mapping[str, Iterable[tuple]]) -> dict[str, list]:
    """Packs ComfyUI's weight patches of the transformer as trees of tensors and plain data.

    Raises Refused for a patch that carries a function, or whose type ComfyUI lacks: packs replace
    ``comfy.lora.calculate_weight`` for their own types, and ranks have ComfyUI's.
    """
    import comfy.weight_adapter

    def packed(key: str, value: Any) -> list:
        if isinstance(value, comfy.weight_adapter.WeightAdapterBase):
            if getattr(comfy.weight_adapter, type(value).__name__, None) is not type(value):
                raise of_another_pack(key, patch_name(type(value)))
            return ["adapter", type(value).__name__, value.weights]
        if isinstance(value, list):
            weight, convert = value[0]
            return ["merge", convert(weight), [entry(key, item) for item in value[1:]]]
        if len(value) > 1 and value[0] not in TYPES:
            raise of_another_pack(key, str(value[0]))
        return ["raw", value]

    def entry(key: str, item: tuple) -> list:
        strength, value, strength_model, offset, function = item
        if function is not None and function is not functions.get(getattr(function, "__name__", "")):
            raise Refused(
                f"The weight patch of {key} carries the function {patch_name(function)}, which cannot run in"
                " the pool: remove the node that adds it."
            )
        name = "" if function is None else function.__name__
        return [strength, packed(key, value), strength_model, offset, name]

    functions = known_functions()
    below = [(key, items) for key, items in patches.items() if key.startswith(PREFIX)]
    return {key: [entry(key, item) for item in items] for key, items in below}


def of_another_pack(key: str, kind: str) -> Refused:
    return Refused(
        f"The weight patch of {key} is of the type {kind}, which is another pack's and cannot be applied in"
        f" the pool: remove the node that adds it, or {ON_ONE_GPU}."
    )


def known_functions() -> dict[str, Callable]:
    """ComfyUI's own functions on weight patches, by name: a diffusers LoRA of the last layer has
    scale and shift the other way round.
    """
    import comfy.utils

    return {"swap_scale_shift": comfy.utils.swap_scale_shift}


def unpack_patches(patches: dict[str, list]) -> dict[str, list[tuple]]:
    """The inverse of ``pack_patches``."""
    import comfy.weight_adapter

    def value(kind: str, *content: Any) -> Any:
        if kind == "adapter":
            name, weights = content
            return getattr(comfy.weight_adapter, name)(set(), weights)
        if kind == "merge":
            weight, rest = content
            return [(weight, lambda tensor, **_: tensor), *(entry(item) for item in rest)]
        return content[0]

    def entry(item: list) -> tuple:
        strength, packed, strength_model, offset, function = item
        return (strength, value(*packed), strength_model, offset, functions[function] if function else None)

    functions = known_functions()

    return {key: [entry(item) for item in items] for key, items in patches.items()}


def plain_objects(object_patches: dict[str, Any]) -> dict[str, Any]:
    """The object patches of the transformer. Raises Refused, naming one that is not plain data."""
    objects = {key: value for key, value in object_patches.items() if f"{key}.".startswith(PREFIX)}
    for key, value in objects.items():
        if not is_plain(value):
            raise Refused(
                f"The object patch {key} ({patch_name(value)}) is code and cannot run in the pool: remove"
                " the node that adds it, or bypass PipeMesh Parallelize."
            )
    return objects


def cast_switches(patcher: Any) -> dict[str, Any]:
    """Returns object patches that make every layer cast its weights to the dtype of its input, if
    the MODEL computes in another dtype than its weights have (the node ModelComputeDtype). ComfyUI
    sets these switches as it loads weights, which it does not do in the UI.
    """
    if not patcher.force_cast_weights:
        return {}
    modules = patcher.model.diffusion_model.named_modules()
    off = [path for path, module in modules if getattr(module, "comfy_cast_weights", True) is False]
    return {f"{PREFIX}{path}.comfy_cast_weights": True for path in off}


def widened_weights(model: Any, patches: Mapping[str, list]) -> dict[str, torch.nn.Parameter]:
    """In the UI, as object patches: weights without content of the shape to which a weight patch
    widens layers, as control LoRAs do. ComfyUI tells by the shape which inputs the model takes.
    """
    import comfy.utils

    made = {}
    for key, shape in patched_shapes(model, patches).items():
        weight = comfy.utils.get_attr(model, key)
        if shape != tuple(weight.shape):
            empty = torch.zeros((), dtype=weight.dtype, device=weight.device).expand(shape)
            made[key] = torch.nn.Parameter(empty, requires_grad=False)
    return made


def patched_shapes(model: Any, patches: Mapping[str, list]) -> dict[str, tuple[int, ...]]:
    import comfy.lora
    import comfy.utils

    shape_of, weight = comfy.lora.calculate_shape, comfy.utils.get_attr
    below = [(key, entries) for key, entries in patches.items() if key.startswith(PREFIX)]
    return {key: tuple(shape_of(entries, weight(model, key), key)) for key, entries in below}


def put_object(model: Any, name: str, value: Any, device: torch.device) -> Callable[[], Any] | None:
    """In a rank: puts an object patch that is no parameter into place. Returns the call that takes
    it away again, None if this rank has no such place: a stage has no blocks but its own.
    """
    import comfy.utils

    if name == BYPASS:
        return put_bypass(model, value)
    *path, attribute = name.split(".")
    try:
        holder = comfy.utils.get_attr(model, ".".join(path))
    except AttributeError:
        return None
    before = getattr(holder, attribute, comfy.utils.ATTR_UNSET)
    if callable(value):
        before = vars(holder).get(attribute, comfy.utils.ATTR_UNSET)  # else the method of its class
    if isinstance(value, torch.Tensor):
        value = value.to(device)
    setattr(holder, attribute, value)
    return lambda: comfy.utils.set_attr(holder, attribute, before)


def digest_of(tensor: torch.Tensor) -> bytes:
    content = tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data
    return hashlib.blake2b(content, digest_size=16).digest()


class Digests:
    """The digests of tensors that do not change, such as a LoRA's: each is hashed once."""

    def __init__(self):
        self._known: WeakIdKeyDictionary = WeakIdKeyDictionary()

    def of(self, tensor: torch.Tensor) -> bytes:
        if tensor not in self._known:
            self._known[tensor] = digest_of(tensor)
        return self._known[tensor]


def content_id(objects: Mapping[str, Any], digest: Callable[[torch.Tensor], bytes] = digest_of) -> str:
    """A name for object patches, or for packed weight patches: equal for equal content, "" for
    none. It hashes values, not addresses, which are handed out again.
    """
    if not objects:
        return ""
    content = hashlib.blake2b(digest_size=8)

    def put(_path: str, tensor: torch.Tensor) -> TensorRef:
        content.update(digest(tensor))
        return TensorRef(0, tuple(tensor.shape), dtype_name(tensor.dtype))

    content.update(encode_tree(objects, put))
    return f"|{content.hexdigest()}"


def with_hooks(patcher: Any, of_hooks: Mapping[str, list]) -> dict[str, list]:
    """Returns the transformer's weight patches, followed by those ``of_hooks``."""
    keys = sorted(key for key in {*patcher.patches, *of_hooks} if key.startswith(PREFIX))
    return {key: [*patcher.patches.get(key, []), *of_hooks.get(key, [])] for key in keys}


def hooked_id(patcher: Any, of_hooks: Mapping[str, list], digests: Digests) -> str:
    """Names the transformer's weight patches under these hooks by their content, because the same
    set comes back at every step; "" if the hooks change none.
    """
    if not any(key.startswith(PREFIX) for key in of_hooks):
        return ""
    return content_id(pack_patches(with_hooks(patcher, of_hooks)), digests.of)
