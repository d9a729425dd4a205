"""A ComfyUI from an archive, installed beside the first one. No network: the commands are played by
a fake; what the tests of both hosts run on is installed for real.
"""

import io
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from pipemesh.launcher.comfyui import beside, find, install

from .fake_installs import ROOT, Desk, write_tree

STEPS = ["venv", "install", "check", "compileall"]


def write_archive(file: Path, version: str = "0.33.0", without: str = "", more: str = "") -> Path:
    tree = write_tree(file.parent / f"tree of {file.name}", version)
    with tarfile.open(file, "w:xz") as tar:
        for path in sorted(tree.glob("*.*")):
            if path.name != without:
                tar.add(path, f"ComfyUI/{path.name}")
        if more:
            tar.addfile(tarfile.TarInfo(more), io.BytesIO())
    return file


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    made = Desk(tmp_path)
    made.first = made.ensure()
    made.commands.ran.clear()
    made.screen.clear()
    return made


def named(desk: Desk, archive: Path):
    desk.env["PIPEMESH_COMFYUI"] = str(archive)
    return desk.ensure()


def test_an_archive_is_installed_once_beside_the_first_host_and_says_what_it_costs(
    desk: Desk, tmp_path: Path
) -> None:
    archive = write_archive(tmp_path / "new.tar.xz")
    made = named(desk, archive)
    assert desk.commands.ran == STEPS
    assert "About 0.4 GB" in desk.screen[0] and desk.first.base in desk.screen[0]
    assert made.version == "0.33.0"
    assert made.comfyui != desk.first.comfyui and made.python != desk.first.python
    same = archive.rename(tmp_path / "other name.tar.xz")
    assert named(desk, same) == made, "the content counts, not the name"
    assert desk.commands.ran == STEPS


def test_its_environment_finds_its_own_packages_first_and_those_of_the_first_host_then(
    desk: Desk, tmp_path: Path
) -> None:
    made = named(desk, write_archive(tmp_path / "new.tar.xz"))
    (venv,) = (command for command in desk.commands.commands if "--without-pip" in command)
    own, below = beside.site_packages(Path(venv[-1])), beside.site_packages(Path(desk.first.base) / "venv")
    for folder, modules in ((own, ("both",)), (below, ("both", "one"))):
        folder.mkdir(parents=True, exist_ok=True)
        for module in modules:
            (folder / f"{module}.py").write_text("")
    code = f"import site; site.addsitedir({str(own)!r}); import both, one; print(both.__file__, one.__file__)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(own / "both.py"), str(below / "one.py")]
    (call,) = (one for one in desk.commands.commands if made.python in one and "install" in one)
    assert {*install.TORCH_PINS, str(Path(made.comfyui) / "requirements.txt")} <= set(call)


def test_two_archives_of_one_version_do_not_meet(desk: Desk, tmp_path: Path) -> None:
    one = named(desk, write_archive(tmp_path / "one.tar.xz"))
    two = named(desk, write_archive(tmp_path / "two.tar.xz", more="ComfyUI/changed.py"))
    assert len({desk.first.base, one.base, two.base}) == 3
    assert find.other_installs(one) == (two.base,), "the first host is needed by this one"
    assert set(find.other_installs(desk.first)) == {one.base, two.base}


@pytest.mark.parametrize(
    "options, cut, says",
    [
        ({"without": "main.py"}, None, "holds no ComfyUI"),
        ({"version": "0.29.1"}, None, "holds ComfyUI 0.29.1: take 0.30.0 or newer"),
        ({"more": "ComfyUI/../../escaped.py"}, None, "leads out of the folder"),
        ({}, 0, "wrong.tar.xz is no whole tar archive"),
        ({}, 200, "wrong.tar.xz is no whole tar archive"),
    ],
)
def test_a_wrong_archive_is_one_sentence(
    desk: Desk, tmp_path: Path, options: dict[str, str], cut: int | None, says: str
) -> None:
    archive = write_archive(tmp_path / "wrong.tar.xz", **options)
    archive.write_bytes(archive.read_bytes()[:cut])
    desk.env["PIPEMESH_COMFYUI"] = str(archive)
    message = desk.refusal()
    assert says in message and "wrong.tar.xz" in message
    assert "install" not in desk.commands.ran


def test_an_archive_with_another_digest_than_the_one_asked_for_is_one_sentence(
    desk: Desk, tmp_path: Path
) -> None:
    archive = write_archive(tmp_path / "new.tar.xz")
    tools, digest = install.Tools(run=desk.commands, env=desk.env), beside.sha256_of(archive)
    with pytest.raises(install.LaunchError, match=f"has the sha256 {digest}, not {'0' * 64}"):
        beside.ensure_from_archive(archive, ROOT, tools, "0" * 64)
    assert desk.commands.ran == []
    assert beside.ensure_from_archive(archive, ROOT, tools, digest.upper()).version == "0.33.0"
