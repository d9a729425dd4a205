"""The benches' model and the ways to run one forward of it: whole, one shard of it without the
other ranks, in parallel.

The model has 24 blocks, so that the ends do not dominate, and heads of 128 as in files. It is
narrow (hidden 256 against 3072 of the released ones), so a rank computes little for each byte it
exchanges: the harder case.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Protocol

import torch

from ...parallel_runtime.comm.exchange import Exchange, StopFlag
from ...parallel_runtime.comm.mesh import SequenceComm
from ...parallel_runtime.comm.parts import unit_of
from ...parallel_runtime.comm.ring import Ring
from ...parallel_runtime.comm.shares import shares_of
from ...parallel_runtime.families import plan_for
from ...parallel_runtime.families.catalogue import sample_with
from ...parallel_runtime.families.sample import Size
from ...parallel_runtime.layout import Layout
from ...parallel_runtime.methods.usp import SequenceParallel
from ...parallel_runtime.patches import Part
from .lockstep import timed

SAMPLE, SIZE = sample_with("bench")
SMALL = replace(SIZE, blocks=(1, 2))  # of smallest cases
CHANNELS = SAMPLE.latents["even"][1]
TEXT_TOKENS, ROW_TOKENS = 64, 64
LEAST_TOKENS = TEXT_TOKENS + 3 * ROW_TOKENS  # of smallest cases


def sampled(
    model: Any,
    tokens: int,
    steps: int,
    *,
    images: int = 1,
    cfg: float = 1.0,
    prompts: tuple[int, int] = (TEXT_TOKENS, TEXT_TOKENS),
    callback: Callable[..., None] | None = None,
    seed: int = 1,
) -> torch.Tensor:
    """Sample a MODEL of the benches at ``tokens`` tokens, text included; ``prompts``: how many
    tokens the positive and the negative prompt have.
    """
    import comfy.sample

    generator = torch.Generator().manual_seed(0)
    latent = torch.zeros(images, CHANNELS, 2 * ((tokens - TEXT_TOKENS) // ROW_TOKENS), 2 * ROW_TOKENS)
    pooled = {"pooled_output": torch.randn(1, SIZE.pooled_dim, generator=generator)}
    conds = [[[torch.randn(1, count, SIZE.text_dim, generator=generator), pooled]] for count in prompts]
    with torch.inference_mode():
        noise = comfy.sample.prepare_noise(latent, seed)
        how = (steps, cfg, "euler", "simple", *conds, latent)
        return comfy.sample.sample(model, noise, *how, callback=callback, disable_pbar=True, seed=seed)


@contextmanager
def on_cores(cores: Sequence[int]) -> Iterator[None]:
    """Let this process run on these cores meanwhile, as a UI does: its ranks share them out."""
    own = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores or own)
    try:
        yield
    finally:
        os.sched_setaffinity(0, own)


class Slowing(Protocol):
    """Is called wherever a rank tells of its progress, from ``begin`` of a forward on."""

    def begin(self) -> None: ...
    def __call__(self) -> None: ...


def unslowed() -> None:
    pass


class OwnRank:
    """This process as a rank of the mesh of ``comm``: evaluates a model under sequence parallelism.

    Ranks compare their tokens in the first evaluation alone, as in a run. ``on_progress``: as the
    method has it.
    """

    def __init__(
        self,
        model: Any,
        forward: Callable[..., Any],
        comm: SequenceComm,
        on_progress: Callable[[], None] = unslowed,
    ):
        plan = plan_for(type(model))
        assert plan is not None, f"{type(model).__name__} has no plan"
        self._forward = forward
        self._method = SequenceParallel(model, plan, comm, on_progress)

    @contextmanager
    def attached(self) -> Iterator[None]:
        self._method.attach()
        try:
            yield
        finally:
            self._method.detach()

    def evaluate(self, arguments: dict[str, Any]) -> Any:
        """Return the output on rank 0. Call it while ``attached``."""
        self._method.begin(Part(1, 0))
        return self._method.forward(self._forward, dict(arguments), 1)


class Forwards:
    """One evaluation of ``tokens`` tokens, text included, at batch 1 in fp32. ``whole`` and
    ``through`` time it, in seconds.
    """

    def __init__(self, tokens: int, size: Size = SIZE):
        assert tokens % ROW_TOKENS == 0 and tokens > TEXT_TOKENS
        self.hidden, self.blocks = size.hidden, sum(size.blocks)
        self.model: Any = SAMPLE.form.random_model(size).model.diffusion_model
        self._ranks: dict[tuple[SequenceComm, Callable[[], None]], OwnRank] = {}
        rows = (tokens - TEXT_TOKENS) // ROW_TOKENS
        generator = torch.Generator().manual_seed(0)
        self.arguments: dict[str, Any] = {
            "x": torch.randn(1, CHANNELS, 2 * rows, 2 * ROW_TOKENS, generator=generator),
            "timestep": torch.tensor([0.5]),
            "context": torch.randn(1, TEXT_TOKENS, size.text_dim, generator=generator),
            "y": torch.randn(1, size.pooled_dim, generator=generator),
            "transformer_options": {},
        }

    def evaluate(self) -> torch.Tensor:
        return self.model._forward(**self.arguments)

    @contextmanager
    def parallel(
        self, comm: SequenceComm, on_progress: Callable[[], None] = unslowed
    ) -> Iterator[Callable[[], torch.Tensor]]:
        """Yield the same evaluation under sequence parallelism, as this rank of the mesh; rank 0
        gets its result. A rank that was here before goes on as in a run.
        """
        key = comm, on_progress
        if key not in self._ranks:
            self._ranks[key] = OwnRank(self.model, self.model._forward, comm, on_progress)
        with self._ranks[key].attached():
            yield lambda: self._ranks[key].evaluate(self.arguments)

    def whole(self) -> float:
        return timed(self.evaluate)

    def through(self, comm: SequenceComm, slowed: Slowing | None = None) -> float:
        """``slowed``: what makes this rank slower than it is."""
        if slowed is None:
            with self.parallel(comm) as evaluate:
                return timed(evaluate)
        with self.parallel(comm, slowed) as evaluate:
            slowed.begin()
            return timed(lambda: (evaluate(), slowed()))


class StandinExchange(Exchange):
    """Stand in for any rank of a group in one process: pack, unpack and count like the real
    exchange, but move nothing.

    It receives normal deviates: zeros, NaN and denormals would change the speed of arithmetic.
    """

    def __init__(self, rank: int, size: int, axis: str = "ulysses"):
        super().__init__(None, rank, size, axis=axis, via_cpu=False)

    def _buffer(self, use: Hashable, count: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return ordinary(self._buffers.get((use, dtype, device)), super()._buffer(use, count, dtype, device))

    def largest(self, flag: torch.Tensor) -> torch.Tensor:
        self.traffic.sent_bytes[self.axis] += (self.size - 1) * flag.nbytes
        return flag

    def _exchange(
        self,
        receiving: torch.Tensor,
        sending: torch.Tensor,
        receive_sizes: Sequence[int],
        send_sizes: Sequence[int],
    ) -> None:
        end = 0
        for size in receive_sizes:
            end += size
            if size:  # nobody wishes anything: to stop, behind a message, or what such a short one says
                receiving[end - size if size <= unit_of(receiving.dtype) else end - 1 : end] = 0.0


class StandinRing(Ring):
    """Stand in for any rank of a ring in the same way."""

    def __init__(self, index: int, size: int):
        super().__init__(None, range(size), index, via_cpu=False)

    def _buffer(self, use: Hashable, count: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return ordinary(self._buffers.get((use, dtype, device)), super()._buffer(use, count, dtype, device))

    def _pass_on(self, current: torch.Tensor, arriving: torch.Tensor) -> list:
        arriving[0] = 0.0
        return []


def ordinary(before: torch.Tensor | None, buffer: torch.Tensor) -> torch.Tensor:
    """Fill ``buffer`` with normal deviates, unless it is part of the one that was there
    ``before``.
    """
    same = before is not None and before.data_ptr() == buffer.data_ptr()
    return buffer if same else buffer.normal_()


def standin(layout: Layout, rank: int, speeds: Sequence[int] = ()) -> SequenceComm:
    """Make the groups that a rank of ``layout`` has, without the other ranks. ``speeds``: as a mesh
    has them.
    """
    here = layout.coordinates(rank)
    return SequenceComm(
        StandinExchange(here["ulysses"], layout.ulysses),
        StandinRing(here["ring"], layout.ring),
        StandinExchange(rank, layout.world_size, "gather"),
        StopFlag(lambda: False),
        shares=shares_of(layout, rank, speeds),
    )
