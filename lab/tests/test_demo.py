"""README's first command: what it prints and writes, and that it fails where pictures differ."""

import signal
from contextlib import nullcontext
from functools import partial

import psutil
import pytest
from PIL import Image
from pipemesh.lab.comfyui.server import CUSTOM_NODES, ComfyServer
from pipemesh.lab.commands import demo
from pipemesh.lab.pictures import files, showcase
from pipemesh.lab.pictures.scenes import LARGER_SIDE, SIDE
from pipemesh.launcher.errors import LaunchError
from pipemesh.tests.kit.served import pids
from pipemesh.tests.project.test_package import unpack

ROWS = ("time per step", "speed-up", "this machine's capacity", "largest difference of a pixel")
ROWS += ("hop per evaluation", "sent per rank and evaluation")
PICTURES = ("stock.png", "pool.png", "captions.png")


@pytest.fixture
def demonstrated(tmp_path, monkeypatch, host):
    """The demo with two small pictures."""
    monkeypatch.setattr(demo, "SHOWN", SIDE)
    monkeypatch.setattr(showcase, "CAPTIONS", showcase.CAPTIONS[:2])
    terminated = signal.getsignal(signal.SIGTERM)
    yield lambda: demo.main(["--steps", "2", "--keep", str(tmp_path)], host)
    signal.signal(signal.SIGTERM, terminated)


class Published(ComfyServer):
    """Has the pack as it is published, unpacked among its nodes."""

    def start(self):
        unpack(self.base / "custom_nodes" / "pipemesh")
        super().start()


@pytest.fixture
def ranks(monkeypatch):
    """The demo's server has the published pack; of its pool's ranks, with the folder that they
    compute from.
    """
    nodes, found = {"pipemesh_demo": CUSTOM_NODES["pipemesh_demo"]}, {}

    def noted(server, real=demo.pool_report):
        pack = str(server.base / "custom_nodes" / "pipemesh")
        found.update({one: pack in " ".join(one.cmdline()) for one in map(psutil.Process, pids(server))})
        return real(server)

    monkeypatch.setattr(demo, "ComfyServer", partial(Published, custom_nodes=nodes))
    monkeypatch.setattr(demo, "pool_report", noted)
    return found


@pytest.mark.host
def test_the_demo_shows_stock_beside_the_published_packs_pool_whose_ranks_end_with_it(
    ranks, demonstrated, tmp_path, capsys
):
    assert demonstrated() == 0
    assert [*ranks.values()] == [True, True] and not psutil.wait_procs(ranks, 20)[1]
    said = capsys.readouterr().out
    for row in ROWS:
        (line,) = [line for line in said.splitlines() if line.strip().startswith(row)]
        assert line.split(row)[1].strip() and "n/a" not in line, line
    assert "2 stages of PipeFusion, approximate: " in said
    stock, pool, sheet = (Image.open(tmp_path / name) for name in PICTURES)
    assert stock.size == pool.size == (SIDE, SIDE) and sheet.width > 2 * showcase.THUMBNAIL


class NoServer(nullcontext):
    models, log = None, "the log"


@pytest.fixture
def without_a_server(monkeypatch):
    monkeypatch.setattr(demo, "ComfyServer", lambda *args, **kwargs: NoServer())
    monkeypatch.setattr(demo, "Capacity", lambda python, ranks, real=demo.Capacity: real(python, 0))
    monkeypatch.setattr(demo, "pool_report", lambda server: {})


def test_the_demo_fails_where_the_pictures_differ_and_still_leaves_them(
    demonstrated, without_a_server, tmp_path, monkeypatch, capsys
):
    """As much as patches that are one evaluation old make of it."""

    def drawn(server, caption, pool, *_):
        return showcase.Drawn(Image.new("RGB", (SIDE, SIDE), (90, 90, 90 if pool is None else 91)), [0.1])

    monkeypatch.setattr(showcase, "copy_files", lambda *_: None)
    monkeypatch.setattr(showcase, "draw", drawn)
    says = (
        r"^a picture of the 2 ranks has a PSNR of 52\.9 dB to stock's, and rounding leaves 70 or more: report"
    )
    with pytest.raises(LaunchError, match=says + r" it with the log\.$"):
        demonstrated()
    assert {path.name for path in tmp_path.glob("*.png")} == set(PICTURES)
    assert "1 of 255" in capsys.readouterr().out


def test_a_file_that_is_missing_is_named_with_the_command_that_makes_it(
    demonstrated, without_a_server, tmp_path, monkeypatch
):
    monkeypatch.setattr(demo, "SHOWN", LARGER_SIDE)
    monkeypatch.setattr(files, "ASSETS", tmp_path)
    says = (
        r"There is no \S+larger_model\.safetensors: `python3 -m lab train --larger --export lab/assets` makes"
    )
    with pytest.raises(LaunchError, match=says + r" it, and the repository has it\.$"):
        demonstrated()
