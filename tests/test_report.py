"""Figures of made runs, and the report's text of made figures; the node is tested on a running
server.
"""

import json
from dataclasses import asdict, replace

import pytest
from pipemesh.launcher.pool.devices import place
from pipemesh.nodes.notices import Notice
from pipemesh.nodes.report.causes import slowed, why_layout
from pipemesh.nodes.report.figures import (
    InPatches,
    KeptWeights,
    LastRun,
    MemoryFigures,
    PoolFigures,
    RankFigures,
    Report,
    RingKernels,
    achieved_s,
    last_run,
)
from pipemesh.nodes.report.text import NO_POOL, report_text
from pipemesh.nodes.timing import Speed
from pipemesh.parallel_runtime.client.run import Evaluation, Run, measured
from pipemesh.parallel_runtime.layout import Layout
from pipemesh.parallel_runtime.occupancy import Span
from pipemesh.parallel_runtime.patches import Part
from pipemesh.parallel_runtime.wire.messages import Done, Memory

GIB = 2**30


RUN = LastRun(
    began=1.0,
    evaluations=6,
    step_ms_mean=320.0,
    step_ms_p50=312.44,
    hop_ms_p50=1.071,
    exchange_ms_p50=38.0,
    exchange_share=0.1234,
    bytes_per_evaluation=4 << 20,
)
UNKNOWN = dict.fromkeys(("step_ms_p50", "hop_ms_p50", "exchange_ms_p50", "exchange_share"))


def pool(*, ulysses=2, ring=2, state="ready", ran=True, **changes):
    layout = Layout(ulysses=ulysses, ring=ring)
    devices = [f"cuda:{rank}" for rank in range(layout.world_size)]
    memory = MemoryFigures(10 * GIB, 24 * GIB, 300 << 20)
    return PoolFigures(
        state=state,
        layout=layout.equation(),
        grid=layout.grid(devices),
        backend="gloo",
        ranks=tuple(RankFigures(rank, name, 1, "waiting", memory) for rank, name in enumerate(devices)),
        models=("model",),
        loads=3,
        patches=5,
        conditioning_uploads=7,
        last_run=replace(RUN, **changes) if ran else None,
    )


def text_of(*pools, asked=None):
    return report_text(Report(pools), asked)


def said(text):
    """What a line says, without the blanks that line it up."""
    return [" ".join(line.split()) for line in text.splitlines()]


def test_the_text_says_everything_that_is_known_of_the_last_run():
    text = text_of(pool())
    assert said(text) == [
        "ulysses 2 x ring 2 = 4 ranks, gloo, ready",
        "ring 0: 0 cuda:0 1 cuda:1",
        "ring 1: 2 cuda:2 3 cuda:3",
        "",
        "Last run: 6 evaluations of the model, times are medians",
        "time per evaluation 312.4 ms",
        "share of communication 12.3 %",
        "hop to the pool and back 1.07 ms",
        "sent per rank and evaluation 4.00 MiB",
        "",
        "Pool",
        "models it holds 1",
        "models loaded so far 3",
        "weight patches so far 5",
        "prompts sent so far 7",
        "",
        "rank device models free total",
        *(f"{rank} cuda:{rank} 300.0 MiB 10.0 GiB 24.0 GiB" for rank in range(4)),
    ]


def test_kernels_of_a_ring_are_named_and_so_are_those_that_were_refused():
    figures = pool()
    text = text_of(replace(figures, kernels=RingKernels(("flash-attn 3",) * 4)))
    assert "attention around the ring: flash-attn 3" in said(text)
    text = text_of(
        replace(
            figures,
            kernels=RingKernels(("flash-attn 3", "torch's"), ("flash-attn 2 is not used: it is wrong.",)),
        )
    )
    assert {
        "attention around the ring: rank 0 flash-attn 3, rank 1 torch's",
        "flash-attn 2 is not used: it is wrong.",
    } <= {*said(text)}


def test_tables_line_up_in_a_monospaced_font():
    _head, run, held, memory = text_of(pool(ulysses=12, ring=1)).split("\n\n")
    for table in (run.splitlines()[1:], held.splitlines()[1:], memory.splitlines()):
        assert len({len(line) for line in table}) == 1


def test_a_long_value_makes_no_other_line_long():
    lost = {"sampler": 10.0, "hand-over": 20.0, "stage": 30.0}
    run = text_of(
        pool(in_patches=InPatches("free-running", 3, 2, 0.9, lost), busy=(0.5, 0.5), **UNKNOWN)
    ).split("\n\n")[1]
    assert "sampler 10.0, hand-over 20.0, stage 30.0" in run
    assert (
        max(len(line) for line in run.splitlines() if "lost per" not in line and "Last run" not in line) < 60
    )


