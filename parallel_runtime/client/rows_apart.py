"""Whether a model without a token plan makes the same of a row of a batch, whatever other rows it
computes with it. A class name does not say: temporal attention, and what exchanges the halves of a
batch, mix rows. So rows that were computed apart are compared with all of them together, once.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Sequence
from functools import partial

import torch

from ..branches import Batch
from ..errors import ModelError, OutOfMemory, PipeMeshError, Refused, RunCancelled
from ..families import FRAMES_ALONE, name_of
from .alone import Form, Judge, RowsKnown, Shared

log = logging.getLogger("pipemesh")
ROUNDING = 1e-3  # of the output's scale: what batches of other sizes differ by


def form_of(model: torch.nn.Module) -> Form:
    """Returns a model's class and those of its modules: two of one class may have other layers."""
    return name_of(type(model)), frozenset(name_of(type(one)) for one in model.modules())


class RowsApart:
    """Compares, for one model, the first evaluation whose rows were computed apart; of a class that
    nobody has tried in groups (not ``is_tried``) the first of each shape.
    """

    def __init__(self, known: RowsKnown, model: torch.nn.Module, is_tried: bool):
        self._known = known
        self._form = form_of(model)
        self._is_tried = is_tried
        self._is_first = True  # of the evaluations of a run
        self._not_now: set[Hashable] = set()  # what one rank could not compute in this run

    def require(self) -> None:
        """Raises Refused for a model that was found to mix rows."""
        if refusal := self._known.mixes.get(self._form):
            raise Refused(refusal)

    def begin_run(self) -> None:
        self._is_first, self._not_now = True, set()

    def require_several(self, batches: Sequence[Batch], prompts: int) -> None:
        """Raises Refused if the first evaluation of a run keeps all but one group idle, because
        there are no more ``prompts``, and its rows are computed together. Other prompts may be
        computed after it, where something between them keeps a state.
        """
        first, self._is_first = self._is_first, False
        if first and prompts == len(batches) == 1 and batches[0].together and batches[0].items > 1:
            raise Refused(FRAMES_ALONE)

    def watch(self, shapes: tuple[torch.Size, ...], of: str = "images") -> Judge | None:
        """Returns who compares rows, ``of`` one prompt's images, or of two prompts."""
        own = (of,) if self._is_tried else (of, shapes)
        is_done = own in self._not_now or (self._form, own) in self._known.are_apart
        return None if is_done else partial(self._judge, own)

    def judge_failure(
        self,
        shapes: tuple[torch.Size, ...],
        error: ModelError,
        alone: Callable[[], list[torch.Tensor]],
    ) -> None:
        """Raises Refused if rows fail apart, with this error, that one rank computes together."""
        if self.watch(shapes) is None:
            return
        try:
            alone()
        except RunCancelled:
            raise
        except PipeMeshError:  # it is not because rows are apart
            return
        self._refuse(f"fails ({str(error).partition(chr(10))[0].rstrip('.')}), and on one GPU it does not")

    def _judge(self, shapes: Hashable, shared: Shared) -> None:
        """What looks like more than rounding is computed once more in fp32 without TF32, which
        decides. If one rank cannot compute all rows, or has no memory for them, the next run tries
        again.
        """
        try:
            off = furthest_apart(shared.made, shared.alone())
            if off:
                off = furthest_apart(shared.again(in_fp32=True), shared.alone(in_fp32=True))
        except (OutOfMemory, ModelError) as error:
            self._not_now.add(shapes)
            log.warning("[PipeMesh] Rows of a batch were not compared with all of them: %s", error)
            return
        if off:
            self._refuse(f"is {off:.1%} off from that of one GPU")
        self._known.are_apart.add((self._form, shapes))

    def _refuse(self, does: str) -> None:
        name = self._form[0].rpartition(":")[2].rpartition(".")[2]
        self._known.mixes[self._form] = (
            f"{name} has no token plan, and its prompts and images cannot be shared out: computed apart, its"
            f" first evaluation {does}. Sample it on one GPU, without PipeMesh Parallelize."
        )
        self.require()


def furthest_apart(apart: list[torch.Tensor], together: list[torch.Tensor]) -> float:
    """Returns how far rows that were computed apart are from what a model makes of all of them, of
    the output's scale, where that is further than rounding explains, or nearer to another row; else
    0.
    """
    for rows, whole in zip(apart, together, strict=True):
        of_each, scale = distances(rows, whole), float(whole.float().square().mean().sqrt())
        least = scale * max(ROUNDING, 4 * torch.finfo(whole.dtype).eps)
        others = [
            float(one) for shift in range(1, len(whole)) for one in distances(whole, whole.roll(shift, 0))
        ]
        nearest = min((one for one in others if one > scale * ROUNDING), default=2 * least)
        if not float(of_each.max()) <= min(least, nearest / 2):
            return float(of_each.max()) / scale
    return 0.0


def distances(rows: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
    """Returns how far each row is from another tensor's (root mean square)."""
    return (rows.float() - others.float()).square().flatten(1).mean(1).sqrt()
