"""What ComfyUI, a rank and a leader import, functions included: no command, nothing of the
laboratory. It would cost every start its time, and the published pack lacks some of it.

Runs without ComfyUI.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import PurePosixPath
from types import MappingProxyType

import pytest

from ..kit.axis_names import nodes_of
from .test_architecture import PACK, ROOT, SCRIPTS, imports_of

# What ComfyUI imports, the processes of a pool, and the leader of a machine
AT_WORK = ("__init__.py", *SCRIPTS, "launcher/commands/node.py")
# What finds a ComfyUI, the other commands, and what a published pack leaves out
NOT_AT_WORK = ("launcher/comfyui/", "launcher/commands/", "lab/", "tests/")
AT_WORK_TOO = {
    "launcher/comfyui/__init__.py",
    "launcher/comfyui/host_record.py",
    "launcher/commands/__init__.py",
    "launcher/commands/node.py",
}


def for_type_checkers(tree: ast.AST) -> set[int]:
    """The lines that only a type checker reads."""
    blocks = (
        node
        for node in nodes_of(tree)
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
    )
    return {line for block in blocks for one in block.body for line in range(one.lineno, one.end_lineno + 1)}


@cache
def imported_files(path: PurePosixPath, source: str) -> list[str]:
    """The files of the project that `source` imports, in functions too, and their packages'."""
    found = []
    tree = ast.parse(source)
    unread = for_type_checkers(tree)
    for imported in imports_of(path, tree):
        is_by_name = str(path) in SCRIPTS and imported.top == PACK
        if imported.line in unread or not (imported.own or is_by_name):
            continue
        name = imported.name[is_by_name:]
        for length in range(1, len(name) + 1):
            module = "/".join(name[:length])
            found += [file for file in (f"{module}.py", f"{module}/__init__.py") if (ROOT / file).is_file()]
    return found


def chains(starts: Iterable[str], changed: Mapping[str, str] = MappingProxyType({})) -> dict[str, list[str]]:
    """Every file that these import, directly or not, with the files between. ``changed``: sources
    in place of the files' own.
    """
    found = {start: [start] for start in starts}
    queue = list(found)
    while queue:
        path = queue.pop()
        source = changed.get(path) or (ROOT / path).read_text(encoding="utf-8")
        for file in imported_files(PurePosixPath(path), source):
            if file not in found:
                found[file] = [*found[path], file]
                queue.append(file)
    return found


def idle_imports(changed: Mapping[str, str] = MappingProxyType({})) -> list[str]:
    return [
        " imports ".join(chain)
        for file, chain in chains(AT_WORK, changed).items()
        if file.startswith(NOT_AT_WORK) and file not in AT_WORK_TOO
    ]


def test_neither_comfyui_nor_a_rank_nor_a_leader_imports_a_command_or_the_laboratory() -> None:
    assert idle_imports() == []


@pytest.mark.parametrize(
    ("path", "source", "imports"),
    [
        (
            "nodes/planning.py",
            "def f():\n    from ..launcher.comfyui.search import ROOT",
            "launcher/comfyui/search.py",
        ),
        ("parallel_runtime/worker/main.py", "from ...lab.bench import hop", "lab/bench/hop.py"),
        ("pool/rendezvous.py", "from ..launcher.commands import doctor", "launcher/commands/doctor.py"),
    ],
)
def test_a_command_or_the_laboratory_at_work_is_found(path, source, imports) -> None:
    assert any(f"{path} imports {imports}" in sentence for sentence in idle_imports({path: source}))
