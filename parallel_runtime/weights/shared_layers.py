"""Choose the layers of a model whose weights ranks share out: linear layers and convolutions, which
hold nearly all bytes of a transformer. Their weights are read in their own forward, or by a cast of
the host (``casts``).

Read: comfy/ops.py (Linear, Conv1d to Conv3d, mixed_precision_ops) @ ComfyUI 0.30.0.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor

from .parameters import users_of
from .quantisation import is_quantised, stored_bytes

# Of one model's bytes: what its ranks hold together where they gather layer by layer; what their
# processes add stays below 1.15
TOGETHER = 1.13
OF_A_BLOCK = re.compile(r".*?\.\d+(?=\.)")  # as in double_blocks.3.img_attn.qkv
LEFT_WHOLE = 1000  # the smallest layers stay whole, while they are together one part in so many


class Layer(NamedTuple):
    """A layer and the parameters of its own that parts can be made of, by their names in it."""

    path: str
    module: torch.nn.Module
    parameters: Mapping[str, torch.nn.Parameter]

    @property
    def nbytes(self) -> int:
        return stored_bytes(self.parameters.values())


def shared_layers(model: torch.nn.Module) -> list[Layer]:
    """Returns the layers of ``model`` that are shared out, in its own order."""
    layers = list(layers_of(model))
    least = least_shared([layer.nbytes for layer in layers])
    return [layer for layer in layers if layer.nbytes >= least]


def layers_of(model: torch.nn.Module) -> Iterator[Layer]:
    """Yields the layers to share out, without weights that another module has too, and weights that
    only their own operations can read as numbers.
    """
    users = users_of(model)
    for path, module in model.named_modules():
        if hasattr(module, "in_features") or hasattr(module, "kernel_size"):
            named = module.named_parameters(recurse=False)
            own = {name: one for name, one in named if is_number(one) and users[id(one)] == 1}
            if own:
                yield Layer(path, module, own)


def is_number(parameter: torch.nn.Parameter) -> bool:
    return type(parameter) in (torch.nn.Parameter, FakeTensor) or is_quantised(parameter)


def gathered_together(layers: Sequence[Layer], by_layer: bool = False) -> list[list[Layer]]:
    """Returns the layers whose weights come in one message: all layers of a block of a container,
    any other layer alone; with ``by_layer`` every one alone.
    """
    if by_layer:
        return [[layer] for layer in layers]
    return [list(some) for _, some in groupby(layers, block_of)]


def block_of(layer: Layer) -> str:
    found = OF_A_BLOCK.match(layer.path)
    return found[0] if found else layer.path


def least_shared(sizes: Sequence[int]) -> int:
    """Returns the bytes of the smallest layer that is worth a message of its own."""
    together = 0
    for size in sorted(sizes):
        together += size
        if together > sum(sizes) // LEFT_WHOLE:
            return size
    return 0


class Sharing(NamedTuple):
    """Bytes of weights: ``whole`` on every rank; ``shared`` out in blocks, of which the ``largest``
    one and the largest ``two`` are so large. ``by_layer``: in layers.
    """

    whole: int
    shared: int
    largest: int
    two: int
    by_layer: bool = False

    @classmethod
    def of(cls, sizes: Sequence[int], whole: int, by_layer: bool = False) -> Sharing:
        return cls(whole, sum(sizes), max(sizes, default=0), sum(sorted(sizes)[-2:]), by_layer)

    def room(self, ranks: int) -> int:
        """Returns the bytes of the unshard buffer: the weights of the block that computes and of
        the next. By layer it has at least one, and the next one too if the ranks then hold no more
        than ``TOGETHER``.
        """
        if not self.by_layer:
            return self.two
        left = (TOGETHER * (self.whole + self.shared) - self.shared) / ranks - self.whole
        return min(self.two, max(self.largest, int(left)))

    def held(self, ranks: int) -> int:
        """Returns the bytes that each of so many ranks holds."""
        return self.whole + self.shared // ranks + (self.room(ranks) if ranks > 1 else 0)
