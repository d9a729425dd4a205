"""Flatten the objects of a patch into plain data, tensors and references to code, and unflatten
them in a rank.

A rank calls only code that it imported itself, and runs no constructor: an instance is made empty
and given its attributes. A value that is neither plain data nor code that ranks may import is
refused by name.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable
from enum import Enum
from functools import cached_property, partial
from types import CellType, FunctionType, MethodType
from typing import Any

import torch

from ..errors import Refused
from ..refusals import ON_ONE_GPU, patch_name
from ..wire.tree import is_plain
from .code import NotReferable, Reference, compiled, imported, reference_to, resolved

Flattened = Any  # a plain value, or [number of the object, kind, content...]; "same" for one that came before


class Disassembly:
    """Flattens objects that may share others. Modules of ``transformer`` are named by their paths.

    ``code`` lists the functions and classes that the objects refer to. ``models`` maps a number to
    each flattened module that patches bring along as a model of its own. Others refer to a module
    by an id that stays the same while the patches do.
    """

    def __init__(self, transformer: torch.nn.Module):
        self._transformer = transformer
        self._numbers: dict[int, int] = {}
        self._kept: list[Any] = []  # so that no address is handed out again
        self.models: dict[int, Flattened] = {}
        self.code: list[Any] = []

    @cached_property
    def _paths(self) -> dict[int, str]:
        return {id(module): path for path, module in self._transformer.named_modules()}

    def take(self, value: Any, path: str) -> Flattened:
        """Returns ``value``, flattened. ``path`` is its place, for errors. Raises Refused."""
        is_gpu = type(value) is str and OF_A_GPU.fullmatch(value)
        if not is_gpu and not isinstance(value, SHARED) and is_plain(value):
            return value
        if id(value) in self._numbers:
            return [self._numbers[id(value)], "same"]
        number = self._numbers[id(value)] = len(self._numbers)
        self._kept.append(value)
        try:
            return [number, *self._content(value, path, number)]
        except NotReferable as error:
            raise Refused(
                f"The patch {path} holds {patch_name(value)}, which cannot be sent to the pool ({error}): "
                f"remove the node that adds it, or {ON_ONE_GPU}."
            ) from error

    def _content(self, value: Any, path: str, number: int) -> tuple:
        if id(value) in self._paths:
            return "of transformer", self._paths[id(value)]
        if type(value) is torch.Tensor:
            order = memory_order(value)
            return "tensor", value.detach().permute(order), value.device.type != "cpu", order
        if type(value) is torch.nn.Parameter:
            return "parameter", value.detach()
        if isinstance(value, torch.device):
            return "device", str(value)
        if isinstance(value, str):
            return "device's name", value
        if type(value) in SEQUENCES.values():
            kind = next(kind for kind, made in SEQUENCES.items() if made is type(value))
            return kind, [self.take(item, f"{path}[{place}]") for place, item in enumerate(value)]
        if type(value) in (dict, OrderedDict):
            items = [[self.take(key, path), self.take(item, f"{path}[{key}]")] for key, item in value.items()]
            return "dict", type(value) is OrderedDict, items
        return self._code(value, path, number)

    def _code(self, value: Any, path: str, number: int) -> tuple:
        import comfy.model_patcher

        if isinstance(value, MethodType):
            return "method", self.take(value.__func__, path), self.take(value.__self__, f"{path}.__self__")
        if isinstance(value, FunctionType):
            return self._function(value, path)
        if isinstance(value, type):
            self.code.append(value)
            return "named", reference_to(value)
        if isinstance(value, comfy.model_patcher.ModelPatcher):
            if value.patches:
                raise NotReferable("it has weight patches of its own")
            self.models[number] = self.take(value.model, f"{path}.model")
            return "model", value.clone_base_uuid.hex
        if hasattr(value, "spacial_compression_encode"):
            return "vae", value.spacial_compression_encode()
        if not hasattr(value, "__dict__") or isinstance(value, BUILT_IN):
            raise NotReferable("it is no plain data")
        self.code.append(type(value))
        others = OF_PATCHERS if isinstance(value, torch.nn.Module) else ()
        own = [(name, item) for name, item in vars(value).items() if name not in others]
        return (
            "instance",
            reference_to(type(value)),
            {name: self.take(item, f"{path}.{name}") for name, item in own},
        )

    def _function(self, function: FunctionType, path: str) -> tuple:
        self.code.append(function)
        if "<locals>" not in function.__qualname__:
            return "named", reference_to(function)
        if vars(function).get("_torchdynamo_disable"):
            return "uncompiled", self.take(vars(function)["_torchdynamo_orig_callable"], path)
        cells = [self.take(cell.cell_contents, f"{path}.{name}") for name, cell in _filled(function, path)]
        given = [self.take(value, path) for value in (function.__defaults__, function.__kwdefaults__)]
        attributes = {name: self.take(item, path) for name, item in vars(function).items()}
        return "function", compiled(function), cells, given, attributes


class Assembly:
    """The inverse of ``Disassembly``, in a rank: ``put`` returns the objects. ``models`` are
    ``Disassembly.models``. Tensors that were on a GPU in the UI, and all tensors of models, come to
    ``device``. Raises Refused.
    """

    def __init__(self, transformer: torch.nn.Module, models: dict[int, Flattened], device: torch.device):
        self._modules = dict(transformer.named_modules())
        self._models = models
        self._device = device
        self._made: dict[int, Any] = {}

    def put(self, taken: Flattened) -> Any:
        if not isinstance(taken, list):
            return taken
        number, kind, *content = taken
        if kind != "same":
            if kind not in self._kinds():
                raise Refused(
                    f"A patch holds a {kind}, which this version of PipeMesh does not know: install the same"
                    " one on every machine."
                )
            self._made[number] = self._kinds()[kind](number, *content)
        return self._made[number]

    def _kinds(self) -> dict[str, Callable[..., Any]]:
        """Returns a function for each kind of object that makes it. An object that may hold itself
        is noted before it is complete.
        """
        return {
            "tensor": self._tensor,
            "parameter": lambda _, content: torch.nn.Parameter(content, requires_grad=False),
            "device": lambda _, _name: self._device,
            "device's name": lambda _, _name: str(self._device),
            "dict": self._dict,
            "method": self._method,
            "uncompiled": lambda _, inner: torch.compiler.disable(self.put(inner)),
            "function": self._function,
            "named": lambda _, reference: resolved(reference),
            "of transformer": lambda _, path: self._modules.get(path),
            "model": self._model,
            "vae": lambda _, compression: VaeElsewhere(compression),
            "instance": self._instance,
            **{kind: partial(self._sequence, make) for kind, make in SEQUENCES.items()},
            "list": self._list,
        }

    def _tensor(self, _number: int, content: torch.Tensor, elsewhere: bool, order: list[int]) -> torch.Tensor:
        made = content.to(self._device, copy=True) if elsewhere else content.clone()
        return made.permute([order.index(axis) for axis in range(len(order))])

    def _method(self, _number: int, function: Flattened, owner: Flattened) -> Any:
        bound = self.put(owner)  # None: a module of another stage's block, where nobody calls it
        return self.put(function) if bound is None else MethodType(self.put(function), bound)

    def _sequence(self, make: Callable[[list], Any], _number: int, items: list) -> Any:
        return make([self.put(item) for item in items])

    def _list(self, number: int, items: list) -> list:
        made = self._made[number] = []
        made += [self.put(item) for item in items]
        return made

    def _dict(self, number: int, ordered: bool, items: list) -> dict:
        made = self._made[number] = OrderedDict() if ordered else {}
        made.update((self.put(key), self.put(item)) for key, item in items)
        return made

    def _function(
        self, number: int, reference: Reference, cells: list, given: list, attributes: dict
    ) -> FunctionType:
        closure = tuple(CellType() for _ in cells)
        code = resolved(reference)
        own = vars(imported(reference[:3]))
        made = self._made[number] = FunctionType(code, own, code.co_name, None, closure)
        for cell, content in zip(closure, cells, strict=True):
            cell.cell_contents = self.put(content)
        made.__defaults__, made.__kwdefaults__ = (self.put(value) for value in given)
        vars(made).update({name: self.put(item) for name, item in attributes.items()})
        return made

    def _instance(self, number: int, reference: Reference, attributes: dict) -> Any:
        made = self._made[number] = object.__new__(resolved(reference))
        vars(made).update({name: self.put(item) for name, item in attributes.items()})
        return made

    def _model(self, number: int, _id: str) -> Any:
        import comfy.model_patcher

        module = self.put(self._models[number]).to(self._device)
        return comfy.model_patcher.ModelPatcher(
            module, load_device=self._device, offload_device=torch.device("cpu")
        )


class VaeElsewhere:
    """Stands in a rank for a VAE, which stays in ComfyUI's process."""

    def __init__(self, compression: Any):
        self._compression = compression

    def spacial_compression_encode(self) -> Any:
        return self._compression

    def encode(self, *_args: Any, **_kwargs: Any) -> Any:
        raise Refused(
            "A patch encodes its image while the model samples, but must do so before: give it an image of"
            f" the size that is sampled, in multiples of 16 pixels, or {ON_ONE_GPU}."
        )


