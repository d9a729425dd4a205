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

from ..families import plan_or_whole
from ..layout import OF_A_SEQUENCE, Layout, listed
from ..stages import share_out
from ..weights.main_memory import tables_of
from ..weights.quantisation import stored_bytes
from ..weights.shared_layers import Sharing, gathered_together, shared_layers
from .ways import WAYS, Kept

LEFT_FREE = 3 << 29  # bytes on each device, at least, for what an evaluation computes


def least() -> int:
    return LEFT_FREE


@dataclass(frozen=True)
class ModelBytes:
    """Bytes of a model's weights: ``around`` the blocks, and of the ``blocks``, whose number is
    ``count``. ``shared_around`` and ``shared_blocks`` are the parts of these in layers that ranks
    can share out. The ``largest`` such layer and the largest ``two`` in a row have so many bytes,
    as do the largest ``two_blocks`` that are gathered together. ``aside`` bytes stay in main memory
    when weights are sharded.
    """

    around: int = 0
    blocks: int = 0
    shared_around: int = 0
    shared_blocks: int = 0
    largest: int = 0
    two: int = 0
    two_blocks: int = 0
    aside: int = 0
    count: int = 0

    @classmethod
    def of(cls, diffusion_model: torch.nn.Module) -> ModelBytes:
        plan = plan_or_whole(type(diffusion_model))
        assert plan is not None
        in_blocks = tuple(f"{group.path}." for group in plan.blocks)
        containers = [diffusion_model.get_submodule(group.path) for group in plan.blocks]
        blocks = sum(map(module_bytes, containers))
        layers = shared_layers(diffusion_model)
        shared_blocks = sum(layer.nbytes for layer in layers if layer.path.startswith(in_blocks))
        sharing = Sharing.of([layer.nbytes for layer in layers], 0)
        together = [sum(layer.nbytes for layer in some) for some in gathered_together(layers)]
        around = module_bytes(diffusion_model) - blocks
        return cls(
            around=around,
            blocks=blocks,
            shared_around=sharing.shared - shared_blocks,
            shared_blocks=shared_blocks,
            largest=sharing.largest,
            two=sharing.two,
            two_blocks=Sharing.of(together, 0).two,
            aside=sum(table.nbytes for table in tables_of(diffusion_model)),
            count=sum(len(list(one.children())) for one in containers),
        )

    def whole(self, stages: float) -> int:
        """Returns the bytes that each rank of a pipeline of so many stages holds. A stage with half
        of the blocks counts as one of two stages, however the other half is cut.
        """
        return self.around + int(self.blocks // stages)

    def sharded(self, stages: float, ranks: int, by_layer: bool = False) -> int:
        """Returns the bytes that each of a stage's ``ranks`` holds."""
        shared = self.shared_around + int(self.shared_blocks // stages)
        two = self.two if by_layer else self.two_blocks
        whole = self.whole(stages) - shared - self.aside
        return Sharing(whole, shared, self.largest, two, by_layer).held(ranks)


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
        present memory of each. ``parts`` has the number of blocks of each stage; empty if all
        stages have as many.

        Ranks on one device share its free memory. Ranks of one sequence shard weights: by layer if
        whole blocks do not fit, and on the CPU, whose memory all ranks share.
        """
        sharers, ranks = Counter(names), layout.sequence_size
        stages = [sum(parts) / part for part in parts] or [layout.stages] * layout.stages
        if self.asked == "sharded" and ranks == 1:
            return Keeping(
                "whole",
                f"no other rank has the same blocks: raise {listed(OF_A_SEQUENCE, 'or')} to share weights"
                " out",
            )
        if not self.depends_on_room:
            return Keeping("whole", "as chosen", self.size.whole(min(stages)))
        on_cpu = are_cpus(names)
        left = LEFT_FREE if on_cpu else self.left_free()
        beside, alone = ([math.inf] * len(stages), [math.inf] * len(stages))
        for rank, (one, name) in enumerate(zip(memory, names, strict=True)):
            stage = layout.stage(rank)
            beside[stage] = min(beside[stage], one.free // sharers[name] - left)
            alone[stage] = min(alone[stage], (one.free + one.model) // sharers[name] - left)
        if self.asked == "sharded":
            _, by_block, by_layer = self._ways(min(stages), ranks)
            way = by_layer if on_cpu or by_block.nbytes > min(alone) else by_block
            leaves = math.inf if way.by_layer else min(alone) - way.nbytes + left
            return Keeping("sharded", "as chosen", way.nbytes, leaves, way.by_layer)
        if self.asked == "offloaded":
            return Keeping("offloaded", "as chosen", int(max(0, min(alone))), math.inf if on_cpu else left)
        if on_cpu:
            return Keeping("whole", "ranks on the CPU map the checkpoint, one copy for all")
        return self._fitting(stages, ranks, beside, alone, left)

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
        return evenly, tuple(stage.size for stage in share_out([1.0] * self.size.count, layout.stages))

    def _ways(self, stages: float, ranks: int) -> list[Way]:
        """Returns the ways to keep all weights on the devices, the fastest first."""
        parts = [
            Way("sharded", self.size.sharded(stages, ranks, by_layer), by_layer) for by_layer in (False, True)
        ]
        return [Way("whole", self.size.whole(stages)), *(parts if ranks > 1 else ())]

    def _fitting(
        self, stages: Sequence[float], ranks: int, beside: Sequence[float], alone: Sequence[float], left: int
    ) -> Keeping:
        """Returns the first way that fits, and names the tightest stage. ``beside`` and ``alone``
        have the bytes of each stage for weights, next to other models and in their place, without
        the ``left`` bytes that stay free there for activations.
        """
        needed, room = 0.0, 0.0
        for rooms, where in ((beside, "are free"), (alone, "are free without other models")):
            for ways in zip(*(self._ways(one, ranks) for one in stages), strict=True):
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


WHOLE = WeightsWish("whole", ModelBytes())


def are_cpus(names: Sequence[str]) -> bool:
    """Whether ranks on devices of these names compute on CPUs."""
    return all(name.rpartition("/")[2] == "cpu" for name in names)


def module_bytes(module: torch.nn.Module) -> int:
    return stored_bytes([*module.parameters(), *module.buffers()])


def as_gib(nbytes: float) -> str:
    return f"{max(0, nbytes) / 2**30:.1f} GiB"
