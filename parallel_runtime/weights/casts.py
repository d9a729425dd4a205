"""Gathers a layer's weights in time even if the host casts them outside of the layer's forward, as
some of its helpers do to compute a layer together with the operation before or after it.

Read: comfy/ops.py (cast_bias_weight, uncast_bias_weight, linear_input_act) @ ComfyUI 0.30.0 and
0.33.0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from ..stand_ins import StandIn, standing_in
from .quantisation import put_together, stored_parts, stored_tensors, taken_apart, with_tensors

# An attribute of layers: computes the cast of their weights that it is given, in their turn
TURN = "pipemesh_turn"
Cast = Callable[[], Any]


class CastsInTurn(StandIn):
    """Stands for ``comfy.ops.cast_bias_weight``: the ``TURN`` of a layer computes its casts."""

    def __call__(self, module: Any, *args: Any, **kwargs: Any) -> Any:
        cast, turn = partial(self.own, module, *args, **kwargs), getattr(module, TURN, None)
        return cast() if turn is None else turn(cast)


@contextmanager
def casts_in_turn() -> Iterator[None]:
    """Has the host's casts heed ``TURN`` inside an evaluation, in which other ranks take part."""
    import comfy.ops  # a rank finds ComfyUI once it has started

    with standing_in(comfy.ops, "cast_bias_weight", CastsInTurn):
        yield


def in_own_memory(found: Any, room: torch.Tensor) -> Any:
    """Returns a cast's weights outside of ``room``, in which later layers' weights arrive: the
    caller may use them after those were gathered.
    """
    weight, bias, *more = found
    return (*(None if one is None else out_of(one, room) for one in (weight, bias)), *more)


def out_of(weight: torch.Tensor, room: torch.Tensor) -> torch.Tensor:
    """Returns the weight, or a copy if it lies in ``room``."""
    storage = room.untyped_storage()._cdata
    if all(tensor.untyped_storage()._cdata != storage for tensor in stored_tensors(weight)):
        return weight
    tree = taken_apart(weight)
    copies = {name: tensor.clone() for name, tensor in stored_parts(tree).items()}
    return put_together(with_tensors(tree, copies), weight)
