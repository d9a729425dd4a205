"""Times the parts of each prompt: its runs in a pool, and the VAE work of ranks or of ComfyUI, as
they pass through auto mode's methods. Other work, such as text encoders, does not pass through
them.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .bounded_dict import Latest

if TYPE_CHECKING:
    from ..parallel_runtime.client.run import Run


@dataclass(frozen=True)
class VAEWork:
    """Says how many ``seconds`` one ``work`` (decode, encode or upscale) took, and whether ranks
    did it (``in_pool``) or ComfyUI itself.
    """

    work: str
    seconds: float
    in_pool: bool


@dataclass(frozen=True)
class RunParts:
    """Splits the seconds of a run: until its first evaluation began, the first evaluation, and all
    that followed. ``began_at`` counts from 1970.
    """

    prompt: str
    began_at: float
    loading_s: float
    first_s: float
    sampling_s: float


@dataclass(frozen=True, kw_only=True)
class PromptFigures:
    """Splits the seconds of the prompt that a run belongs to. ``before_s`` passed until it sampled.
    ``left_s`` would remain if all work of ranks took no time. Until ComfyUI has ended the prompt,
    ``before_s`` and ``total_s`` are None, and ``left_s`` counts only the work that was timed so
    far. The prompt was ``speedup`` times as fast as on one device, and can be at most ``at_most``
    times as fast (Amdahl's law); both are None if one device's time is not known.
    """

    before_s: float | None
    loading_s: float
    first_s: float
    sampling_s: float
    vae: tuple[VAEWork, ...]
    total_s: float | None
    left_s: float
    speedup: float | None
    at_most: float | None


class PromptTimes:
    """Keeps the times of runs and VAEs, and may be asked for the figures of a run from any thread.
    ``prompt_now`` returns the id of the prompt that this thread executes, empty if it executes
    none. ``span_of`` returns when an ended prompt began and ended, in seconds since 1970.
    """

    def __init__(
        self,
        prompt_now: Callable[[], str] = str,
        span_of: Callable[[str], tuple[float, float] | None] = lambda prompt: None,
    ):
        self._prompt_now = prompt_now
        self._span_of = span_of
        self._lock = threading.Lock()  # a prompt's thread notes while the server's asks
        self._vae: Latest[str, tuple[VAEWork, ...]] = Latest(10)
        self._runs: weakref.WeakKeyDictionary[Run, RunParts] = weakref.WeakKeyDictionary()

    def note_vae(self, work: str, seconds: float, in_pool: bool) -> None:
        prompt = self._prompt_now()
        with self._lock:
            self._vae[prompt] = *self._vae.get(prompt, ()), VAEWork(work, seconds, in_pool)

    def note_run(self, run: Run, began: float, ended: float) -> None:
        """Notes a run that ends now, by the clock of its evaluations."""
        if evaluations := list(run.evaluations):
            first = evaluations[0]
            parts = first.began - began, first.seconds, ended - first.began - first.seconds
            noted = RunParts(self._prompt_now(), time.time() - (ended - began), *parts)
            with self._lock:
                self._runs[run] = noted

    def of(self, run: Run, ratio: float | None) -> PromptFigures | None:
        """Returns None before the run's end. ``ratio``: how many times as fast as one device ranks
        computed.
        """
        with self._lock:
            if (own := self._runs.get(run)) is None:
                return None
            noted, works = list(self._runs.values()), self._vae.get(own.prompt, ())
        runs = [one for one in noted if one.prompt == own.prompt] if own.prompt else [own]
        span = self._span_of(own.prompt)
        by_ranks = sum(one.first_s + one.sampling_s for one in runs)
        by_ranks += sum(one.seconds for one in works if one.in_pool)
        others = sum(one.loading_s for one in runs) + sum(one.seconds for one in works if not one.in_pool)
        total = by_ranks + others if span is None else max(by_ranks + others, span[1] - span[0])
        left = max(total - by_ranks, 1e-3)
        alone = None if ratio is None else left + ratio * by_ranks
        return PromptFigures(
            before_s=max(0.0, min(one.began_at for one in runs) - span[0]) if span is not None else None,
            loading_s=own.loading_s,
            first_s=own.first_s,
            sampling_s=own.sampling_s,
            vae=works,
            total_s=None if span is None else total,
            left_s=left,
            speedup=None if alone is None else alone / total,
            at_most=None if alone is None else alone / left,
        )
