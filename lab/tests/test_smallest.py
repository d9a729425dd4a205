"""The smallest case of every bench and of every command, each in a process of its own: what it says
means nothing, but it says all of it, and writes nothing.
"""

import json
import math
import re

import pytest
from pipemesh.lab.__main__ import INSIDE
from pipemesh.lab.bench.command import NAMES
from pipemesh.tests.fixtures import ROOT, all_said_by

ALL = [*(f"bench {name}" for name in NAMES), *(command for command in INSIDE if command != "bench")]
LISTED = re.findall(
    r"^\| `python3 -m lab (.+) --smallest.*?` \|", (ROOT / "lab/docs/TESTING.md").read_text(), re.MULTILINE
)
WRITTEN = [
    ROOT / name
    for name in (
        "docs/FAMILIES.md",
        "docs/VAES.md",
        "lab/vaes.json",
        "lab/hosts.json",
        "pool/trial/known_hosts.json",
    )
]


def test_what_is_left_to_commands_is_a_bench_or_a_command():
    assert LISTED and set(LISTED) <= set(ALL)


@pytest.mark.parametrize("case", [case for case in ALL if case not in LISTED])
def test_the_smallest_case_has_its_figures_and_writes_no_file(case, command, tmp_path):
    before = [file.stat().st_mtime_ns for file in WRITTEN]
    cache, is_bench = tmp_path / "cache", case.startswith("bench ")
    process = command(*case.split(), "--smallest", *["--json"] * is_bench, PIPEMESH_CACHE=str(cache))
    said = all_said_by(process)
    assert process.wait() == 0, said
    assert said.strip() and not cache.exists() and before == [file.stat().st_mtime_ns for file in WRITTEN]
    if is_bench:
        figures = [json.loads(line) for line in said.splitlines() if line.startswith('{"bench"')]
        assert figures and all(math.isfinite(one["value"]) and one["goal"] is None for one in figures), said
