"""FakeTensorMode that remembers the results of operations.

A model has thousands of operations that differ only in the content of tensors, and no tensor has
content here. torch's own cache of them takes most of a shape-only run's time.

Read: torch/_subclasses/fake_tensor.py @ torch 2.11 (FakeTensorMode.dispatch).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, Literal, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, in_kernel_invocation_manager

PLAIN = (int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)
ResultKind = Literal["new", "view", "same"]


class Unpredictable(Exception):
    """An argument that tells more than its type and size."""


class TensorForm(NamedTuple):
    """The properties by which one tensor without content can differ from another."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, tensor: FakeTensor) -> TensorForm:
        return cls(
            tuple(tensor.shape),
            tensor.stride(),
            int(tensor.storage_offset()),
            tensor.dtype,
            tensor.fake_device,
        )


class QuickFakeMode(FakeTensorMode):
    """As FakeTensorMode, that also takes tensors with content among the arguments. An operation
    that it has seen on tensors of the same form returns what it returned then.
    """

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self._returned: dict[tuple, Any] = {}  # Forms in place of tensors; Unlike: torch is asked every time

    @classmethod
    # Nothing is compiled here, and asking takes longer than most operations
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kind, given = operation_kind(func), kwargs or {}
        if kind is None:
            return self.dispatch(func, types, args, given)
        try:
            key = (func, result_depends_on(args), result_depends_on(tuple(given.items())))
        except Unpredictable:
            return self.dispatch(func, types, args, given)
        if key not in self._returned:
            made = self.dispatch(func, types, args, given)
            try:
                self._returned[key] = result_form(kind, made, args)
            except Unpredictable:
                self._returned[key] = Unpredictable
            return made
        known = self._returned[key]
        if known is Unpredictable:
            return self.dispatch(func, types, args, given)
        return args[0] if kind == "same" else self._made(known, args[0] if kind == "view" else None)

    def _made(self, known: Any, base: FakeTensor | None) -> Any:
        """Makes a known result anew: tensors of their own, or views of ``base``."""
        if isinstance(known, (tuple, list)) and not isinstance(known, TensorForm):
            return type(known)(self._made(one, base) for one in known)
        if not isinstance(known, TensorForm):
            return known
        with in_kernel_invocation_manager(self):
            if base is None:
                tensor = torch.empty_strided(known.shape, known.stride, dtype=known.dtype, device="meta")
            else:
                tensor = torch.empty(0, dtype=known.dtype, device="meta")
                tensor.set_(base.untyped_storage(), known.offset, known.shape, known.stride)
        return FakeTensor(self, tensor, known.device)


@cache
def operation_kind(func: Any) -> ResultKind | None:
    """Whether an operation makes tensors, returns views of its first argument, or that argument.
    None where it acts on anything else.
    """
    schema = getattr(func, "_schema", None)
    if schema is None or func.namespace in ("c10d", "prim"):
        return None
    if schema.is_mutable:
        writes = [one for one in schema.arguments if one.is_write]
        return "same" if func._opname.endswith("_") and writes == schema.arguments[:1] else None
    return (
        "view" if any(one.alias_info is not None for one in (*schema.returns, *schema.arguments)) else "new"
    )


def result_depends_on(value: Any) -> Any:
    """All that the result of an operation can depend on. Raises Unlike if that is not known."""
    if isinstance(value, FakeTensor):
        if value.constant is not None:
            raise Unpredictable
        return TensorForm.of(value)
    if isinstance(value, (tuple, list)):
        return tuple(map(result_depends_on, value))
    if isinstance(value, PLAIN):
        return type(value), value
    raise Unpredictable


def result_form(kind: ResultKind, made: Any, args: Sequence[Any]) -> Any:
    """Returns the form of an operation's result, to remember it. Raises Unpredictable if the result
    does not fit its ``kind``.
    """
    if isinstance(made, (list, tuple)):
        found = [result_form(kind, one, args) for one in made]
        return found if isinstance(made, list) else tuple(found)
    if isinstance(made, PLAIN):
        return made
    if not isinstance(made, FakeTensor) or made.constant is not None:
        raise Unpredictable
    form, storage, first = TensorForm.of(made), made.untyped_storage(), args[0] if args else None
    if kind == "same":
        is_as_said = made is first
    elif kind == "view":
        is_as_said = isinstance(first, FakeTensor) and storage._cdata == first.untyped_storage()._cdata
    else:
        ends = ((size - 1) * stride for size, stride in zip(form.shape, form.stride, strict=True))
        extent = 1 + sum(ends) if made.numel() else 0
        is_as_said = form.offset == 0 and storage.nbytes() == extent * form.dtype.itemsize
    if not is_as_said:
        raise Unpredictable
    return form
