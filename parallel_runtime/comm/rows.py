"""Exchange rows of pictures among the ranks of a sequence, each of which has a band of them.

Every message brings the cancel flags, and ranks leave after it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..errors import Refused
from .bands import ROWS, Bands, Window
from .mesh import SequenceComm


class RowExchange:
    """Exchanges rows of the pictures that come of one picture, which is cut into ``bands``."""

    def __init__(self, comm: SequenceComm):
        self._comm = comm
        self.bands = Bands(())

    @property
    def size(self) -> int:
        return self._comm.world.size

    def place(self, own: int) -> tuple[int, int, int]:
        """Return the first row, the end and the count of all rows of a picture of which this rank
        has ``own`` rows: 8, 16 and 20 for the second rank of three that have 8, 8 and 4.
        """
        sizes = self.of_all(own)
        start = sum(sizes[: self._comm.world.rank])
        return start, start + own, sum(sizes)

    def of_all(self, own: int) -> tuple[int, ...]:
        return self.bands.scaled(self._comm.world.rank, own)

    def exchange(self, to: Sequence[torch.Tensor], come: Sequence[torch.Tensor]) -> None:
        """Send each rank its part of ``to``, and receive each rank's in ``come``. Raises Stopped on
        all ranks alike.
        """
        flag = self._comm.world.all_to_all(
            [[part.unsqueeze(0) for part in to]],
            [part.unsqueeze(0) for part in come],
            self._comm.stop.wants_stop,
        )
        self._comm.stop.decide(flag)

    def beside(
        self, x: torch.Tensor, window: Window
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """Return a band, and its neighbours' rows above and below it; None beyond the picture."""
        rank, last = self._comm.world.rank, self._comm.world.size - 1
        if rank < last:  # the zero row that the model adds below: a neighbour has the real one
            x = x.narrow(ROWS, 0, x.shape[ROWS] - x.shape[ROWS] % window.stride)
        rows = x.shape[ROWS]
        if rows < max(window.above, window.below):
            raise Refused(f"A band of {rows} rows is less than a convolution reads: take fewer ranks.")
        nothing = x.narrow(ROWS, 0, 0)
        to, come = [nothing] * (last + 1), [nothing] * (last + 1)
        above = below = None
        if rank:
            above = x.new_empty((*x.shape[:ROWS], window.above, x.shape[-1]))
            to[rank - 1], come[rank - 1] = x.narrow(ROWS, 0, window.below), above
        if rank < last:
            below = x.new_empty((*x.shape[:ROWS], window.below, x.shape[-1]))
            to[rank + 1], come[rank + 1] = x.narrow(ROWS, rows - window.above, window.above), below
        self.exchange(to, come)
        return x, above, below

    def every(self, own: torch.Tensor) -> torch.Tensor:
        """Return all ranks' rows on each, of a band whose first dimension is rows."""
        sizes = self.of_all(len(own))
        every = own.new_empty((sum(sizes), *own.shape[1:]))
        self.exchange([own] * len(sizes), list(every.split(sizes)))
        return every

    def gathered(self, output: torch.Tensor) -> torch.Tensor:
        """Return all rows on the first rank, its own on others."""
        nothing = output.narrow(ROWS, 0, 0)
        to, come = [nothing] * self._comm.world.size, [nothing] * self._comm.world.size
        to[0] = output
        if self._comm.world.rank:
            self.exchange(to, come)
            return output
        sizes = self.of_all(output.shape[ROWS])
        every = output.new_empty((*output.shape[:ROWS], sum(sizes), output.shape[-1]))
        self.exchange(to, every.split(sizes, ROWS))
        return every
