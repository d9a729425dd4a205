"""Run a stock sampler once per patch, so that a pipeline of stages never drains between steps.

Each timeline is a coroutine in which the same sampler code runs on the full-shape latent, with
random numbers of its own; only its patch's pixels are meaningful. It is suspended at every
evaluation and resumed with the output, always in the order of patches, so that the result depends
neither on timing nor on the number of stages. This is right only if everything between the sampler
and the transformer acts on each pixel by itself: ``separability`` decides.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch

from ..crossing.rows import Constants
from ..errors import ModelError, OutOfMemory, PoolFailed
from ..patches import Patch, TokenGrid
from .branch import Branch, SampleCall
from .coroutines import Coroutine, RandomState, unwind

Callback = Callable[[int, torch.Tensor, torch.Tensor, int], Any]


class PatchBackend(Protocol):
    """Computes evaluations and patches of them: first in, first out. ``constants``: the arguments
    that ComfyUI does not batch. ``beside_ui``: it also computes on the samplers' own device.
    """

    constants: Constants
    beside_ui: bool

    def begin_run(self) -> None:
        """Discards all data that it keeps of the run before, or of this run so far."""
        ...

    def restart_if_reloaded(self) -> bool:
        """Begins the run anew if its kept keys and values of this run are gone. Returns whether it
        did.
        """
        ...

    def submit(self, call: SampleCall, patch: Patch | None) -> Any:
        """Starts one patch of an evaluation, or the whole evaluation, which is exact and gives
        later patches the keys and values of their neighbours. Returns a ticket.
        """
        ...

    def collect(self, ticket: Any) -> torch.Tensor:
        """Returns the output in full shape. Outside the patch it is zero, or as last seen."""
        ...

    def make_room(self) -> bool:
        """Frees memory that other models hold. Returns False if there is no more to free."""
        ...

    def may_start_again(self) -> bool:
        """Says whether the run may begin anew in a fresh pool, after ranks ran out of memory; notes
        that it does.
        """
        ...

    def tell_of_fresh_workers(self, error: OutOfMemory) -> None:
        """Tells the user that the run goes on after ``error``, in a fresh pool."""
        ...

    def abandon(self) -> None:
        """Ends all patches that were submitted and not collected."""
        ...


class Result:
    """The output of one submission; several timelines may take it."""

    def __init__(self, backend: PatchBackend, ticket: Any):
        self._backend = backend
        self._ticket = ticket
        self._output: torch.Tensor | None = None

    def take(self) -> torch.Tensor:
        if self._output is None:
            self._output = self._backend.collect(self._ticket)
        return self._output.clone()


@dataclass(eq=False)
class Call:
    """One evaluation that a timeline waits for. ``number`` counts the evaluations of its branch."""

    branch: Branch
    number: int
    arguments: dict[str, Any]
    result: Result | None = None

    def take(self) -> torch.Tensor:
        """Returns the output of a call that was submitted."""
        assert self.result is not None
        return self.result.take()

    @property
    def latent(self) -> tuple[str, torch.Tensor]:
        """Returns the latent's name and value: the first argument of ComfyUI's every forward."""
        return next(iter(self.arguments.items()))


class Timeline(Coroutine):
    """Runs the sampler for one patch."""

    def __init__(self, run: Callable[[], torch.Tensor], device: torch.device):
        super().__init__(run, RandomState(device), device)
        self._counts: Counter[Branch] = Counter()

    def numbered_calls(self) -> list[Call]:
        """Returns the calls that it waits for, each with the number of its evaluation. Call it once
        for each time that it waits.
        """
        calls = []
        for one in self.asked:
            calls.append(Call(one.branch, self._counts[one.branch], one.arguments))
            self._counts[one.branch] += 1
        return calls


class FreeRun:
    """One sampling with a timeline for each of the ``patches``, which cover the ``grid``.
    ``warm_up``: how many first evaluations of every branch are whole. Call ``run`` once.
    """

    def __init__(
        self,
        backend: PatchBackend,
        grid: TokenGrid,
        patches: Sequence[Patch],
        warm_up: int,
        device: torch.device,
    ):
        self._backend = backend
        self._warm_up = warm_up
        self._device = device
        self._patches = patches
        self._pixels = [grid.pixels(patch).to(device) for patch in self._patches]
        self._timelines: list[Timeline] = []
        self._waiting: deque[tuple[int, list[Call]]] = deque()
        self._gathering: dict[tuple[Branch, int], list[Call]] = {}
        # Of the timeline that came first, for each that was there
        self._arguments: dict[tuple[Branch, int], list[dict[str, Any]]] = {}
        # Branch -> the latent, each patch's pixels as last submitted
        self._seen: dict[Branch, torch.Tensor] = {}

    @torch.no_grad()  # samplers switch gradients off and on for the whole thread: off until the last is done
    def run(
        self,
        sampler: Callable[[Callback | None, bool], torch.Tensor],
        callback: Callback | None,
        begun: Callable[[], None],
    ) -> torch.Tensor:
        """Returns the samples, each patch's pixels from its own timeline. ``sampler`` takes its
        callback and whether it is the first, and runs to its end. ``callback`` is called once for
        every step, when the last patch has reached it; ``begun`` when an output is there.
        """
        callbacks = [None] * len(self._patches) if callback is None else merging(callback, self._pixels)
        self._timelines += [
            Timeline(partial(sampler, own, index == 0), self._device) for index, own in enumerate(callbacks)
        ]
        try:
            for index in range(len(self._timelines)):
                self._resume(index)
            while self._waiting:
                if not any(submitted(calls) for _, calls in self._waiting):
                    raise ModelError(
                        "The sampler evaluates its patches in different orders: set pipefusion to 1 for this"
                        " sampler."
                    )
                index, calls = self._waiting.popleft()
                if submitted(calls):
                    outputs = [call.take() for call in calls]
                    begun()
                    self._resume(index, outputs)
                else:
                    self._waiting.append((index, calls))  # other timelines have not reached it
        finally:
            if any(self._timelines):
                self._backend.abandon()
            unwind(self._timelines)
        self._timelines[0].random.restore()  # as after one run
        return merged([timeline.result for timeline in self._timelines], self._pixels)

    def _resume(self, index: int, *outputs: list[torch.Tensor]) -> None:
        """Runs a timeline to its next evaluation or its end."""
        timeline = self._timelines[index]
        timeline.resume(*outputs)
        if timeline.dead:
            return
        if self._backend.restart_if_reloaded():
            raise PoolFailed(
                "The model was unloaded, or its workers lost, while its patches were on their way: run again."
            )
        calls = timeline.numbered_calls()
        for call in calls:
            self._submit(index, call)
        self._waiting.append((index, calls))

    def _submit(self, index: int, call: Call) -> None:
        name, latent = call.latent
        if call.number < self._warm_up:
            calls = self._gathering.setdefault((call.branch, call.number), [])
            calls.append(call)
            if len(calls) < len(self._timelines):
                return
            del self._gathering[call.branch, call.number]
            patch, whole = None, merged([each.latent[1] for each in calls], self._pixels)
        else:
            calls, patch = [call], self._patches[index]
            whole = torch.where(self._pixels[index], latent, self._seen[call.branch])
        self._seen[call.branch] = whole
        asked = SampleCall({**self._shared(call, len(calls)), name: whole}, call.branch)
        result = Result(self._backend, self._backend.submit(asked, patch))
        for each in calls:
            each.result = result

    def _shared(self, call: Call, here: int) -> dict[str, Any]:
        """Returns the arguments of an evaluation, from the timeline that came first: timelines
        differ only in the latent, and an argument that is the same object is compared and written
        once.
        """
        given = self._arguments.setdefault((call.branch, call.number), [])
        given += [call.arguments] * here
        if len(given) == len(self._timelines):
            del self._arguments[call.branch, call.number]
        return given[0]


def submitted(calls: Sequence[Call]) -> bool:
    return all(call.result is not None for call in calls)


def merged(latents: Sequence[torch.Tensor], pixels: Sequence[torch.Tensor]) -> torch.Tensor:
    """Returns one latent, with each patch's pixels from that patch's own latent."""
    whole = latents[0]
    for latent, own in zip(latents[1:], pixels[1:], strict=True):
        whole = torch.where(own, latent, whole)
    return whole


def merging(callback: Callback, pixels: Sequence[torch.Tensor]) -> list[Callback]:
    """Returns a callback for each patch. The user's is called once for every step, when all patches
    have reached it, with each one's pixels.
    """
    reached: list[deque[tuple[torch.Tensor, torch.Tensor]]] = [deque() for _ in pixels]

    def step_done(index: int, step: int, x0: torch.Tensor, x: torch.Tensor, total: int) -> None:
        reached[index].append((x0.clone(), x.clone()))
        if all(reached):
            denoised, noisy = zip(*(steps.popleft() for steps in reached), strict=True)
            callback(step, merged(denoised, pixels), merged(noisy, pixels), total)

    return [partial(step_done, index) for index in range(len(pixels))]
