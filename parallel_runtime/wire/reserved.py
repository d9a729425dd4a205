"""A tree with its tensors in a place that was reserved when their sizes were known, but not yet
what they are.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from ..errors import PipeMeshError
from .segment import Segment, TensorRef, aligned, mib
from .tree import decode_tree, encode_tree

HEADER = 1024  # bytes before the tensors: the length of the encoded tree, and the tree
LENGTH = torch.int64


def room_for(sizes: Iterable[int]) -> int:
    """Bytes to reserve for a tree whose tensors have these sizes."""
    return HEADER + sum(map(aligned, sizes))


def write_tree(segment: Segment, place: TensorRef, tree: Any) -> None:
    """Raises PipeMeshError where the place is too small."""
    offset, end = place.offset + HEADER, place.offset + place.nbytes

    def put(path: str, tensor: torch.Tensor) -> TensorRef:
        nonlocal offset
        if offset + tensor.nbytes > end:
            what = f"A tensor of {mib(tensor.nbytes)} ({path or 'the tree'})"
            raise PipeMeshError(
                f"{what} does not fit into the {mib(place.nbytes)} that were reserved for it."
            )
        ref = segment.put(offset, tensor)
        offset += aligned(ref.nbytes)
        return ref

    content = encode_tree(tree, put)
    if len(content) > HEADER - LENGTH.itemsize:
        raise PipeMeshError(
            f"The description of a tensor takes {len(content)} bytes, and {HEADER - LENGTH.itemsize} are"
            " reserved."
        )
    segment.put(place.offset, torch.tensor([len(content)], dtype=LENGTH))
    segment.put(place.offset + LENGTH.itemsize, torch.frombuffer(bytearray(content), dtype=torch.uint8))


def read_tree(segment: Segment, place: TensorRef) -> Any:
    """What ``write_tree`` wrote there. Its tensors are views of the segment."""
    length = int(segment.tensor(TensorRef(place.offset, (1,), "int64")))
    content = segment.tensor(TensorRef(place.offset + LENGTH.itemsize, (length,), "uint8"))
    return decode_tree(content.numpy().tobytes(), segment.tensor)
