"""docs/ADDING_A_MODEL.md followed to the letter gives the family as it stands here, of which its
command tries the cases whose parity lab/tests/test_parity.py holds.
"""

import re
import shlex
from pathlib import Path

from pipemesh.lab.commands import parity

ROOT = Path(__file__).resolve().parents[2]
DOCUMENT = (ROOT / "docs" / "ADDING_A_MODEL.md").read_text(encoding="utf-8")
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.S | re.M)


def blocks(kind: str) -> list[str]:
    return [text for language, text in BLOCK.findall(DOCUMENT) if language == kind]


def without_its_lines(text: str, lines: list[str]) -> str:
    for line in lines:
        text = text.replace(f"{line[1:]}\n", "") if line.startswith("+") else text
    return text


def with_its_lines(text: str, lines: list[str]) -> str:
    """The marked lines behind the ones that stand before them."""
    before = "\n".join(line[1:] for line in lines if line.startswith(" ")) + "\n"
    added = "".join(f"{line[1:]}\n" for line in lines if line.startswith("+"))
    assert text.count(before) == 1, f"there are no such lines any more:\n{before}"
    return text.replace(before, before + added)


def test_a_family_that_is_added_as_the_document_says_is_the_one_that_is_here():
    for block in blocks("python"):
        first, text = block.split("\n", 1)
        assert (ROOT / first.removeprefix("# ")).read_text(encoding="utf-8") == text
    for block in blocks("diff"):
        first, *lines = block.splitlines()
        here = (ROOT / first.removeprefix("# ")).read_text(encoding="utf-8")
        without = without_its_lines(here, lines)
        assert without != here
        assert sorted(with_its_lines(without, lines).splitlines()) == sorted(here.splitlines())


def test_the_command_of_the_document_tries_it_under_ulysses_and_with_a_ring():
    command, *made_anew = (line for block in blocks("sh") for line in block.splitlines())
    assert [shlex.split(line)[3] for line in made_anew] == ["families", "fingerprints"]
    python, *asked = shlex.split(command)
    assert [python, *asked[:3]] == ["python3", "-m", "lab", "parity"]
    _, cases = parity.chosen(asked[3:])
    assert {case.family for case in cases} == {"auraflow"} and set(cases) <= set(parity.cover())
    methods = {case.method for case in cases}
    assert "ulysses2" in methods and methods & set(parity.RINGS)
