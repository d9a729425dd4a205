"""Cut a picture's rows into bands, one for each rank; say which rows beside it a band needs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import Refused
from ..layout import Split

ROWS = -2  # the dimension of a picture (B, C, H, W) or (B, C, T, H, W)


@dataclass(frozen=True)
class Window:
    """The rows that one output row of a convolution is computed of. A band begins at a multiple of
    ``stride``, and has the output rows whose windows begin ``padding`` rows before its own rows: it
    needs so many rows of the bands ``above`` and ``below``.
    """

    kernel: int
    stride: int = 1
    padding: int = 0
    dilation: int = 1

    @property
    def above(self) -> int:
        return self.padding

    @property
    def below(self) -> int:
        return max(0, self.of(1) - self.stride - self.padding)

    def of(self, outputs: int) -> int:
        """Return the rows that so many neighbouring output rows are computed of."""
        return (outputs - 1) * self.stride + self.dilation * (self.kernel - 1) + 1

    def outputs(self, rows: int) -> int:
        return -(-rows // self.stride)


@dataclass(frozen=True)
class Bands:
    """``rows`` of each rank, of a picture that a VAE is given."""

    rows: tuple[int, ...]

    @classmethod
    def of(cls, rows: int, unit: int, ranks: int, weights: Sequence[float] = ()) -> Bands | None:
        """Cut ``rows`` at multiples of ``unit``, which become one row of the VAE's smallest
        picture. None if there are too few for so many ranks, or no multiple of it.
        """
        if rows % unit or rows // unit < ranks:
            return None
        return cls(tuple(unit * part for part in Split.by(tuple(weights), rows // unit, ranks, 1).sizes))

    def start(self, rank: int) -> int:
        return sum(self.rows[:rank])

    def scaled(self, rank: int, own: int) -> tuple[int, ...]:
        """Return every rank's rows of a picture of which ``rank`` has ``own``. Raises Refused if it
        is not as much larger or smaller for all of them.
        """
        scaled = [divmod(rows * own, self.rows[rank]) for rows in self.rows]
        if any(rest for _, rest in scaled):
            raise Refused(
                f"This VAE makes {own} rows of a band of {self.rows[rank]}, which is no whole number of rows"
                " for other bands: leave PipeMesh Parallelize VAE out."
            )
        return tuple(rows for rows, _ in scaled)
