"""Suspend code when it asks for evaluations, so that the evaluations of several are computed side
by side.

Each is a greenlet: the sampler of a patch or of a seed, a context window, or one cond of an
evaluation. A policy says who computes the requested evaluations, and which coroutine goes on first:

- ``in_flight_together``, here: all go on when all that they asked for is computed;
- ``timelines.FreeRun``: patches of a pipeline go on one by one, always in their order;
- ``seeds.sample_together``: the first one, which a prompt waits for, ends the others.
"""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from greenlet import greenlet

from .branch import SampleCall


class RandomState:
    """Keeps the state of torch's default generators for ``restore``: of the CPU, and of a
    ``device``, or of every GPU that is in use.
    """

    def __init__(self, device: torch.device | None = None):
        gpus = range(torch.cuda.device_count()) if device is None and torch.cuda.is_initialized() else ()
        self._cpu = torch.get_rng_state()
        self._gpus = {
            gpu: torch.cuda.get_rng_state(gpu)
            for gpu in ([device] if device is not None and device.type == "cuda" else gpus)
        }

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return self._cpu, *self._gpus.values()

    def is_same(self, other: RandomState) -> bool:
        return all(map(torch.equal, self.tensors, other.tensors))

    def restore(self) -> None:
        torch.set_rng_state(self._cpu)
        for gpu, state in self._gpus.items():
            torch.cuda.set_rng_state(state, gpu)


class Coroutine(greenlet):
    """Runs ``run`` until it asks for evaluations, and waits there for their outputs.

    ``asked`` are the calls that it waits for. ``result`` is the value that ``run`` returned, once
    it has ended. ``random`` is the state in which its own random numbers begin, on the CPU and on
    ``device``; None if it shares the random numbers of the code around it. Context variables are a
    copy, since ComfyUI's progress reads one.
    """

    def __init__(
        self,
        run: Callable[[], Any],
        random: RandomState | None = None,
        device: torch.device | None = None,
    ):
        super().__init__(run)
        self.gr_context = contextvars.copy_context()
        self._random = random
        self.asked: Sequence[SampleCall] = ()
        self.result: Any = None
        self._device = device

    @property
    def random(self) -> RandomState:
        """The state of its own random numbers now."""
        assert self._random is not None, "it shares those of the code around it"
        return self._random

    def outputs_of(self, asked: Sequence[SampleCall]) -> list[Any]:
        """Waits until all outputs are there. Call from inside it."""
        assert self.parent is not None, "the main greenlet is never suspended"
        return self.parent.switch(asked)

    def resume(self, *outputs: list[Any]) -> None:
        """Runs it, with the outputs that it waits for, to the next calls that it asks for or to its
        end. Raises what it raises.
        """
        if self._random is not None:
            self._random.restore()
        left_with = self.switch(*outputs)
        if self._random is not None:
            self._random = RandomState(self._device)
        if self.dead:
            self.asked, self.result = (), left_with
        else:
            self.asked = left_with


def unwind(coroutines: Iterable[Coroutine]) -> None:
    """Ends the suspended coroutines: their own ``finally`` runs."""
    for one in coroutines:
        if one:  # suspended
            one.throw()


def in_flight_together(
    runs: Sequence[Callable[[], Any]], compute: Callable[[Sequence[SampleCall]], list[Any]]
) -> list[Any]:
    """Runs all of ``runs`` and returns their results. Each is taken to its next evaluations before
    ``compute`` is called for those of all.
    """
    coroutines = [Coroutine(run) for run in runs]
    try:
        for one in coroutines:
            one.resume()
        while waiting := [one for one in coroutines if one]:
            outputs = iter(compute([call for one in waiting for call in one.asked]))
            for one in waiting:
                one.resume([next(outputs) for _ in one.asked])
        return [one.result for one in coroutines]
    finally:
        unwind(coroutines)
