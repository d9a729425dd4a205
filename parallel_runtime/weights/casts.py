"""Give layers their turn also where the host casts their weights from outside their forward, as its
helpers do that compute a layer together with what comes before or behind it.

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
    """Stands for ``comfy.ops.cast_bias_weight``: a layer that is given ``TURN`` has its casts
    computed by that.
    """

    def __call__(self, module: Any, *args: Any, **kwargs: Any) -> Any:
        cast, turn = partial(self.own, module, *args, **kwargs), getattr(module, TURN, None)
        return cast() if turn is None else turn(cast)


@contextmanager
def casts_in_turn() -> Iterator[None]:
    """Has the host's casts heed ``TURN`` inside. Only there: other ranks take no part in what an
    evaluation does not do.
    """
    import comfy.ops  # a rank finds ComfyUI once it has started

    with standing_in(comfy.ops, "cast_bias_weight", CastsInTurn):
        yield


def in_own_memory(found: Any, room: torch.Tensor) -> Any:
    """What a cast returns, where none of the weights in it lie in ``room``, which others arrive in:
    the caller may still have them when further layers have had their turn.
    """
    weight, bias, *more = found
    return (*(None if one is None else out_of(one, room) for one in (weight, bias)), *more)


def out_of(weight: torch.Tensor, room: torch.Tensor) -> torch.Tensor:
    """The weight, or a copy where it lies in ``room``."""
    storage = room.untyped_storage()._cdata
    if all(tensor.untyped_storage()._cdata != storage for tensor in stored_tensors(weight)):
        return weight
    tree = taken_apart(weight)
    copies = {name: tensor.clone() for name, tensor in stored_parts(tree).items()}
    return put_together(with_tensors(tree, copies), weight)
