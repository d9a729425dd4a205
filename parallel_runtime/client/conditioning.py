"""Send conditioning once per run: later evaluations name it.

ComfyUI makes new tensors for every evaluation. One is recognised by what it was made of
(``Origin``), else by its content: compared first with the one that the same branch sent last, on
its own device, and hashed only when that misses.
"""

from __future__ import annotations

import hashlib
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from itertools import count

import torch

from ..wire.arena import KEPT_CONDITIONING, Arena
from ..wire.segment import TensorRef
from .branch import Branch, Origin, Origins

RECENT = 4  # context windows alternate between a few slices under one branch
KEYS = 1024  # of arguments of branches: windows that shift make new ones in every evaluation


@dataclass(frozen=True, eq=False)
class Entry:
    """Conditioning that lies in the arena. ``digest`` identifies its content."""

    digest: tuple
    ref: TensorRef
    copy: torch.Tensor | None  # on the sender's device; none where that is the CPU, which sees the arena


@dataclass(eq=False)
class Sent:
    """The values that were sent for one argument of one branch, the last first. ``entry`` was made
    from conds with ``origins``. ``surprised`` says that once in this run the value was not the
    expected one.
    """

    recent: list[Entry] = field(default_factory=list)
    origins: Origins = ()
    entry: Entry | None = None
    surprised: bool = False

    def recognised(self, origins: Origins) -> Entry | None:
        are_known = bool(origins) and len(origins) == len(self.origins)
        return self.entry if are_known and all(map(Origin.is_same, self.origins, origins)) else None


