"""A stock sampler run once per patch, so that a pipeline of stages never drains between steps.

Each timeline is a greenlet in which the same sampler code runs on the full-shape latent, with
random numbers of its own; only its patch's pixels are meaningful. It is left at every evaluation
and entered again with the output, always in the order of patches, so that what is computed depends
neither on timing nor on the number of stages. Right only where everything between the sampler and
the transformer acts on each pixel by itself: ``modes`` decides.
"""

from __future__ import annotations

import contextvars
from collections import Counter, deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from greenlet import greenlet

from ..errors import ModelError
from ..patches import Patch, TokenGrid

Callback = Callable[[int, torch.Tensor, torch.Tensor, int], Any]


@dataclass(frozen=True)
class Branch:
    """Which cond an evaluation is of. ``weights``, the id of the weight patches it is computed
    under, may change in mid-run, by hooks.
    """

    conds: tuple[Hashable, ...]
    weights: str = field(default="", compare=False)


Asked = tuple[dict[str, Any], Branch]  # the arguments of an evaluation and its branch


class PatchBackend(Protocol):
    """Computes evaluations and patches of them: first in, first out."""

    def begin_run(self) -> None:
        """Makes void what it keeps of the run before, or of this one so far."""
        ...

    def restart_if_reloaded(self) -> bool:
        """Begins the run anew, and says so, if what it kept of this run is gone."""
        ...

    def submit(self, arguments: dict[str, Any], branch: Branch, patch: Patch | None) -> Any:
        """Starts one patch of an evaluation, or all of it (exact, and what later patches see of
        their neighbours). Returns a ticket.
        """
        ...

    def collect(self, ticket: Any) -> torch.Tensor:
        """The output, full shape, zero outside the patch."""
        ...

    def make_room(self) -> bool:
        """Frees memory that something else has. False: nothing has."""
        ...

    def abandon(self) -> None:
        """Ends what was submitted and not collected."""
        ...


class Result:
    """The output of one submission, which several timelines may want."""

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
    """One evaluation that a timeline waits for; ``number`` counts those of its branch."""

    branch: Branch
    number: int
    arguments: dict[str, Any]
    result: Result | None = None

    @property
    def latent(self) -> tuple[str, torch.Tensor]:
        """The first argument of every host forward."""
        return next(iter(self.arguments.items()))


class RandomState:
    """torch's default generators of the CPU and of one device, which samplers draw from."""

    def __init__(self, device: torch.device):
        self._device = device if device.type == "cuda" else None
        self._cpu = torch.get_rng_state()
        self._cuda = torch.cuda.get_rng_state(self._device) if self._device else None

    def restore(self) -> None:
        torch.set_rng_state(self._cpu)
        if self._device:
            torch.cuda.set_rng_state(self._cuda, self._device)


class Timeline(greenlet):
    """One patch's run of the sampler."""

    def __init__(self, run: Callable[[], torch.Tensor], device: torch.device):
        super().__init__(run)
        self.gr_context = contextvars.copy_context()  # the host's progress reads a context variable
        self.random = RandomState(device)
        self.output: torch.Tensor | None = None
        self._counts: Counter[Branch] = Counter()

    def evaluate(self, asked: Sequence[Asked]) -> list[torch.Tensor]:
        """To be called within it: leaves it until all outputs are there."""
        calls = []
        for arguments, branch in asked:
            calls.append(Call(branch, self._counts[branch], arguments))
            self._counts[branch] += 1
        return self.parent.switch(calls)


class Cond(greenlet):
    """One cond of an evaluation: left where it waits for the transformer, so that another one can
    come to it as well.
    """

    def __init__(self, run: Callable[[], Any]):
        super().__init__(run)
        self.gr_context = contextvars.copy_context()

    def evaluate(self, asked: Asked) -> torch.Tensor:
        """To be called within it."""
        return self.parent.switch(asked)


def in_flight_together(runs: Sequence[Callable[[], Any]], evaluate: Callable[[Sequence[Asked]], list[torch.Tensor]]) -> list[Any]:
    """What ``runs`` return. Each goes on to what it asks of the transformer before ``evaluate`` is
    called for all of them.
    """
    conds = [Cond(run) for run in runs]
    try:
        left_with = [cond.switch() for cond in conds]
        while waiting := [index for index, cond in enumerate(conds) if cond]:
            outputs = evaluate([left_with[index] for index in waiting])
            for index, output in zip(waiting, outputs, strict=True):
                left_with[index] = conds[index].switch(output)
        return left_with
    finally:
        for cond in conds:
            if cond:  # alive: unwound here
                cond.throw()