def test_of_several_pools_the_one_that_ran_last_is_shown_and_the_others_are_named():
    text = text_of(
        pool(began=5.0, ulysses=3, ring=1),
        pool(began=2.0),
        pool(ulysses=1, ring=1, state="closed", ran=False),
    )
    assert text.startswith("ulysses 3 = 3 ranks")
    assert said(text)[-2:] == ["", "Another pool: ulysses 2 x ring 2 = 4 ranks, ready"], (
        "layouts without a worker are over"
    )


def test_before_anything_was_sampled_one_sentence_says_the_next_move():
    assert text_of() == NO_POOL
    text = text_of(pool(state="failed", ran=False))
    assert (
        "ulysses 2 x ring 2 = 4 ranks is failed" in text
        and "run a sampler on it" in text
        and "\n" not in text
    )


def test_a_pool_that_sampled_nothing_is_named_with_what_to_connect():
    asked = place(Layout(ulysses=3), "cpu", "gloo", ())
    text = text_of(asked=asked)
    assert (
        text.startswith(
            "The pool ulysses 3 = 3 ranks on cpu (gloo) has sampled nothing: connect the same PipeMesh Pool"
        )
        and "\n" not in text
    )
    assert "leave this node's pool open" in text and NO_POOL not in text
    assert text_of(pool(), asked=asked) == text_of(pool())


def test_what_is_not_known_is_said_and_no_figure_is_made_up():
    text = text_of(replace(pool(exchange_share=None, evaluations=1), ranks=(RankFigures(0, "cuda:0"),)))
    assert "share of communication not measured with nccl" in said(text)
    assert "0 cuda:0 - - -" in said(text)
    assert "Last run: 1 evaluation of the model" in said(text)


@pytest.mark.parametrize(
    ("patches", "mode", "sentence"),
    [
        (3, "free-running", "sampled in 3 patches, free-running"),
        (
            3,
            "single-timeline, because of the sampler x",
            "sampled in 3 patches, single-timeline, because of the sampler x",
        ),
        (0, "free-running", "sampled whole"),
    ],
)
def test_how_a_pipeline_sampled_is_said_without_figures_that_overlapping_patches_do_not_have(
    patches, mode, sentence
):
    text = text_of(pool(in_patches=InPatches(mode, patches, 2), **UNKNOWN))
    assert said(text.split("\n\n")[1]) == [
        f"Last run: 6 evaluations of the model, {sentence}",
        "of them whole (warm-up) 2",
        "time per evaluation (mean) 320.0 ms",
        "sent per rank and evaluation 4.00 MiB",
    ]


@pytest.mark.parametrize(
    ("busy", "words"),
    [
        ([0.931, 0.902], "ranks that computed 93%, 90%"),
        ([0.3, 0.98], "ranks that computed 30%, 98%; the others wait for rank 1"),
    ],
)
def test_the_stage_that_others_wait_for_is_named(busy, words):
    run = {"in_patches": InPatches("free-running", 3, 2), "busy": busy, **UNKNOWN}
    assert said(text_of(pool(**run)).split("\n\n")[1])[-1] == words


def test_a_run_in_patches_is_held_to_its_schedule_where_each_stage_is_one_rank():
    """One whole evaluation, then two patches: the second stage gets each 0.2 s late."""
    cuts = [None, (0, 4, False), (4, 4, True)]
    spans = [
        (Span(0, 1, 0), Span(0, 2, 1)),
        (Span(2, 3, 0), Span(2, 4.2, 1.2)),
        (Span(3, 4, 0), Span(4.2, 5.4, 0.2)),
    ]
    run = [
        Evaluation(1.0, 0.0, 0.0, 6, began=own[0].began_s, part=Part(1, 0, cut), spans=dict(enumerate(own)))
        for cut, own in zip(cuts, spans, strict=True)
    ]
    figures = last_run(7.0, "free-running", run, "gloo", stages=2).in_patches
    assert figures.of_schedule == pytest.approx(5 / 5.4)
    assert figures.lost_ms == pytest.approx({"sampler": 0, "hand-over": 200, "stage": 0})
    text = said(text_of(pool(in_patches=figures, **UNKNOWN)).split("\n\n")[1])
    assert text[-2:] == [
        "of the ideal schedule 92.6%",
        "lost per evaluation, ms sampler 0.0, hand-over 200.0, stage 0.0",
    ]
    for backend, stages in (("nccl", 2), ("gloo", 1)):
        assert last_run(7.0, "free-running", run, backend, stages=stages).in_patches == InPatches(
            "free-running", 2, 1
        )


