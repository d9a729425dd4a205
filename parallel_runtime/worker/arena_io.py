"""Read an evaluation's arguments from the arena, and write its output there."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from ..comm.late import Reached, to_cpu, to_device
from ..wire.arena import KEPT_CONDITIONING
from ..wire.segment import Segment, TensorRef, aligned, dtype_name
from ..wire.tree import decode_tree, encode_tree
from .kept import KeptConditioning


class Writing(NamedTuple):
    """An output on its way to the arena. ``finish`` puts it there, when the device has come so far.

    Where it does not fit, ``tree`` is empty and ``needs_bytes`` are what it takes. ``wrote``: its
    place, as offset and bytes.
    """

    tree: bytes
    needs_bytes: int
    finish: Callable[[], None]
    wrote: tuple[int, int] = (0, 0)


NOTHING = Writing(b"", 0, lambda: None)


class ArenaIO:
    """Reads and writes for one rank. ``arena`` is the UI's arena, mapped; on another machine, that
    of the leader, which has in the same places what ranks there read.
    """

    def __init__(
        self,
        arena: Segment,
        device: torch.device,
        conditioning_bytes: int = KEPT_CONDITIONING,
    ):
        self.arena = arena
        self._device = device
        self.conditioning = KeptConditioning(conditioning_bytes)
        self._read: Reached | None = None  # what the device itself reads of the arena
        self._unwritten: Any = None  # the last output, where it did not fit

    def read(self, arguments: bytes) -> Any:
        """Returns one evaluation's arguments."""
        try:
            with self.conditioning.evaluation():
                return decode_tree(arguments, self.tensor)
        finally:
            if self.arena.is_pinned:
                self._read = Reached(self._device)

    def tensor(self, ref: TensorRef) -> torch.Tensor:
        """Returns the tensor at ``ref``. Conditioning is copied to the device once, and is the same
        object in every evaluation: a model may keep what it made of it under its identity. A tensor
        that changes with every evaluation is copied, because a model may write to it. One that is
        ``in_place`` stays in the arena: the method moves the rows that it needs.

        No copy waits for the device.
        """
        view = self.arena.tensor(ref)
        if ref.in_place:
            return view
        if not ref.version:
            return self._copied(view)
        return self.conditioning.get(ref.version, lambda: self._copied(view))

    def _copied(self, view: torch.Tensor) -> torch.Tensor:
        if self.arena.is_pinned:
            return view.to(self._device, non_blocking=True)
        moved = to_device(view, self._device)
        return view.clone() if moved is view else moved

    def settle(self) -> None:
        """Waits until the device has copied what an evaluation that failed was to read: the UI
        takes the memory back. A device that fails copies nothing any more.
        """
        with contextlib.suppress(RuntimeError):
            if self._read is not None:
                self._read.wait()

    def write(self, output: Any, place: TensorRef) -> Writing:
        """Begins to write ``output`` into ``place``, without waiting for the device. An output that
        does not fit is kept for ``write_again``.
        """
        offset, end = place.offset, place.offset + place.nbytes
        pieces: list[tuple[TensorRef, torch.Tensor]] = []

        def put(_path: str, tensor: torch.Tensor) -> TensorRef:
            nonlocal offset
            ref = TensorRef(offset, tuple(tensor.shape), dtype_name(tensor.dtype))
            offset += aligned(tensor.nbytes)
            if offset > end:
                return ref
            if self.arena.is_pinned:
                self.arena.tensor(ref).copy_(tensor, non_blocking=True)
            else:
                pieces.append((ref, to_cpu(tensor)))
            return ref

        def finish() -> None:
            for ref, tensor in pieces:
                self.arena.tensor(ref).copy_(tensor)

        tree = encode_tree(output, put)
        self._unwritten = output if offset > end else None
        return (
            Writing(tree, 0, finish, (place.offset, offset - place.offset))
            if offset <= end
            else NOTHING._replace(needs_bytes=offset - place.offset)
        )

    def write_again(self, place: TensorRef) -> Writing:
        return self.write(self._unwritten, place)
