"""Weights of ComfyUI's that lie on a checkpoint's mapped pages, and what becomes of them when
another process wants to write to the file.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import threading
import time
import weakref
from typing import Any, NoReturn

import torch

from ..errors import Refused
from ..lease import Lease, seconds_that_others_wait
from ..memory import system_memory
from ..own_pages import blank, chunks_of, pages_of, take_over

PART_FOR_CALLS = 0.1  # of the time that others wait: for layers that compute to end
MOST_FOR_CALLS_S = 5.0
log = logging.getLogger("pipemesh")


class Loan:
    """A checkpoint's pages on loan to tensors of one transformer, under a read lease on the file:
    nobody changes it meanwhile. When somebody wants to, the tensors get a copy, where they are, and
    then the lease is given up. It is too when no tensor is left.
    """

    def __init__(self, path: str, name: str, transformer: torch.nn.Module):
        """``name``: of the checkpoint, for users. Raises OSError where no lease is to be had."""
        self._name = name
        self._transformer = weakref.ref(transformer)
        self._lock = threading.RLock()  # the garbage collector may end a tensor at any place
        self._lent: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self.is_open = True
        self._lost = False
        self._file = file_at(path)
        self._lease = Lease(path, self._take_back, lambda: self._lose("the system did not wait long enough"))

    def is_of(self, path: str) -> bool:
        """True while it is open, if the file at ``path`` is its own."""
        return self.is_open and file_at(path) == self._file

    def add(self, tensor: torch.Tensor) -> bool:
        """Counts a tensor on the file's pages, for as long as anything of it is used: by a weight,
        or by the backup of one that ComfyUI has patched. False where none can be lent any more.
        """
        storage = tensor.untyped_storage()
        key = id(storage)
        with self._lock:
            if self.is_open:
                self._lent[key] = weakref.ref(storage, lambda _gone: self._remove(key))
            return self.is_open

    def _remove(self, key: int) -> None:
        with self._lock:
            self._lent.pop(key, None)
        self.close_if_unused()

    def close_if_unused(self) -> None:
        with self._lock:
            if not self._lent and self.is_open:
                self.is_open = False
                self._lease.end()

    def _take_back(self, until: float) -> None:
        """Gives all tensors a copy, or none of them a future."""
        with self._lock:
            self.is_open = False
            # Held: addresses stay theirs
            storages = [storage for ref in list(self._lent.values()) if (storage := ref()) is not None]
            self._lent.clear()
        pages = pages_of((storage.data_ptr(), storage.nbytes()) for storage in storages)
        wanted, done = sum(nbytes for _start, nbytes in pages), 0
        log.info(
            "[PipeMesh] %s is about to be written to: ComfyUI copies its weights (%d MiB).",
            self._name,
            wanted >> 20,
        )
        chunks = list(chunks_of(pages))
        try:
            if wanted > (free := system_memory()[0]):
                raise OSError(f"{free >> 20} MiB of memory are free")
            for start, nbytes in chunks:
                if time.monotonic() > until:
                    raise TimeoutError("the system did not wait long enough")
                take_over(start, nbytes)
                done += nbytes
        except OSError as error:
            self._lose(f"{done >> 20} of {wanted >> 20} MiB were copied; {error.strerror or error}")
            # Layers that compute read them still; there, the file has lost them already
            if error.errno != errno.EIO:
                time.sleep(min(PART_FOR_CALLS * seconds_that_others_wait(), MOST_FOR_CALLS_S))
            for start, nbytes in pages:
                with contextlib.suppress(OSError):  # the others are to end nobody all the same
                    blank(start, nbytes)

    def _lose(self, why: str) -> None:
        """Lets nothing compute with the transformer any more, from the next layer on."""
        if self._lost:
            return
        self._lost = True
        transformer, lost = self._transformer(), LostWeights(self._name, why)
        log.error("[PipeMesh] %s", lost.refusal())
        for module in transformer.modules() if transformer is not None else ():
            module.register_forward_pre_hook(lost)


def file_at(path: str) -> tuple[int, int]:
    found = os.stat(path)
    return found.st_dev, found.st_ino


class LostWeights:
    """A forward pre-hook on every module of a transformer whose weights went with their file."""

    def __init__(self, name: str, why: str):
        self._name = name
        self._why = why

    def refusal(self) -> Refused:
        return Refused(
            f"The checkpoint {self._name} was overwritten while ComfyUI's weights lay on its pages, and not"
            f" all could be copied in time ({self._why}): unload models and execution cache in ComfyUI's menu"
            " and run again."
        )

    def __call__(self, *_: Any) -> NoReturn:
        raise self.refusal()
