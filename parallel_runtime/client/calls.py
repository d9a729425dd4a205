"""Tell apart the calls of the transformer that one evaluation of a sampler makes.

Code of other packs between the sampler and the transformer may call it on several tiles, or twice
on one latent under other patches, all with the id of one cond. Patches of one call must never see
the keys and values of another.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from .branch import Branch

NEAR = 0.5  # correlation: a tile stays well above it from step to step, another tile is well below
KEPT_LATENTS = 256 << 20  # bytes, on the sampler's device; windows that shift are new branches at every step
IN_PLACE = 0.99  # likewise; the model's input is the sampler's latent, scaled and rounded


class Calls:
    """Counts the calls of every branch of a run. Call ``begin_evaluation`` at each evaluation of
    the sampler.
    """

    def __init__(self):
        self._counts: Counter[Branch] = Counter()
        self._numbers: Counter[Branch] = Counter()  # likewise, in this evaluation of the sampler
        # As the branch saw them last; the branch of the latest last
        self._latents: dict[Branch, list[torch.Tensor]] = {}
        self._held_bytes = 0  # of these
        self._sampled: torch.Tensor | None = None  # the sampler's latent
        self._moved: Callable[[], None] | None = None

    def begin_run(self) -> None:
        """Forgets all calls: the next one of every branch is its first."""
        self._counts.clear()
        self._numbers.clear()
        self._latents.clear()
        self._held_bytes = 0

    def watch(self, moved: Callable[[], None] | None) -> None:
        """Has ``own_branch`` tell calls apart, and call ``moved`` if a latent is not the one that
        its branch saw before. None: the code is known to call the transformer once.
        """
        self._moved = moved
        self._latents.clear()
        self._held_bytes = 0
        self._sampled = None

    def begin_evaluation(self, sampled: torch.Tensor) -> None:
        self._numbers.clear()
        self._sampled = sampled

    def own_branch(self, branch: Branch, latents: Sequence[torch.Tensor]) -> Branch:
        """Returns the branch of the next call, which has the call's number in the sampler's
        evaluation. The branch begins anew if the latents are neither the sampler's own, scaled or
        not, nor near the latents that the branch saw last: tiles may move, or come in another
        order.
        """
        if self._moved is None:
            return branch
        number = self._numbers[branch]
        self._numbers[branch] += 1
        if number:
            branch = replace(branch, call=number)
        if self._counts[branch] and not self._is_of(branch, latents):
            self._counts[branch] = 0
            tell, self._moved = self._moved, lambda: None  # once a run
            tell()
        for latent in self._latents.pop(branch, ()):
            self._held_bytes -= latent.nbytes
        self._latents[branch] = [latent.clone() for latent in latents]
        for latent in latents:
            self._held_bytes += latent.nbytes
        if self._held_bytes > KEPT_LATENTS:
            self._forget_oldest()
        return branch

    def _forget_oldest(self) -> None:
        """Forgets branches beyond the bound: a call of theirs would be their first."""
        for branch in list(self._latents)[:-1]:
            if self._held_bytes > KEPT_LATENTS:
                self._held_bytes -= sum(latent.nbytes for latent in self._latents.pop(branch))
                del self._counts[branch]

    def _is_of(self, branch: Branch, latents: Sequence[torch.Tensor]) -> bool:
        if len(latents) == 1 and self._sampled is not None and in_place(latents[0], self._sampled):
            return True
        return branch in self._latents and all(map(is_near, latents, self._latents[branch]))

    def count(self, branch: Branch) -> int:
        """Counts a call of ``branch``. Returns how many it had before."""
        self._counts[branch] += 1
        return self._counts[branch] - 1


def is_near(one: torch.Tensor, other: torch.Tensor) -> bool:
    """True if every row (B, ...) is nearly equal to that row of the other tensor, of the same
    shape.
    """
    a_BN, b_BN = one.flatten(1).float(), other.flatten(1).float()
    squares_B = a_BN.square().sum(1) + b_BN.square().sum(1)
    return bool((2 * (a_BN * b_BN).sum(1) >= NEAR * squares_B).all())


def in_place(latent: torch.Tensor, sampled: torch.Tensor) -> bool:
    """True if every row of a model's input (n x B, C and more, ...) is the sampler's latent (B, C,
    ...) times a number.
    """
    rows, channels = sampled.shape[:2]
    if latent.shape[2:] != sampled.shape[2:] or latent.shape[1] < channels or latent.shape[0] % rows:
        return False
    a_BN = latent[:, :channels].flatten(1).float()
    b_BN = (
        sampled.to(latent.device)
        .repeat(latent.shape[0] // rows, *[1] * (sampled.ndim - 1))
        .flatten(1)
        .float()
    )
    norms_B = a_BN.norm(dim=1) * b_BN.norm(dim=1)
    return bool(((a_BN * b_BN).sum(1) >= IN_PLACE * norms_B).all())
