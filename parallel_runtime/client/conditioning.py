"""Send conditioning once per run: later evaluations name it.

ComfyUI makes new tensors for every evaluation. One is recognised by what it was made of
(``Origin``), else by its content: compared first with the one that the same branch sent last, on
its own device, and hashed only when that misses.
"""

from __future__ import annotations

import ctypes
import hashlib
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count

import torch

from ..wire.arena import KEPT_CONDITIONING, Arena
from ..wire.segment import TensorRef
from .branch import Branch, Origin, Origins

memcmp = ctypes.CDLL(None).memcmp
memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)

RECENT = 4  # context windows alternate between a few slices under one branch


@dataclass(frozen=True)
class Entry:
    ref: TensorRef
    copy: torch.Tensor | None  # on the sender's device; none where that is the CPU, which sees the arena


def cache_key(branch: Branch, name: str, tensor: torch.Tensor) -> tuple:
    return (branch, name, tuple(tensor.shape), tensor.dtype, tensor.device)


class ConditioningCache:
    """The UI's record of the conditioning in the arena; ranks cache by ``version``. At most
    ``limit_bytes`` are kept between runs.
    """

    def __init__(self, arena: Arena, limit_bytes: int = KEPT_CONDITIONING):
        self._arena = arena
        self._limit_bytes = limit_bytes
        # No two records of a process give the same version to a rank
        self._versions = count(time.monotonic_ns())
        self._entries: OrderedDict[tuple, Entry] = OrderedDict()
        self._recent: dict[tuple, list[Entry]] = {}
        # Keys whose tensor differed from the one sent last, once in this run
        self._surprising: set[tuple] = set()
        # What was last sent under a key, and of what it was made
        self._made_of: dict[tuple, tuple[Origins, Entry]] = {}
        self.uploads = 0

    def assume(
        self, branch: Branch, name: str, tensor: torch.Tensor, origins: Origins = ()
    ) -> tuple[TensorRef, Callable[[], bool]]:
        """Assumes that ``tensor`` equals the one this branch sent last; returns that one's place,
        and a check to run while the ranks compute with it.

        After one wrong assumption in a run, ``put`` is called instead.
        """
        key = cache_key(branch, name, tensor)
        recent = self._recent.get(key)
        if not recent or key in self._surprising or self._recognised(key, origins) is not None:
            return self.put(branch, name, tensor, origins), lambda: True
        last = recent[0]

        def is_right() -> bool:
            if self._is_content(last, tensor):
                self._made_of[key] = origins, last
                return True
            self._surprising.add(key)
            return False

        return last.ref, is_right

    def put(self, branch: Branch, name: str, tensor: torch.Tensor, origins: Origins = ()) -> TensorRef:
        """Returns the place of ``tensor`` in the arena, written now if it is new. ``branch``
        identifies the cond; ``name`` is the argument's path. What has the same ``origins`` as the
        one before is not looked at.
        """
        key = cache_key(branch, name, tensor)
        recent = (one for one in self._recent.get(key, ()) if self._is_content(one, tensor))
        entry = self._recognised(key, origins) or next(recent, None)
        if entry is None:
            entry = self._find_or_store(tensor)
            recent = self._recent.setdefault(key, [])
            recent.insert(0, entry)
            del recent[RECENT:]
        self._made_of[key] = origins, entry
        return entry.ref

    def _recognised(self, key: tuple, origins: Origins) -> Entry | None:
        made_of, entry = self._made_of.get(key, ((), None))
        are_known = bool(origins) and len(origins) == len(made_of)
        return entry if are_known and all(map(Origin.is_same, made_of, origins)) else None

    def _find_or_store(self, tensor: torch.Tensor) -> Entry:
        local = tensor.detach().to("cpu").contiguous()
        digest = hashlib.blake2b(local.flatten().view(torch.uint8).numpy().data, digest_size=16).digest()
        key = (digest, tuple(tensor.shape), tensor.dtype, tensor.device)
        if key not in self._entries:
            ref = self._arena.put(local, version=next(self._versions))
            self.uploads += 1
            self._entries[key] = Entry(ref, None if tensor.device.type == "cpu" else tensor.detach().clone())
        self._entries.move_to_end(key)
        return self._entries[key]

    def _is_content(self, entry: Entry, tensor: torch.Tensor) -> bool:
        """Returns whether the entry's tensor, of the same shape and dtype, equals this one. On the
        CPU bit by bit, in a quarter of ``torch.equal``'s time.
        """
        # A view made anew each time: a kept one would keep a closed arena's memory
        content = self._arena.segment.tensor(entry.ref) if entry.copy is None else entry.copy
        if content.device.type != "cpu" or not (content.is_contiguous() and tensor.is_contiguous()):
            return torch.equal(content, tensor)
        return memcmp(content.data_ptr(), tensor.data_ptr(), tensor.nbytes) == 0

    def begin_run(self) -> None:
        """Forgets which branch sent what, and evicts down to the limit. Call between runs only: an
        evaluation in flight may name what is evicted.
        """
        self._recent.clear()
        self._surprising.clear()
        self._made_of.clear()
        held = sum(entry.ref.nbytes for entry in self._entries.values())
        while held > self._limit_bytes:
            _, entry = self._entries.popitem(last=False)
            held -= entry.ref.nbytes
            self._arena.give(entry.ref.offset, entry.ref.nbytes)
