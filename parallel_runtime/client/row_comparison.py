"""Finds out whether a model without a token plan computes a row of a batch to the same result,
whatever the other rows are. The class name does not say: temporal attention mixes rows, and so do
models that exchange the halves of a batch. So rows that were computed apart are compared, once,
with all rows computed together.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import partial

import torch

from ..branches import Batch
from ..errors import ModelError, PipeMeshError, Refused, RunCancelled
from ..families.unplanned_models import FRAMES_ALONE, class_path
from ..tolerance import ROWS_OF_BATCH
from .first_results import FirstResults
from .shared_evaluation import Judge, SharedEvaluation

ModelClasses = tuple[str, frozenset[str]]  # a model's class, and those of its modules


def model_classes(model: torch.nn.Module) -> ModelClasses:
    """Returns the class of a model and the classes of its modules: two models of one class may have
    other layers.
    """
    return class_path(type(model)), frozenset(class_path(type(one)) for one in model.modules())


class RowsApart:
    """Compares, for one model, the first evaluation whose rows were computed apart; of a class that
    nobody has tried in groups (not ``is_tried``) the first of each shape.
    """

    def __init__(self, known: FirstResults, model: torch.nn.Module, is_tried: bool):
        self._known = known
        self._form = model_classes(model)
        self._is_tried = is_tried
        self._is_first = True  # of the evaluations of a run
        self._not_now: set[Hashable] = set()  # what one rank could not compute in this run

    def require(self) -> None:
        """Raises Refused for a model that was found to mix rows."""
        self._known.require(self._form)

    def begin_run(self) -> None:
        self._is_first, self._not_now = True, set()

    def require_several(self, batches: Sequence[Batch], prompts: int) -> None:
        """Raises Refused if the first evaluation of a run keeps all but one group idle, because
        there are no more ``prompts``, and its rows are computed together. Other prompts may come in
        a later evaluation, if some code between them keeps a state.
        """
        first, self._is_first = self._is_first, False
        if first and prompts == len(batches) == 1 and batches[0].together and batches[0].items > 1:
            raise Refused(FRAMES_ALONE)

    def watch(self, shapes: tuple[torch.Size, ...], of: str = "images") -> Judge | None:
        """Returns the comparison of rows, ``of`` one prompt's images or of two prompts."""
        own = (of,) if self._is_tried else (of, shapes)
        is_done = own in self._not_now or (self._form, own) in self._known.right
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
        does = f"fails ({str(error).partition(chr(10))[0].rstrip('.')}), and on one GPU it does not"
        self._known.refuse(self._form, self._refusal(does))

    def _judge(self, own: Hashable, shared: SharedEvaluation) -> None:
        """Compares rows that were computed apart with all rows on one rank. If the difference looks
        like more than rounding, both are computed once more in fp32 without TF32, which decides. If
        one rank cannot compute all rows, or has too little memory for them, the next run tries
        again.
        """
        in_fp32 = partial(shared.again, in_fp32=True), partial(shared.alone, in_fp32=True)
        is_judged = self._known.hold(
            (self._form, own),
            f"A batch of {self._name}, of which each group of GPUs computed a part,",
            [(lambda: shared.made, shared.alone), in_fp32],
            furthest_apart,
            self._refusal("is {} off from that of one GPU"),
        )
        if not is_judged:
            self._not_now.add(own)

    @property
    def _name(self) -> str:
        return self._form[0].rpartition(":")[2].rpartition(".")[2]

    def _refusal(self, does: str) -> str:
        return (
            f"{self._name} has no token plan, and its prompts and images cannot be shared out: computed"
            f" apart, its first evaluation {does}. Sample it on one GPU, without PipeMesh Parallelize."
        )


def furthest_apart(apart: list[torch.Tensor], together: list[torch.Tensor]) -> float:
    """Returns how far rows that were computed apart are from the same rows computed together, if
    that is more than rounding, or if a row is nearer to another row; else 0.
    """
    for rows, whole in zip(apart, together, strict=True):
        shifted = (ROWS_OF_BATCH.each(whole, whole.roll(shift, 0)) for shift in range(1, len(whole)))
        others = [float(one) for distances in shifted for one in distances]
        nearest = min((one for one in others if one > ROWS_OF_BATCH.of_scale), default=float("inf"))
        off, allowed = ROWS_OF_BATCH.distance([rows], [whole]), ROWS_OF_BATCH.allowed([whole])
        if off > min(allowed, nearest / 2):
            return off
    return 0.0
