"""Figures of made runs, and the report's text of made figures; the node is tested on a running
server.
"""

from dataclasses import asdict, replace

import pytest
from pipemesh.nodes.notices import Notice
from pipemesh.nodes.report.text import NO_POOL, report_text
from pipemesh.nodes.status.figures import (
    InPatches,
    MemoryFigures,
    ModelStatus,
    PoolStatus,
    RankFigures,
    RingKernels,
    RunFigures,
    RunStatus,
)
from pipemesh.nodes.status.reasons import as_graphs, slowed, why_layout
from pipemesh.nodes.status.sums import achieved_s, run_figures
from pipemesh.nodes.timing import Speed
from pipemesh.parallel_runtime.client.run import Evaluation, Run, RunNames, measured
from pipemesh.parallel_runtime.comm.traffic import COUNTED
from pipemesh.parallel_runtime.layout import Layout
from pipemesh.parallel_runtime.methods.recordings import NOT_ASKED
from pipemesh.parallel_runtime.occupancy import Span
from pipemesh.parallel_runtime.patches import Part
from pipemesh.parallel_runtime.texts import Text
from pipemesh.parallel_runtime.wire.messages import Done, Memory, Recorded
from pipemesh.pool.devices import place

GIB = 2**30
RUN = RunFigures(
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


def kept(title, how="whole", why=""):
    return ModelStatus(title, title, "ready", how, why)


def pool_of_figures(*, ulysses=2, ring=2, state="ready", **changes):
    layout = Layout(ulysses=ulysses, ring=ring)
    devices = [f"cuda:{rank}" for rank in range(layout.world_size)]
    memory = MemoryFigures(10 * GIB, 24 * GIB, 300 << 20)
    ranks = tuple(RankFigures(rank, name, 1, "waiting", memory) for rank, name in enumerate(devices))
    called, grid = layout.equation(), layout.grid(devices)
    told = {"loads": 3, "patchings": 5, "conditioning_uploads": 7, "models": (kept("model"),), **changes}
    told = {"grid": grid, "backend": "gloo", "ranks": ranks, **told}
    return PoolStatus(id=called, state=state, layout=called, **told)


def run_of_figures(of, speed=None, causes=(), **changes):
    """A run of this pool."""
    figures = replace(RUN, **changes)
    return RunStatus(of.id, "model", "model", figures.began, 2.0, figures, speed, causes)


def text_of(of=None, *others, **changes):
    of = of or pool_of_figures()
    return report_text([*others, of], run_of_figures(of, **changes))


def lines_of(text):
    """What a line says, without the blanks that line it up."""
    return [" ".join(line.split()) for line in text.splitlines()]


def summed(evaluations, backend="gloo", mode="free-running"):
    return run_figures(Run(began_s=7.0, mode=mode, evaluations=evaluations), "m", backend)


def test_the_text_says_everything_that_is_known_of_the_last_run():
    kernels = RingKernels(("cuDNN's", "torch's"), ("the merge in one kernel is not used: it is wrong.",))
    shares = (Text("share_stage", ("1", "2.3")),)
    whole = kept("model"), kept("other", "offloaded", "it does not fit")
    text = text_of(
        pool_of_figures(kernels=kernels, shares=shares, models=whole),
        causes=(Text("slowed_imbalance", ("3",)),),
    )
    assert lines_of(text) == [
        "ulysses 2 x ring 2 = 4 ranks, gloo, ready",
        "ring 0: 0 cuda:0 1 cuda:1",
        "ring 1: 2 cuda:2 3 cuda:3",
        "Give stage 1 fewer blocks: it is 2.3 times slower than the fastest stage.",
        "",
        "Last run: 6 evaluations of the model, times are medians",
        "time per evaluation 312.4 ms",
        "share of communication 12.3 %",
        "hop to the pool and back 1.07 ms",
        "sent per rank and evaluation 4.00 MiB",
        "",
        "What slowed it",
        "The other ranks waited for rank 3.",
        "",
        "Pool",
        "models it holds 2",
        "models loaded so far 3",
        "weight patches so far 5",
        "prompts sent so far 7",
        "weights of other: offloaded, it does not fit",
        "attention around the ring: rank 0 cuDNN's, rank 1 torch's",
        "the merge in one kernel is not used: it is wrong.",
        "",
        "rank device models free total",
        *(f"{rank} cuda:{rank} 300.0 MiB 10.0 GiB 24.0 GiB" for rank in range(4)),
    ]


def test_the_text_says_what_ranks_replayed_as_cuda_graphs_and_why_not_all():
    def lines(*recorded):
        here = pool_of_figures()
        held = RankFigures(0, "cuda:0", 1, "waiting", MemoryFigures(10 * GIB, 24 * GIB, 0, graphs=200 << 20))
        models = (replace(kept("model"), graphs=as_graphs(recorded)),)
        text = text_of(replace(here, models=models, ranks=(held, *here.ranks[1:])))
        assert "rank device models CUDA graphs free total" in lines_of(text)
        assert "0 cuda:0 0.0 MiB 200.0 MiB 10.0 GiB 24.0 GiB" in lines_of(text)
        return [line for line in lines_of(text) if line.startswith("model: ")]

    on, off = Recorded(20, 17), Recorded(0, 0, NOT_ASKED)
    refused = Recorded(20, 0, "aten::randn draws random numbers\nmore")
    replayed = "model: CUDA graphs: in the last run workers replayed {} evaluations, all workers together."
    assert lines(on, on) == [replayed.format("34 of 40")]
    assert lines(on, refused, refused) == [
        replayed.format("17 of 60"),
        "model: Computed without CUDA graphs: aten::randn draws random numbers.",
    ]
    assert lines(off, off) == lines(None, None) == lines() == [], "nobody asked for graphs"


def test_tables_line_up_in_a_monospaced_font_and_a_long_value_makes_no_other_line_long():
    _head, run, held, memory = text_of(pool_of_figures(ulysses=12, ring=1)).split("\n\n")
    for table in (run.splitlines()[1:], held.splitlines()[1:], memory.splitlines()):
        assert len({len(line) for line in table}) == 1
    run = text_of(exchange_by_axis={name: 0.1 for name in COUNTED}).split("\n\n")[1]
    (long,) = (line for line in run.splitlines()[1:] if len(line) > 60)
    assert "gather 10.0 %" in long


def test_other_pools_with_workers_are_named():
    text = text_of(
        pool_of_figures(ulysses=3, ring=1),
        pool_of_figures(),
        pool_of_figures(ulysses=1, ring=1, state="closed"),
    )
    assert text.startswith("ulysses 3 = 3 ranks")
    assert lines_of(text)[-2:] == ["", "Another pool: ulysses 2 x ring 2 = 4 ranks, ready"]


def test_without_a_run_one_sentence_says_the_next_move():
    assert report_text([], None) == NO_POOL
    text = report_text([pool_of_figures(state="failed")], None)
    assert text.startswith("The pool ulysses 2 x ring 2 = 4 ranks is failed and has no run to report: run a")
    text = report_text([], None, asked=place(Layout(ulysses=3), "cpu", "gloo", ()))
    assert text.startswith("The pool ulysses 3 = 3 ranks on cpu (gloo) has sampled nothing: connect the same")
    assert "leave this node's pool open" in text and "\n" not in text


def test_what_is_not_known_is_said_and_no_figure_is_made_up():
    text = text_of(pool_of_figures(ranks=(RankFigures(0, "cuda:0"),)), exchange_share=None, evaluations=1)
    assert "share of communication not measured with nccl" in lines_of(text)
    assert "0 cuda:0 - - -" in lines_of(text)
    assert "Last run: 1 evaluation of the model" in lines_of(text)


@pytest.mark.parametrize(
    ("patches", "mode", "sentence"),
    [
        (3, "single-timeline, because of x", "in 3 patches, single-timeline, because of x"),
        (0, "free-running", "whole"),
    ],
)
def test_how_a_pipeline_sampled_is_said_without_figures_that_overlapping_patches_do_not_have(
    patches, mode, sentence
):
    text = text_of(in_patches=InPatches(mode, patches, 2), busy=[0.3, 0.98], **UNKNOWN)
    assert lines_of(text.split("\n\n")[1]) == [
        f"Last run: 6 evaluations of the model, sampled {sentence}",
        "whole evaluations (warm-up) 2",
        "time per evaluation (mean) 320.0 ms",
        "sent per rank and evaluation 4.00 MiB",
        "ranks that computed 30%, 98%; the others wait for rank 1",
    ]


def test_evaluations_of_a_pipeline_are_counted_from_what_was_submitted_and_timed_over_the_run():
    """Two branches, each whole once and then in three patches that overlap, the last ones of a
    context window of another shape.
    """
    cuts = [None, (0, 4, False), (4, 4, False), (8, 4, True)]
    parts = [Part(1, branch, cut) for cut in cuts for branch in (0, 1)]
    parts += [Part(1, 2, (0, 9, False)), Part(1, 2, (9, 9, True))]
    run = [Evaluation(0.5, 0.1, 0.1, 6, began=0.1 * number, part=part) for number, part in enumerate(parts)]
    figures = summed(run)
    assert (figures.began, figures.in_patches) == (7.0, InPatches("free-running", 3, 2))
    assert (figures.evaluations, figures.bytes_per_evaluation) == (5, 12)
    assert figures.step_ms_mean == pytest.approx(280.0)
    assert {name for name, value in asdict(figures).items() if value is None} == UNKNOWN.keys()
    assert summed([Evaluation(0.1, 0.0, 0.0, 0)]).in_patches is None
    both = Run(evaluations=run, names=RunNames(branches={"a": 0, "b": 1}))
    assert achieved_s(both, Layout(pipefusion=2)) == pytest.approx(0.56), "of both branches"


def test_the_share_of_communication_is_of_the_whole_run_by_axis_and_unknown_under_nccl():
    """Of the rank that waited most in all of it, though another one did in the last evaluation."""

    def evaluated(seconds, hop, waited, nbytes, *by_rank):
        spans = {rank: Span(0, 1, 0.0, by_axis) for rank, by_axis in enumerate(by_rank)}
        return Evaluation(seconds, hop, waited, nbytes, spans=spans)

    both = {"ulysses": 0.04, "gather": 0.01}, {"ring": 0.02}
    run = [
        evaluated(0.1, 0.001, 0.05, 10, *both),
        evaluated(0.3, 0.003, 0.05, 30, *both),
        evaluated(0.2, 0.002, 0.06, 20, {"ulysses": 0.05}, {"ring": 0.06}),
    ]
    figures = summed(run)
    assert figures.exchange_share == pytest.approx(0.25)
    assert figures.exchange_by_axis == pytest.approx({"ulysses": 0.13 / 0.6, "gather": 0.02 / 0.6})
    assert "of it ulysses 21.7 %, gather 3.3 %" in lines_of(
        text_of(exchange_by_axis=figures.exchange_by_axis)
    )
    assert (figures.step_ms_p50, figures.hop_ms_p50, figures.bytes_per_evaluation) == (200.0, 2.0, 30)
    unknown = summed(run, "nccl")
    assert (unknown.exchange_share, unknown.exchange_by_axis) == (None, {})
    assert summed([]) is None


def test_a_run_in_patches_says_for_which_messages_a_rank_waited():
    """Of two submissions that overlap, in a run of 2 s."""

    def submitted(request, began, began_s, *waited_s):
        answers = {
            rank: Done(
                request=request, memory=Memory(1, 2, 3), began_s=began_s, compute_s=1.0, waited_s=waited
            )
            for rank, waited in enumerate(waited_s)
            if waited
        }
        return replace(measured(0.0, [answers], Part(1, 0, (0, 9, True))), began=began, seconds=1.5)

    run = [
        submitted(1, 5.0, 5.0, {"ulysses": 0.1}, {"ulysses": 0.2, "pipefusion": 0.3}),
        submitted(2, 5.5, 6.0, None, {"ring": 0.1}),
    ]
    assert [one.spans[1].waited_s for one in run] == [pytest.approx(0.5), pytest.approx(0.1)]
    figures = summed(run)
    assert figures.busy == pytest.approx((0.9 / 1.9, 1.4 / 1.9)), "since the first input was there"
    assert figures.exchange_by_axis == pytest.approx({"ulysses": 0.1, "pipefusion": 0.15, "ring": 0.05})
    text = lines_of(
        text_of(in_patches=figures.in_patches, exchange_by_axis=figures.exchange_by_axis, **UNKNOWN)
    )
    assert "waited for messages pipefusion 15.0 %, ulysses 10.0 %, ring 5.0 %" in text
    unknown = summed(run, "nccl")
    assert (unknown.exchange_by_axis, unknown.busy) == ({}, ())


FASTER = "3.00 times as fast as one device: 0.50 s per step, one device 1.50 s"


@pytest.mark.parametrize(
    ("speed", "said"),
    [
        (Speed(0.5, 1.5, measured=True), f"{FASTER} (timed here)"),
        (Speed(0.5, 1.5), f"{FASTER} (predicted, not timed)"),
        (Speed(0.5), "0.50 s per step. One device was not timed for this model and size:"),
    ],
)
def test_how_much_faster_a_run_was_comes_first_with_how_that_is_known(speed, said):
    assert text_of(speed=speed).splitlines()[0] == said


def test_what_slowed_a_run_is_named_and_nothing_where_nothing_did():
    def causes(devices, models, **run):
        found = slowed(devices, models, replace(RUN, **run))
        return [(cause.name.removeprefix("slowed_"), *cause.values) for cause in found]

    patched = InPatches("single-timeline, because of a ControlNet", 3, 2)
    models = kept("m.gguf", "offloaded", "it does not fit"), kept("n")
    assert causes(
        ["cuda:0", "cuda:0", "cpu", "cpu"], models, in_patches=patched, busy=(0.9, 0.5), exchange_share=0.34
    ) == [
        ("communication", "34 %"),
        ("imbalance", "0"),
        ("single_timeline", "a ControlNet"),
        ("offloaded", "m.gguf"),
        ("shared_device", "cuda:0"),
    ]
    both = kept("m", "sharded"), kept("other", "sharded"), kept("n")
    sharded = [("sharded", "m"), ("sharded", "other")]
    assert causes(["cpu"], both, to_compile="m") == [*sharded, ("uncompiled", "m")]
    assert causes(["cpu"], both, to_compile="n") == sharded, "whole weights are compiled"
    assert not causes(["cuda:0", "cuda:1"], (), busy=(0.5, 0.45))


def test_a_layout_says_what_it_is_good_for():
    assert [one.name for one in why_layout(Layout(ulysses=2, ring=2))] == ["why_ulysses", "why_ring"]
    assert [one.english for one in why_layout(Layout())] == ["One worker computes everything."]


def test_what_was_on_one_device_after_the_last_run_is_told_first_and_a_vae_whatever_is_sampled_after_it():
    here, first = pool_of_figures(), "Last prompt, node 7\nOn one GPU: it has no plan."
    notice = Notice(RUN.began + 1, "7", "prompt", "On one GPU: it has no plan.")
    vae = Notice(RUN.began - 1, "9", "prompt", "it has weight patches.", stays=True)

    def told(*notices):
        return report_text([here], run_of_figures(here), notices)

    assert told(notice).startswith(f"{first}\n\nulysses 2")
    assert report_text([pool_of_figures(state="closed")], None, [notice]) == first
    for other in ({"at": RUN.began - 1}, {"node": ""}, {"one_gpu": False}):
        assert told(replace(notice, **other)) == text_of(), "it is an earlier one, or of no sampling"
    assert told(vae).startswith(f"Last prompt, node 9\n{vae.text}\n\nulysses 2")
    both = told(notice, vae)
    assert both.startswith("Last prompt, node 7\n") and f"Last prompt, node 9\n{vae.text}" in both
    assert "node 9" not in told(notice, replace(vae, prompt="before"))
