"""A rank's part of a model's weights: an equal part of every block's bytes. A block has all of its
weights only while it computes; those of the next one are on their way meanwhile.

Read: comfy/ops.py (forward reads ``module.weight``), comfy/quant_ops.py @ ComfyUI 0.30.0.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from ..comm.shard_gather import ShardGather
from .device_weights import DeviceWeights, settled_as
from .forward import PREFIX
from .quantised import is_quantised, put_together, stored_bytes, taken_apart

ALIGNED = 16  # bytes: where the next tensor begins


class Place(NamedTuple):
    """Where one stored tensor lies in its block's bytes."""

    at: int
    shape: torch.Size
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return self.shape.numel() * self.dtype.itemsize

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        """The tensor, as a view of all bytes."""
        return whole[self.at : self.at + self.nbytes].view(self.dtype).view(self.shape)


class ShardedParameter:
    """One parameter of a block. ``loaded``: as the loader made it, on the file's pages or in shared
    memory, in the loader's dtype.
    """

    def __init__(self, module: torch.nn.Module, attribute: str, loaded: torch.nn.Parameter):
        self.module = module
        self.attribute = attribute
        self.loaded = loaded
        self.tree: Any = None  # of Places
        self.instead: torch.nn.Parameter | None = None  # held whole: it was replaced by one of another size
        self.placeholder = loaded

    def settled(self) -> torch.nn.Parameter:
        return settled_as(self.module, self.attribute, self.loaded)

    def put(self, parameter: torch.nn.Parameter) -> None:
        self.module._parameters[self.attribute] = parameter

    def put_away(self) -> None:
        """Leaves a parameter of the same kind without content, so that what only asks for a dtype,
        a shape or a device has an answer. Numbers in it are NaN.
        """
        self.put(self.placeholder if self.instead is None else self.instead)


def tensors_of(tree: Any) -> dict[str, Any]:
    return tree["tensors"] if isinstance(tree, dict) else {"": tree}


def with_tensors(tree: Any, tensors: dict[str, Any]) -> Any:
    return {**tree, "tensors": tensors} if isinstance(tree, dict) else tensors[""]


