"""Keeps a large tensor of a model in the machine's memory if an evaluation reads a few rows of it:
a table of positions, or of a language's tokens.

Read: torch/_tensor.py, torch/_ops.py (OpOverload.is_view) @ torch 2.11.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_map_only

from .parameters import dotted, settled_as, users_of
from .quantisation import stored_bytes

OF_MODEL = 50  # a tensor stays in the machine's memory that is more than one part in so many of its model
LEAST_BYTES = 1 << 20
CPU = torch.device("cpu")
PLAIN = (torch.Tensor, torch.nn.Parameter, FakeTensor)
# They return rows of their first argument
ROWS_OF = {torch.ops.aten.embedding.default, torch.ops.aten.index_select.default}


class Table(NamedTuple):
    """A parameter or buffer that is kept in the machine's memory, of a model on ``device``.
    ``slot``: where its module has it; ``name``: in the model.
    """

    name: str
    module: torch.nn.Module
    slot: dict[str, Any]
    tensor: torch.Tensor
    device: torch.device

    @property
    def nbytes(self) -> int:
        return self.tensor.nbytes

    @property
    def attribute(self) -> str:
        return self.name.rpartition(".")[2]

    @property
    def is_parameter(self) -> bool:
        return self.slot is self.module._parameters

    def settled(self) -> torch.Tensor:
        """The tensor in the dtype that ComfyUI archived for it."""
        if isinstance(self.tensor, torch.nn.Parameter):
            return settled_as(self.module, self.attribute, self.tensor)
        return self.tensor

    @property
    def held(self) -> torch.Tensor:
        """The tensor that is in place, in the machine's memory."""
        return self.slot[self.attribute].held

    def put(self, tensor: torch.Tensor) -> None:
        self.slot[self.attribute] = tensor

    def keep(self, tensor: torch.Tensor) -> None:
        """Puts a tensor in place that stays in its present memory."""
        self.put(InMainMemory(tensor.detach(), self.device))

    def put_away(self) -> None:
        self.keep(self.settled())


def tables_of(model: torch.nn.Module, device: torch.device = CPU) -> list[Table]:
    """Returns the large tensors that no linear layer or convolution has, which read all of theirs
    at once, nor two modules.
    """
    every = stored_bytes([*model.parameters(), *model.buffers()])
    users = users_of(model)
    found = []
    for path, module in model.named_modules():
        if hasattr(module, "in_features") or hasattr(module, "kernel_size"):
            continue
        for slot in (module._parameters, module._buffers):
            for attribute, tensor in slot.items():
                if tensor is None or type(tensor) not in PLAIN or users[id(tensor)] > 1:
                    continue
                if tensor.nbytes >= LEAST_BYTES and tensor.nbytes * OF_MODEL > every:
                    found.append(Table(dotted(path, attribute), module, slot, tensor, device))
    return found


class InMainMemory(torch.Tensor):
    """A tensor of a model on a device, whose elements stay in the machine's memory. An operation
    that only chooses among the elements runs there, and returns another such tensor, or rows; for
    any other operation the elements that it reads are first copied to the device.
    """

    held: torch.Tensor

    __torch_function__ = torch._C._disabled_torch_function_impl  # pyright: ignore[reportAssignmentType]

    @staticmethod
    def __new__(cls, held: torch.Tensor, device: torch.device) -> InMainMemory:
        made = torch.Tensor._make_wrapper_subclass(  # pyright: ignore[reportAttributeAccessIssue]
            cls,
            held.shape,
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            device=device,
        )
        made.held = held
        return made

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        first, options = args[0], kwargs or {}
        if func.is_view and isinstance(first, cls):
            views = func(first.held, *args[1:], **options)
            return tree_map_only(torch.Tensor, lambda view: cls(view, first.device), views)
        if func in ROWS_OF and isinstance(first, cls):
            at = first.held.device
            rest = tree_map_only(torch.Tensor, lambda index: index.to(at), (args[1:], options))
            return func(first.held, *rest[0], **rest[1]).to(first.device)
        args, options = tree_map_only(cls, lambda one: one.held.to(one.device), (args, dict(options)))
        return func(*args, **options)

    def __repr__(self) -> str:  # pyright: ignore[reportIncompatibleMethodOverride]
        return f"{type(self).__name__}({tuple(self.shape)}, {self.dtype}, for {self.device})"
