"""Read an evaluation's arguments from the arena, and write its output there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from ..comm.late import to_cpu, to_device
from ..comm.machines import MachineComm
from ..wire.arena import KEPT_CONDITIONING
from ..wire.segment import Segment, TensorRef, aligned, dtype_name
from ..wire.tree import decode_tree, encode_tree
from .kept import KeptConditioning

EMPTY = torch.empty(0)


class Writing(NamedTuple):
    """An output on its way to the arena. ``finish`` puts it there, when the device has come so far.

    Where it does not fit, ``tree`` is empty and ``needs_bytes`` are what it takes.
    """

    tree: bytes
    needs_bytes: int
    finish: Callable[[], None]


NOTHING = Writing(b"", 0, lambda: None)


class ArenaIO:
    """Reads and writes for one rank. ``arena`` is the UI's arena, mapped; on another machine, the
    leader's, which ``machines`` fills.
    """

    def __init__(
        self,
        arena: Segment,
        device: torch.device,
        machines: MachineComm | None = None,
        conditioning_bytes: int = KEPT_CONDITIONING,
    ):
        self.arena = arena
        self._device = device
        self._machines = machines
        self._spread: set[int] = set()  # versions that every machine has
        self.conditioning = KeptConditioning(conditioning_bytes)
        self._unwritten: Any = None  # the last output, where it did not fit

    @property
    def spans_machines(self) -> bool:
        """Whether inputs come from another machine, for which ranks wait together."""
        return self._machines is not None

    def read(self, arguments: bytes) -> Any:
        """Returns one evaluation's arguments. Every rank must call it: machines exchange them."""
        if self._machines is not None:
            self._receive(self._machines, arguments)
        with self.conditioning.evaluation():
            return decode_tree(arguments, self.tensor)

    def _receive(self, machines: MachineComm, arguments: bytes) -> None:
        """Brings the tensors that this evaluation names to every machine's arena. Those with a
        version go once.
        """
        new: dict[int, TensorRef] = {}

        def note(ref: TensorRef) -> torch.Tensor:
            if ref.nbytes and not (ref.version and ref.version in self._spread):
                new[ref.offset] = ref
            return EMPTY

        decode_tree(arguments, note)
        machines.spread(
            [self.arena.tensor(TensorRef(ref.offset, (ref.nbytes,), "uint8")) for ref in new.values()]
        )
        self._spread.update(ref.version for ref in new.values() if ref.version)

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
        moved = to_device(view, self._device)
        return view.clone() if moved is view else moved

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
            if offset <= end:
                pieces.append((ref, to_cpu(tensor)))
            return ref

        def finish() -> None:
            for ref, tensor in pieces:
                self.arena.tensor(ref).copy_(tensor)

        tree = encode_tree(output, put)
        self._unwritten = output if offset > end else None
        return (
            Writing(tree, 0, finish) if offset <= end else NOTHING._replace(needs_bytes=offset - place.offset)
        )

    def write_again(self, place: TensorRef) -> Writing:
        return self.write(self._unwritten, place)