class ShardedBlock:
    """The parameters of one block and this rank's part of their bytes."""

    def __init__(self, parameters: Sequence[ShardedParameter], rank: int, size: int, part_on: torch.device, device: torch.device):
        self._rank = rank
        self._views: dict[int, list[torch.nn.Parameter]] = {}
        self.parameters = parameters
        at = 0
        for one in parameters:
            tree = taken_apart(one.settled())
            places = {}
            for name, tensor in tensors_of(tree).items():
                places[name] = Place(at, tensor.shape, tensor.dtype)
                at += -(-places[name].nbytes // ALIGNED) * ALIGNED
            one.tree = with_tensors(tree, places)
            empty = with_tensors(tree, {name: without_content(tensor, device) for name, tensor in tensors_of(tree).items()})
            one.placeholder = torch.nn.Parameter(put_together(empty, one.loaded), requires_grad=False)
        count = -(-at // size)
        self.part = torch.empty(count, dtype=torch.uint8, device=part_on, pin_memory=part_on.type == "cpu" and device.type == "cuda")
        self.nbytes = size * count

    def write(self, one: ShardedParameter, weight: Any) -> bool:
        """Stores this rank's part of a parameter. False where it is of another size than the one
        that was loaded.
        """
        old, new = tensors_of(one.tree), tensors_of(weight)
        if {name: (place.shape, place.dtype) for name, place in old.items()} != {
            name: (tensor.shape, tensor.dtype) for name, tensor in new.items()
        }:
            return False
        for name, place in old.items():
            self._write(place, new[name])
        one.tree = with_tensors(weight, old)
        self._views.clear()
        return True

    def _write(self, place: Place, tensor: torch.Tensor) -> None:
        first = self._rank * self.part.numel()
        begin, end = max(place.at, first), min(place.at + place.nbytes, first + self.part.numel())
        if begin < end:
            content = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
            self.part[begin - first : end - first].copy_(content[begin - place.at : end - place.at])

    def put(self, whole: torch.Tensor) -> None:
        """Gives every parameter its content: views of ``whole``, in which all bytes are."""
        views = self._views.get(whole.data_ptr())
        if views is None:
            views = self._views[whole.data_ptr()] = [self._view(one, whole) for one in self.parameters]
        for one, view in zip(self.parameters, views, strict=True):
            one.put(view)

    def _view(self, one: ShardedParameter, whole: torch.Tensor) -> torch.nn.Parameter:
        if one.instead is not None:
            return one.instead
        tree = with_tensors(one.tree, {name: place.of(whole) for name, place in tensors_of(one.tree).items()})
        return torch.nn.Parameter(put_together(tree, one.loaded), requires_grad=False)

    def put_away(self) -> None:
        for one in self.parameters:
            one.put_away()

    def forget_views(self) -> None:
        self._views.clear()


class Turns:
    """Gives each of ``blocks`` its weights while it computes: ``modules`` are the blocks, in the
    order in which they do. All ranks compute the same ones.
    """

    def __init__(self, modules: Sequence[torch.nn.Module], blocks: Sequence[ShardedBlock], gather: ShardGather, device: torch.device):
        self.largest = max((block.nbytes for block in blocks), default=0)
        self._modules = modules
        self._blocks = blocks
        self._gather = gather
        self._device = device
        self._here: list[torch.Tensor] = []  # two, where weights are computed with, in turn
        self._arriving: list[torch.Tensor] = []  # the same, or in the machine's memory
        self._coming = -1  # the block whose weights are on their way, or there
        self._handles: list[Any] = []

    def attach(self) -> None:
        for index, module in enumerate(self._modules):
            self._handles.append(module.register_forward_pre_hook(lambda *_, index=index: self._enter(index)))
            self._handles.append(module.register_forward_hook(lambda *_, index=index: self._blocks[index].put_away()))

    def detach(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _enter(self, index: int) -> None:
        """Puts the block's weights in place, and sends for those of the next one."""
        if self._coming != index:
            self._send_for(index)
        self._gather.wait()
        self._blocks[index].put(self._arrived(index))
        if index + 1 < len(self._blocks):
            self._send_for(index + 1)

    def _send_for(self, index: int) -> None:
        """Starts to gather a block's weights. Of two buffers one is computed with meanwhile."""
        block = self._blocks[index]
        self._make_room()
        self._coming = -1
        self._gather.start(index, block.part, self._arriving[index % 2][: block.nbytes])
        self._coming = index

    def _arrived(self, index: int) -> torch.Tensor:
        here, arrived, nbytes = self._here[index % 2], self._arriving[index % 2], self._blocks[index].nbytes
        if here is not arrived:
            here[:nbytes].copy_(arrived[:nbytes])
        return here

    def _make_room(self) -> None:
        if not self._here:
            here = [torch.empty(self.largest, dtype=torch.uint8, device=self._device) for _ in range(2)]
            via_cpu = self._gather.via_cpu and self._device.type != "cpu"
            self._arriving = [torch.empty(self.largest, dtype=torch.uint8, pin_memory=True) for _ in here] if via_cpu else here
            self._here = here

    def end_evaluation(self) -> None:
        """Puts away what an evaluation that ended early left in place."""
        self._gather.wait()
        self._coming = -1
        for block in self._blocks:
            block.put_away()

    def end_run(self) -> None:
        """Frees the memory in which weights arrive."""
        self.end_evaluation()
        self._here, self._arriving = [], []
        for block in self._blocks:
            block.forget_views()


class ShardedWeights:
    """As ``DeviceWeights``, but of each of ``blocks`` this rank keeps an equal part. ``turns``
    gather a block's weights before it computes.

    What no part can be made of stays whole: what is outside the blocks, what two modules share, and
    weights that are numbers to nobody but their own operations.
    """

    def __init__(
        self,
        diffusion_model: torch.nn.Module,
        blocks: Sequence[torch.nn.Module],
        device: torch.device,
        gather: ShardGather,
        on_progress: Callable[[int], None],
    ):
        self._device = device
        self._sharded: dict[str, tuple[ShardedBlock, ShardedParameter]] = {}
        self._replaced: set[str] = set()
        own = [dict(parameters_of(block, diffusion_model)) for block in blocks]
        self._whole = DeviceWeights(diffusion_model, device, on_progress, apart={name for named in own for name in named})
        part_on = torch.device("cpu") if gather.via_cpu else device
        made = [ShardedBlock(list(named.values()), gather.rank, gather.size, part_on, device) for named in own]
        for block, named in zip(made, own, strict=True):
            for name, one in named.items():
                block.write(one, taken_apart(one.settled()))
                one.put_away()
                self._sharded[PREFIX + name] = block, one
                on_progress(stored_bytes([one.loaded]))
        self.turns = Turns(blocks, made, gather, device)
        self._parts_bytes = sum(block.part.numel() for block in made)

    @property
    def nbytes(self) -> int:
        """Bytes that the rank holds while a model computes: its parts, what is whole, and room for
        the two largest blocks.
        """
        instead = stored_bytes(one.instead for _, one in self._sharded.values() if one.instead is not None)
        return self._whole.nbytes + self._parts_bytes + 2 * self.turns.largest + instead

    def has(self, name: str) -> bool:
        return name in self._sharded or self._whole.has(name)

    def get(self, name: str) -> torch.nn.Parameter:
        return self._sharded[name][1].settled() if name in self._sharded else self._whole.get(name)

    @contextmanager
    def in_place(self, name: str) -> Iterator[None]:
        """The model has this one parameter inside, for the host to patch."""
        if name not in self._sharded:
            yield
            return
        one = self._sharded[name][1]
        one.put(one.settled())
        try:
            yield
        finally:
            one.put_away()

    def replace(self, name: str, weight: Any) -> None:
        """Puts a weight, or one that was taken apart, in the place of a parameter."""
        if name not in self._sharded:
            self._whole.replace(name, weight)
            return
        block, one = self._sharded[name]
        tree = weight if isinstance(weight, dict) else taken_apart(weight)
        one.instead = None
        if not block.write(one, tree):
            one.instead = torch.nn.Parameter(put_together(tree, one.loaded).to(self._device), requires_grad=False)
            block.forget_views()
        one.put_away()
        self._replaced.add(name)

    def restore(self) -> None:
        """Puts every parameter back as it was loaded."""
        self._whole.restore()
        while self._replaced:
            block, one = self._sharded[self._replaced.pop()]
            one.instead = None
            block.write(one, taken_apart(one.settled()))
            one.put_away()


def parameters_of(block: torch.nn.Module, model: torch.nn.Module) -> Iterator[tuple[str, ShardedParameter]]:
    """Yields each parameter of a block that parts are made of, by its name in the model."""
    uses = Counter(id(parameter) for module in model.modules() for parameter in module.parameters(recurse=False))
    names = {id(module): path for path, module in model.named_modules()}
    for module in block.modules():
        for attribute, parameter in module.named_parameters(recurse=False):
            is_number = type(parameter) is torch.nn.Parameter or is_quantised(parameter)
            if is_number and uses[id(parameter)] == 1 and not parameter.is_meta:
                yield f"{names[id(module)]}.{attribute}", ShardedParameter(module, attribute, parameter)


def without_content(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor of the same shape and dtype that takes next to no memory."""
    fill = float("nan") if tensor.dtype.is_floating_point else 0
    return torch.full((), fill, dtype=torch.float32, device=device).to(tensor.dtype).expand(tensor.shape)
