"""Read an evaluation's arguments from the arena, and write its output there. A run's conditioning
is kept on the rank's device.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch

from ..comm.device_copies import Reached, to_cpu, to_device
from ..wire.arena import KEPT_CONDITIONING
from ..wire.channel import Carried
from ..wire.parcel import Parcel
from ..wire.segment import Segment, TensorRef, aligned, dtype_name
from ..wire.tree import decode_tree, encode_tree


class Written(NamedTuple):
    """An output as a tree. ``wrote`` is its place in the arena, as offset and bytes. ``apart`` is
    memory of its own, if it did not fit there.
    """

    tree: bytes = b""
    wrote: tuple[int, int] = (0, 0)
    apart: Carried | None = None


class KeptConditioning:
    """Tensors by version, the least recently used first. Tensors that the present evaluation names
    stay, of any size; ``limit_bytes`` of others are kept too.

    A dropped tensor is read again when it is next named: the arena has it for as long as the UI
    names it.
    """

    def __init__(self, limit_bytes: int):
        self._limit_bytes = limit_bytes
        self.nbytes = 0  # of all that is kept
        self._tensors: OrderedDict[int, torch.Tensor] = OrderedDict()
        self._named: set[int] = set()

    def get(self, version: int, read: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Returns the tensor of ``version``, the same object for as long as it is kept."""
        self._named.add(version)
        if version not in self._tensors:
            self._tensors[version] = read()
            self.nbytes += self._tensors[version].nbytes
        self._tensors.move_to_end(version)
        return self._tensors[version]

    @contextlib.contextmanager
    def evaluation(self) -> Iterator[None]:
        """Notes which conditioning is read inside. Then drops conditioning that was not read, down
        to the limit, even if the evaluation failed.
        """
        self._named.clear()
        try:
            yield
        finally:
            others = [version for version in self._tensors if version not in self._named]
            held = sum(self._tensors[version].nbytes for version in others)
            for version in others:
                if held <= self._limit_bytes:
                    break
                dropped = self._tensors.pop(version).nbytes
                held -= dropped
                self.nbytes -= dropped

    def forget(self) -> None:
        self._tensors.clear()
        self.nbytes = 0
        self._named.clear()


class ArenaIO:
    """Reads and writes for one rank. ``arena`` is the UI's arena, mapped; on another machine, the
    leader's arena, which has the data that ranks there read in the same places.
    """

    def __init__(self, arena: Segment, device: torch.device, conditioning_bytes: int = KEPT_CONDITIONING):
        self.arena = arena
        self._device = device
        self.conditioning = KeptConditioning(conditioning_bytes)
        self._read: Reached | None = None  # what the device itself reads of the arena

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
        object in every evaluation: a model may cache results under its identity. A tensor that
        changes with every evaluation is copied, because a model may write to it. One that is
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
        """Waits until the device has copied the arguments of a failed evaluation, because the UI
        takes their memory back. A device that fails copies nothing any more.
        """
        with contextlib.suppress(RuntimeError):
            if self._read is not None:
                self._read.wait()

    def write(self, output: Any, place: TensorRef) -> Callable[[], Written]:
        """Begins to write ``output`` into ``place``, without waiting for the device. The returned
        function finishes the write, when the device has computed the output; it then writes an
        output that does not fit into memory of its own. It raises SharedMemoryFull if there is
        none.
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

        tree, nbytes = encode_tree(output, put), offset - place.offset

        def finish() -> Written:
            for ref, tensor in pieces:
                self.arena.tensor(ref).copy_(tensor)
            return Written(tree, (place.offset, nbytes))

        return finish if offset <= end else partial(written_apart, output)


def written_apart(output: Any) -> Written:
    """Copies an output from the device's memory, without pinned memory, which torch would keep."""
    parcel = Parcel(output)
    return Written(parcel.tree, apart=Carried(parcel.segment.fd))
