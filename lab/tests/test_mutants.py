"""The list of faults is one of today's code."""

import json
import re
from collections import Counter
from dataclasses import asdict, replace

import pytest
from pipemesh.lab.bench.forked import imported_at_hand
from pipemesh.lab.commands import mutants
from pipemesh.launcher.checkout import ROOT
from pipemesh.launcher.errors import LaunchError

CONFTEST = """
def pytest_addoption(parser):
    parser.addoption("--browser", action="store_true")
    parser.addoption("--forked-from")
"""


@pytest.fixture(scope="module")
def runs(host):
    with imported_at_hand(host, mutants.AT_HAND) as server:
        yield mutants.Runs(server)


UNNAMED = {  # files of tests that no fault names, and why
    "test_cuda_report": "holds the checks that run on a GPU",
    "test_end_to_end_captions": "of the laboratory's own nodes",
    "test_end_to_end_host": "PIPEMESH_TEST_ALL runs it",
    "test_packs": "needs packs that are not here",
    "test_pose_cache": "needs a newer ComfyUI",
    "test_on_a_gpu": "needs a GPU",
    "test_slurm": "needs a Slurm",
}


def test_every_room_has_several_faults():
    counted = Counter(one.room for one in mutants.read())
    assert min(counted.values()) >= 3, counted


def test_every_file_of_tests_finds_a_fault():
    named = {name.partition("::")[0] for one in mutants.read() for name in one.tests}
    files = {file.stem for file in (ROOT / "tests").glob("*/test_*.py")}
    assert files - named == UNNAMED.keys(), (
        "in lab/mutants.json no row names a file, or one that is in UNNAMED"
    )


def test_every_fault_can_be_made_and_its_tests_are_there():
    for one in mutants.read():
        text = (ROOT / one.file).read_text(encoding="utf-8")
        broken = one.broken(text)
        assert broken != text
        if one.file.endswith(".py"):
            compile(broken, one.file, "exec")
        assert one.tests
        for file, name in (mutants.place_of(test, ROOT) for test in one.tests):
            tests = (ROOT / file).read_text(encoding="utf-8")
            assert not name or re.search(rf"^(def |class )?{name.partition('[')[0]}\b", tests, re.M), name


def test_a_line_that_is_not_there_is_named():
    with pytest.raises(LaunchError, match=r"a\.py has 'x = 1' 2 times: mend lab/mutants\.json"):
        mutants.Mutant("comm", "a.py", "x = 1", "x = 2", ("test_comm",)).broken("x = 1\nx = 1\n")


def test_tests_that_cannot_run_or_fail_without_a_fault_are_no_fault_that_is_found(runs, tmp_path):
    gone = mutants.Mutant("", "a.py", "return 1", "return 2", ("test_gone",))
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "a.py").write_text("return 1")
    with pytest.raises(LaunchError, match=r"^pytest could not run test_gone: .*tests/test_gone\.py"):
        runs.tried(gone, tmp_path)
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_gone.py").write_text("def test_one():\n    assert 0\n")
    with pytest.raises(LaunchError, match=r"Without any fault test_gone::test_one fails too"):
        runs.require_whole(runs.tried(gone, tmp_path).failed, tmp_path)


def test_a_fault_of_the_list_is_found_in_a_copy_of_the_checkout(runs, tmp_path):
    (one, *_) = (one for one in mutants.read() if mutants.files_of(one) == {"test_arena"})
    assert runs.tried(one, mutants.copied(tmp_path / "copy")).found == "found"


TESTS = """
import time
from a import one
def test_slow(): time.sleep(0.1); assert one() < 2
def test_one(): assert one() == 1
def test_none(): assert one
"""


@pytest.mark.parametrize(
    ("instead", "found", "by"),
    [("return 2", "found", ["test_a::test_one", "test_a::test_slow"]), ("return  1", "not found", [])],
)
def test_a_fault_is_found_by_tests_that_fail_the_cheapest_first_and_mended_again(
    runs, tmp_path, instead, found, by
):
    (tmp_path / "tests").mkdir()
    (tmp_path / "a.py").write_text("def one():\n    return 1\n")
    (tmp_path / "tests" / "test_a.py").write_text(TESTS)
    (tmp_path / "conftest.py").write_text(CONFTEST)
    mutant = mutants.Mutant("", "a.py", "return 1", instead, ("test_a",))
    runs.require_whole(mutant.tests, tmp_path)  # Python keeps what it compiled of a file of this size
    outcome = runs.tried(mutant, tmp_path, to_the_end=True)
    assert (outcome.found, list(outcome.failed)) == (found, by)
    assert (tmp_path / "a.py").read_text() == "def one():\n    return 1\n"


def test_the_matrix_names_who_finds_a_fault_and_who_finds_none(tmp_path, monkeypatch):
    one = mutants.Mutant("comm", "a.py", "x = 1", "x = 2", ("test_a",))
    monkeypatch.setattr(mutants, "ROOT", tmp_path)
    monkeypatch.setattr(mutants, "TABLE", tmp_path / "table.json")
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_a.py").write_text(TESTS)
    rows = [json.dumps(asdict(row)) for row in (one, replace(one, line="y = 1"))]
    mutants.TABLE.write_text("[\n  " + ",\n  ".join(rows) + "\n]\n")
    outcomes = [mutants.Outcome(one, "found", ["test_a::test_one"], 1.0)]
    mutants.write_finders(outcomes)
    assert (
        mutants.TABLE.read_text()
        == f"[\n  {rows[0].replace('test_a', 'test_a::test_one')},\n  {rows[1]}\n]\n"
    )
    assert list(mutants.idle(outcomes, ["test_a"])) == ["test_a::test_slow", "test_a::test_none"]