class ConditioningCache:
    """The UI's record of the conditioning in the arena; ranks cache by ``version``. Beside the
    conditioning of evaluations in flight or collected last, at most ``limit_bytes`` are kept.
    """

    def __init__(self, arena: Arena, limit_bytes: int = KEPT_CONDITIONING):
        self._arena = arena
        self.limit_bytes = limit_bytes
        # No two records of a process give the same version to a rank
        self._versions = count(time.monotonic_ns())
        self._entries: OrderedDict[tuple, Entry] = OrderedDict()  # the last named last
        self._sent: OrderedDict[tuple, Sent] = OrderedDict()  # by key, likewise
        self._named: Counter[tuple] = Counter()  # how often in this run, by digest
        # Versions that the evaluations collected last have named
        self.collected: set[int] = set()
        self.nbytes = 0  # in the arena
        self.uploads = 0

    @property
    def copied_bytes(self) -> int:
        """Returns the bytes of its copies on GPUs of this process. May be asked from any thread."""
        copies = [entry.copy for entry in list(self._entries.values())]
        return sum(copy.nbytes for copy in copies if copy is not None)

    def assume(
        self, branch: Branch, name: str, tensor: torch.Tensor, origins: Origins = ()
    ) -> tuple[TensorRef, Callable[[], bool]]:
        """Assumes that ``tensor`` equals the one this branch sent last; returns that one's place,
        and a check to run while the ranks compute with it.

        After one wrong assumption in a run, ``put`` is called instead.
        """
        sent = self._sent_by(branch, name, tensor)
        if not sent.recent or sent.surprised or sent.recognised(origins) is not None:
            return self.put(branch, name, tensor, origins), lambda: True
        last = sent.recent[0]
        self._named[last.digest] += 1
        self._entries.move_to_end(last.digest)

        def is_right() -> bool:
            if self._is_content(last, tensor):
                sent.origins, sent.entry = origins, last
                return True
            sent.surprised = True
            return False

        return last.ref, is_right

    def put(self, branch: Branch, name: str, tensor: torch.Tensor, origins: Origins = ()) -> TensorRef:
        """Returns the place of ``tensor`` in the arena, written now if it is new. ``branch``
        identifies the cond; ``name`` is the argument's path. A tensor with the same ``origins`` as
        the one before is not compared.
        """
        sent = self._sent_by(branch, name, tensor)
        recent = (one for one in sent.recent if self._is_content(one, tensor))
        entry = sent.recognised(origins) or next(recent, None)
        if entry is None:
            entry = self._find_or_store(tensor)
            sent.recent.insert(0, entry)
            del sent.recent[RECENT:]
        self._named[entry.digest] += 1
        self._entries.move_to_end(entry.digest)
        sent.origins, sent.entry = origins, entry
        return entry.ref

    def _sent_by(self, branch: Branch, name: str, tensor: torch.Tensor) -> Sent:
        key = (branch, name, tuple(tensor.shape), tensor.dtype, tensor.device)
        sent = self._sent.setdefault(key, Sent())
        self._sent.move_to_end(key)
        if len(self._sent) > KEYS:
            self._sent.popitem(last=False)
        if len(self._named) > KEYS:
            self._named.clear()
        return sent

    def _find_or_store(self, tensor: torch.Tensor) -> Entry:
        local = tensor.detach().to("cpu").contiguous()
        content = hashlib.blake2b(local.flatten().view(torch.uint8).numpy().data, digest_size=16).digest()
        digest = (content, tuple(tensor.shape), tensor.dtype, tensor.device)
        if digest not in self._entries:
            copy = None if tensor.device.type == "cpu" else tensor.detach().clone()
            ref = self._arena.put(local, version=next(self._versions))
            self.uploads += 1
            self.nbytes += ref.nbytes
            self._entries[digest] = Entry(digest, ref, copy)
        return self._entries[digest]

    def _is_content(self, entry: Entry, tensor: torch.Tensor) -> bool:
        """Returns whether the entry's tensor, of the same shape and dtype, equals this one."""
        # A view made anew each time: a kept one would keep a closed arena's memory
        content = self._arena.segment.tensor(entry.ref) if entry.copy is None else entry.copy
        return torch.equal(content, tensor)

    def begin_run(self) -> None:
        """Forgets which values each branch sent, and how often."""
        self._sent.clear()
        self._named.clear()

    def evict(self, in_flight: Iterable[int], end: int | None = None) -> None:
        """Evicts entries down to the limit, and all entries behind ``end`` of the arena. A version
        stays if it is ``in_flight``, because ranks may still read it, or ``collected``, because the
        next evaluation mostly names it again.

        Entries that this run has not named go first, the oldest of them first. Then go the entries
        that it named least often, the latest of them first: windows that come again and again would
        all be sent anew if each made room for the next.
        """
        spared = {*in_flight, *self.collected}
        others = [one for one in self._entries.values() if one.ref.version not in spared]
        kept_bytes, gone = sum(one.ref.nbytes for one in others), []
        order = {id(one): place for place, one in enumerate(others)}

        def worth(entry: Entry) -> tuple[int, int]:
            times, place = self._named[entry.digest], order[id(entry)]
            return times, -place if times else place

        for one in sorted(others, key=worth):
            if kept_bytes > self.limit_bytes or (end is not None and one.ref.offset + one.ref.nbytes > end):
                gone.append(one)
                kept_bytes -= one.ref.nbytes
        for one in gone:
            del self._entries[one.digest]
            self.nbytes -= one.ref.nbytes
            self._arena.give(one.ref.offset, one.ref.nbytes)
        self._forget(gone)

    def _forget(self, gone: Collection[Entry]) -> None:
        """Drops the places and copies of evicted entries."""
        for key, sent in list(self._sent.items()) if gone else ():
            sent.recent = [one for one in sent.recent if one not in gone]
            if sent.entry in gone:
                sent.origins, sent.entry = (), None
            if not sent.recent and not sent.surprised:
                del self._sent[key]

    def close(self) -> None:
        """Keeps nothing of a closed arena: the copies would stay on the UI's GPU."""
        self._entries.clear()
        self.begin_run()
        self.nbytes = 0
