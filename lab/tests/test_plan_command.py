"""``python3 -m launcher plan``: what it prints for people and for scripts, from saved counts."""

import json

import pytest
from pipemesh.lab.boxes import published_box
from pipemesh.lab.commands import plan as command
from pipemesh.lab.dry_run.decoding import Decoding, counted, decoding_s
from pipemesh.parallel_runtime.layout import Layout
from pipemesh.parallel_runtime.planner.choice import plan
from pipemesh.parallel_runtime.planner.job import Job
from pipemesh.tests.kit.planned import counts, saved

FLUX = counts("flux 1024")
MODEL = saved()["flux 1024"]["model"]
# As of a large picture
DECODING = Decoding(flops=10**13, moved=[(10**8, 100)], launches=150, messages=60, picture_bytes=6 << 20)
ASKED = ["--family", MODEL, "--box", "8xL40-PCIe"]


@pytest.fixture
def planned(monkeypatch, capsys):
    monkeypatch.setattr(command, "counted", lambda _model, _extent: (FLUX, DECODING))

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
    batch, evaluations = (3, 9) if "--batch" in options else (1, 28)
    branches = 1 + ("--cfg" in options)
    job = Job(whole=FLUX, branches=branches, batch=batch, evaluations=evaluations, warm_up=1 + allows)
    box = published_box("8xL40-PCIe")
    made = plan(job, box, allows_approximate=allows)
    asked = {"model", "extent", "box", "tflops", "verdict"}
    assert set(told) == asked | {"prompt_s", "best_of", "between_machines", "layouts"}
    assert (told["model"], told["extent"], told["box"]) == (MODEL, [1024, 1024, 1], "8xL40-PCIe")
    assert told["tflops"] == pytest.approx(FLUX.flops / 1e12)
    assert told["verdict"].startswith(f"Fastest: {made.best.layout.equation()}")
    assert [row["equation"] for row in told["layouts"]] == [row.layout.equation() for row in made.rows]
    for row, due in zip(told["layouts"], made.rows, strict=True):
        ms = pytest.approx(1e3 * due.prediction.seconds)
        assert ms == row["ms"] and ms == sum(row["ms_by_cause"].values())
        assert row["why_not"] == due.why and row["is_approximate"] == (row["layout"]["pipefusion"] > 1)
    best = made.best
    ranks = 1 if best.layout.stages > 1 else best.layout.world_size
    alone_s, of_pool_s = (batch * decoding_s(DECODING, box.first(count)) for count in (1, ranks))
    assert told["prompt_s"]["pool"] == {
        "loading": pytest.approx(best.prediction.weight_bytes / box.host_bytes_per_s),
        "sampling": pytest.approx(job.evaluations * best.prediction.seconds),
        "decoding": pytest.approx(min(alone_s, of_pool_s)),
    }
    assert told["prompt_s"]["one_gpu"]["decoding"] == pytest.approx(alone_s)
    for size, best in told["best_of"].items():
        alone = plan(job, box.first(int(size)), allows_approximate=allows).best
        assert (best["equation"], best["why_not"]) == (alone.layout.equation(), "")
        assert best["ms"] == pytest.approx(1e3 * alone.prediction.seconds)
    assert [*told["best_of"]] == ["1", "2", "4", "8"]
    assert any(row["is_approximate"] for row in told["best_of"].values()) == allows


def test_people_read_the_fastest_the_best_of_each_number_of_gpus_and_why_others_lose(planned):
    lines = planned().splitlines()
    computed = f"{FLUX.flops / 1e12:.1f} TFLOP per evaluation of a branch"
    assert lines[0] == f"{MODEL}, 1024x1024, {computed}, on 8xL40-PCIe"
    assert lines[1].startswith("Fastest: ") and lines[1].endswith(" times as fast as one GPU.")
    names, seconds = zip(*(line.rsplit(maxsplit=2)[::2] for line in lines[4:8]), strict=True)
    assert [name.split(",")[0].strip() for name in names] == ["loading", "sampling", "decoding", "in all"]
    assert sum(map(float, seconds[:3])) == pytest.approx(float(seconds[3]), abs=0.02)
    assert " times as fast; at most " in lines[8]
    assert [line.split(":")[0].strip() for line in lines[10:14]] == ["1 GPU", "2 GPUs", "4 GPUs", "8 GPUs"]
    assert "the fastest" in lines[16] and lines[-1].endswith("more: --all")
    assert len(planned("--all").splitlines()) > len(lines)


def test_of_several_machines_it_says_what_the_fastest_takes_with_each_axis_between_them(planned):
    box = ("--box", "2x4xL40-PCIe-1G", "--approximate", "--cfg")
    told = json.loads(planned("--json", *box))["between_machines"]
    assert [*told] == sorted(told, key=lambda axis: told[axis]["ms"])
    # What sends least is the fastest there: groups before stages, stages before sequences
    assert [*told][:2] == ["cfg", "pipefusion"] and {*told} == {"cfg", "pipefusion", "ring", "ulysses"}
    assert told["cfg"]["why_not"] == "" and all(told[axis]["why_not"] for axis in told if axis != "cfg")
    for axis, row in told.items():
        layout = Layout(**row["layout"])
        assert any(min(line) < 4 <= max(line) for line in layout.lines(axis))
    lines = [line for line in planned(*box).splitlines() if "between machines: " in line]
    assert [line.split()[0] for line in lines] == [*told] and lines[0].endswith("; the fastest")
    assert json.loads(planned("--json"))["between_machines"] == {}


def test_decoding_is_counted_of_comfyuis_own_vae_and_shared_out_where_that_is_faster():
    few, many = (counted("Flux", (1, 16, side, side)) for side in (16, 128))
    assert many.flops > 60 * few.flops and many.picture_bytes == 1024 * 1024 * 3 * 2
    assert many.messages == few.messages > 40
    alone, eight = (published_box(f"{ranks}xL40-PCIe") for ranks in (1, 8))
    assert decoding_s(few, alone) < decoding_s(few, eight), "its messages take longer than it"
    assert decoding_s(many, eight) < decoding_s(many, alone) < 8 * decoding_s(many, eight)
    assert counted("LTXV", (1, 128, 4, 8, 8)) is None


@pytest.mark.host
@pytest.mark.parametrize(
    "latents, shape, picture",
    [
        ("SDXL", (1, 4, 8, 8), 64 * 64),
        ("Flux2", (1, 128, 4, 4), 64 * 64),
        ("HunyuanVideo", (1, 16, 2, 4, 4), 5 * 32 * 32),
        ("Wan21", (1, 16, 2, 4, 4), 5 * 32 * 32),
        ("Wan22", (1, 48, 2, 2, 2), 5 * 32 * 32),
    ],
)
def test_the_vaes_of_released_models_are_those_of_their_latents(latents, shape, picture):
    assert counted(latents, shape).picture_bytes == 3 * 2 * picture


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--box", "8xL41-PCIe"], "L41 of the box"),
        (["--batch", "0"], "--batch 0: choose 1 or more"),
        (["--patches", "1"], "--patches 1: choose 2 or more"),
        (["--family", "fluxx"], "argument --family: invalid choice: 'fluxx'"),
        *((["--size", size], "WIDTHxHEIGHT") for size in ("1024", "axb", "64x0", "1x2x3x4")),
    ],
)
def test_what_cannot_be_planned_is_refused_in_a_sentence(planned, capsys, options, said):
    with pytest.raises(SystemExit, match="2"):
        planned(*options)
    assert said in capsys.readouterr().err
