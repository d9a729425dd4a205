"""The cache that a node puts into a MODEL's options for the tokens of a branch: the model's results
for them, for later evaluations of the run. Its settings cross, and each rank keeps the rows that it
computes.

Read: the classes that plans name as ``BranchCache``, and their nodes, @ ComfyUI 0.33.0.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from importlib import import_module
from typing import Any, NamedTuple

import torch

from ..errors import Refused
from ..families.plan import BranchCache
from ..memory import system_memory
from ..wire.segment import mib

KEPT = "kept_tokens"  # the option as it crosses
WINDOW = "context_window"  # in one, the model fills the cache before it comes to its own tokens
ELEMENT_BYTES = {"int8": 1.0, "int4": 0.5}


def kept_settings(kept: BranchCache, options: Mapping[str, Any]) -> dict[str, Any]:
    """In the UI: returns the settings that ranks get in place of the cache; empty if there is no
    cache. ``id`` tells two caches of one run apart.
    """
    cache: Any = options.get(kept.option)
    if f"{type(cache).__module__}:{type(cache).__qualname__}" != kept.cache:
        return {}
    on_device = cache.store_device.type != "cpu"
    return {"id": id(cache), "dtype": cache.dtype, "on_device": on_device, "in_window": WINDOW in options}


class KeptBranch(dict):
    """The tokens that are kept for one branch's latents. It equals nothing but itself, because
    dicts of tensors cannot be compared. ``shapes``: the tokens' shape in each block.
    """

    __eq__ = object.__eq__
    __hash__: Any = object.__hash__

    def __init__(self, made: dict[str, Any]):
        super().__init__(made)
        self.shapes: dict[int, torch.Size] = {}


class Sharers(NamedTuple):
    """Who keeps rows. ``size`` of the sequence at hand, ``any_wishes`` of its ranks: all must ask
    it. ``blocks`` of the model; ``ranks``: how many fill the same memory.
    """

    size: Callable[[], int]
    any_wishes: Callable[[bool], bool]
    blocks: int
    ranks: int


class KeptTokens:
    """In a rank: the caches of one model's run. Groups that share a sequence keep other rows than
    those that compute apart.
    """

    def __init__(self, kept: BranchCache, device: torch.device, sharers: Sharers):
        self._kept = kept
        self._device = device
        self._sharers = sharers
        self._made: dict[tuple[int, int], Any] = {}
        self._run: Hashable = None

    def put(self, options: dict[str, Any], run: Hashable) -> dict[str, Any]:
        """Returns the options with a cache in place of its settings. Frees what is of another
        ``run``, or attempt at it.
        """
        if run != self._run:
            self.free()
        self._run = run
        if KEPT not in options:
            return options
        settings = options[KEPT]
        key = (settings["id"], self._sharers.size())
        if key not in self._made:
            store = self._device if settings["on_device"] else torch.device("cpu")
            self._made[key] = cache_class(self._kept)(store, settings["dtype"], self._sharers)
        window = {WINDOW: True} if settings["in_window"] else {}
        given = {name: value for name, value in options.items() if name != KEPT}
        return {**given, **window, self._kept.option: self._made[key]}

    @property
    def nbytes(self) -> int:
        """The bytes that they hold on the rank's device."""
        held = (cache for cache in self._made.values() if cache.store_device == self._device)
        return sum(cache.memory_bytes() for cache in held)

    def free(self) -> None:
        for cache in self._made.values():
            cache.free()
        self._made.clear()


def free_bytes(device: torch.device) -> int:
    """Returns the free bytes of a device; of main memory within a container's limit."""
    from comfy.model_management import get_free_memory

    return system_memory()[0] if device.type == "cpu" else int(get_free_memory(device))


def cache_class(kept: BranchCache) -> Any:
    """Returns a subclass of ComfyUI's cache class with which ranks free memory together: if one
    rank alone dropped tokens, the others would wait for its messages.
    """
    module, name = kept.cache.split(":")
    base: Any = getattr(import_module(module), name)

    class SharedCache(base):
        def __init__(self, store: torch.device, dtype: str, sharers: Sharers):
            super().__init__(store, dtype)
            self._sharers = sharers
            self._is_selecting = False
            self._ranks = sharers.ranks if store.type == "cpu" else 1

        def _slot_bytes(self, slot: Any) -> int:
            return 0 if self._is_selecting else super()._slot_bytes(slot)

        def select(self, latents: torch.Tensor) -> None:
            """Makes room after ComfyUI's own choice, which so finds enough."""
            self._is_selecting = True
            try:
                super().select(latents)
            finally:
                self._is_selecting = False
            if self.slot["blocks"]:
                return
            self.slots[-1] = self.slot = KeptBranch(self.slot)
            wanted = max(map(self._slot_bytes, self.slots)) * 1.5 * self._ranks
            while self.slots[0] is not self.slot and self._sharers.any_wishes(
                free_bytes(self.store_device) < wanted
            ):
                self._free_slot(self.slots.pop(0))

        def put(self, i: int, tokens: torch.Tensor) -> None:
            """Of the first block all rows come, of later ones this rank's."""
            if i == 0 and self.store_device.type == "cpu":
                self._require_room(tokens[:1])
            super().put(i, tokens)
            self.slot.shapes[i] = tokens[:1].shape

        def take(self, i: int, *how: Any) -> torch.Tensor:
            self.slot["shape"] = self.slot.shapes[i]  # ComfyUI takes all blocks' for alike
            return super().take(i, *how)

        def _require_room(self, rows: torch.Tensor) -> None:
            each = ELEMENT_BYTES.get(self.dtype, rows.element_size())
            needed = int(rows.numel() * each * self._sharers.blocks * self._ranks / self._sharers.size())
            if needed > (free := system_memory()[0]):
                raise Refused(
                    f"{kept.node} needs {mib(needed)} of main memory and {mib(free)} are free: set its dtype"
                    " to int8 or int4, its device to gpu, or remove the node."
                )

    return SharedCache
