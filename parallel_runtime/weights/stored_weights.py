"""The weights of a transformer as its checkpoint has them, to compare with.

The file is read, never through its mapped pages: if it is cut short meanwhile, reading mapped pages
would end ComfyUI.
"""

from __future__ import annotations

import ctypes
import json
import os
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ..checkpoint import File, refuse_change
from .slots import WeightSlot, slots

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
SMALL = 1 << 12  # bytes of tensors that ComfyUI looks into where it only names them


class StoredTensors:
    """The tensors of a safetensors file by name, in memory that is reserved and has no content but
    that of small ones. ``read`` gives the content of one.
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
        """True for a tensor of the file, or a view of one."""
        return self._room.data_ptr() <= tensor.data_ptr() < self._room.data_ptr() + self._room.nbytes()

    def read(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns a tensor that the file ``has``, with its content. Raises EOFError if the file has
        become shorter.
        """
        stored = tensor.untyped_storage()
        content = torch.UntypedStorage(stored.nbytes())
        read_into(content, 0, content.nbytes(), self._descriptor, stored.data_ptr() - self._room.data_ptr())
        empty = torch.empty(0, dtype=tensor.dtype)
        return empty.set_(content, tensor.storage_offset(), tensor.shape, tensor.stride())  # pyright: ignore[reportCallIssue, reportArgumentType]

    def fill(self) -> None:
        """Gives all tensors their content, in as much memory as the file has bytes."""
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
    """Reads ``nbytes`` of a file from ``offset`` on. Raises EOFError if it has fewer."""
    place = memoryview((ctypes.c_char * nbytes).from_address(storage.data_ptr() + start)).cast("B")
    done = 0
    while done < nbytes:
        if not (read := os.preadv(descriptor, [place[done:]], offset + done)):
            raise EOFError(f"a file has {offset + done} bytes, and should have {offset + nbytes}")
        done += read


class CheckpointContent:
    """The transformer's weights as the checkpoint has them, under the model's names."""

    def __init__(self, model: Any, file: File):
        """Raises Refused if ``file`` no longer describes the file on disk."""
        self._stored: StoredTensors | None = None
        if not is_safetensors(file[0]):
            import comfy.utils

            self._tensors = processed(model, comfy.utils.load_torch_file(file[0]))
            return
        descriptor = os.open(file[0], os.O_RDONLY)
        weakref.finalize(self, os.close, descriptor)
        self._descriptor, self._file = descriptor, file
        refuse_change(file, os.fstat(descriptor))
        self._stored = StoredTensors(descriptor)
        self._tensors = processed(model, dict(self._stored.tensors))
        own = [slot.name for slot in slots(model.diffusion_model)]
        named = [self._tensors[name] for name in own if name in self._tensors]
        # Some are computed from others
        if not all(self._stored.has(tensor) for tensor in named if tensor.nbytes):
            with self._whole():
                self._stored.fill()
            self._tensors = processed(model, dict(self._stored.tensors))

    def has(self, slot: WeightSlot) -> bool | None:
        """True if the weight equals the file's, in the file's dtype or as ComfyUI cast it; None if
        the file has none of that name. Raises Refused if the file was cut short.
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


def is_equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Compares bit for bit, as fast as memory is, without the GIL."""
    one, other = one.cpu().contiguous(), other.contiguous()
    compare = ctypes.CDLL(None).memcmp
    compare.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
    return compare(one.data_ptr(), other.data_ptr(), one.nbytes) == 0
