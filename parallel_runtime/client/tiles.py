"""Give each rank whole tiles of a picture that ComfyUI takes tile by tile.

ComfyUI cuts the picture and puts the tiles together; its loop waits for each tile before it asks
for the next (comfy/utils.py tiled_scale_multidim @ 0.30.0), although no tile depends on another
(``lookahead``).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import comfy.utils
import torch

from ..errors import Refused
from ..stand_ins import StandIn, standing_in
from .lookahead import Lookahead

T = TypeVar("T")
OnTile = Callable[[torch.Tensor], torch.Tensor]
OTHERWISE = (
    "ComfyUI goes through the tiles of this picture in another way than it was asked to at first: update"
    " PipeMesh, and leave PipeMesh Parallelize VAE out until then."
)


def side_by_side(
    ask_all: Callable[[OnTile], Any],
    loop: Callable[[OnTile], T],
    compute: Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]],
    at_once: int,
    prepare: OnTile = lambda tile: tile,
) -> T:
    """Returns the picture that ``loop``, ComfyUI's own, makes from the tiles that ``compute``
    computes, ``at_once`` of them together. ``ask_all`` is the same loop if results take no memory;
    its results are not used. It asks for tiles of the picture; ``loop`` asks for the tiles that
    ``prepare`` makes from them. Raises Refused if ``loop`` asks for a tile that was not computed.
    """

    def together(tiles: Sequence[torch.Tensor]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        prepared = [prepare(tile) for tile in tiles]
        return list(zip(prepared, compute(prepared), strict=True))

    ahead: Lookahead[torch.Tensor, tuple[torch.Tensor, torch.Tensor]] = Lookahead(
        together, at_once, OTHERWISE
    )

    def ask(tile: torch.Tensor) -> torch.Tensor:
        ahead.ask(tile)
        return tile.new_zeros((1,) * tile.dim())

    def answer(tile: torch.Tensor) -> torch.Tensor:
        computed, output = ahead.answer()
        if not are_same(computed.cpu(), tile.cpu()):
            raise Refused(OTHERWISE)
        return output

    with no_progress_shown():
        ask_all(ask)
    return loop(answer)


def are_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether both hold the same numbers, some of which may be NaN."""
    if (one.shape, one.dtype) != (other.shape, other.dtype):
        return False
    return torch.allclose(one, other, rtol=0, atol=0, equal_nan=True)


@contextmanager
def no_progress_shown() -> Iterator[None]:
    """Inside, ComfyUI's progress bars of this thread show nothing."""
    with standing_in(comfy.utils, "PROGRESS_BAR_HOOK", NoProgress):
        yield


class NoProgress(StandIn):
    """The hook of progress bars, which other threads' go on to reach."""

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        if self.own is not None and threading.get_ident() not in self.inside:
            self.own(*args, **kwargs)
