"""``python3 -m launcher plan``: what it prints for people and for scripts, from saved counts."""

import json

import pytest
from pipemesh.launcher.commands import plan as command
from pipemesh.parallel_runtime.planner.choose import plan
from pipemesh.parallel_runtime.planner.job import Job
from pipemesh.parallel_runtime.planner.published import published_box

from .planned import counts, saved

FLUX = counts("flux 1024")
MODEL = saved()["flux 1024"]["model"]
ASKED = ["--family", MODEL, "--box", "8xL40-PCIe"]


@pytest.fixture
def planned(monkeypatch, capsys):
    monkeypatch.setattr(command, "counted", lambda _model, _extent: FLUX)

    def run(*options):
        assert command.main([*ASKED, *options], None) == 0
        return capsys.readouterr().out

    return run


@pytest.mark.cover(3)
@pytest.mark.parametrize(
    "options", [[], ["--cfg"], ["--approximate", "--warm-up", "2"], ["--batch", "3", "--evaluations", "9"]]
)
def test_scripts_find_the_layouts_their_times_and_the_best_of_each_number_of_gpus(planned, options):
    told = json.loads(planned("--json", *options))
    allows = "--approximate" in options
    job = Job(
        whole=FLUX,
        branches=1 + ("--cfg" in options),
        batch=3 if "--batch" in options else 1,
        evaluations=9 if "--evaluations" in options else 28,
        warm_up=2 if allows else 1,
    )
    made = plan(job, published_box("8xL40-PCIe"), allows_approximate=allows)
    assert set(told) == {"model", "extent", "box", "tflops", "verdict", "decoding_s", "best_of", "layouts"}
    assert (told["model"], told["extent"], told["box"]) == (MODEL, [1024, 1024, 1], "8xL40-PCIe")
    assert told["tflops"] == pytest.approx(FLUX.flops / 1e12)
    assert told["verdict"].startswith(f"Fastest: {made.best.layout.equation()}")
    assert [row["equation"] for row in told["layouts"]] == [row.layout.equation() for row in made.rows]
    for row, due in zip(told["layouts"], made.rows, strict=True):
        assert (
            row["ms"]
            == pytest.approx(1e3 * due.prediction.seconds)
            == pytest.approx(sum(row["ms_by_cause"].values()))
        )
        assert row["why_not"] == due.why and row["is_approximate"] == (row["layout"]["pipefusion"] > 1)
    for size, best in told["best_of"].items():
        alone = plan(job, published_box("8xL40-PCIe").first(int(size)), allows_approximate=allows).best
        assert (best["equation"], best["ms"]) == (
            alone.layout.equation(),
            pytest.approx(1e3 * alone.prediction.seconds),
        )
        assert best["why_not"] == ""
    assert [*told["best_of"]] == ["1", "2", "4", "8"]
    assert any(row["is_approximate"] for row in told["best_of"].values()) == allows


def test_people_read_the_fastest_the_best_of_each_number_of_gpus_and_why_others_lose(planned):
    lines = planned().splitlines()
    assert (
        lines[0]
        == f"{MODEL}, 1024x1024, {FLUX.flops / 1e12:.1f} TFLOP per evaluation of a branch, on 8xL40-PCIe"
    )
    assert lines[1].startswith("Fastest: ") and lines[1].endswith(" times as fast as one GPU.")
    assert [line.split(":")[0].strip() for line in lines[3:7]] == ["1 GPU", "2 GPUs", "4 GPUs", "8 GPUs"]
    assert "the fastest" in lines[9] and lines[-1].endswith("more: --all")
    assert len(planned("--all").splitlines()) > len(lines)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--box", "8xL41-PCIe"], "L41 of the box"),
        (["--batch", "0"], "--batch 0: choose 1 or more"),
        (["--patches", "1"], "--patches 1: choose 2 or more"),
        (["--family", "fluxx"], "argument --family: invalid choice: 'fluxx'"),
    ],
)
def test_what_cannot_be_planned_is_refused_in_a_sentence(planned, capsys, options, said):
    with pytest.raises(SystemExit, match="2"):
        planned(*options)
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("size", ["1024", "axb", "64x0", "1x2x3x4"])
def test_what_is_no_size_is_refused_with_the_form_of_one(capsys, size):
    with pytest.raises(SystemExit):
        command.main([*ASKED, "--size", size], None)
    assert "WIDTHxHEIGHT" in capsys.readouterr().err