def test_evaluations_of_a_pipeline_are_counted_from_what_was_submitted_and_timed_over_the_run():
    """Two branches, each whole once and then in three patches that overlap, the last ones of a
    context window of another shape.
    """
    cuts = [None, (0, 4, False), (4, 4, False), (8, 4, True)]
    parts = [Part(1, branch, cut) for cut in cuts for branch in (0, 1)] + [
        Part(1, 2, (0, 9, False)),
        Part(1, 2, (9, 9, True)),
    ]
    run = [Evaluation(0.5, 0.1, 0.1, 6, began=0.1 * number, part=part) for number, part in enumerate(parts)]
    figures = last_run(7.0, "free-running", run, "gloo")
    assert (figures.began, figures.in_patches) == (7.0, InPatches("free-running", 3, 2))
    assert (figures.evaluations, figures.bytes_per_evaluation) == (5, 12)
    assert figures.step_ms_mean == pytest.approx(280.0)
    assert {name for name, value in asdict(figures).items() if value is None} == UNKNOWN.keys()
    assert last_run(7.0, "", [Evaluation(0.1, 0.0, 0.0, 0)], "gloo").in_patches is None
    achieved = achieved_s(Run(evaluations=run, branches={"a": 0, "b": 1}), Layout(pipefusion=2))
    assert achieved == pytest.approx(0.56), "of both branches"


def test_the_share_of_communication_is_of_the_whole_run_by_axis_and_unknown_under_nccl():
    """Of the rank that waited most in all of it, though another one did in the last evaluation."""
    waited = {"ulysses": 0.04, "gather": 0.01}, {"ring": 0.02}
    spans = [
        {rank: Span(0, 1, 0.0, by_axis) for rank, by_axis in enumerate(both)}
        for both in (waited, waited, ({"ulysses": 0.05}, {"ring": 0.06}))
    ]
    run = [
        Evaluation(0.1, 0.001, 0.05, 10, spans=spans[0]),
        Evaluation(0.3, 0.003, 0.05, 30, spans=spans[1]),
        Evaluation(0.2, 0.002, 0.06, 20, spans=spans[2]),
    ]
    figures = last_run(7.0, "", run, "gloo")
    assert figures.exchange_share == pytest.approx(0.25)
    assert figures.exchange_by_axis == pytest.approx({"ulysses": 0.13 / 0.6, "gather": 0.02 / 0.6})
    assert "of it ulysses 21.7 %, gather 3.3 %" in said(
        text_of(pool(exchange_by_axis=figures.exchange_by_axis))
    )
    assert (figures.step_ms_p50, figures.hop_ms_p50, figures.bytes_per_evaluation) == (200.0, 2.0, 30)
    unknown = last_run(7.0, "", run, "nccl")
    assert (unknown.exchange_share, unknown.exchange_by_axis) == (None, {})
    assert last_run(7.0, "", [], "gloo") is None


def test_a_run_in_patches_says_for_which_messages_a_rank_waited():
    """Of two submissions that overlap, in a run of 2 s."""

    def answered(request, began_s, **waited_s):
        return Done(
            request=request, memory=Memory(1, 2, 3), began_s=began_s, compute_s=1.0, waited_s=waited_s
        )

    answers = [
        {0: answered(1, 5.0, ulysses=0.1), 1: answered(1, 5.0, ulysses=0.2, pipefusion=0.3)},
        {1: answered(2, 6.0, ring=0.1)},
    ]
    run = [
        replace(measured(0.0, [one], Part(1, 0, None)), began=began, seconds=1.5)
        for began, one in zip((5.0, 5.5), answers, strict=True)
    ]
    assert [one.spans[1].waited_s for one in run] == [pytest.approx(0.5), pytest.approx(0.1)]
    figures = last_run(7.0, "free-running", run, "gloo")
    assert figures.exchange_by_axis == pytest.approx({"ulysses": 0.1, "pipefusion": 0.15, "ring": 0.05})
    text = said(
        text_of(pool(in_patches=figures.in_patches, exchange_by_axis=figures.exchange_by_axis, **UNKNOWN))
    )
    assert "waited for messages pipefusion 15.0 %, ulysses 10.0 %, ring 5.0 %" in text
    assert last_run(7.0, "free-running", run, "nccl").exchange_by_axis == {}


