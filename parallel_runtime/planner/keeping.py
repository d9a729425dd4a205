"""Choose how ranks keep a model's weights: whole, an equal part of each block, or as much of them
as fits, the rest in the machine's memory.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ..families.plan import TokenPlan
from ..layout import OF_A_SEQUENCE, Layout, listed
from ..methods.blocks import blocks_of
from ..stages import share_out
from ..weights.main_memory import InMainMemory, tables_of
from ..weights.placeholder import Placeholder
from ..weights.quantisation import stored_bytes
from ..weights.shared_layers import Sharing, gathered_together, shared_layers
from .evaluation_count import ModelBytes, Shareable
from .prediction import sharded_bytes, weight_bytes
from .ways import WAYS, Kept

LEFT_FREE = 3 << 29  # bytes on each device, at least, for what an evaluation computes


def least() -> int:
    return LEFT_FREE


class Way(NamedTuple):
    """A way to keep all weights on the devices, and the bytes on each. ``by_layer``: of parts, that
    each layer is gathered by itself.
    """

    kept: Kept
    nbytes: int
    by_layer: bool = False


@dataclass(frozen=True)
class Keeping:
    """How the ranks keep a model's weights, and why. ``nbytes``: the most that the weights take on
    each device; offloaded weights take no more than that. ``leaves``: free bytes on each device
    afterwards. A run that needs more reloads the model with less kept. Infinite if reloading would
    change nothing. ``by_layer``: of sharded weights, as ``Way`` has it.
    """

    kept: Kept = "whole"
    why: str = ""
    nbytes: int = 0
    leaves: float = math.inf
    by_layer: bool = False

    def leaves_less(self, needed: Callable[[], int]) -> bool:
        """Whether they leave less free than that. It is not asked where that changes nothing."""
        return self.leaves < math.inf and self.leaves < needed()

    @property
    def budget(self) -> int:
        return self.nbytes if self.kept == "offloaded" else 0


@dataclass(frozen=True)
class WeightsWish:
    """How a model's weights are to be kept, one of ``ways.ASKED``, and their size. ``left_free``
    returns the bytes that an evaluation needs beside them on each device.
    """

    asked: str
    size: ModelBytes
    left_free: Callable[[], int] = least

    @property
    def depends_on_room(self) -> bool:
        return self.asked != "whole"

    def kept_in(
        self, names: Sequence[str], layout: Layout, memory: Sequence[Any], parts: Sequence[float] = ()
    ) -> Keeping:
        """Returns the wanted way to keep weights. For ``auto`` it is the first way that fits beside
        other models, or else in their place. ``names`` has each rank's device, ``memory`` the
        present memory of each. ``parts``: the numbers of blocks of the stages, or their speeds, in
        proportion to which they have blocks; empty if all stages have as many.

        Ranks on one device share its free memory. Ranks of one sequence shard weights: by layer if
        whole blocks do not fit, and on the CPU, whose memory all ranks share.
        """
        sharers = Counter(names)
        if self.asked == "sharded" and layout.sequence_size == 1:
            return Keeping(
                "whole",
                f"no other rank has the same blocks: raise {listed(OF_A_SEQUENCE, 'or')} to share weights"
                " out",
            )
        if not self.depends_on_room:
            return Keeping("whole", "as chosen")
        on_cpu = are_cpus(names)
        left = LEFT_FREE if on_cpu else self.left_free()
        beside, alone = ([math.inf] * layout.stages, [math.inf] * layout.stages)
        for rank, (one, name) in enumerate(zip(memory, names, strict=True)):
            stage = layout.stage(rank)
            beside[stage] = min(beside[stage], one.free // sharers[name] - left)
            alone[stage] = min(alone[stage], (one.free + one.model) // sharers[name] - left)
        if self.asked == "sharded":
            _, by_block, by_layer = (
                max(ways, key=lambda way: way.nbytes) for ways in self._ways(layout, parts)
            )
            way = by_layer if on_cpu or by_block.nbytes > min(alone) else by_block
            leaves = math.inf if way.by_layer else min(alone) - way.nbytes + left
            return Keeping("sharded", "as chosen", way.nbytes, leaves, way.by_layer)
        if self.asked == "offloaded":
            return Keeping("offloaded", "as chosen", int(max(0, min(alone))), math.inf if on_cpu else left)
        if on_cpu:
            return Keeping("whole", "ranks on the CPU map the checkpoint, one copy for all")
        return self._fitting(self._ways(layout, parts), beside, alone, left)

    def cut_for(
        self,
        names: Sequence[str],
        layout: Layout,
        memory: Sequence[Any],
        sizes: tuple[int, ...],
        speeds: Sequence[float],
    ) -> tuple[Keeping, tuple[int, ...]]:
        """Returns the way of ``kept_in`` for stages of these ``sizes``. If the sizes are left open,
        stages have blocks in proportion to their ``speeds``, or evenly if more weights stay on the
        devices then. Returns the sizes too; empty: by speed.
        """
        if sizes:
            return self.kept_in(names, layout, memory, sizes), sizes
        by_speed = self.kept_in(names, layout, memory, speeds)
        evenly = self.kept_in(names, layout, memory)
        if not speeds or WAYS.index(by_speed.kept) <= WAYS.index(evenly.kept):
            return by_speed, ()
        return evenly, tuple(last - first for first, last in self._cut(layout, ()))

    def _cut(self, layout: Layout, parts: Sequence[float]) -> list[tuple[int, int]]:
        """Returns the blocks [first, end) of each stage."""
        cut = share_out([1.0] * len(self.size.block_weight_bytes), layout.stages, parts)
        return [(stage.first, stage.end) for stage in cut]

    def _ways(self, layout: Layout, parts: Sequence[float]) -> list[list[Way]]:
        """Returns the ways to keep all weights on the devices, the fastest first, each with the
        bytes that a rank of each stage holds.
        """
        cut = self._cut(layout, parts)
        ways = [[Way("whole", weight_bytes(self.size, blocks)) for blocks in cut]]
        for by_layer in (False, True) if layout.sequence_size > 1 else ():
            ways.append(
                [
                    Way("sharded", sharded_bytes(self.size, layout, blocks, by_layer), by_layer)
                    for blocks in cut
                ]
            )
        return ways

    def _fitting(
        self, ways_there: list[list[Way]], beside: Sequence[float], alone: Sequence[float], left: int
    ) -> Keeping:
        """Returns the first of the ways that fits, and names the tightest stage. ``beside`` and
        ``alone`` have the bytes of each stage for weights, next to other models and in their place,
        without the ``left`` bytes that stay free there for activations.
        """
        needed, room = 0.0, 0.0
        for rooms, where in ((beside, "are free"), (alone, "are free without other models")):
            for ways in ways_there:
                room, needed = min(
                    ((there, way.nbytes) for there, way in zip(rooms, ways, strict=True)),
                    key=lambda pair: pair[0] - pair[1],
                )
                if needed <= room:
                    most = max(way.nbytes for way in ways)
                    return Keeping(
                        ways[0].kept,
                        f"each rank needs {as_gib(needed)}, and {as_gib(room)} {where}",
                        most,
                        room - needed + left,
                        ways[0].by_layer,
                    )
        return Keeping(
            "offloaded",
            f"each rank needs {as_gib(needed)} of weights, and {as_gib(room)} are free",
            int(max(0, min(alone))),
            left,
        )


WHOLE = WeightsWish(
    "whole", ModelBytes(weight_bytes=0, block_weight_bytes=(), shareable=Shareable((), 0, 0, 0))
)


def model_bytes(transformer: torch.nn.Module, plan: TokenPlan) -> ModelBytes:
    """Returns the bytes of a transformer's weights, and which of them ranks can share out."""
    weights = module_bytes(transformer)
    blocks = [(f"{group.path}.{index}.", held[index]) for held, index, group in blocks_of(transformer, plan)]
    if not blocks:
        return ModelBytes(
            weight_bytes=weights, block_weight_bytes=[weights], shareable=Shareable([0], 0, 0, 0)
        )
    layers: list[list[int]] = [[] for _ in (*blocks, "around")]
    together: list[list[int]] = [[] for _ in layers]
    for some in gathered_together(shared_layers(transformer)):
        sizes, first = [layer.nbytes for layer in some], some[0].path
        at = next((place for place, (path, _) in enumerate(blocks) if first.startswith(path)), -1)
        layers[at] += sizes
        together[at].append(sum(sizes))
    *of_blocks, around = map(sum, layers)
    sharing = Sharing.of([size for one in layers for size in one], 0)
    aside = sum(table.nbytes for table in tables_of(transformer))
    return ModelBytes(
        weight_bytes=weights,
        block_weight_bytes=[stored_bytes(block.parameters()) for _, block in blocks],
        shareable=Shareable(of_blocks, around, sharing.largest, sharing.two, aside, layers, together),
    )


def are_cpus(names: Sequence[str]) -> bool:
    """Whether ranks on devices of these names compute on CPUs."""
    return all(name.rpartition("/")[2] == "cpu" for name in names)


def own_weights(module: torch.nn.Module) -> list[torch.Tensor]:
    """Returns the weights that are on the module's device."""
    every = (*module.parameters(), *module.buffers())
    return [tensor for tensor in every if not isinstance(tensor, (InMainMemory, Placeholder))]


def module_bytes(module: torch.nn.Module) -> int:
    return stored_bytes(own_weights(module))


def as_gib(nbytes: float) -> str:
    return f"{max(0, nbytes) / 2**30:.1f} GiB"
