"""The arena: one segment per pool, mapped by the UI and by every local rank.

Its first page is the board: word 0 holds the request to cancel, and each rank has a line of its own
with a progress counter, its phase, and how much of its request it has done. Everything
else is handed out by a first-fit allocator that lives in the UI alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from mmap import PAGESIZE

import torch
from msgspec.structs import replace

from ..errors import SharedMemoryFull
from .segment import Segment, TensorRef, aligned, dtype_name

BOARD_BYTES = 4096
LINE_WORDS = 8
USED_WORDS = 4  # of a line
MAX_RANKS = BOARD_BYTES // (8 * LINE_WORDS) - 1
# Bytes. In the arena, on the UI's GPU and on each rank, beside what evaluations in flight name
KEPT_CONDITIONING = 256 << 20
KEPT_ARENA = 512 << 20  # from run to run, of all kinds
STEP = 256 << 20  # that the arena is extended by at most beside what is needed
ROOM = 1 << 38  # of addresses, which take no memory: the most that the arena can grow to
PHASES = (
    "starting",
    "importing",
    "joining",
    "waiting",
    "loading",
    "patching",
    "computing",
    "releasing",
    "compiling",
)


class Board:
    """Single-writer words: the UI writes the cancel word, each rank its own line (progress, phase,
    done, total). Readable from any process at any time.
    """

    def __init__(self, segment: Segment):
        ref = TensorRef(0, (MAX_RANKS + 1, LINE_WORDS), dtype_name(torch.int64))
        self._lines = segment.tensor(ref).numpy()[:, :USED_WORDS]  # the first one is the UI's

    @property
    def cancelled_request(self) -> int:
        return int(self._lines[0, 0])

    def cancel(self, request: int) -> None:
        self._lines[0, 0] = request

    def freeze(self) -> None:
        """Keeps the words as they are now, without the memory they were shared in."""
        self._lines = self._lines.copy()

    def tick(self, rank: int, steps: int = 1) -> None:
        self._lines[rank + 1, 0] += steps

    def enter(self, rank: int, phase: str, request: int = 0) -> None:
        """Notes the phase, and the progress that it begins with. Every request starts the counter
        at a place of its own, so that ranks at work on the same one can be compared.
        """
        line = self._lines[rank + 1]
        line[1] = PHASES.index(phase)
        line[0] = request << 32 if request else line[0] + 1
        if request:
            line[2:] = 0

    def note(self, rank: int, phase: str) -> None:
        """Notes a phase within a request: its progress goes on."""
        self._lines[rank + 1, 1] = PHASES.index(phase)

    def count(self, rank: int, done: int, total: int) -> None:
        """Notes how much of the request at hand is done; that stays until the next request."""
        self._lines[rank + 1, 2:] = done, total

    def counted(self, rank: int) -> tuple[int, int]:
        """Returns (done, total) of a rank's present work; total is 0 if it is not known."""
        return self.line(rank)[2:]

    def progress(self, rank: int) -> int:
        return int(self._lines[rank + 1, 0])

    def phase(self, rank: int) -> str:
        return PHASES[int(self._lines[rank + 1, 1])]

    def line(self, rank: int) -> tuple[int, int, int, int]:
        """Returns a rank's words, for ``copy_line`` on another machine's board."""
        progress, phase, done, total = map(int, self._lines[rank + 1])
        return progress, phase, done, total

    def copy_line(self, rank: int, line: tuple[int, int, int, int]) -> None:
        self._lines[rank + 1] = line


class Allocator:
    """Hands out ranges of [start, end), first fit; ``end`` moves out when nothing fits. Sizes are
    in bytes. No range crosses a seam: a place where ``end`` has been, or ``bound``, because what
    lies between two seams was registered with a GPU by itself.
    """

    def __init__(self, start: int, end: int, bound: int):
        self.end = end
        self.bound = bound
        # (offset, size), sorted; adjacent at seams only
        self._free: list[tuple[int, int]] = [(start, end - start)]
        self._seams = {end, bound}

    def extend(self, nbytes: int) -> int:
        """Returns the new end, so many bytes further or more; if it raises, nothing has changed."""
        return self.end + nbytes

    def take(self, nbytes: int) -> int:
        """Returns the offset of a free range. Raises what ``extend`` does."""
        size = max(aligned(nbytes), aligned(1))
        while True:
            for index, (offset, room) in enumerate(self._free):
                if room >= size:
                    self._free[index : index + 1] = [(offset + size, room - size)] if room > size else []
                    return offset
            before = self.end
            crosses = before < self.bound < before + size
            self.end = self.extend(size + (self.bound - before if crosses else 0))
            self._seams.add(self.end)
            ends = [before, self.bound, self.end] if before < self.bound < self.end else [before, self.end]
            self._free += [(start, end - start) for start, end in pairwise(ends)]

    def give(self, offset: int, nbytes: int) -> None:
        size = max(aligned(nbytes), aligned(1))
        merged: list[tuple[int, int]] = []
        for start, room in sorted([*self._free, (offset, size)]):
            if merged and sum(merged[-1]) == start and start not in self._seams:
                merged[-1] = (merged[-1][0], merged[-1][1] + room)
            else:
                merged.append((start, room))
        self._free = merged

    def cut(self) -> bool:
        """Moves ``end`` back to ``bound``, unless something behind it is in use. Returns whether it
        was moved.
        """
        behind = sum(room for offset, room in self._free if offset >= self.bound)
        if self.end <= self.bound or behind < self.end - self.bound:
            return False
        self._free = [one for one in self._free if one[0] < self.bound]
        self._seams = {one for one in self._seams if one <= self.bound}
        self.end = self.bound
        return True


