"""Measure a queue of seeds: two at once, in two groups of one rank each, beside stock's one after
the other, and beside all of them on ``ulysses 2``; how near both come to what is predicted of them,
by speeds that the same rounds measured of the same model at smaller sizes; and how long a queue is
looked at whose prompts share nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from ...parallel_runtime.families.sample import Released, Size
from ...parallel_runtime.layout import Layout
from ...parallel_runtime.planner.box import Box
from ...parallel_runtime.planner.evaluation_count import Whole
from ...parallel_runtime.planner.job import Job
from ...parallel_runtime.planner.prediction import predict
from .figures import CaseFigures, Figure, Goal, Options, Round, ratio, typical
from .groups import LEAST_STEPS, QUEUED, STEPS, GroupRuns
from .groups import figures as of_groups
from .lockstep import Phase, Ranks, attend_with_sdpa, merge, run, timed
from .plan import ITEM_BYTES, Forwards, Timed, counts_of, measured, of_link

EFFICIENCY, OFF = 0.95, 0.1  # goals; beside sampling, each result is copied, kept and compared
TOKENS = (256, 1024)
CALIBRATED = (128, 320, 512, 768)  # tokens, at which speeds are measured
LEAST_CALIBRATED = (128,)
PIXELS, ROW = 1024, 16  # of a latent's width; of the height of a row of 64 tokens
SEQUENCE = Layout(ulysses=2)
BOTH = {"parallel": (Layout(data=2), 2), "beside": (SEQUENCE, 1)}  # phase -> layout, images at once
PROMPTS, NODES = 200, 40  # of a queue that shares nothing


def released(tokens: int, size: Size) -> Released:
    """Return a model of that size and a picture of so many tokens, text included."""
    from .forwards import ROW_TOKENS, SAMPLE, TEXT_TOKENS

    rows = (tokens - TEXT_TOKENS) // ROW_TOKENS
    return Released(name=SAMPLE.name, size=size, text=TEXT_TOKENS, extent=(PIXELS, ROW * rows, 1))


def unrelated() -> float:
    """Seconds of looking at a queue of prompts that differ in their text."""
    from ...parallel_runtime.client.alike_prompts import Moment, Pending
    from ...parallel_runtime.client.queue_lookahead import QueueLookahead

    def graph(text: int) -> dict[str, Any]:
        made = {
            str(number): {"class_type": "Node", "inputs": {"before": [str(number - 1), 0], "value": number}}
            for number in range(1, NODES)
        }
        made["0"] = {"class_type": "Text", "inputs": {"text": text}}
        made["sampler"] = {"class_type": "KSampler", "inputs": {"seed": 1, "model": [str(NODES - 1), 0]}}
        return made

    others = tuple(Pending(str(text), graph(text), ("sampler",)) for text in range(1, PROMPTS))
    ahead = QueueLookahead(lambda: Moment("0", "sampler", None, graph(0), others))

    def nobody() -> Any:
        raise AssertionError("nothing is alike")

    return timed(lambda: ahead.at_once(8, nobody))


def measure(ranks: Ranks, tokens: int, steps: int, rounds: int) -> dict[str, Any]:
    phases, counted = calibration(ranks, tokens, ranks.connect(SEQUENCE).sequence.ulysses)
    runs = GroupRuns(ranks, "queue", tokens, steps, SEQUENCE)
    phases["unrelated"] = Phase(unrelated, alone=True)
    try:
        measured = runs.measure(rounds, phases)
        return {"rounds": measured, "counted": {count: asdict(one) for count, one in counted.items()}}
    finally:
        runs.close()


def calibration(ranks: Ranks, tokens: int, exchange: Any) -> tuple[dict[str, Phase], dict[int, Whole]]:
    """Return the phases that speeds are measured by, of the model at smaller sizes, messages of
    ``exchange`` and the memory; and counts at those sizes and at ``tokens``.
    """
    from .forwards import SAMPLE, SIZE, SMALL

    attend_with_sdpa()
    size, smaller = ranks.choose((SIZE, CALIBRATED), (SMALL, LEAST_CALIBRATED))
    model, counted, phases = SAMPLE.form.random_model(size).model, dict[int, Whole](), of_link(exchange)
    for count in (*smaller, tokens):
        small = released(count, size)
        forwards = Forwards(model, SAMPLE, small, small.extent)
        counted[count] = forwards.whole
        if count in smaller:
            phases[f"{count} both"] = Phase(forwards.alone)
    return phases, counted


def calibrated(rounds: Sequence[Round], counted: Mapping[int, Whole], ranks: int) -> Box:
    """Return so many ranks of the speed that ``calibration``'s phases took."""
    timed = {count: f"{count} both" for count in counted if f"{count} both" in rounds[0]}
    found = [Timed.of(counted[count], typical(rounds, phase)) for count, phase in timed.items()]
    return measured(found, rounds).box(ranks, ITEM_BYTES)


def predicted(
    rounds: Sequence[Round], counted: Mapping[int, Whole], tokens: int, steps: int, phase: str
) -> float:
    """Return the seconds of the queue in a layout."""
    layout, images = BOTH[phase]
    job = Job(whole=counted[tokens], evaluations=steps, batch=images)
    box = calibrated(rounds, counted, layout.world_size)
    return QUEUED // images * steps * min(one.seconds for one in predict(job, layout, box))


def bench(options: Options) -> Iterator[Figure]:
    from .forwards import LEAST_TOKENS

    sizes, steps = options.choose((TOKENS, STEPS), ((LEAST_TOKENS,), LEAST_STEPS))
    for tokens in sizes:
        asked = {"tokens": tokens, "steps": steps, "rounds": options.rounds}
        by_rank = run(options, 2, "queue:measure", **asked)
        rounds = merge([rank["rounds"] for rank in by_rank])
        yield from figures(tokens, steps, rounds, counts_of(by_rank[0]["counted"]))


def figures(
    tokens: int, steps: int, rounds: Sequence[Round], counted: Mapping[int, Whole]
) -> Iterator[Figure]:
    made = CaseFigures("queue", f"queue2_{tokens}", rounds)
    yield from of_groups(made, EFFICIENCY)
    yield made.estimated("over_ulysses", ratio("beside", "parallel"), "x")
    for phase, (layout, _) in BOTH.items():

        def near(some: Sequence[Round], phase: str = phase) -> float:
            return typical(some, phase) / predicted(some, counted, tokens, steps, phase)

        name = f"over_predicted_{layout.product()}".replace(" ", "")
        yield made.estimated(name, near, "ratio", Goal.within(OFF, 1.0))
    yield made.estimated("unrelated", lambda some: 1e3 * typical(some, "unrelated"), "ms")
