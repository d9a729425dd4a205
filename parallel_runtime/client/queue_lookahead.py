"""Sample prompts that wait in ComfyUI's queue together with the one that runs, if they differ only
in the seed of the noise: look ahead, verify, then use.

A sampler's arguments are described when it starts. An image that was sampled ahead is handed over
if all arguments of its prompt's own sampler, the noise and the random state included, are equal to
those that it was sampled with. Else it is thrown away, and the prompt is sampled as ever.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import torch

from .alike_prompts import (
    LATENT,
    Graph,
    InputPlace,
    Moment,
    differences,
    linked_to,
    readers,
    seed_at,
    seed_place,
)
from .branch import Compute
from .coroutines import RandomState
from .description import cpu_copy, described, is_same, tensors_of
from .run import Queued
from .sampler_arguments import Asked
from .seeds import SeedResult, SeedSampler, sample_together
from .shared_evaluation import as_it_is
from .timelines import Callback

log = logging.getLogger("pipemesh")
MOST_BYTES = 1 << 30  # of main memory, for all that waits to be handed over
SamplerKey = tuple[str, str, int | None]  # prompt, node, list index
Step = tuple[int, torch.Tensor, torch.Tensor, int]


class Computing(NamedTuple):
    """The functions that compute evaluations: ``together`` for at most so many ``images``,
    ``alone`` for one. An evaluation of one image can be computed anew if memory has to be freed for
    it.
    """

    images: int
    together: Compute
    alone: Compute


@dataclass(frozen=True, eq=False)
class NodeOutput:
    """The result of a sampler: its output as a node returns it, and the random state that it
    left.
    """

    output: torch.Tensor
    random: RandomState


# A sampler of a prompt that waits, its graph, and what was done before it, where that is another's
Alike = tuple[SamplerKey, Graph, NodeOutput | None]


@dataclass(frozen=True, eq=False)
class SampledAhead:
    """An image that was sampled ahead for a sampler with the described arguments ``asked``.
    ``steps`` has the calls of its callback. ``at_once`` images were sampled together.
    """

    asked: dict[str, Any]
    samples: torch.Tensor
    steps: list[Step]
    done: NodeOutput
    at_once: int
    model: weakref.ref  # drops this as the MODEL goes, as by ComfyUI's Unload Models and Execution Cache

    @property
    def tensors(self) -> Iterator[torch.Tensor]:
        yield from tensors_of(self.asked)
        yield from (one for _, *both, _ in self.steps for one in both)
        yield from (self.samples, self.done.output)

    def hand_over(self, callback: Callback | None, device: torch.device) -> torch.Tensor:
        if callback is not None:
            for step, denoised, noisy, total in self.steps:
                callback(step, denoised.to(device), noisy.to(device), total)
        self.done.random.restore()
        return self.samples.to(device)


@dataclass(frozen=True, eq=False)
class QueuedSampler:
    """A sampler of a prompt that waits. ``own`` describes the arguments that differ from those of
    other prompts.
    """

    key: SamplerKey
    asked: Asked
    own: dict[str, Any]
    steps: list[Step] = field(default_factory=list)

    def told(self, step: int, denoised: torch.Tensor, noisy: torch.Tensor, total: int) -> None:
        self.steps.append((step, cpu_copy(denoised), cpu_copy(noisy), total))

    def kept(
        self, shared: dict[str, Any], sampled: SeedResult, at_once: int, drop: Callable[[SamplerKey], None]
    ) -> SampledAhead:
        done, key = NodeOutput(self.asked.output_of(sampled.samples), sampled.random), self.key
        # Of this, which has the MODEL, the callback must keep nothing
        model = weakref.ref(self.asked.guider.model_patcher.model, lambda _: drop(key))
        return SampledAhead(
            {**shared, **self.own}, cpu_copy(sampled.samples), self.steps, done, at_once, model
        )


@dataclass(frozen=True)
class Images:
    """Counts images that were handed over, and that were sampled and thrown away. ``held``: the
    bytes of those that wait.
    """

    used: int = 0
    dropped: int = 0
    held: int = 0


class QueueLookahead:
    """Keeps the images that were sampled ahead, of all pools. ``moment`` returns the prompt that
    ComfyUI executes now and the prompts that wait; None if no prompt runs, or if nothing can be
    handed over. ``by_default`` returns whether prompts may be sampled together if the pool does not
    say.
    """

    def __init__(
        self,
        moment: Callable[[], Moment | None],
        by_default: Callable[[], bool] = lambda: True,
        most_bytes: int = MOST_BYTES,
    ):
        self._moment = moment
        self._by_default = by_default
        self._most_bytes = most_bytes
        self._kept: dict[SamplerKey, SampledAhead] = {}
        self._done: dict[SamplerKey, NodeOutput] = {}  # by the samplers of the prompt that runs
        # Where a waiting prompt's graph differs from the running one's: plan and sampler both ask
        self._differing: dict[tuple[str, str, str], tuple[Graph, frozenset[InputPlace] | None]] = {}
        self._useless: set[str] = set()  # nodes of this queue whose results were of no use
        self.images = Images()

    @property
    def held_bytes(self) -> int:
        """Returns the bytes of the images that were sampled ahead and wait. May be called from any
        thread.
        """
        held = {id(one): one.nbytes for kept in list(self._kept.values()) for one in kept.tensors}
        return sum(held.values())

    def is_wanted(self, by_pool: bool | None) -> bool:
        """Returns whether prompts may be sampled at once; None if the pool does not say."""
        return self._by_default() if by_pool is None else by_pool

    def free(self) -> None:
        """Throws away all images that wait, unless a prompt asks for the memory."""
        if self._moment() is None:
            for key in list(self._kept):
                self._drop(key)
            self._done.clear()

    def forget(self) -> None:
        """Throws away images that no prompt in the queue can use."""
        if (moment := self._moment()) is not None:
            self._forget(moment)

    def at_once(self, most: int, to_come: Callable[[], Asked]) -> tuple[int, int]:
        """Returns (n, rounds): n prompts can be sampled together, at most ``most``; the queue holds
        ``rounds`` such groups. If the sampler ``to_come`` is to get what was sampled ahead, n is
        the number of prompts that were sampled together with it.
        """
        if (moment := self._moment()) is None or most < 2:
            return 1, 1
        if kept := self._kept.get((moment.prompt, moment.node, moment.index)):
            return min(most, kept.at_once), 1
        images = 1 + len(self._beside(moment, to_come, most - 1, lambda asked: {})[0])
        # Those behind are taken to be as those before
        return images, -(-(1 + len(moment.others)) // images) if images == most else 1

    def sample(
        self,
        executor: Any,
        asked: Asked,
        callback: Callback | None,
        quiet: bool,
        computing: Computing,
        tell: Callable[[Queued], None],
    ) -> torch.Tensor:
        """Samples with the arguments ``asked``, together with as many waiting prompts as have a
        group, by ``sample_together``. ``tell`` gets their number before it begins.
        """
        run, device = partial(asked.run, executor, callback, quiet), asked.noise.device
        moment = self._moment()
        if moment is None:
            return run()
        self._forget(moment)
        key = moment.prompt, moment.node, moment.index
        if (kept := self._kept.pop(key, None)) is not None and self._is_right(kept, asked, key):
            self._done[key] = kept.done
            tell(Queued(0))
            return kept.hand_over(callback, device)
        beside, shared = self._beside(
            moment, lambda: asked, computing.images - 1, lambda asked: asked.described(cpu_copy)
        )
        if not beside:
            return run()
        at_once = 1 + len(beside)
        tell(Queued(at_once, 1 + len(moment.others)))
        starts = [
            SeedSampler(partial(one.asked.run, executor, one.told, True), one.asked.random) for one in beside
        ]
        own, *others = sample_together([SeedSampler(run, asked.random), *starts], *computing[1:], device)
        assert own is not None
        try:
            for one, sampled in zip(beside, others, strict=True):
                if sampled is None:
                    self._useless.add(moment.node)
                else:
                    self._kept[one.key] = one.kept(shared, sampled, at_once, self._drop)
            self._done[key] = NodeOutput(asked.output_of(own.samples), own.random)
        except Exception as error:  # noqa: BLE001 - of what waits: this prompt's image is there
            self._useless.add(moment.node)
            log.warning("[PipeMesh] Images that were sampled ahead could not be kept:", exc_info=error)
            own.random.restore()
        return own.samples

    def _forget(self, moment: Moment) -> None:
        """Throws away images and notes of prompts that are over."""
        queue = {moment.prompt, *(other.prompt for other in moment.others)}
        for key in [key for key in list(self._kept) if key[0] not in queue]:
            self._drop(key)
        self._done = {key: done for key, done in self._done.items() if key[0] == moment.prompt}
        self._differing = {pair: found for pair, found in self._differing.items() if pair[0] == moment.prompt}
        if not moment.others:
            self._useless.clear()

    def _drop(self, key: SamplerKey) -> None:
        if self._kept.pop(key, None) is not None:
            self.images = replace(self.images, dropped=self.images.dropped + 1)

    def _is_right(self, kept: SampledAhead, asked: Asked, key: SamplerKey) -> bool:
        try:
            own = asked.described(as_it_is)
            changed = [name for name, value in kept.asked.items() if not is_same(value, own[name])]
        except Exception as error:  # noqa: BLE001 - then it is sampled as ever
            changed = [f"arguments, which could not be compared ({type(error).__name__}: {error})"]
        if is_right := not changed:
            self.images = replace(self.images, used=self.images.used + 1)
        else:
            self.images = replace(self.images, dropped=self.images.dropped + 1)
            self._useless.add(key[1])
            log.info("[PipeMesh] An image sampled ahead is thrown away: other %s.", ", ".join(changed))
        return is_right

    def _beside(
        self,
        moment: Moment,
        to_come: Callable[[], Asked],
        most: int,
        describe: Callable[[Asked], dict[str, Any]],
    ) -> tuple[list[QueuedSampler], dict[str, Any]]:
        """Returns samplers of the next prompts, at most ``most``, and a description of the
        arguments that all have in common.
        """
        place = seed_place(moment.graph, moment.node)
        if place is None or moment.node in self._useless:
            return [], {}
        try:
            if not (alike := self._alike(moment, most)):
                return [], {}
            asked = to_come()
            if seed_at(moment.graph, place) != asked.seed:
                return [], {}
            if why := asked.why_alone():
                self._useless.add(moment.node)
                log.info("[PipeMesh] Prompts are sampled one after the other, because of %s.", why)
                return [], {}
            found = [*self._started(asked, place, self._done_before(moment), alike)]
            shared = describe(asked) if found else {}
            held_bytes = self.held_bytes + sum(one.nbytes for one in tensors_of(shared))
            room = min((self._most_bytes - held_bytes) // asked.keeps_bytes(), asked.have_room())
        except Exception as error:  # noqa: BLE001 - then nothing is sampled ahead
            log.warning("[PipeMesh] The queue could not be looked at:", exc_info=error)
            return [], {}
        return found[: max(0, room)], shared

    def _done_before(self, moment: Moment) -> NodeOutput | None:
        """Returns the result of the sampler that the latent comes from, if it ran together with
        other prompts.
        """
        return self._done.get((moment.prompt, linked_to(moment.graph, moment.node, LATENT), moment.index))

    def _alike(self, moment: Moment, most: int) -> list[Alike]:
        """Returns the next prompts, at most ``most``, whose sampler differs only in the seeds of
        its noise and of the sampler before it, which has their results by then.
        """
        graph, node, before = moment.graph, moment.node, linked_to(moment.graph, moment.node, LATENT)
        place = seed_place(graph, node)
        before_place = seed_place(graph, before) if self._done_before(moment) is not None else None
        reads = {place: {node}, before_place: {node, before}}
        places = {one for one in (place, before_place) if one is not None}
        if (
            place is None
            or before_place == place
            or any(
                source not in (node, before) and readers(graph, node, source) - reads[source, name]
                for source, name in places
            )
        ):
            return []
        found: list[Alike] = []
        seeds = {tuple(seed_at(graph, one) for one in places)}
        for pending in moment.others[:most]:
            prompt, other, _ = pending
            pair = moment.prompt, node, prompt
            if pair not in self._differing or self._differing[pair][0] is not other:
                is_needed = pending.executes(node)
                self._differing[pair] = other, differences(graph, other, node) if is_needed else None
            differing = self._differing[pair][1]
            key, earlier = (prompt, node, moment.index), self._kept.get((prompt, before, moment.index))
            own_seeds = tuple(seed_at(other, one) for one in places)
            if not differing or not differing <= places or key in self._kept or own_seeds in seeds:
                continue
            seeds.add(own_seeds)
            if before_place not in differing:
                found.append((key, other, None))
            elif earlier is not None:
                found.append((key, other, earlier.done))
        return found

    def _started(
        self, asked: Asked, place: InputPlace, done: NodeOutput | None, found: Sequence[Alike]
    ) -> Iterator[QueuedSampler]:
        """Yields the samplers, each with its noise, latent and random state. Yields none if the
        running sampler's noise is not the one that stock makes of its seed, or its latent not the
        one that was ``done`` before.
        """
        follows = done is not None and is_same(
            described(asked.latent), described(asked.latent_of(done.output))
        )
        seeds = [seed_at(graph, place) or 0 for _, graph, _ in found]
        if asked.noise.any():
            starts = [*asked.noises(seeds)]
        elif done is not None and follows and done.random.is_same(asked.random):
            starts = [(asked.noise, earlier.random) if earlier is not None else None for *_, earlier in found]
        else:
            starts = []
        for (key, _, earlier), seed, start in zip(found, seeds, starts, strict=False):
            if start is None or (earlier is not None and not follows):
                continue
            latent = asked.latent if earlier is None else asked.latent_of(earlier.output)
            one = asked.of_seed(seed, start[0], latent, start[1])
            yield QueuedSampler(key, one, one.of_one(cpu_copy))
