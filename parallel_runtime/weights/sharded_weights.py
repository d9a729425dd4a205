"""A rank's part of a model's weights: an equal part of the bytes of each block that is shared out.
A layer has all of its weights only while it computes. Large tables stay in the machine's memory.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from ..comm.shard_gather import ShardGather
from ..forward import PREFIX
from .device_weights import DeviceWeights, parameter_on
from .layer_parts import ShardedBlock, ShardedParameter, aligned_bytes
from .main_memory import Table, tables_of
from .placement import WeightPlacement
from .prefetch import Turns
from .quantisation import put_together, stored_bytes, taken_apart
from .shared_layers import Sharing, gathered_together, shared_layers


class ShardedWeights(WeightPlacement):
    """An equal part of each block of layers that is shared out; all ranks of a sequence make theirs
    at the same time. ``by_layer``: each layer is gathered by itself, which takes less memory.
    Everything else is whole, except tables of which little is read: they stay where they were
    loaded.
    """

    def __init__(
        self,
        diffusion_model: torch.nn.Module,
        device: torch.device,
        gather: ShardGather,
        on_progress: Callable[[int], None],
        by_layer: bool = False,
    ):
        super().__init__(diffusion_model, device)
        self._sharded: dict[str, tuple[ShardedBlock, ShardedParameter]] = {}
        self._replaced: set[str] = set()
        chosen = shared_layers(diffusion_model)
        tables = tables_of(diffusion_model, device)
        self._tables: dict[str, Table] = {PREFIX + table.name: table for table in tables}
        apart = {f"{layer.path}.{name}" for layer in chosen for name in layer.parameters}
        apart |= {table.name for table in self._tables.values()}
        self._whole = DeviceWeights(diffusion_model, device, on_progress, apart=apart)
        part_on = torch.device("cpu") if gather.via_cpu else device
        together = gathered_together(chosen, by_layer)
        blocks = [ShardedBlock(some, gather.rank, gather.size, part_on, device) for some in together]
        for block in blocks:
            for layer in block.layers:
                for name, one in layer.parameters.items():
                    block.load(one)
                    one.put_away()
                    self._sharded[f"{PREFIX}{layer.path}.{name}"] = block, one
                on_progress(stored_bytes(one.loaded for one in layer.parameters.values()))
        for table in self._tables.values():
            table.put_away()
            on_progress(table.nbytes if table.is_parameter else 0)
        sharing = Sharing.of([block.nbytes for block in blocks], self._whole.nbytes, by_layer)
        self.turns = self._turns = Turns(blocks, gather, device, aligned_bytes(sharing.room(gather.size)))
        self._parts_bytes = sum(block.part.numel() for block in blocks)

    @property
    def nbytes(self) -> int:
        """Bytes that the rank holds while a model computes: its shards, its whole weights, and the
        unshard buffer.
        """
        instead = stored_bytes(one.instead for _, one in self._sharded.values() if one.instead is not None)
        return self._whole.nbytes + self._parts_bytes + self._turns.room_bytes + instead

    def has(self, name: str) -> bool:
        return name in self._sharded or self._whole.has(name)

    def get(self, name: str) -> torch.Tensor:
        one = self._apart(name)
        return self._whole.get(name) if one is None else one.settled()

    def _apart(self, name: str) -> Table | ShardedParameter | None:
        """Returns the table or sharded parameter of that name; None if the rank has it whole."""
        return self._sharded[name][1] if name in self._sharded else self._tables.get(name)

    @contextmanager
    def in_place(self, name: str) -> Iterator[None]:
        one = self._apart(name)
        if one is None:
            yield
            return
        one.put(one.settled())
        try:
            yield
        finally:
            one.put_away()

    def replace(self, name: str, weight: Any) -> None:
        if name in self._tables:
            self._tables[name].keep(put_together(weight, self._tables[name].tensor).to("cpu"))
            return
        if name not in self._sharded:
            self._whole.replace(name, weight)
            return
        block, one = self._sharded[name]
        tree = weight if isinstance(weight, dict) else taken_apart(weight)
        one.instead = None
        if not block.write(one, tree):
            whole = put_together(tree, one.loaded).to(self._device)
            one.instead = torch.nn.Parameter(whole, requires_grad=False)
            block.forget_views()
        one.put_away()
        self._replaced.add(name)

    def restore(self, but: Collection[str] = (), kept: Mapping[str, Any] | None = None) -> None:
        here = {} if kept is None else kept
        self._whole.restore(but, here)
        for name, table in self._tables.items():
            if name not in but:
                table.put_away()
        for name in self._replaced.difference(but):
            block, one = self._sharded[name]
            if name in here:
                self.put_back(name, here[name])
            else:
                one.instead = None
                block.load(one)
                one.put_away()
            self._replaced.discard(name)

    def aside_bytes(self, name: str) -> int:
        if name in self._tables:
            return self._tables[name].nbytes
        if name not in self._sharded:
            return self._whole.aside_bytes(name)
        block, one = self._sharded[name]
        return stored_bytes([one.instead]) if one.instead is not None else block.part_bytes(one)

    def aside(self, name: str, device: torch.device) -> Any:
        """Returns a copy of a sharded one: its bytes are overwritten by the next set."""
        if name in self._tables:
            return self._tables[name].held
        if name not in self._sharded:
            return self._whole.aside(name, device)
        block, one = self._sharded[name]
        return parameter_on(one.instead, device) if one.instead is not None else block.copy(one, device)

    def put_back(self, name: str, aside: Any) -> None:
        if name in self._tables:
            self._tables[name].keep(aside)
            return
        if name not in self._sharded:
            self._whole.put_back(name, aside)
            return
        block, one = self._sharded[name]
        if isinstance(aside, torch.nn.Parameter):
            one.instead = parameter_on(aside, self._device)
            block.forget_views()
        else:
            one.instead = None
            block.put_copy(one, aside)
        one.put_away()
        self._replaced.add(name)
