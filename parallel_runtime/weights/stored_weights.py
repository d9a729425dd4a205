"""The weights of a transformer as its checkpoint has them, to compare with and to lend.

The file is read, never through its mapped pages: where it is cut short meanwhile, reading those
would end ComfyUI.
"""

from __future__ import annotations

import ctypes
import json
import logging
import os
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from ..checkpoint import File, refuse_change
from .loan import Loan
from .quantised import store_in
from .slots import Slot, slots

DTYPES = {  # of the safetensors format
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E8M0": torch.float8_e8m0fnu,
    "C64": torch.complex64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
log = logging.getLogger("pipemesh")
SMALL = 1 << 12  # bytes of tensors that ComfyUI looks into where it only names them


class StoredTensors:
    """The tensors of a safetensors file by name, in memory that is reserved and has no content but
    that of small ones. ``read`` gives the content, of one at a time.
    """

    def __init__(self, descriptor: int):
        self._descriptor = descriptor
        self._room = torch.UntypedStorage(os.fstat(descriptor).st_size)
        length = int.from_bytes(os.pread(descriptor, 8, 0), "little")
        header = json.loads(os.pread(descriptor, length, 8))
        header.pop("__metadata__", None)
        self.tensors: dict[str, torch.Tensor] = {}
        for name, entry in header.items():
            start, end = (8 + length + offset for offset in entry["data_offsets"])
            dtype = DTYPES.get(entry["dtype"])
            form = (torch.uint8, [end - start]) if dtype is None else (dtype, entry["shape"])
            self.tensors[name] = view_of(self._room, start, end - start, *form)
            if end - start <= SMALL:
                self._fill(start, end - start)

    def has(self, tensor: torch.Tensor) -> bool:
        """True for a tensor of the file, or a view of one; False for one that was computed."""
        return self._room.data_ptr() <= tensor.data_ptr() < self._room.data_ptr() + self._room.nbytes()

    def offset_of(self, tensor: torch.Tensor) -> int:
        """Returns where in the file a tensor that it ``has`` begins."""
        return tensor.data_ptr() - self._room.data_ptr()

    def read(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns a tensor that the file ``has``, with its content. Raises EOFError where the file
        has become shorter.
        """
        stored = tensor.untyped_storage()
        content = torch.UntypedStorage(stored.nbytes())
        read_into(content, 0, content.nbytes(), self._descriptor, stored.data_ptr() - self._room.data_ptr())
        empty = torch.empty(0, dtype=tensor.dtype)
        return empty.set_(content, tensor.storage_offset(), tensor.shape, tensor.stride())  # pyright: ignore[reportCallIssue, reportArgumentType]

    def fill(self) -> None:
        """Gives all tensors their content: as much memory as the file has bytes."""
        self._fill(0, self._room.nbytes())

    def _fill(self, start: int, nbytes: int) -> None:
        read_into(self._room, start, nbytes, self._descriptor, start)


def view_of(
    storage: torch.UntypedStorage, start: int, nbytes: int, dtype: torch.dtype, shape: Any
) -> torch.Tensor:
    """Returns a tensor in a part of ``storage``, with a storage of its own that keeps the whole."""
    if not nbytes:
        return torch.empty(tuple(shape), dtype=dtype)
    return torch.asarray(storage[start : start + nbytes], dtype=torch.uint8).view(dtype).view(tuple(shape))


def read_into(storage: torch.UntypedStorage, start: int, nbytes: int, descriptor: int, offset: int) -> None:
    """Reads ``nbytes`` of a file from ``offset`` on. Raises EOFError where it has fewer."""
    place = memoryview((ctypes.c_char * nbytes).from_address(storage.data_ptr() + start)).cast("B")
    done = 0
    while done < nbytes:
        if not (read := os.preadv(descriptor, [place[done:]], offset + done)):
            raise EOFError(f"a file has {offset + done} bytes, and was to have {offset + nbytes}")
        done += read


class CheckpointContent:
    """The transformer's weights as the checkpoint has them, under the model's names."""

    def __init__(self, model: Any, file: File, lends: bool, loan: Loan | None = None):
        """``lends``: weights may lie on the file's pages, where a lease on it is to be had;
        ``loan``: one that may be open still. Raises Refused where it is not the file that ``file``
        describes any more.
        """
        self.loan: Loan | None = None
        self._stored: StoredTensors | None = None
        self._mapped: torch.UntypedStorage | None = None
        if not is_safetensors(file[0]):
            import comfy.utils

            self._tensors = processed(model, comfy.utils.load_torch_file(file[0]))
            return
        descriptor = os.open(file[0], os.O_RDONLY)
        weakref.finalize(self, os.close, descriptor)
        self._descriptor, self._file = descriptor, file
        if lends:
            self._borrow(model.diffusion_model, loan)
        try:
            self._read(model, descriptor, file)
        except BaseException:  # nobody else knows of the loan yet
            if self.loan is not None:
                self.loan.close_if_unused()
            raise

    def _read(self, model: Any, descriptor: int, file: File) -> None:
        found = os.fstat(descriptor)
        refuse_change(file, found)
        # Mapped anew for every comparison: a node may have written to what was lent before
        if self.loan is not None:
            path = of_descriptor(descriptor)
            whole = torch.from_file(path, shared=False, size=found.st_size, dtype=torch.uint8)
            self._mapped = whole.untyped_storage()
        self._stored = StoredTensors(descriptor)
        self._tensors = processed(model, dict(self._stored.tensors))
        own = [slot.name for slot in slots(model.diffusion_model)]
        named = [self._tensors[name] for name in own if name in self._tensors]
        # Some are computed from others
        if not all(self._stored.has(tensor) for tensor in named if tensor.nbytes):
            with self._whole():
                self._stored.fill()
            self._tensors = processed(model, dict(self._stored.tensors))

    def _borrow(self, transformer: torch.nn.Module, loan: Loan | None) -> None:
        path = of_descriptor(self._descriptor)
        try:
            is_own = loan is not None and loan.is_of(path)
            self.loan = loan if is_own else Loan(path, Path(self._file[0]).name, transformer)
        except OSError as error:
            log.info(
                "[PipeMesh] ComfyUI keeps weights of its own of %s: no read lease on it (%s).",
                self._file[0],
                error.strerror or error,
            )

    def has(self, slot: Slot) -> bool | None:
        """True if the weight equals the file's, in the file's dtype or as ComfyUI cast it; None if
        the file has none of that name. Raises Refused where the file was cut short.
        """
        theirs = self._tensors.get(slot.name)
        if theirs is None:
            return None
        if slot.tensor.dtype not in (theirs.dtype, slot.archived) or slot.tensor.shape != theirs.shape:
            return False
        if self._stored is not None and self._stored.has(theirs):
            with self._whole():
                theirs = self._stored.read(theirs)
        return is_equal(slot.tensor.detach(), theirs.to(slot.tensor.dtype))

    @contextmanager
    def _whole(self) -> Iterator[None]:
        try:
            yield
        except EOFError:
            refuse_change(self._file, os.fstat(self._descriptor))
            raise

    def lend(self, slot: Slot) -> bool:
        """Points a weight that the file ``has`` at the file's pages. False where that cannot be: it
        has another dtype there, is no parameter on the CPU, or nobody would tell of a writer.
        """
        theirs, ours = self._tensors.get(slot.name), slot.tensor
        if theirs is None or self._stored is None or self._mapped is None or self.loan is None:
            return False
        if theirs.dtype != ours.dtype or not theirs.is_contiguous() or ours.device.type != "cpu":
            return False
        if not theirs.nbytes or not self._stored.has(theirs):
            return False
        if slot.holder is None and not isinstance(ours, torch.nn.Parameter):
            return False
        # A parameter of one kind with data of the other is neither
        with torch.inference_mode(ours.is_inference()):
            lent = view_of(
                self._mapped, self._stored.offset_of(theirs), theirs.nbytes, theirs.dtype, theirs.shape
            )
            if not self.loan.add(lent):
                return False
            if slot.holder is not None:
                return store_in(slot.holder, ours, lent)
            ours.data = lent
        return True


def processed(model: Any, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Returns the transformer's part of a file's tensors, under its own names."""
    import comfy.utils
    from comfy import model_detection

    prefix = model_detection.unet_prefix_from_state_dict(state)
    bare = comfy.utils.state_dict_prefix_replace(state, {prefix: ""}, filter_keys=True) or state
    bare, _ = comfy.utils.convert_old_quants(bare, "")
    return model.model_config.process_unet_state_dict(bare)


def is_safetensors(path: str) -> bool:
    return path.lower().endswith((".safetensors", ".sft"))


def of_descriptor(descriptor: int) -> str:
    """Returns a path to the open file itself, whatever has its name by now."""
    return f"/proc/self/fd/{descriptor}"


def is_equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Compares bit for bit. As fast as memory is, without the GIL."""
    one, other = one.cpu().contiguous(), other.contiguous()
    compare = ctypes.CDLL(None).memcmp
    compare.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
    return compare(one.data_ptr(), other.data_ptr(), one.nbytes) == 0