class Arena(Allocator):
    """The UI's side of the arena: allocation and writing. Between runs it has at most ``bound``
    bytes. ``at_close``: called once it is closed.
    """

    def __init__(self, nbytes: int = 4 << 20, bound: int = KEPT_ARENA):
        super().__init__(BOARD_BYTES, nbytes, bound)
        self.segment = Segment.create("arena", nbytes, ROOM)
        self.board = Board(self.segment)
        self.at_close: list[Callable[[], None]] = []

    @property
    def nbytes(self) -> int:
        return self.segment.nbytes

    def extend(self, nbytes: int) -> int:
        """Reserves ``nbytes`` more. It reserves ahead of need, too: as many bytes as there are, at
        most ``STEP``, unless memory is short. Raises SharedMemoryFull.
        """
        needed, wanted = self.end + whole_pages(nbytes), self.end + min(self.end, STEP)
        try:
            self.segment.grow(max(needed, min(wanted, self.bound) if self.end < self.bound else wanted))
        except SharedMemoryFull:
            self.segment.grow(needed)
        return self.segment.nbytes

    def shrink(self) -> None:
        """Gives the memory behind ``bound`` back to the system, unless some of it is in use. Every
        rank must have cut it off before.
        """
        if self.cut():
            self.segment.shrink(self.bound)

    def put(self, tensor: torch.Tensor, version: int = 0) -> TensorRef:
        offset = self.take(tensor.nbytes)
        try:
            return self.segment.put(offset, tensor, version)
        except BaseException:
            self.give(offset, tensor.nbytes)
            raise

    @contextmanager
    def frame(self) -> Iterator[Frame]:
        """Yields a frame, whose memory is given back at the end of the block."""
        frame = Frame(self)
        try:
            yield frame
        finally:
            frame.release()

    def close(self) -> None:
        """Gives the descriptor back now and the memory with the last view. The board stays
        readable.
        """
        self.board.freeze()
        self.segment.close()
        self.segment.unmap()
        for call in self.at_close:
            call()
        self.at_close.clear()


def whole_pages(nbytes: int) -> int:
    return -(-nbytes // PAGESIZE) * PAGESIZE


def identity(tensor: torch.Tensor) -> tuple:
    """Returns a key by which tensors that are alive at the same time differ."""
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.device


class Frame:
    """The tensors of one message; storage that appears twice is written once."""

    def __init__(self, arena: Arena):
        self._arena = arena
        self._taken: list[TensorRef] = []
        self._seen: dict[tuple, tuple[TensorRef, torch.Tensor]] = {}
        self._on_their_way: set[torch.device] = set()  # GPUs that copy

    def put(self, tensor: torch.Tensor, in_place: bool = False) -> TensorRef:
        key = identity(tensor)
        if key not in self._seen:
            segment = self._arena.segment
            segment.pin(tensor.device)
            ref = segment.put(self.blank(tensor.nbytes).offset, tensor, later=True)
            if tensor.device.type == "cuda" and segment.is_pinned:
                self._on_their_way.add(tensor.device)
            self._seen[key] = (ref, tensor)  # the tensor is kept so that its address is not handed out again
        return replace(self._seen[key][0], in_place=in_place)

    def blank(self, nbytes: int) -> TensorRef:
        ref = TensorRef(self._arena.take(nbytes), (nbytes,), "uint8")
        self._taken.append(ref)
        return ref

    def settle(self) -> None:
        """Waits until GPUs have written all tensors of this frame: one wait for all of them."""
        while self._on_their_way:
            torch.cuda.current_stream(self._on_their_way.pop()).synchronize()

    def release(self) -> None:
        self.settle()
        for ref in self._taken:
            self._arena.give(ref.offset, ref.nbytes)
        self._taken.clear()
        self._seen.clear()
