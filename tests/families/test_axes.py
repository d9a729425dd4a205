"""A sixth axis is added to a copy of the pack as docs/ARCHITECTURE.md says, in a few edits, and all
that the pack does with axes is done with it: nothing else spells one.
"""

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from pipemesh.lab.bench.run_picture import panel_colours
from pipemesh.parallel_runtime.comm.traffic import COUNTED
from pipemesh.parallel_runtime.layout import OF_A_GROUP

from ..fixtures import ALL

ROOT = Path(__file__).resolve().parents[2]
COPIED = ("lab", "launcher", "locales", "nodes", "parallel_runtime", "pool", "tests", "web")


@dataclass(frozen=True)
class Hunk:
    """One contiguous edit: ``added`` behind the text ``before``, which is in ``file`` once."""

    file: str
    before: str
    added: str

    def apply(self, root: Path) -> None:
        file = root / self.file
        text = file.read_text(encoding="utf-8")
        assert text.count(self.before) == 1, f"{self.file} has not once:\n{self.before}"
        file.write_text(text.replace(self.before, self.before + self.added), encoding="utf-8")


HUNKS = (
    Hunk(
        "parallel_runtime/layout.py",
        """    Axis("data", "pool", parts_batches=True),
""",
        """    Axis("echo", "pool"),
""",
    ),
    Hunk("parallel_runtime/layout.py", "    data: int = 1\n", "    echo: int = 1\n"),
    Hunk(
        "nodes/settings.py",
        "    data: int = taking(Takes(1, 1, 32))\n",
        "    echo: int = taking(Takes(1, 1, 32))\n",
    ),
    Hunk(
        "locales/en/main.json",
        ' "pipemesh": {\n',
        '  "why_echo": "%1 groups of workers compute what one would.",\n',
    ),
    Hunk(
        "locales/en/nodeDefs.json",
        'at the first run and stay ready.",\n  "inputs": {\n',
        '   "echo": {"name": "echo (echo)", "tooltip": "How many groups say the same."},\n',
    ),
)


def test_the_panel_has_a_colour_for_each_axis_whose_ranks_send_messages():
    assert panel_colours().keys() == {*OF_A_GROUP, "weights", "gather"} == {*COUNTED}


def test_the_recipe_of_a_new_axis_names_every_file_that_is_edited():
    page = (ROOT / "docs/ARCHITECTURE.md").read_text(encoding="utf-8")
    recipe = "\n".join(re.findall(r"^\| `layout\.py` \|.*", page, re.M))
    edited = {hunk.file.removeprefix("parallel_runtime/") for hunk in HUNKS}
    assert edited <= {*re.findall(r"`([^`]+)`", recipe)}


@pytest.fixture
def copy(tmp_path):
    for name in COPIED:
        left_out = shutil.ignore_patterns("assets", "saved")
        shutil.copytree(ROOT / name, tmp_path / name, ignore=left_out)
    for file in (*ROOT.glob("*.py"), ROOT / "pyproject.toml"):
        shutil.copy(file, tmp_path)
    return tmp_path


def tried(copy: Path) -> subprocess.CompletedProcess[str]:
    """Run the tests of the sixth axis in a copy of the pack."""
    colours = f"tests/families/test_axes.py::{test_the_panel_has_a_colour_for_each_axis_whose_ranks_send_messages.__name__}"
    command = (
        sys.executable,
        "-m",
        "pytest",
        "-qx",
        "-p",
        "no:cacheprovider",
        colours,
        "tests/kit/sixth_axis.py",
    )
    return subprocess.run(command, cwd=copy, env=os.environ, capture_output=True, text=True, check=False)


def test_a_sixth_axis_takes_its_table_its_input_and_its_texts(copy):
    assert len(HUNKS) <= 8
    for hunk in HUNKS:
        hunk.apply(copy)
    done = tried(copy)
    assert done.returncode == 0 and "5 passed" in done.stdout, done.stdout + done.stderr


@pytest.mark.skipif(not ALL, reason="a process of its own for each edit")
@pytest.mark.parametrize("left_out", range(len(HUNKS)), ids=lambda number: HUNKS[number].file)
def test_every_edit_for_a_sixth_axis_is_needed(copy, left_out):
    for number, hunk in enumerate(HUNKS):
        if number != left_out:
            hunk.apply(copy)
    done = tried(copy)
    assert done.returncode and re.search("^E .*echo", done.stdout, re.M), done.stdout + done.stderr
