"""Verdicts on this ComfyUI's classes hold for the pack's code that computes and compares: what
another plan, tolerance or message may change is tried anew, and what a docstring says is not.
"""

import ast
from pathlib import Path

import pytest
from pipemesh.pool.trial.host_trials import NOT_IN_RANKS, RUNTIME, TRIAL, pack_digest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = sorted({one.parent.relative_to(ROOT).as_posix() for one in (ROOT / RUNTIME).rglob("*.py")})
ELSEWHERE = [*(f"{RUNTIME}/{name}" for name in NOT_IN_RANKS), "pool", "nodes"]
DECIDES = {  # file, text, what stands instead
    "a plan": ("parallel_runtime/families/plan.py", "interleaved: bool = False", "interleaved: bool = True"),
    "a tolerance": ("parallel_runtime/tolerance.py", "Tolerance(2e-5, 20)", "Tolerance(3e-5, 20)"),
    "a measure": ("pool/trial/rounding.py", "FACTOR = 5.0", "FACTOR = 6.0"),
    "what is compared": ("pool/trial/comparisons.py", "STEPS = 2", "STEPS = 1"),
    "a message": ("parallel_runtime/wire/messages.py", "in_fp32: bool = False", "in_fp32: bool = True"),
}


@pytest.fixture
def digest(tmp_path):
    """Makes a pack of a file, and returns the digest of it and of those before it."""

    def of(name, text):
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
        pack_digest.cache_clear()
        return pack_digest(tmp_path)

    yield of
    pack_digest.cache_clear()


def reworded(text):
    """The text with other docstrings, and with comments."""
    tree, lines = ast.parse(text), text.splitlines()
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(node):
            said = node.body[0]
            lines[said.lineno - 1 : said.end_lineno] = [
                " " * said.col_offset + '"""Says it otherwise."""',
                *["# too"] * (said.end_lineno - said.lineno),
            ]
    return "# Another comment\n" + "\n".join(lines)


def shortest_in(folder):
    """The shortest file of a folder that has code."""
    files = sorted((ROOT / folder).glob("*.py"), key=lambda one: one.stat().st_size)
    return next(one for one in files if len(ast.parse(one.read_bytes()).body) > 1)


@pytest.mark.parametrize("folder", [*FOLDERS, TRIAL, *ELSEWHERE[-2:]])
def test_code_of_each_folder_that_computes_or_compares_is_told_and_what_it_says_of_itself_is_not(
    digest, folder
):
    file = shortest_in(folder)
    name, text = file.relative_to(ROOT).as_posix(), file.read_text(encoding="utf-8")
    before = digest(name, text)
    assert reworded(text) != text and digest(name, reworded(text)) == before
    assert (digest(name, f"{text}\n\nANOTHER = 1\n") == before) == (folder in ELSEWHERE)


@pytest.mark.parametrize("what", DECIDES)
def test_another_plan_tolerance_or_message_voids_a_verdict(digest, what):
    name, before, after = DECIDES[what]
    text = (ROOT / name).read_text(encoding="utf-8")
    assert before in text
    assert digest(name, text) != digest(name, text.replace(before, after, 1))


def test_a_file_under_another_name_is_other_code(digest, tmp_path):
    before = digest(f"{RUNTIME}/families/one.py", "VALUE = 1\n")
    (tmp_path / RUNTIME / "families" / "one.py").unlink()
    assert digest(f"{RUNTIME}/families/two.py", "VALUE = 1\n") != before
