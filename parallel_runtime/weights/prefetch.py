"""Gathers each layer's weights before it computes (all-gather prefetch), block by block: the next
block's weights travel while one block computes.

All ranks compute the same blocks in the same order, which the first evaluation that succeeds shows.
A rank learns it behind the last message. If another rank has not come so far, the pool ends: no two
ranks of a pool know another order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from typing import Any

import torch

from ..comm.shard_gather import ShardGather
from .casts import TURN, Cast, casts_in_turn, in_own_memory
from .layer_parts import ShardedBlock, ShardedLayer

NONE = -1


class Room:
    """The unshard buffer, in which weights arrive and are computed with. A block lies at one end,
    the next block at the other, if both fit. With ``via_cpu`` weights arrive in main memory first.
    """

    def __init__(self, nbytes: int, device: torch.device, via_cpu: bool):
        self.nbytes = nbytes
        self._here = torch.empty(nbytes, dtype=torch.uint8, device=device)
        self._arriving = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True) if via_cpu else self._here

    def place(self, end: int, nbytes: int) -> torch.Tensor:
        return self._arriving[self._span(end, nbytes)]

    def arrived(self, end: int, nbytes: int) -> None:
        """Copies arrived weights to the device, if they arrived in main memory."""
        if self._arriving is not self._here:
            self.content(end, nbytes).copy_(self.place(end, nbytes))

    def content(self, end: int, nbytes: int) -> torch.Tensor:
        return self._here[self._span(end, nbytes)]

    def _span(self, end: int, nbytes: int) -> slice:
        return slice(self.nbytes - nbytes, self.nbytes) if end else slice(nbytes)


class Order:
    """Which block follows which, for each ``width``: how many groups compute an evaluation
    together, whose ranks learn of the same ones.
    """

    def __init__(self) -> None:
        self._follows: dict[int, dict[tuple[int, int], int]] = {}  # after a block and the one before it
        self._seen: list[int] = [NONE]  # the blocks of this evaluation, as far as it has come

    def following(self, index: int, width: int) -> int:
        """Notes that a block computes now. Returns the one that will follow; NONE if it is not
        known.
        """
        self._seen.append(index)
        return self._follows.get(width, {}).get((self._seen[-2], index), NONE)

    def learn(self, width: int) -> None:
        """Notes the order of the first evaluation that succeeded."""
        if width not in self._follows:
            self._follows[width] = {
                (before, here): after for (before, here), (_, after) in pairwise(pairwise(self._seen))
            }

    def end_evaluation(self) -> None:
        self._seen = [NONE]


class Turns:
    """Gives the layers of each of ``blocks`` their weights in its turn, in ``room_bytes``."""

    def __init__(
        self, blocks: Sequence[ShardedBlock], gather: ShardGather, device: torch.device, room_bytes: int
    ):
        self.room_bytes = room_bytes
        self._blocks = blocks
        self._gather = gather
        self._device = device
        self._room: Room | None = None
        self._order = Order()
        self._at = [NONE, NONE]  # the block at each end of the room
        self._end = 0  # where the block at hand lies
        self._coming = NONE  # the end at which weights have not arrived
        self._take_away: list[Callable[[], None]] = []

    def attach(self) -> None:
        for index, block in enumerate(self._blocks):
            for layer in block.layers:
                own = index, layer
                enter = layer.module.register_forward_pre_hook(lambda *_, own=own: self._enter(*own))
                leave = layer.module.register_forward_hook(lambda *_, layer=layer: layer.put_away())
                setattr(layer.module, TURN, partial(self._cast, *own))
                self._take_away += [enter.remove, leave.remove, partial(delattr, layer.module, TURN)]

    def detach(self) -> None:
        for take_away in self._take_away:
            take_away()
        self._take_away.clear()
        self._gather.wait()  # after a failure one may be on its way, and would keep what is released

    @contextmanager
    def evaluation(self) -> Iterator[None]:
        """One evaluation is computed inside. If this rank alone fails, the others may never start
        the gather that it has started: it is waited for before the next evaluation, when they are
        known to be at one place.
        """
        waits = True
        with casts_in_turn():
            try:
                yield
            except Exception:  # Stopped is none: all ranks leave there
                waits = False
                raise
            finally:
                self.end_evaluation(waits=waits)

    def _cast(self, index: int, layer: ShardedLayer, cast: Cast) -> Any:
        """Computes a cast of the layer's weights. Outside of its forward that is its block's turn,
        and returns copies: nobody says how long they are used, and a helper may have the weights of
        several layers at once. A rank that casts them and one that computes the layer gather the
        same, and a rank that does both one after the other gathers once.
        """
        if layer.is_in_place:
            return cast()
        self._enter(index, layer)
        assert self._room is not None
        try:
            return in_own_memory(cast(), self._room.content(self._end, self._blocks[index].nbytes))
        finally:
            layer.put_away()

    def _enter(self, index: int, layer: ShardedLayer) -> None:
        """Puts a layer's weights in place. The first of a block waits for them, and sends for the
        next.
        """
        room = self._open_room()
        if self._at[self._end] != index:
            if index not in self._at:
                self._send_for(index)
            self._end = self._at.index(index)
            self._gather.wait()
            if self._coming != NONE:
                room.arrived(self._coming, self._blocks[self._at[self._coming]].nbytes)
                self._coming = NONE
            following = self._order.following(index, self._gather.width)
            if following != NONE and following not in self._at and self._fit(index, following):
                self._send_for(following)
        layer.put(self._end, room.content(self._end, self._blocks[index].nbytes))

    def _open_room(self) -> Room:
        if self._room is None:
            self._room = Room(
                self.room_bytes, self._device, self._gather.via_cpu and self._device.type != "cpu"
            )
        return self._room

    def _fit(self, one: int, other: int) -> bool:
        return self._blocks[one].nbytes + self._blocks[other].nbytes <= self.room_bytes

    def _send_for(self, index: int) -> None:
        """Starts to gather a block's weights at the end that is not computed with."""
        assert self._room is not None
        end = 1 - self._end
        self._at[end] = self._coming = NONE
        if self._at[self._end] != NONE and not self._fit(self._at[self._end], index):
            self._at[self._end] = NONE  # it has computed, and is overwritten
        self._gather.start(self._blocks[index].part, self._room.place(end, self._blocks[index].nbytes))
        self._at[end], self._coming = index, end

    def learn(self) -> None:
        """Notes that the evaluation succeeded."""
        self._order.learn(self._gather.width)

    def end_evaluation(self, *, waits: bool = True) -> None:
        """Puts away the weights that an evaluation left in place when it ended early. Raises the
        error of a gather in flight, if this rank ``waits`` for it.
        """
        if waits:
            self._gather.wait()
        self._at, self._coming = [NONE, NONE], NONE
        self._order.end_evaluation()
        for block in self._blocks:
            block.put_away()

    def end_run(self) -> None:
        """Frees the memory in which weights arrive."""
        self.end_evaluation()
        self._room = None
        for block in self._blocks:
            block.forget_views()
