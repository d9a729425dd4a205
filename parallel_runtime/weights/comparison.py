"""Compares the UI's weights of a model with the ranks' weights.

The ranks read the checkpoint themselves, or are sent a state dict once. A node that changes a
weight in place tells nobody, so the UI compares contents in full, once per load. That reads the
checkpoint from the page cache, as the ranks do next. From then on ``WeightMark`` tells which
weights may have been written to, and only these are compared in full again. Changes that a mark may
miss are found by ``BackgroundCheck`` while ranks load or compute.
"""

from __future__ import annotations

import uuid
import weakref
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from math import gcd
from typing import Any

import torch

from ..checkpoint import File, check_file, check_mapped
from ..errors import Refused
from ..forward import PREFIX
from ..memory import Mapping, is_unwritten, mapped_files, pages_of
from .checksum import checksum
from .gguf import described_weight, is_ggml
from .quantisation import stored_bytes, taken_apart
from .slots import WeightSlot, slots
from .stored_weights import CheckpointContent

# By bytes of an element, numbers of the same size that torch can index, whatever the dtype
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}


class Weights:
    """Tells which of the UI's weights of a model differ from the ranks', which are the content of
    ``file``, or the state dict that was sent.

    ``changed`` names these weights. ``changed_id`` changes whenever the content of one of them
    does, and is "" if there are none.
    """

    def __init__(self, file: File | None = None):
        self.changed: set[str] = set()
        self.changed_id = ""
        self._file = file
        # Checksums of what is in no file: as it was sent to the ranks, or else as it was first seen
        self._own: dict[str, bytes] = {}
        self._seen: dict[str, WeightMark] = {}
        self._nbytes = 0

    def nbytes(self, diffusion_model: torch.nn.Module) -> int:
        """The bytes in memory, counted once, because ComfyUI asks again and again."""
        self._nbytes = self._nbytes or stored_bytes(diffusion_model.parameters())
        return self._nbytes

    def note_sent(self, state: dict[str, torch.Tensor]) -> None:
        """Compares with ``state``, which goes to the ranks, from now on."""
        self._own = {name: checksum(tensor) for name, tensor in state.items()}
        self._seen.clear()

    def compare(self, model: Any) -> None:
        """Updates ``changed``. ``model``: ComfyUI's own of a transformer, or the module of a VAE or
        of an upscale model, unpatched, so that names and contents are those of the loader. Raises
        Refused if the checkpoint is not the one that was loaded, and ComfyUI's interrupt.
        """
        import comfy.model_management as mm

        on_files = [mark.pages for mark in self._seen.values() if mark.pages is not None]
        unwritten = all(is_unwritten(*pages) for pages in pages_of(on_files))
        doubtful = [
            slot
            for slot in slots(getattr(model, "diffusion_model", model))
            if slot.name not in self._seen or not self._seen[slot.name].is_still(slot.tensor, unwritten)
        ]
        theirs = self._open(model) if doubtful else None
        if theirs is None:
            return
        self._nbytes = 0
        mapped = mapped_files()
        for slot in doubtful:
            mm.throw_exception_if_processing_interrupted()
            same = theirs(slot)
            mark = WeightMark(slot.tensor, mapped)
            if same is None:
                content = mark.checksum or checksum(slot.tensor)
                same = self._own.setdefault(slot.name, content) == content
            if not same or slot.name in self.changed:
                self.changed = self.changed - {slot.name} if same else self.changed | {slot.name}
                self.changed_id = uuid.uuid4().hex if self.changed else ""
            self._seen[slot.name] = mark

    def changed_since(self, is_ended: Callable[[], bool]) -> Iterator[str]:
        """Yields the names of weights in memory whose full content has changed since they were last
        compared. Stops if ``is_ended`` says so. May be called from any thread.
        """
        for name, mark in list(self._seen.items()):
            if mark.has_changed(is_ended):
                yield name

    def forget(self, names: list[str]) -> None:
        """Has these weights alone compared in full next time. If their file is gone by then, only
        these count as changed.
        """
        for name in names:
            self._seen.pop(name, None)

    def changed_tensors(self, diffusion_model: torch.nn.Module) -> dict[str, Any]:
        """The weights of ``changed`` as object patches for the ranks."""
        found = [slot for slot in slots(diffusion_model) if slot.name in self.changed] if self.changed else []
        return {
            PREFIX + slot.owner: described_weight(slot.holder)
            if is_ggml(slot.holder)
            else taken_apart(slot.tensor if slot.holder is None else slot.holder)
            for slot in found
        }

    def _open(self, model: Any) -> Callable[[WeightSlot], bool | None] | None:
        """Returns the function that says whether a weight equals its content in the file (None if
        it is in no file). If ranks have a checkpoint mapped that was deleted or replaced, whatever
        may have been written to since the last comparison counts as changed. Returns None if there
        is nothing to compare with yet, or if the file was overwritten: its run is refused.
        """
        if self._file is None:
            return (lambda slot: None) if self._own else None
        if not self._seen:
            check_file(self._file)
        try:
            check_mapped(self._file)
        except Refused:
            return None
        try:
            check_file(self._file)
        except Refused:
            return lambda slot: False
        return CheckpointContent(model, self._file).has