OF_A_GPU = re.compile(r"cuda:\d+")  # ranks on others compute on theirs
SHARED = (list, tuple, dict, set, frozenset, torch.Tensor)  # two that hold the same one still do in a rank
SEQUENCES: dict[str, type] = {
    "list": list,
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
    "size": torch.Size,
}
# What a ModelPatcher notes on a model that it loads; the rank's own notes its own
OF_PATCHERS = frozenset((
    "current_patcher", "current_weight_patches_uuid", "lowvram_patch_counter",
    "model_loaded_weight_memory", "model_lowvram", "model_offload_buffer_memory", "dynamic_patchers",
    "dynamic_pins", "dynamic_vbars", "seed_key", "_pin_state", "_v", "_v_signature",
))  # fmt: skip
BUILT_IN = (Enum, list, tuple, dict, set, frozenset, str, bytes, int, float, torch.Tensor)


def memory_order(tensor: torch.Tensor) -> list[int]:
    """Returns the axes in the order in which they lie in memory, outermost first: in another order
    kernels would add up differently, and a patch may magnify the difference.
    """
    order = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    return order if tensor.permute(order).is_contiguous() else list(range(tensor.dim()))


def _filled(function: FunctionType, path: str) -> list[tuple[str, CellType]]:
    cells = list(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
    for name, cell in cells:
        try:
            cell.cell_contents  # noqa: B018
        except ValueError as error:
            raise NotReferable(f"its {name} has no value yet") from error
    return cells
