"""Decodes, encodes and upscales in the pool that sampled, if that takes less time than ComfyUI's
own device took before. Else, and after any failure, ComfyUI computes it itself.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch

from ...parallel_runtime.client.interrupt import interrupting
from ...parallel_runtime.client.remote_upscaler import largest_share
from ...parallel_runtime.client.remote_vae import FirstStage, ranks_of
from ...parallel_runtime.errors import LayoutError, PipeMeshError, RunCancelled
from ...pool.devices import Placement
from ..bounded_dict import Latest
from ..notices import OF_A_VAE, OF_AN_UPSCALER, Notices
from ..runtime import Runtime
from ..settings import Choice
from ..vaes import lent, lent_upscaler
from .sampling import reason_of
from .seam import UPSCALE

WORTH_S = 0.5  # what several devices have to save
TRIES = 2  # before a device, or a pool, is judged: the first loads the VAE there
VAEKey = tuple[type, int, torch.dtype, str]  # class of the module, its weights' number, dtype, method
log = logging.getLogger("pipemesh")


class VAETimes:
    """Remembers the seconds that a VAE took for each number of its input: the least for each key
    and number of ranks. Seconds are kept for one number because the time of a VAE grows with the
    picture. ComfyUI's own device counts as one rank.
    """

    def __init__(self) -> None:
        self._least: Latest[tuple[VAEKey, int], tuple[float, int]] = Latest()

    def note(self, kind: VAEKey, ranks: int, numbers: int, seconds: float) -> None:
        least, times = self._least.get((kind, ranks), (seconds / numbers, 0))
        self._least[kind, ranks] = min(least, seconds / numbers), times + 1

    def is_worth(self, kind: VAEKey, ranks: int, numbers: int, share: float) -> bool:
        """Return whether so many ``ranks`` may save enough time, judged by earlier calls. False
        until one device was timed ``TRIES`` times. ``share`` is the part of the picture on the rank
        that computes most: 0.5 for two equal ranks.
        """
        alone, timed = self._least.get((kind, 1), (0.0, 0))
        saved_s = alone * numbers * (1 - share)
        return timed >= TRIES and share < 1 and saved_s >= WORTH_S and not self.is_slower(kind, ranks)

    def is_slower(self, kind: VAEKey, ranks: int) -> bool:
        alone, _ = self._least.get((kind, 1), (0.0, 0))
        pool, times = self._least.get((kind, ranks), (0.0, 0))
        return times >= TRIES and pool > alone > 0


@dataclass(frozen=True)
class Lending:
    """How a pool does the work of VAEs, or of upscale models. ``told`` is the beginning of a
    notice. ``lend`` makes the substitute of a VAE or upscale model in a pool; ``through`` calls
    ComfyUI's own function with it. Raises Refused if it cannot. ``share`` is the part of the input
    on the rank that computes most, by the number of ranks.
    """

    told: str
    lend: Callable[[Runtime, Any, Choice, Placement], Any]
    share: Callable[[torch.Tensor, int], float]


VAES = Lending(OF_A_VAE, lent, lambda given, ranks: 1 / ranks)
UPSCALERS = Lending(OF_AN_UPSCALER, lent_upscaler, largest_share)


class PoolDecoding:
    def __init__(self, runtime: Runtime, notices: Notices):
        self.times = VAETimes()
        self._runtime = runtime
        self._notices = notices
        # What stands for a VAE in ranks
        self._lent: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
        self._left: weakref.WeakSet[Any] = weakref.WeakSet()  # with which the pool has failed

    @interrupting
    def use(self, vae: Any, work: str, given: Any, call: Callable[[Any], Any], *, is_on: bool) -> Any:
        """Call ``work`` of ``vae``, a VAE or an upscale model. If the switch ``is_on``, the call
        may go to its substitute in the pool.
        """
        lending = UPSCALERS if work == UPSCALE else VAES
        if not is_on:
            self._give_back()
        model = getattr(vae, "first_stage_model", getattr(vae, "model", None))
        if not is_on or isinstance(model, FirstStage) or not isinstance(given, torch.Tensor):
            return call(vae)
        if torch.is_grad_enabled():  # gradients do not come back from ranks
            return call(vae)
        size = (
            sum(weight.numel() for weight in model.parameters()) if isinstance(model, torch.nn.Module) else 0
        )
        kind = type(model), size, getattr(vae, "vae_dtype", given.dtype), work
        if vae not in self._left:
            try:
                if (made := self._worth_having(vae, kind, given, lending)) is not None:
                    return self._in_pool(vae, made, kind, given, call, lending)
            except RunCancelled:
                raise
            except Exception as error:  # noqa: BLE001 - a graph that works without PipeMesh works with it
                self._left.add(vae)
                self._free(vae)
                self._notices.tell(f"{lending.told}: {reason_of(error).removesuffix('.')}.")
                log.debug("[PipeMesh] A VAE failed in the pool:", exc_info=error)
        return self._timed(vae, kind, 1, given, call)

    def _worth_having(self, vae: Any, kind: VAEKey, given: torch.Tensor, lending: Lending) -> Any:
        """Return the VAE's substitute in a pool that is up. None if the pool would save little, or
        if it refuses the VAE.
        """
        try:
            choice = self._runtime.default_choice()
        except LayoutError:
            return None
        placement = self._runtime.live_placement(choice)
        if placement is None:
            return None
        ranks = ranks_of(placement.layout)
        if not self.times.is_worth(kind, ranks, given.numel(), lending.share(given, ranks)):
            return None
        if self._runtime.pool_for(choice).runs.models():  # ranks keep their memory for the sampler
            return None
        if vae not in self._lent:
            self._lent[vae] = lending.lend(self._runtime, vae, choice, placement)
        return self._lent[vae]

    def _in_pool(
        self,
        vae: Any,
        made: Any,
        kind: VAEKey,
        given: torch.Tensor,
        call: Callable[[Any], Any],
        lending: Lending,
    ) -> Any:
        ranks = made.remote.ranks()
        output = self._timed(made, kind, ranks, given, lambda made: made.through(call))
        if self.times.is_slower(kind, ranks):
            self._free(vae)
            slower = f"{ranks} workers were slower, {TRIES} times."
            self._notices.tell(f"{lending.told} from now on: {slower}")
        return output

    def _timed(
        self, vae: Any, kind: VAEKey, ranks: int, given: torch.Tensor, call: Callable[[Any], Any]
    ) -> Any:
        began = time.perf_counter()
        output = call(vae)
        self.times.note(kind, ranks, max(1, given.numel()), time.perf_counter() - began)
        return output

    def _give_back(self) -> None:
        """Have ranks free all VAEs and upscale models that they hold for auto mode."""
        for vae in list(self._lent):
            self._free(vae)

    def _free(self, vae: Any) -> None:
        made = self._lent.pop(vae, None)
        if made is not None:
            with suppress(PipeMeshError):  # of ranks that are gone
                made.remote.release()
