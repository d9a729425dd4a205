"""README's first command: what it prints and writes, and that it fails where the latents differ."""

import os
import signal
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from PIL import Image
from pipemesh.lab.commands import demo
from pipemesh.lab.pictures import showcase
from pipemesh.launcher.comfyui.host_record import ComfyInstall
from pipemesh.launcher.errors import LaunchError
from pipemesh.parallel_runtime.families.sample import Size

ROWS = (
    "time per step",
    "speed-up",
    "this machine's capacity",
    "largest difference / scale",
    "hop per evaluation",
    "sent per rank and evaluation",
)
PICTURES = ("stock.png", "pool.png", "contact_sheet.png")


def no_file():
    raise LaunchError("There is no file.")


@pytest.fixture
def run(tmp_path, monkeypatch):
    """The demo with a model of a few blocks."""
    monkeypatch.setattr(
        demo, "Workload", partial(demo.Workload, size=Size(heads=1, head_dim=128, blocks=(1, 1)), pixels=64)
    )
    monkeypatch.setattr(demo, "SEEDS", demo.SEEDS[:2])
    monkeypatch.setattr(demo, "trained_files", no_file)  # its captions cost two more pools
    terminated = signal.getsignal(signal.SIGTERM)
    yield lambda: demo.main(
        ["--steps", "2", "--keep", str(tmp_path)], ComfyInstall.from_json(os.environ["PIPEMESH_HOST"])
    )
    signal.signal(signal.SIGTERM, terminated)


def test_the_demo_shows_stock_beside_the_pool_and_writes_both_pictures(run, tmp_path, capsys):
    assert run() == 0
    said = capsys.readouterr().out
    for row in ROWS:
        (line,) = [line for line in said.splitlines() if line.strip().startswith(row)]
        assert line.split(row)[1].strip() and "n/a" not in line, line
    assert "No captions are drawn. There is no file." in said
    stock, pool, sheet = (Image.open(tmp_path / name) for name in PICTURES)
    assert stock.size == pool.size == (64, 64) and sheet.width > 3 * 64


def test_its_comparison_is_of_a_picture_that_was_drawn_and_of_noise_only_where_it_says_so():
    same = demo.Sampled([0.1], torch.ones(1, 4, 8, 8).cumsum(-1), Image.new("RGB", (64, 64)))
    stock, ours = Image.new("RGB", (64, 64), "red"), Image.new("RGB", (64, 64), "red")
    drawn = {"stock": [showcase.Drawn(stock)], "Ulysses": [showcase.Drawn(ours)], "PipeFusion": []}
    left, right, difference = demo.compared(demo.Round(same, same), drawn, 2).values()
    assert left.getpixel((1, 1)) == right.getpixel((1, 1)) == (255, 0, 0) and difference.getextrema() == (
        0,
        0,
    )
    ours.putpixel((9, 9), (0, 0, 255))
    assert demo.compared(demo.Round(same, same), drawn, 2)["difference, white is any"].getextrema() == (
        0,
        255,
    )
    assert next(iter(demo.compared(demo.Round(same, same), {}, 2))) == "stock: noise, as the model is random"


class NoServer(nullcontext):
    models, log = None, "the log"


def test_the_demo_fails_where_the_latents_differ_and_still_leaves_the_pictures(
    run, tmp_path, monkeypatch, capsys
):
    def sampled(factor):
        return demo.Sampled([0.1], torch.ones(1, 4, 8, 8).cumsum(-1) * factor, Image.new("RGB", (64, 64)))

    monkeypatch.setattr(demo, "ComfyServer", lambda *args, **kwargs: NoServer())
    monkeypatch.setattr(
        demo, "Capacity", lambda python, ranks, work, real=demo.Capacity: real(python, 0, work)
    )
    monkeypatch.setattr(demo, "write_models", lambda *args: None)
    monkeypatch.setattr(demo, "sample_round", lambda *args: demo.Round(sampled(1.0), sampled(1.001)))
    monkeypatch.setattr(demo, "pool_report", lambda server: {})
    with pytest.raises(
        LaunchError,
        match=r"^the latents differ by .* of their scale, more than 2e-05: report it with the log\.$",
    ):
        run()
    assert {path.name for path in tmp_path.glob("*.png")} == set(PICTURES)
    assert "largest difference" in capsys.readouterr().out
