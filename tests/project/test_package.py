"""The published pack: what `comfy node publish` leaves of a checkout under .comfyignore. It is
small, works without what is left out, and says so where it cannot.
"""

import ast
import os
import re
import shutil
import subprocess
import sys
from pathlib import PurePosixPath

import pytest

from ..fixtures import ROOT
from .test_architecture import imports_of
from .test_docs import links_resolve

MAX_BYTES = 1_996_000
LEFT_OUT = ("lab/", "tests/", ".ci/")


def git(*command):
    listed = subprocess.run(
        ["git", "-C", str(ROOT), *command, "-z"], capture_output=True, text=True, check=True
    ).stdout
    return set(listed.split("\0")) - {""}


def published():
    """What is packed of this checkout once all of it is committed, as paths from its root."""
    kept = git("ls-files", "-co", "--exclude-standard")
    left_out = git("ls-files", "-coi", "--exclude-from=.comfyignore")
    return {name for name in kept - left_out if (ROOT / name).is_file()}


def unpack(folder):
    for name in published():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, folder / name)
    return folder


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A base folder of ComfyUI with the pack in its custom_nodes, as a registry's client unpacks
    it.
    """
    folder = tmp_path_factory.mktemp("comfyui")
    unpack(folder / "custom_nodes" / "pipemesh")
    return folder


@pytest.fixture(scope="module")
def pack(base):
    return base / "custom_nodes" / "pipemesh"


def packed(pack, suffix):
    return sorted(pack.rglob(f"*{suffix}"))


# -- what is in it


def test_the_pack_is_small_and_has_nothing_of_the_laboratory_and_the_tests():
    names = published()
    assert [name for name in names if name.startswith(LEFT_OUT)] == []
    assert sum((ROOT / name).stat().st_size for name in names) <= MAX_BYTES
    assert {"__init__.py", "pyproject.toml", "requirements.txt", "README.md", "LICENSE"} <= names


def test_an_extra_can_be_installed():
    """`pip install ".[browser]"`: pip finds seven top-level packages where it is not told that none
    is in the wheel, and refuses.
    """
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert re.search(r"^\[build-system\]\nrequires = .*\nbuild-backend = ", project, re.M)
    assert re.search(r"^\[tool\.setuptools\]\npackages = \[\]$", project, re.M)


def test_every_link_of_a_published_document_leads_to_a_published_file_or_to_an_address(pack):
    documents = packed(pack, ".md")
    assert len(documents) > 5
    assert [
        (document.relative_to(pack).as_posix(), broken)
        for document in documents
        for broken in links_resolve(document.read_text(encoding="utf-8"), document)
    ] == []


def test_every_module_that_the_pack_imports_anywhere_is_in_it(pack):
    """In functions too, and for type checkers alone."""
    lacking = []
    for file in packed(pack, ".py"):
        path = PurePosixPath(file.relative_to(pack).as_posix())
        for imported in imports_of(path, ast.parse(file.read_text(encoding="utf-8"))):
            module = pack.joinpath(*imported.name[:-1])
            if imported.own and not any(
                found.exists() for found in (module.with_suffix(".py"), module / "__init__.py")
            ):
                lacking.append(f"{path} imports {imported}")
    assert lacking == []


# -- what it does


def environment(**more):
    """This process's, without what leads to the checkout or to a ComfyUI."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PIPEMESH_", "PYTHON"))}
    return {**kept, **more}


def started(pack, *argv, **env):
    """``python3 -m launcher ARGV`` of the unpacked pack."""
    return subprocess.Popen(
        [sys.executable, *argv],
        cwd=pack,
        env=environment(**env),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize(
    ("command", "part"), [("demo", "lab"), ("host", "lab"), ("plan", "lab"), ("test", "tests")]
)
def test_a_command_of_a_checkout_says_in_one_sentence_what_the_pack_leaves_out(pack, tmp_path, command, part):
    process = started(pack, "-m", "launcher", command, PIPEMESH_CACHE=str(tmp_path / "cache"))
    said, complaint = process.communicate(timeout=60)
    assert (process.returncode, said) == (1, "")
    assert complaint == (
        f"pipemesh: `{command}` needs {part}/, which the published pack leaves out: clone PipeMesh's"
        " repository and run it there.\n"
    )
    assert not (tmp_path / "cache").exists(), "no ComfyUI was installed before it was said"


def test_the_other_commands_run_in_the_unpacked_pack(pack, host):
    usage, _ = started(pack, "-m", "launcher").communicate(timeout=60)
    assert usage.startswith("python3 -m launcher COMMAND")
    running = {
        command: started(pack, "-m", "launcher", command, "--help", PIPEMESH_HOST=host.to_json())
        for command in ("doctor", "node")
    }
    for command, process in running.items():
        said, complaint = process.communicate(timeout=120)
        assert process.returncode == 0, complaint
        assert re.match(rf"usage: .*launcher {command}\b", said), said


def test_without_a_comfyui_the_pack_installs_none_and_says_where_to_put_it(pack, tmp_path):
    alone = shutil.copytree(pack, tmp_path / "pipemesh")
    for command, says in (("node", "PIPEMESH_COMFYUI to the folder that has"), ("doctor", "none yet")):
        process = started(alone, "-m", "launcher", command, PIPEMESH_CACHE=str(tmp_path))
        assert says in "".join(process.communicate(timeout=60))
        assert not (tmp_path / "hosts").exists()
