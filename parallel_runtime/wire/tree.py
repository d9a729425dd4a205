"""Trees of tensors and plain data as msgpack bytes. Nothing else crosses the border, and nothing is
pickled.

Leaves: None, bool, int, float, str, bytes, torch.dtype, tensors (as TensorRef). Nodes: list, tuple,
dict with str or int keys, set and frozenset without tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec
import torch

from .segment import TensorRef, dtype_name, dtype_named

TENSOR, TUPLE, DTYPE, SET, FROZENSET = 1, 2, 3, 4, 5
PLAIN = (type(None), bool, int, float, str, bytes)

_encode = msgspec.msgpack.encode
_ref_decoder = msgspec.msgpack.Decoder(TensorRef)


class NotPlain(TypeError):
    """Names a value that cannot cross; ``path`` is its place in the tree."""

    def __init__(self, path: str, value: Any):
        super().__init__(f"{path or 'value'} is a {type(value).__module__}.{type(value).__qualname__}")
        self.path = path
        self.value = value


def encode_tree(tree: Any, put: Callable[[str, torch.Tensor], TensorRef]) -> bytes:
    """Returns the tree as bytes. ``put`` stores a tensor found at a path (such as
    ``control/input/0``) and returns its place. Raises NotPlain.
    """
    return _encode(_flatten(tree, "", put))


def encode_plain(tree: Any) -> bytes:
    """Returns a tree of plain data as bytes. Raises NotPlain, also for a tensor."""
    return encode_tree(tree, _refuse)


def is_plain(tree: Any) -> bool:
    return why_not_plain(tree) is None


def why_not_plain(tree: Any, path: str = "") -> NotPlain | None:
    """Returns the first value of the tree that cannot cross, with its place below ``path``; None if
    all can.
    """
    try:
        _flatten(tree, path, lambda _path, _tensor: TensorRef(0, (), "uint8"))
    except NotPlain as error:
        return error
    return None


def _flatten(value: Any, path: str, put: Callable[[str, torch.Tensor], TensorRef]) -> Any:
    if type(value) in PLAIN and _fits(value):
        return value
    if isinstance(value, torch.Tensor):
        return msgspec.msgpack.Ext(TENSOR, _encode(put(path, value)))
    if isinstance(value, list):
        return [_flatten(item, f"{path}/{i}", put) for i, item in enumerate(value)]
    if isinstance(value, tuple):
        return msgspec.msgpack.Ext(
            TUPLE, _encode([_flatten(item, f"{path}/{i}", put) for i, item in enumerate(value)])
        )
    if isinstance(value, dict):
        for key in value:
            if type(key) not in (str, int) or not _fits(key):
                raise NotPlain(f"a key of {path or 'the tree'}", key)
        return {
            key: _flatten(item, f"{path}/{key}" if path else str(key), put) for key, item in value.items()
        }
    if isinstance(value, torch.dtype):
        return msgspec.msgpack.Ext(DTYPE, dtype_name(value).encode())
    if isinstance(value, (set, frozenset)):
        # Equal sets, equal bytes
        items = sorted(_encode(_flatten(item, f"an item of {path or 'the tree'}", _refuse)) for item in value)
        return msgspec.msgpack.Ext(
            SET if isinstance(value, set) else FROZENSET, _encode([msgspec.Raw(item) for item in items])
        )
    raise NotPlain(path, value)


def _refuse(path: str, tensor: torch.Tensor) -> TensorRef:
    """Raises NotPlain. In a set a tensor is the same one by its identity, which ends here."""
    raise NotPlain(path, tensor)


def _fits(value: Any) -> bool:
    """True if msgpack can hold it: an integer of 64 bits, text that is UTF-8 (a file name need not
    be).
    """
    if type(value) is int:
        return -(2**63) <= value < 2**64
    return (
        type(value) is not str or value.isascii() or not any("\ud800" <= char <= "\udfff" for char in value)
    )


def decode_tree(data: bytes | memoryview, get: Callable[[TensorRef], torch.Tensor]) -> Any:
    """Returns the tree. ``get`` returns the tensor at a place. Raises msgspec.DecodeError for
    anything that is not such a tree.
    """
    # No closure: one that names itself lives, with all that ``get`` holds, until the garbage
    # collector comes
    return msgspec.msgpack.decode(data, ext_hook=partial(_extension, get))


def decode_plain(data: bytes) -> Any:
    """Returns a tree that holds no tensor. Raises msgspec.DecodeError for one that does, and for
    what is no tree.
    """
    return decode_tree(data, _no_tensor)


def _no_tensor(_ref: TensorRef) -> torch.Tensor:
    raise msgspec.DecodeError("a tree of plain data holds no tensor")


def _extension(get: Callable[[TensorRef], torch.Tensor], code: int, body: memoryview) -> Any:
    if code == TENSOR:
        return get(_ref_decoder.decode(body))
    if code == TUPLE:
        return tuple(decode_tree(body, get))
    if code == DTYPE:
        return dtype_named(bytes(body).decode())
    if code in (SET, FROZENSET):
        try:
            return (set if code == SET else frozenset)(decode_tree(body, get))
        except TypeError as error:  # an item that no set can hold
            raise msgspec.DecodeError(f"a set in a tree: {error}") from error
    raise msgspec.DecodeError(f"unknown extension {code} in a tree")