def free_run(
    sampler: Callable[[Callback | None, bool], torch.Tensor],
    backend: PatchBackend,
    grid: TokenGrid,
    patches: Sequence[Patch],
    warm_up: int,
    callback: Callback | None,
    device: torch.device,
) -> torch.Tensor:
    """The samples, each patch's pixels from its own timeline. ``patches``: all of the ``grid``.

    ``sampler`` takes its callback and whether it is the first, and runs to its end. ``warm_up``: as
    many first evaluations of every branch are whole. ``callback`` sees every step once, when the
    last patch has come to it.
    """
    return FreeRun(backend, grid, patches, warm_up, device).run(sampler, callback)


class FreeRun:
    def __init__(self, backend: PatchBackend, grid: TokenGrid, patches: Sequence[Patch], warm_up: int, device: torch.device):
        self._backend = backend
        self._warm_up = warm_up
        self._device = device
        self._patches = patches
        self._pixels = [grid.pixels(patch).to(device) for patch in self._patches]
        self._timelines: list[Timeline] = []
        self._waiting: deque[tuple[int, list[Call]]] = deque()
        self._gathering: dict[tuple[Branch, int], list[Call]] = {}
        self._seen: dict[Branch, torch.Tensor] = {}  # branch -> the latent, each patch's pixels as last submitted

    @torch.no_grad()  # samplers switch gradients off and on again for the whole thread, so off they stay until the last one is done
    def run(self, sampler: Callable[[Callback | None, bool], torch.Tensor], callback: Callback | None) -> torch.Tensor:
        callbacks = MergedCallback(callback, self._pixels)
        for index in range(len(self._patches)):
            own = callbacks.of(index) if callback else None
            self._timelines.append(Timeline(lambda own=own, first=index == 0: sampler(own, first), self._device))
        try:
            for index in range(len(self._timelines)):
                self._resume(index)
            while self._waiting:
                if not any(submitted(calls) for _, calls in self._waiting):
                    raise ModelError("The sampler evaluates its patches in different orders: set pipefusion to 1 for this sampler.")
                index, calls = self._waiting.popleft()
                if submitted(calls):
                    self._resume(index, [call.result.take() for call in calls])
                else:
                    self._waiting.append((index, calls))  # the others are yet to come to it
        finally:
            if any(self._timelines):
                self._backend.abandon()
            for timeline in self._timelines:
                if timeline:  # alive: unwound here
                    timeline.throw()
        self._timelines[0].random.restore()  # as after one run
        return self._merged([timeline.output for timeline in self._timelines])

    def _resume(self, index: int, *outputs: list[torch.Tensor]) -> None:
        """Enters a timeline, until its next evaluation or its end."""
        timeline = self._timelines[index]
        timeline.random.restore()
        left_with = timeline.switch(*outputs)
        timeline.random = RandomState(self._device)
        if timeline.dead:
            timeline.output = left_with
        else:
            for call in left_with:
                self._submit(index, call)
            self._waiting.append((index, left_with))

    def _submit(self, index: int, call: Call) -> None:
        name, latent = call.latent
        if call.number < self._warm_up:
            calls = self._gathering.setdefault((call.branch, call.number), [])
            calls.append(call)
            if len(calls) < len(self._timelines):
                return
            del self._gathering[call.branch, call.number]
            patch, whole = None, self._merged([each.latent[1] for each in calls])
        else:
            calls, patch = [call], self._patches[index]
            whole = torch.where(self._pixels[index], latent, self._seen[call.branch])
        self._seen[call.branch] = whole
        result = Result(self._backend, self._backend.submit({**call.arguments, name: whole}, call.branch, patch))
        for each in calls:
            each.result = result

    def _merged(self, latents: Sequence[torch.Tensor]) -> torch.Tensor:
        return merged(latents, self._pixels)


def submitted(calls: Sequence[Call]) -> bool:
    return all(call.result is not None for call in calls)


def merged(latents: Sequence[torch.Tensor], pixels: Sequence[torch.Tensor]) -> torch.Tensor:
    """Each patch's pixels of its own latent."""
    whole = latents[0]
    for latent, own in zip(latents[1:], pixels[1:], strict=True):
        whole = torch.where(own, latent, whole)
    return whole


class MergedCallback:
    """A step is told when all patches have come to it, with each one's pixels."""

    def __init__(self, callback: Callback | None, pixels: Sequence[torch.Tensor]):
        self._callback = callback
        self._pixels = pixels
        self._steps: list[deque[tuple[torch.Tensor, torch.Tensor]]] = [deque() for _ in pixels]

    def of(self, index: int) -> Callback:
        def step_done(step: int, x0: torch.Tensor, x: torch.Tensor, total: int) -> None:
            self._steps[index].append((x0.clone(), x.clone()))
            if all(self._steps):
                denoised, noisy = zip(*(steps.popleft() for steps in self._steps), strict=True)
                self._callback(step, merged(denoised, self._pixels), merged(noisy, self._pixels), total)

        return step_done
