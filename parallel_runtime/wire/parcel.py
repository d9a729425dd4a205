"""Pack a tree that is sent once, with a segment of its own for its tensors."""

from __future__ import annotations

from typing import Any

import torch

from .segment import ALIGN, Segment, TensorRef, aligned, dtype_name
from .tree import encode_tree


class Parcel:
    """A tree whose tensors lie one after another in a segment of their own, for content that is
    sent once and not at each evaluation.
    """

    def __init__(self, tree: Any):
        tensors: list[tuple[TensorRef, torch.Tensor]] = []
        offset = 0

        def put(_path: str, tensor: torch.Tensor) -> TensorRef:
            nonlocal offset
            ref = TensorRef(offset, tuple(tensor.shape), dtype_name(tensor.dtype))
            tensors.append((ref, tensor))
            offset += aligned(ref.nbytes)
            return ref

        self.tree = encode_tree(tree, put)
        self.segment = Segment.create("parcel", max(ALIGN, offset))
        try:
            for ref, tensor in tensors:
                self.segment.tensor(ref).copy_(tensor)
        except BaseException:
            self.segment.close()
            raise
