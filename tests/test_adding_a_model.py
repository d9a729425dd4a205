"""docs/ADDING_A_MODEL.md followed to the letter: its file and registry lines are put into a copy of
the package without them, and its commands are run there.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from pipemesh.lab.commands.parity import RINGS

ROOT = Path(__file__).resolve().parent.parent
DOCUMENT = (ROOT / "docs" / "ADDING_A_MODEL.md").read_text(encoding="utf-8")
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.S | re.M)
PACKAGE = ("lab", "launcher", "parallel_runtime", "__init__.py")


def blocks(kind: str, document: str = DOCUMENT) -> list[str]:
    return [text for language, text in BLOCK.findall(document) if language == kind]


def follow(document: str, copy: Path) -> None:
    """Write the document's files, and add the marked lines behind the ones that stand before
    them.
    """
    for block in blocks("python", document):
        first, text = block.split("\n", 1)
        (copy / first.removeprefix("# ")).write_text(text, encoding="utf-8")
    for block in blocks("diff", document):
        first, *lines = block.splitlines()
        file = copy / first.removeprefix("# ")
        before = "\n".join(line[1:] for line in lines if line.startswith(" ")) + "\n"
        added = "".join(f"{line[1:]}\n" for line in lines if line.startswith("+"))
        text = file.read_text(encoding="utf-8")
        assert text.count(before) == 1, f"{file.name} has no such lines any more:\n{before}"
        file.write_text(text.replace(before, before + added), encoding="utf-8")


def undo(copy: Path) -> None:
    """Take the document's family out of the copy, where it is to the letter what the document
    says.
    """
    for block in blocks("python"):
        first, text = block.split("\n", 1)
        file = copy / first.removeprefix("# ")
        assert file.read_text(encoding="utf-8") == text, f"{file.name} is no longer the document's"
        file.unlink()
    for block in blocks("diff"):
        first, *lines = block.splitlines()
        file = copy / first.removeprefix("# ")
        text = file.read_text(encoding="utf-8")
        for line in lines:
            text = text.replace(f"{line[1:]}\n", "") if line.startswith("+") else text
        file.write_text(text, encoding="utf-8")


@pytest.fixture
def copy(tmp_path):
    for name in PACKAGE:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, tmp_path / name)
    undo(tmp_path)
    return tmp_path


def run(command: str, copy: Path) -> tuple[int, list[str]]:
    program, *arguments = shlex.split(command)
    assert program == "python3"
    done = subprocess.run(
        [sys.executable, *arguments], cwd=copy, env=os.environ, capture_output=True, text=True, check=False
    )
    return done.returncode, done.stdout.splitlines() or done.stderr.splitlines()


def commands() -> list[str]:
    return [line for block in blocks("sh") for line in block.splitlines()]


def test_a_family_that_is_added_as_the_document_says_has_parity_under_ulysses_and_with_a_ring(copy):
    follow(DOCUMENT, copy)
    seen = set()
    for command in commands():
        status, lines = run(command, copy)
        assert status == 0 and lines, lines
        assert all(line.startswith("ok") and "auraflow" in line for line in lines), lines
        seen |= {method for method in ("ulysses2", *RINGS) if any(method in line for line in lines)}
    assert len(seen) == 2 and "ulysses2" in seen