class WeightMark:
    """A weight as it was when its content was last compared.

    A write to pages of a file (one of ``mapped``) is always found: by the kernel's marks, or by a
    checksum of the whole weight before every run if a node has written to these pages or others
    may. Other memory, such as that of a weight whose dtype is not the file's, has no marks of
    writes. Before a run, the count that torch keeps of writes is compared, and one element of every
    row and of every column. torch does not count writes through ``tensor.data``, by numpy or to
    inference tensors, and most writes to a single element leave those that are looked at as they
    were: ``has_changed`` finds these.
    """

    def __init__(self, tensor: torch.Tensor, mapped: Sequence[Mapping] = ()):
        self._place = _place(tensor)
        self._offset = tensor.storage_offset()
        self._memory = weakref.ref(tensor.untyped_storage())
        mapping = _mapping_of(tensor, mapped)
        is_told = mapping is not None and _is_told(tensor, mapping)
        self.pages = (tensor.data_ptr(), tensor.nbytes) if is_told else None
        self._content = _looked_at(tensor) if mapping is None else None
        self.checksum = b"" if is_told else checksum(tensor)

    def is_still(self, tensor: torch.Tensor, unwritten: bool = False) -> bool:
        """True if the weight was neither moved nor, as far as this can tell, written to.
        ``unwritten``: the pages of all weights on files are known to be.
        """
        if _place(tensor) != self._place:
            return False
        if self._content is not None:
            return _looked_at(tensor) == self._content
        if self.pages is None:
            return checksum(tensor) == self.checksum
        # Not that of another weight, which came to the address of one that is gone
        is_same = self._memory() is tensor.untyped_storage()
        return is_same and (unwritten or is_unwritten(tensor.data_ptr(), tensor.nbytes))

    def has_changed(self, is_ended: Callable[[], bool]) -> bool:
        """True if all of the weight, read from memory of its own, differs from before. False for a
        weight that has moved, and if ``is_ended`` says so before all is read. Pages of a file are
        not read here: if the file were cut short meanwhile, ComfyUI would die.
        """
        memory = self._memory()
        if memory is None or self._content is None:
            return False
        _, dtype, shape, stride, device = self._place
        weight = torch.empty(0, dtype=dtype, device=device).set_(memory, self._offset, shape, stride)  # pyright: ignore[reportCallIssue, reportArgumentType]
        return checksum(weight, is_ended) not in (b"", self.checksum)


def _place(tensor: torch.Tensor) -> tuple:
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), tensor.device


def _mapping_of(tensor: torch.Tensor, mapped: Sequence[Mapping]) -> Mapping | None:
    """Returns the one of ``mapped``, in order, that a weight lies on."""
    place = bisect_right(mapped, tensor.data_ptr(), key=lambda one: one.addresses.start) - 1
    on_cpu = tensor.device.type == "cpu" and place >= 0
    return mapped[place] if on_cpu and tensor.data_ptr() in mapped[place].addresses else None


def _is_told(tensor: torch.Tensor, mapping: Mapping) -> bool:
    """True for a weight on pages that nobody has written to and that the kernel tells writes of."""
    start, nbytes = tensor.data_ptr(), tensor.nbytes
    is_within = tensor.is_contiguous() and start + nbytes <= mapping.addresses.stop
    return is_within and mapping.is_told and is_unwritten(start, nbytes)


def _looked_at(tensor: torch.Tensor) -> tuple[int | None, int]:
    """Returns torch's count of writes, None for an inference tensor, and a hash of at least one
    element of every row and of every column: of 2 rows and 3 columns those at (0, 0), (0, 2) and
    (1, 1). A tensor of more dimensions has a row for each index of the first; a vector is hashed
    whole.
    """
    version = None if tensor.is_inference() else tensor._version
    bits, step = tensor.detach().view(BITS[tensor.element_size()]), _step(tensor.shape)
    if bits.is_contiguous():
        chosen = bits.view(-1)[::step].cpu().numpy()
    else:  # flattened, it would be copied whole
        places = torch.arange(0, bits.numel(), step, device=bits.device)
        chosen = bits[torch.unravel_index(places, bits.shape)].cpu().numpy()
    return version, hash(chosen.tobytes())  # of this process, and twice as fast as hashlib's


def _step(shape: torch.Size) -> int:
    """Returns the step from element to element of such a tensor, row by row, by which it is looked
    at: the largest that leaves out no row, so at most a row's length, and no column, so at most a
    column's length and without a common factor with the number of columns.
    """
    rows = shape[0] if shape else 1
    columns = shape.numel() // max(1, rows)
    return next((step for step in range(min(rows, columns), 1, -1) if gcd(step, columns) == 1), 1)


def give_back(patcher: Any, kind: type, *args: Any, **kwargs: Any) -> None:
    """In the UI: takes ComfyUI's patches off the shared model, by a patcher of the class ``kind``
    that put them on, with the arguments of its ``unpatch_model``.

    Each class keeps its own books on the model (ModelPatcherDynamic: pages on the GPU, pinned
    buffers, and which are stale). Another class would leave them wrong.
    """
    stock = kind(patcher.model, patcher.load_device, patcher.offload_device, 1)
    stock.backup, stock.backup_buffers, stock.object_patches_backup, stock.pinned = (
        patcher.get_clone_model_override()[1]
    )
    stock.hook_backup = patcher.hook_backup
    stock.unpatch_model(*args, **kwargs)


def is_patched(patcher: Any) -> bool:
    model = patcher.model
    loaded = model.model_loaded_weight_memory > 0 or model.current_weight_patches_uuid is not None
    return loaded or bool(patcher.backup or patcher.hook_backup or patcher.pinned)
