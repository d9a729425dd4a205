"""A sixth axis is added to a copy of the pack as docs/ARCHITECTURE.md says, in a few edits, and all
that the pack does with axes is done with it: nothing else spells one.
"""

import os
import re
import shutil
import subprocess
import sys

import pytest
from pipemesh.lab.bench.run_picture import panel_colours
from pipemesh.parallel_runtime.comm.traffic import COUNTED
from pipemesh.parallel_runtime.layout import OF_A_GROUP

from ..fixtures import ALL, ROOT

COPIED = ("lab", "launcher", "locales", "nodes", "parallel_runtime", "pool", "tests", "web")


INPUT = "    {}: int = taking(Takes(1, 1, 32))\n"
HUNKS = (  # a file, a text that is in it once, and what is added behind that
    (
        "parallel_runtime/layout.py",
        '    Axis("data", "pool", parts_batches=True),\n',
        '    Axis("echo", "pool"),\n',
    ),
    ("parallel_runtime/layout.py", "    data: int = 1\n", "    echo: int = 1\n"),
    ("nodes/settings.py", INPUT.format("data"), INPUT.format("echo")),
    (
        "locales/en/main.json",
        ' "pipemesh": {\n',
        '  "why_echo": "%1 groups of workers compute what one would.",\n',
    ),
    (
        "locales/en/nodeDefs.json",
        'at the first run and stay ready.",\n  "inputs": {\n',
        '   "echo": {"name": "echo (echo)", "tooltip": "How many groups say the same."},\n',
    ),
)


def applied(root, file, before, added):
    text = (root / file).read_text(encoding="utf-8")
    assert text.count(before) == 1, f"{file} has not once:\n{before}"
    (root / file).write_text(text.replace(before, before + added), encoding="utf-8")


def test_the_panel_has_a_colour_for_each_axis_whose_ranks_send_messages():
    assert panel_colours().keys() == {*OF_A_GROUP, "weights", "gather"} == {*COUNTED}


def test_the_recipe_of_a_new_axis_names_every_file_that_is_edited():
    page = (ROOT / "docs/ARCHITECTURE.md").read_text(encoding="utf-8")
    recipe = "\n".join(re.findall(r"^\| `layout\.py` \|.*", page, re.M))
    edited = {file.removeprefix("parallel_runtime/") for file, *_ in HUNKS}
    assert edited <= {*re.findall(r"`([^`]+)`", recipe)}


@pytest.fixture
def copy(tmp_path):
    for name in COPIED:
        left_out = shutil.ignore_patterns("assets", "saved")
        shutil.copytree(ROOT / name, tmp_path / name, ignore=left_out)
    for file in (*ROOT.glob("*.py"), ROOT / "pyproject.toml"):
        shutil.copy(file, tmp_path)
    return tmp_path


def tried(copy, hunks):
    """Edits a copy of the pack, and runs the tests of the sixth axis in it."""
    for hunk in hunks:
        applied(copy, *hunk)
    name = test_the_panel_has_a_colour_for_each_axis_whose_ranks_send_messages.__name__
    tests = f"tests/families/test_axes.py::{name}", "tests/kit/sixth_axis.py"
    command = (sys.executable, "-m", "pytest", "-qx", "-p", "no:cacheprovider", *tests)
    return subprocess.run(command, cwd=copy, env=os.environ, capture_output=True, text=True, check=False)


def test_a_sixth_axis_takes_its_table_its_input_and_its_texts(copy):
    assert len(HUNKS) <= 8
    done = tried(copy, HUNKS)
    assert done.returncode == 0 and "5 passed" in done.stdout, done.stdout + done.stderr


@pytest.mark.skipif(not ALL, reason="a process of its own for each edit")
@pytest.mark.parametrize("left_out", range(len(HUNKS)), ids=lambda number: HUNKS[number][0])
def test_every_edit_for_a_sixth_axis_is_needed(copy, left_out):
    done = tried(copy, HUNKS[:left_out] + HUNKS[left_out + 1 :])
    assert done.returncode and re.search("^E .*echo", done.stdout, re.M), done.stdout + done.stderr
