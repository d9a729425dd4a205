"""Hold a pipelined run to the schedule that it could have kept: every stage computes its patches in
their order, for as long as it did in this very run, and waits for nothing else.

A patch waits for the stage before, and its evaluation for its own output of the evaluation before;
where all patches are sampled in one timeline, for the output of all of them. Whole evaluations of
the warm-up, filling and draining are part of the schedule. Messages and the sampler take no time in
it.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ...parallel_runtime.client.run import Evaluation
from ...parallel_runtime.occupancy import Span

CAUSES: tuple[str, ...] = ("sampler", "hand-over", "stage")


class Submission(NamedTuple):
    """A patch, or with ``patch`` None all tokens, of one branch: when it was submitted, and when
    each stage was at work on it, by the same clock.
    """

    branch: int
    patch: int | None
    submitted_s: float
    spans: Sequence[Span]


@dataclass(frozen=True)
class Held:
    """``ideal_s``: of the schedule; ``taken_s``: by the run, from the first stage's beginning to
    the last one's end. ``lost_s`` between them by cause: until the sampler had submitted a patch
    again, until rows had come from the stage before, and until a stage turned to its next request.
    """

    ideal_s: float
    taken_s: float
    lost_s: Mapping[str, float] = field(default_factory=dict)

    @property
    def share(self) -> float:
        return self.ideal_s / self.taken_s


def submissions(evaluations: Iterable[Evaluation]) -> list[Submission]:
    """Returns what a pipeline computed, in the order of submission."""
    parts = [(one, one.part) for one in evaluations if one.part is not None]
    return [
        Submission(part.branch, part.patch[0] if part.patch else None, one.began, tuple(one.spans.values()))
        for one, part in parts
    ]


def held_to_schedule(submissions: Sequence[Submission], one_timeline: bool = False) -> Held | None:
    """Compare a run, in the order of its submissions, with its schedule. None of no submissions."""
    if not submissions:
        return None
    needs = needed_outputs(submissions, one_timeline)
    begin = min(span.came_in_s for span in submissions[0].spans)
    taken = max(span.ended_s for one in submissions for span in one.spans) - begin
    ideal = makespan(submissions, needs)
    gaps = gaps_on_the_way(submissions, needs)
    scale = max(0.0, taken - ideal) / (sum(gaps.values()) or 1.0)
    return Held(ideal, taken, {cause: gaps[cause] * scale for cause in CAUSES})


def needed_outputs(submissions: Sequence[Submission], one_timeline: bool) -> list[list[int]]:
    """Return for each submission those whose outputs its input was made of: the same patch, or all
    tokens, of every branch, one evaluation before.
    """
    evaluations: Counter[tuple[int, int | None]] = Counter()
    whole: Counter[int] = Counter()
    of_evaluation: defaultdict[int, list[int]] = defaultdict(list)
    needs = []
    for index, (branch, patch, *_) in enumerate(submissions):
        number = whole[branch] + (evaluations[branch, patch] if patch is not None else 0)
        before = of_evaluation[number - 1]
        everything = one_timeline or patch is None
        needs.append([other for other in before if everything or submissions[other].patch in (patch, None)])
        of_evaluation[number].append(index)
        if patch is None:
            whole[branch] += 1
        else:
            evaluations[branch, patch] += 1
    return needs


def makespan(submissions: Sequence[Submission], needs: Sequence[Sequence[int]]) -> float:
    """Return how long the schedule takes."""
    free = [0.0] * len(submissions[0].spans)
    outputs: list[float] = []
    for submission, before in zip(submissions, needs, strict=True):
        ready = max((outputs[index] for index in before), default=0.0)
        for stage, span in enumerate(submission.spans):
            free[stage] = ready = max(ready, free[stage]) + span.busy_s
        outputs.append(ready)
    return max(free)


def gaps_on_the_way(submissions: Sequence[Submission], needs: Sequence[Sequence[int]]) -> dict[str, float]:
    """Return the seconds by cause in which nothing was computed on the way that decided when the
    run ended: from its end back, each time to what the stage waited for last.
    """
    index, stage = max(
        ((index, stage) for index, one in enumerate(submissions) for stage in range(len(one.spans))),
        key=lambda place: submissions[place[0]].spans[place[1]].ended_s,
    )
    gaps: dict[str, float] = dict.fromkeys(CAUSES, 0.0)
    while True:
        span, submitted = submissions[index].spans[stage], submissions[index].submitted_s
        waited_for = (
            [(index, stage - 1)]
            if stage
            else [(before, len(submissions[before].spans) - 1) for before in needs[index]]
        )
        waited_for += [(index - 1, stage)] if index else []
        if not waited_for:
            return gaps
        index, at = max(waited_for, key=lambda place: submissions[place[0]].spans[place[1]].ended_s)
        idle_from = submissions[index].spans[at].ended_s
        gap = max(0.0, span.came_in_s - idle_from)
        first = min(gap, max(0.0, (span.began_s if stage else submitted) - idle_from))
        gaps["stage" if stage else "sampler"] += first
        gaps["hand-over" if stage else "stage"] += gap - first
        stage = at
