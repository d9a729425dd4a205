"""Count the messages of an evaluation, and keep the memory that they travel in.

How far a rank has come is a number of messages and a checksum of their axes. If ranks fail at the
same place, none of them has a message on its way that another waits for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from zlib import crc32

import torch

from ..errors import ModelError

Wish = Callable[[], bool]  # whether this rank was cancelled
# A wish that does not travel yet, or the largest of several that did. A tensor has no dimension
Flag = Wish | torch.Tensor
Tensors = Sequence[torch.Tensor]
COUNTED: tuple[str, ...] = ("ulysses", "ring", "gather", "weights", "pipefusion")  # axes of messages


class Stopped(BaseException):
    """All ranks leave the forward here. Not an Exception: host code catches those around
    attention.
    """


class Unlike(BaseException):
    """All ranks leave the forward here, and it raises ``error`` in place of this: they were about
    to exchange unlike messages. No Exception, as ``Stopped``.
    """

    def __init__(self, error: ModelError):
        super().__init__()
        self.error = error


def at_once(act: Callable[[], None], sent: Tensors = (), come: Tensors = ()) -> None:
    """Do what no CUDA graph can do. ``sent``: the memory that was written to be sent to other
    ranks; ``come``: the memory whose content came from them when it is done.
    """
    act()


def no_wish() -> bool:
    """The wish of a rank that is not asked."""
    return False


class Traffic:
    """Counts the messages since the evaluation, or its patch, began, and their cost by axis: sent
    bytes and seconds of waiting.

    ``at``: the number of messages that this rank took part in and a crc of their axes in order,
    None if a message is unfinished. Ranks with equal values are at the same place. ``is_complete``:
    no message is left because the forward is over. ``posted`` counts started receives, of this
    evaluation or of the next. ``is_outgrown``: a message took more memory than there was, so others
    lie elsewhere from the next evaluation on. ``perform`` does what lies between kernels, as
    ``at_once`` does, or notes it while CUDA graphs are recorded.
    """

    def __init__(self) -> None:
        self.sent_bytes: Counter[str] = Counter(dict.fromkeys(COUNTED, 0))
        self.waited_s: dict[str, float] = dict.fromkeys(COUNTED, 0.0)
        self.at: tuple[int, int] | None = (0, 0)
        self.is_complete = False
        self.posted = 0
        self.is_outgrown = False
        self.perform: Callable[..., None] = at_once

    @property
    def place(self) -> tuple[int, int] | None:
        """``at``, to compare with others; None also if a receive is on its way that nobody takes
        any more.
        """
        return None if self.posted and not self.is_complete else self.at

    def clear(self) -> None:
        for axis in COUNTED:
            self.sent_bytes[axis], self.waited_s[axis] = 0, 0.0
        self.at, self.is_complete = (0, 0), False
        self.is_outgrown = False

    @contextmanager
    def message(self, axis: str) -> Iterator[None]:
        """Take part in one message inside. If that is left by an error, or given up, the message
        stays unfinished: another rank may wait for its rest, or a later one find it.
        """
        before, self.at = self.at, None
        yield
        self.at = None if before is None else (before[0] + 1, crc32(axis.encode(), before[1]))


class Mover:
    """Moves the messages of one ``axis`` among ``size`` ranks, with ``via_cpu`` through CPU memory.

    All memory of a message is allocated before it begins: a rank without memory fails at a place at
    which other ranks can be too.
    """

    def __init__(self, axis: str, size: int, *, via_cpu: bool):
        self.axis = axis
        self.size = size
        self.via_cpu = via_cpu
        self.traffic = Traffic()
        self._buffers: dict[tuple, torch.Tensor] = {}
        self._laid: dict[Hashable, Any] = {}  # message -> its places, views of the buffers

    @property
    def buffers(self) -> list[torch.Tensor]:
        return list(self._buffers.values())

    def free_buffers(self) -> None:
        self._buffers.clear()
        self._laid.clear()

    def _buffer(self, use: Hashable, count: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return the first ``count`` elements of a buffer that is kept for this use."""
        key = (use, dtype, device)
        if key not in self._buffers or self._buffers[key].numel() < count:
            self.traffic.is_outgrown |= bool(self._laid)
            self._laid.clear()  # else a buffer would live on in views of it
            self._buffers[key] = torch.empty(
                count, dtype=dtype, device=device, pin_memory=self.via_cpu and torch.cuda.is_available()
            )
        return self._buffers[key][:count]

    def _flags(self, dtype: torch.dtype, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Return room for every rank's flag, and for the largest."""
        wishes = torch.empty(self.size, dtype=dtype, device=device)
        return wishes, wishes.new_empty(())


def digest(content: object) -> int:
    """Return a number above 0 that ranks tell each other in place of the content."""
    return 1 + crc32(repr(content).encode())
