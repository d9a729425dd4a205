"""Pack a tree that is sent once, with a segment of its own for its tensors."""

from __future__ import annotations

from typing import Any

import torch

from .segment import TensorRef, aligned, dtype_name, pack
from .tree import encode_tree


class Parcel:
    """A tree whose tensors lie one after another in a segment of their own: for what is sent once,
    not per evaluation.
    """

    def __init__(self, tree: Any):
        tensors: list[torch.Tensor] = []
        offset = 0

        def put(_path: str, tensor: torch.Tensor) -> TensorRef:
            nonlocal offset
            tensors.append(tensor)
            ref = TensorRef(offset, tuple(tensor.shape), dtype_name(tensor.dtype))
            offset += aligned(ref.nbytes)
            return ref

        self.tree = encode_tree(tree, put)
        self.segment, _refs = pack("parcel", tensors)