def test_scripts_that_read_the_report_find_every_figure_under_its_name():
    memory = {"free": 10 * GIB, "total": 24 * GIB, "model": 300 << 20}
    whole = {
        "began": 1.0,
        "in_patches": None,
        "busy": [],
        "evaluations": 6,
        "step_ms_mean": 320.0,
        "step_ms_p50": 312.44,
        "hop_ms_p50": 1.071,
        "exchange_ms_p50": 38.0,
        "exchange_share": 0.1234,
        "exchange_by_axis": {},
        "bytes_per_evaluation": 4 << 20,
        "to_compile": "",
    }
    told = {
        "state": "ready",
        "layout": "ulysses 2 = 2 ranks",
        "grid": "ring 0:   0 cuda:0   1 cuda:1",
        "backend": "gloo",
        "ranks": [
            {"rank": rank, "device": f"cuda:{rank}", "pid": 1, "phase": "waiting", "memory": memory}
            for rank in (0, 1)
        ],
        "models": ["model"],
        "loads": 3,
        "patches": 5,
        "conditioning_uploads": 7,
        "weights": [],
        "kernels": {"names": [], "refused": []},
        "shares": [],
        "last_run": whole,
    }
    in_patches = pool(ring=1, in_patches=InPatches("free-running", 3, 2), busy=(0.5, 0.25), **UNKNOWN)
    patched = (
        whole
        | UNKNOWN
        | {
            "in_patches": {
                "mode": "free-running",
                "patches": 3,
                "whole": 2,
                "of_schedule": None,
                "lost_ms": {},
            },
            "busy": [0.5, 0.25],
        }
    )
    pools = [pool(ring=1), in_patches, pool(ring=1, ran=False)]
    speed = {"step_s": 0.5, "one_gpu_s": 1.5, "measured": True}
    assert json.dumps(asdict(Report(tuple(pools), speed=Speed(**speed)))) == json.dumps(
        {
            "pools": [told, told | {"last_run": patched}, told | {"last_run": None}],
            "notices": [],
            "speed": speed,
            "plan": None,
        }
    )


@pytest.mark.parametrize(
    ("speed", "said"),
    [
        (
            Speed(0.5, 1.5, measured=True),
            "3.00 times as fast as one device: 0.50 s per step, one device 1.50 s (timed here)",
        ),
        (
            Speed(0.5, 1.5),
            "3.00 times as fast as one device: 0.50 s per step, one device 1.50 s (predicted, not timed)",
        ),
        (Speed(0.5), "0.50 s per step. How fast one device is was not timed for this model and size:"),
    ],
)
def test_how_much_faster_a_run_was_comes_first_with_how_that_is_known(speed, said):
    assert report_text(Report((pool(),), speed=speed)).splitlines()[0] == said


def test_what_slowed_a_run_is_named_and_nothing_where_nothing_did():
    weights = (KeptWeights("m.gguf", "offloaded", "it does not fit"), KeptWeights("n", "whole", ""))
    patched = replace(
        RUN,
        in_patches=InPatches("single-timeline, because of a ControlNet", 3, 2),
        busy=(0.9, 0.5),
        exchange_share=0.34,
    )
    found = slowed(["cuda:0", "cuda:0", "cpu", "cpu"], weights, patched)
    assert [(cause.word, cause.value) for cause in found] == [
        ("communication", "34 %"),
        ("imbalance", "0"),
        ("single_timeline", "a ControlNet"),
        ("offloaded", "m.gguf"),
        ("shared_device", "cuda:0"),
    ]
    assert all(cause.value in cause.english for cause in found)
    shared_out = (KeptWeights("n", "whole", ""), KeptWeights("m", "sharded", ""))
    assert [(cause.word, cause.value) for cause in slowed(["cpu"], shared_out, RUN)] == [("sharded", "m")]
    both = (KeptWeights("m", "sharded", ""), KeptWeights("other", "sharded", ""))
    found = [(cause.word, cause.value) for cause in slowed(["cpu"], both, replace(RUN, to_compile="m"))]
    assert found == [("sharded", "m"), ("sharded", "other"), ("uncompiled", "m")]
    assert len(slowed(["cpu"], shared_out, replace(RUN, to_compile="n"))) == 1, (
        "it has whole weights, and is compiled"
    )
    assert not slowed(["cuda:0", "cuda:1"], (), RUN) and "What slowed it" not in text_of(pool())


def test_a_layout_says_what_it_is_good_for():
    assert [cause.word for cause in why_layout(Layout(ulysses=2, ring=2).degrees())] == ["ulysses", "ring"]
    assert [cause.english for cause in why_layout(Layout(ulysses=1).degrees())] == [
        "one rank computes everything"
    ]


def test_a_sampling_on_one_gpu_after_the_last_run_is_told_first_and_an_earlier_one_is_not():
    notice = Notice(RUN.began + 1, "7", "prompt", "On one GPU: it has no plan.")
    text = report_text(Report((pool(),), (notice,)))
    assert text.startswith("Last sampling, node 7\nOn one GPU: it has no plan.\n\nulysses 2")
    assert report_text(Report((), (notice,))).startswith("Last sampling, node 7")
    alone = report_text(Report((pool(state="closed", ran=False),), (notice,)))
    assert alone == report_text(Report((), (notice,))), (
        "nothing of a pool that was not asked, and of none that was closed"
    )
    assert report_text(Report((pool(),), (replace(notice, at=RUN.began - 1),))) == text_of(pool())
    assert report_text(Report((pool(),), (replace(notice, node=""),))) == text_of(pool())
