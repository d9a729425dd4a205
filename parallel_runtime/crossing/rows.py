"""Take some rows of an evaluation's arguments, and put the outputs of all rows together.

ComfyUI puts conds of equal shape into one batch: all images of the first cond, then all of the
next. Every tensor of the arguments that is along the batch has these rows first.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from math import prod
from typing import Any

import torch
from comfy.conds import CONDConstant
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

from ..branches import Batch
from .block_code import runs_code_in_blocks

# The argument of a model that takes the rows of a branch for so many frames of one video
FRAMES = "num_video_frames"
OPTIONS, SIDES, SIGMAS = "transformer_options", "cond_or_uncond", "sigmas"
OWN = {SIDES, "uuids", SIGMAS}  # options that each cond has of its own


def latents_of(arguments: dict[str, Any]) -> list[torch.Tensor]:
    """Returns the latents: the first argument of every forward of ComfyUI's."""
    latent = next(iter(arguments.values()))
    return latent if isinstance(latent, list) else [latent]


ALL_ROWS = Batch(1, 1, 1.0)


def batch_of(arguments: dict[str, Any], constants: Collection[str] = ()) -> Batch:
    """Counts the rows that can be computed apart; one if some tensor's rows may not be those of the
    batch. Rows of a branch stay together if they are frames of one video. ``constants``: arguments
    that ComfyUI does not batch.
    """
    rows = latents_of(arguments)[0].shape[0]
    weight = cost_of_row(arguments)
    batched = [value for name, value in arguments.items() if name != OPTIONS and name not in constants]
    if rows < 2 or not all(is_along(tensor, rows) for tensor in tensors_in(batched)):
        return Batch(1, 1, weight * rows)
    branches = len(arguments.get(OPTIONS, {}).get(SIDES, ())) or 1
    branches = branches if rows % branches == 0 else 1
    return Batch(branches, rows // branches, weight, arguments.get(FRAMES) is not None)


def is_along(tensor: torch.Tensor, rows: int) -> bool:
    """True if the tensor has one row for each of the batch, or is the same for all of them; false
    if it may have several for each.
    """
    return tensor.ndim == 0 or tensor.shape[0] <= rows or tensor.shape[0] % rows != 0


def cost_of_row(arguments: dict[str, Any]) -> float:
    """Returns the approximate cost of one row, compared with others: a token for 4 latent pixels,
    and the tokens of the text.
    """
    pixels = sum(prod(latent.shape[2:]) for latent in latents_of(arguments))
    text = arguments.get("context")
    return max(1.0, pixels / 4 + (text.shape[1] if isinstance(text, torch.Tensor) and text.ndim > 2 else 0))


def take(
    arguments: dict[str, Any], start: int, end: int, batch: Batch, constants: Collection[str] = ()
) -> dict[str, Any]:
    """Returns the arguments of some of the rows, [start, end), which are of one branch."""

    def own(tensor: torch.Tensor) -> torch.Tensor:
        return tensor[start:end] if tensor.ndim and tensor.shape[0] == batch.rows else tensor

    taken = {
        name: value if name in constants else tree_map_only(torch.Tensor, own, value)
        for name, value in arguments.items()
        if name != OPTIONS
    }
    if OPTIONS not in arguments:
        return taken
    options = dict(arguments[OPTIONS])
    branch, item = divmod(start, batch.items)
    if len(options.get(SIDES, ())) == batch.branches:
        options[SIDES] = [options[SIDES][branch]]
    sigmas = options.get(SIGMAS)
    if isinstance(sigmas, torch.Tensor) and sigmas.ndim and sigmas.shape[0] in (batch.items, batch.rows):
        first = item if sigmas.shape[0] == batch.items else start
        options[SIGMAS] = sigmas[first : first + end - start]
    # In their order: the first two change
    return {name: options if name == OPTIONS else taken[name] for name in arguments}


class NotAlike(Exception):
    """Evaluations are no batch of equal shapes."""


def equal_trees(one: Any, other: Any) -> bool:
    """True for trees of equal tensors and of other leaves that are equal."""
    (leaves, spec), (others, of_other) = tree_flatten(one), tree_flatten(other)
    return spec == of_other and all(
        a is b
        or (
            a.shape == b.shape and a.device == b.device and torch.equal(a, b)
            if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)
            else type(a) is type(b) and (a == b) is True
        )
        for a, b in zip(leaves, others, strict=True)
    )


def batched(several: Sequence[dict[str, Any]], constants: Collection[str] = ()) -> dict[str, Any]:
    """Makes the arguments of one evaluation of the rows of several, as the host batches conds of
    equal shapes, equal names and the same options. Raises NotAlike.
    """
    first, rows = several[0], latents_of(several[0])[0].shape[0]
    options = [
        {name: value for name, value in own.get(OPTIONS, {}).items() if name not in OWN} for own in several
    ]
    if any(own.keys() != first.keys() for own in several) or not all(
        equal_trees(own, options[0]) for own in options
    ):
        raise NotAlike

    def joined(name: str, *own: Any) -> Any:
        one = own[0]
        if not isinstance(one, torch.Tensor):
            if any(type(other) is not type(one) or other != one for other in own):
                raise NotAlike
            return one
        if any(not isinstance(other, torch.Tensor) or other.shape != one.shape for other in own):
            raise NotAlike
        if one.ndim and one.shape[0] == rows and name not in constants:
            return torch.cat(own)
        if not all(torch.equal(one, other) for other in own):
            raise NotAlike
        return one

    made = {}
    for name in first:
        found = [tree_flatten(own.get(name)) for own in several]
        if name != OPTIONS and any(spec != found[0][1] for _, spec in found):
            raise NotAlike
        leaves = [] if name == OPTIONS else list(zip(*(leaves for leaves, _ in found), strict=True))
        made[name] = (
            tree_unflatten([joined(name, *own) for own in leaves], found[0][1]) if leaves else first[name]
        )
    if OPTIONS in first:
        sides = [side for own in several for side in own[OPTIONS].get(SIDES, ())]
        made[OPTIONS] = {**first[OPTIONS], SIDES: sides}
    return made


def joined_outputs(outputs: Sequence[Any]) -> Any:
    """Joins the outputs of parts of the rows, in their order, to the output of all rows."""
    if len(outputs) == 1:
        return outputs[0]
    if isinstance(outputs[0], torch.Tensor):
        return torch.cat(list(outputs))
    return [torch.cat(parts) for parts in zip(*outputs, strict=True)]  # of several latents, a list or a tuple


def tensors_in(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


class Constants:
    """Names of the arguments that ComfyUI gives every evaluation as they are, for a pool with
    ``groups``. ``together``: rows of a batch stay together, because a node's code in the blocks may
    look at the batch.
    """

    def __init__(self, groups: int) -> None:
        self.names: set[str] = set()
        self.together = False
        self.groups = groups

    def batch_of(self, arguments: dict[str, Any]) -> Batch:
        """Returns which rows of an evaluation can be computed apart; one group computes all."""
        if self.groups == 1:
            return ALL_ROWS
        batch = batch_of(arguments, self.names)
        return Batch(1, 1, batch.weight * batch.rows) if self.together else batch

    def look(self, patcher: Any, conds: Any) -> None:
        """Learns of the conds of every evaluation."""
        self.together = runs_code_in_blocks(patcher)
        for cond in (cond for side in conds for cond in side or ()):
            self.names |= {
                name for name, value in cond.get("model_conds", {}).items() if isinstance(value, CONDConstant)
            }
