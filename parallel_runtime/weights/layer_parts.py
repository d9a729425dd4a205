"""One rank's part of the weights of a block of layers: an equal part of their bytes.

Read: comfy/ops.py (forward reads ``module.weight``), comfy/quant_ops.py @ ComfyUI 0.30.0;
aten/src/ATen/cuda/CUDABlas.cpp (_getAlignment) @ torch 2.11.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from .parameters import settled_as, settled_dtype
from .placeholder import Placeholder
from .quantisation import put_together, stored_parts, taken_apart, with_tensors
from .shared_layers import Layer

# Bytes: where the next tensor begins, and the next rank's part; by this torch chooses among CUDA's
# kernels
ALIGNED = 256


class PackedPlace(NamedTuple):
    """The place of one stored tensor in the bytes of its block."""

    at: int
    shape: torch.Size
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return self.shape.numel() * self.dtype.itemsize

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        """Returns the tensor as a view of the block's bytes."""
        return whole[self.at : self.at + self.nbytes].view(self.dtype).view(self.shape)


class ShardedParameter:
    """One parameter of a layer. ``loaded``: as the loader made it, on the file's pages or in shared
    memory, in the loader's dtype.
    """

    def __init__(self, module: torch.nn.Module, attribute: str, loaded: torch.nn.Parameter):
        self.module = module
        self.attribute = attribute
        self.loaded = loaded
        self.tree: Any = None  # of Places
        self.instead: torch.nn.Parameter | None = None  # held whole: it was replaced by one of another size
        self.placeholder: torch.Tensor = loaded

    def settled(self) -> torch.nn.Parameter:
        return settled_as(self.module, self.attribute, self.loaded)

    def form(self) -> torch.Tensor:
        """A tensor with the shape and dtype that the parameter will have, without content if that
        is another dtype than the loaded one.
        """
        dtype = settled_dtype(self.module, self.attribute, self.loaded)
        return self.loaded if dtype == self.loaded.dtype else self.loaded.to("meta", dtype)

    def put(self, parameter: torch.Tensor) -> None:
        slots: dict[str, Any] = self.module._parameters  # not by setattr, which takes Parameters alone
        slots[self.attribute] = parameter

    def put_away(self) -> None:
        """Puts a placeholder, or the parameter's replacement, back in place."""
        self.put(self.placeholder if self.instead is None else self.instead)


class ShardedLayer:
    """One layer and its parameters, which it has while it computes."""

    def __init__(self, layer: Layer):
        self.path, self.module = layer.path, layer.module
        self.is_in_place = False  # the layer has its weights
        self.parameters = {
            name: ShardedParameter(layer.module, name, one) for name, one in layer.parameters.items()
        }
        self._views: dict[int, list[torch.nn.Parameter]] = {}

    def put(self, end: int, whole: torch.Tensor) -> None:
        """Gives every parameter its content: views of ``whole``, the bytes of the block. The views
        are made once for each ``end`` of the unshard buffer.
        """
        if end not in self._views:
            self._views[end] = [self._view(one, whole) for one in self.parameters.values()]
        for one, view in zip(self.parameters.values(), self._views[end], strict=True):
            one.put(view)
        self.is_in_place = True

    def _view(self, one: ShardedParameter, whole: torch.Tensor) -> torch.nn.Parameter:
        if one.instead is not None:
            return one.instead
        tree = with_tensors(
            one.tree, {name: place.of(whole) for name, place in stored_parts(one.tree).items()}
        )
        return torch.nn.Parameter(put_together(tree, one.loaded), requires_grad=False)

    def put_away(self) -> None:
        for one in self.parameters.values():
            one.put_away()
        self.is_in_place = False

    def forget_views(self) -> None:
        self._views.clear()


class ShardedBlock:
    """Layers that are gathered together, and this rank's shard of their bytes: the tensors lie one
    behind the other, and every rank has an equal part.
    """

    def __init__(
        self, layers: Sequence[Layer], rank: int, size: int, part_on: torch.device, device: torch.device
    ):
        self.layers = [ShardedLayer(layer) for layer in layers]
        self._rank = rank
        at = 0
        for layer in self.layers:
            for name, one in layer.parameters.items():
                tree, places = taken_apart(one.form()), {}
                for stored, tensor in stored_parts(tree).items():
                    places[stored] = PackedPlace(at, tensor.shape, tensor.dtype)
                    at += aligned_bytes(places[stored].nbytes)
                one.tree = with_tensors(tree, places)
                one.placeholder = Placeholder(one.form(), device, f"{layer.path}.{name}")
        count, pinned = aligned_bytes(-(-at // size)), part_on.type == "cpu" and device.type == "cuda"
        self.part = torch.empty(count, dtype=torch.uint8, device=part_on, pin_memory=pinned)
        self.nbytes = size * count

    def load(self, one: ShardedParameter) -> None:
        """Stores this rank's shard of a loaded parameter, reading no other bytes."""
        self._store(one, taken_apart(one.loaded))

    def write(self, one: ShardedParameter, weight: Any) -> bool:
        """Stores this rank's shard of a parameter. False if its size differs from the loaded
        one's.
        """
        old, new = stored_parts(one.tree), stored_parts(weight)
        forms = [{name: (one.shape, one.dtype) for name, one in tree.items()} for tree in (old, new)]
        if forms[0] != forms[1]:
            return False
        self._store(one, weight)
        return True

    def _store(self, one: ShardedParameter, tree: Any) -> None:
        places = stored_parts(one.tree)
        for name, place in places.items():
            self._write(place, stored_parts(tree)[name])
        one.tree = with_tensors(tree, places)
        self.forget_views()

    def _write(self, place: PackedPlace, tensor: torch.Tensor) -> None:
        own = self._own(place)
        if own:
            begin = self._rank * self.part.numel() - place.at
            elements = slice(*((begin + at) // place.dtype.itemsize for at in (own.start, own.stop)))
            content = tensor.detach().contiguous().reshape(-1)[elements].to(place.dtype)
            self.part[own.start : own.stop].copy_(content.view(torch.uint8))

    def _own(self, place: PackedPlace) -> range:
        """Returns the range of bytes of this rank's shard that belong to the tensor."""
        first, nbytes = self._rank * self.part.numel(), self.part.numel()
        begin = min(max(place.at - first, 0), nbytes)
        return range(begin, max(begin, min(place.at + place.nbytes - first, nbytes)))

    def part_bytes(self, one: ShardedParameter) -> int:
        return sum(len(self._own(place)) for place in stored_parts(one.tree).values())

    def copy(self, one: ShardedParameter, device: torch.device) -> tuple[Any, list[torch.Tensor]]:
        """Returns this rank's part of a parameter, to be put back."""
        owns = map(self._own, stored_parts(one.tree).values())
        return one.tree, [self.part[own.start : own.stop].to(device, copy=True) for own in owns]

    def put_copy(self, one: ShardedParameter, copy: tuple[Any, list[torch.Tensor]]) -> None:
        one.tree, parts = copy
        for place, part in zip(stored_parts(one.tree).values(), parts, strict=True):
            own = self._own(place)
            self.part[own.start : own.stop].copy_(part)
        self.forget_views()

    def put_away(self) -> None:
        for layer in self.layers:
            layer.put_away()

    def forget_views(self) -> None:
        for layer in self.layers:
            layer.forget_views()


def aligned_bytes(nbytes: int) -> int:
    return -(-nbytes // ALIGNED) * ALIGNED
