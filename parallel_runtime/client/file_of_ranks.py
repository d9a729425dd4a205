"""The checkpoint on whose pages ranks have their weights: whoever overwrites it changes those."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ..checkpoint import File, check_mapped
from ..errors import PoolFailed, Refused


class FileOfRanks:
    """``release`` has the ranks let go of the model. Without a ``file`` they were sent it."""

    def __init__(self, file: File | None, release: Callable[[], None]):
        self._file = file
        self._release = release

    def require_same(self) -> None:
        """Raises Refused where the file was overwritten while the ranks had it mapped: then they
        hold some of each, and release the model.
        """
        try:
            check_mapped(self._file)
        except Refused:
            self._release()
            raise

    @contextmanager
    def being_read(self) -> Iterator[None]:
        """Inside, ranks read the file or weights on its pages. Raises Refused where it was
        overwritten by then, also in place of the death of a rank, of pages that the file has lost.
        """
        try:
            yield
        except PoolFailed:
            self.require_same()
            raise
        self.require_same()
