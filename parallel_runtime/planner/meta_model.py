"""Describes a loaded MODEL and one cond of ComfyUI's as plain data, in the UI, and rebuilds the
MODEL without weights (a meta model) in the process that counts.

A configuration, shapes and dtypes cross: no weight, no content of a tensor, no code.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any, NamedTuple

import torch

from ..wire.segment import TensorRef, dtype_name, dtype_named
from ..wire.tree import NotPlain, decode_tree, encode_tree

# Of a cond, what is not the model's
BESIDE = {"model_conds", "uuid", "control", "hooks", "area", "mask", "gligen", "default"}
# Of attributes alone: what encoders of images return
OBJECTS = ("comfy.clip_vision.Output", "types.SimpleNamespace")


class MetaModel(NamedTuple):
    """The meta model that ``rebuilt`` makes of a description. ``cond`` holds the arguments that the
    cond gives the model.
    """

    model: Any
    cond: dict[str, Any]
    shape: tuple[int, ...]


class OtherClass(Exception):
    """A configuration makes a transformer of another class than the MODEL's."""


def model_description(model: Any, cond: Mapping[str, Any], shape: tuple[int, ...]) -> bytes:
    """In the UI: describe a BaseModel, the arguments that a cond gives it, and a latent of
    ``shape``. Descriptions are equal if the evaluations cost the same. Raises NotPlain.
    """
    import comfy.supported_models

    config = model.model_config
    if getattr(comfy.supported_models, type(config).__name__, None) is not type(config):
        raise NotPlain("the model's configuration", config)
    tree = {
        "config": type(config).__name__,
        # A meta model has its own dtype
        "settings": {name: value for name, value in sorted(config.unet_config.items()) if name != "dtype"},
        "class": class_of(model),
        "cond": {name: plain(value) for name, value in sorted(cond.items()) if name not in BESIDE},
        "shape": list(shape),
    }
    return encode_tree(
        tree, lambda _path, tensor: TensorRef(0, tuple(tensor.shape), dtype_name(tensor.dtype))
    )


def rebuilt(data: bytes, dtype: torch.dtype, device: torch.device) -> MetaModel:
    """In the process that counts: the inverse of ``model_description``, with weights in ``dtype``.
    Call it where tensors have no content. Raises OtherClass.
    """
    import comfy.supported_models

    tree = decode_tree(data, lambda ref: torch.zeros(ref.shape, dtype=dtype_named(ref.dtype)))
    config = getattr(comfy.supported_models, tree["config"])(dict(tree["settings"]))
    config.unet_config.update(tree["settings"])
    config.set_inference_dtype(dtype, None)
    model = config.get_model({}, "", device=device)
    if class_of(model) != tree["class"]:
        raise OtherClass(f"it is a {tree['class']}, and its configuration makes a {class_of(model)}")
    return MetaModel(
        model, {name: unplain(value) for name, value in tree["cond"].items()}, tuple(tree["shape"])
    )


def class_of(model: Any) -> str:
    transformer = type(model.diffusion_model)
    return f"{transformer.__module__}.{transformer.__qualname__}"


def plain(value: Any) -> Any:
    """Return a value with the attributes of each of ``OBJECTS`` in its place."""
    name = f"{type(value).__module__}.{type(value).__qualname__}"
    if name in OBJECTS:
        return {name: plain(vars(value))}
    if type(value) in (list, tuple):
        return type(value)(map(plain, value))
    return {name: plain(one) for name, one in value.items()} if type(value) is dict else value


def unplain(value: Any) -> Any:
    """Return the inverse of ``plain``."""
    if isinstance(value, (list, tuple)):
        return type(value)(map(unplain, value))
    if not isinstance(value, dict):
        return value
    attributes = {name: unplain(one) for name, one in value.items()}
    name = next(iter(value), "")
    if len(value) > 1 or name not in OBJECTS:
        return attributes
    module, _, kind = name.rpartition(".")
    made = getattr(import_module(module), kind)()
    vars(made).update(attributes[name])
    return made
