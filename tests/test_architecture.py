"""The house rules that a machine can check: which way imports point, where ComfyUI may be touched,
how long things may get.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import pytest

ROOT = Path(__file__).resolve().parent.parent
LAYERS = ("parallel_runtime", "launcher", "nodes")  # each may import itself and what stands to its left
OTHER_CODE = ("tests", "benchmarks")
COMFYUI = {
    "comfy",
    "comfy_api",
    "comfy_config",
    "comfy_execution",
    "comfy_extras",
    "comfyui_version",
    "execution",
    "folder_paths",
    "latent_preview",
    "node_helpers",
    "nodes",
    "server",
}
BRIDGES = (  # files, and folders with a slash, that may import ComfyUI
    "__init__.py",
    "nodes/",
    "parallel_runtime/client/",
    "parallel_runtime/comfy_bridge/",
    "launcher/demo_nodes/",
    "launcher/commands/parity.py",
    "launcher/random_models.py",
    "launcher/tiny.py",
)
BEFORE_THE_HOST = (
    "launcher/__init__.py",
    "launcher/__main__.py",
    "launcher/comfyui/find.py",
    "launcher/comfyui/install.py",
    "launcher/package.py",
)
SCRIPTS = ("launcher/pool/fork_server_main.py", "launcher/pool/worker_main.py")  # started by path, so they cannot import relatively
RUNTIME = "parallel_runtime"
MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 100

Name = tuple[str, ...]


@dataclass(frozen=True)
class Import:
    """One imported name. `own`: inside this project, counted from its root."""

    line: int
    name: Name
    own: bool

    def __str__(self) -> str:
        return ".".join(self.name)

    def within(self, *folder: str) -> bool:
        return self.own and self.name[: len(folder)] == folder

    @property
    def top(self) -> str:
        return "" if self.own else self.name[0]


def imports_of(path: PurePosixPath, tree: ast.AST) -> Iterator[Import]:
    package = path.parts[:-1]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(node.lineno, tuple(alias.name.split(".")), own=False)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) + 1 - node.level] if node.level else ()
            module = tuple(node.module.split(".")) if node.module else ()
            for alias in node.names:
                yield Import(node.lineno, (*base, *module, alias.name), own=node.level > 0)


def violations(path: PurePosixPath, source: str) -> list[str]:
    """What `source`, as the file `path` of the project, does against the house rules."""
    tree = ast.parse(source)
    found = [*length_violations(source, tree)]
    if path.parts[0] not in OTHER_CODE:
        for imported in imports_of(path, tree):
            found += [f"line {imported.line}: {broken}" for broken in import_violations(path, imported)]
    return [f"{path}: {text}" for text in found]


def import_violations(path: PurePosixPath, imported: Import) -> Iterator[str]:
    layer = path.parts[0]
    if layer in LAYERS:
        for above in LAYERS[LAYERS.index(layer) + 1 :]:
            if imported.within(above):
                yield f"{layer} imports {imported}, but imports point one way: {' -> '.join(reversed(LAYERS))}"
    if imported.top in {*LAYERS, "pipemesh"} - {"nodes"} and str(path) not in SCRIPTS:
        yield f"imports {imported} by an absolute name; inside the pack only relative imports work under ComfyUI"
    if imported.top in COMFYUI and not is_bridge(path):
        yield f"imports ComfyUI's {imported}, which only the bridge modules do"
    if str(path) in BEFORE_THE_HOST and not imported.own and not is_standard(imported):
        yield f"imports {imported}, but runs before the host stands: standard library only"
    if layer == RUNTIME:
        yield from runtime_violations(path, imported)


def runtime_violations(path: PurePosixPath, imported: Import) -> Iterator[str]:
    folder = path.parts[1]
    for one, other in (("client", "worker"), ("worker", "client"), ("wire", "client"), ("wire", "worker")):
        if folder == one and imported.within(RUNTIME, other):
            yield f"{one} imports {imported}, but client and worker meet only in wire"
    allowed = {"families": (RUNTIME, "families", "plan"), "comm": (RUNTIME, "comm")}
    if folder in allowed:
        registry = path.parts[1:] == ("families", "__init__.py") and imported.within(RUNTIME, "families")
        if imported.own and not registry and not imported.within(*allowed[folder]) and not imported.within(RUNTIME, "errors"):
            yield f"{folder} imports {imported}, but may import {'.'.join(allowed[folder])} and errors only"
        if not imported.own and imported.top != "torch" and not is_standard(imported):
            yield f"{folder} imports {imported}, but may import torch and the standard library only"


def is_bridge(path: PurePosixPath) -> bool:
    return any(str(path) == bridge or (bridge.endswith("/") and str(path).startswith(bridge)) for bridge in BRIDGES)


def is_standard(imported: Import) -> bool:
    return imported.top in sys.stdlib_module_names


def length_violations(source: str, tree: ast.AST) -> Iterator[str]:
    lines = len(source.splitlines())
    if lines > MAX_FILE_LINES:
        yield f"{lines} lines, at most {MAX_FILE_LINES}"
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > MAX_FUNCTION_LINES:
                yield f"line {node.lineno}: {node.name} has {length} lines, at most {MAX_FUNCTION_LINES}"


def project_files() -> list[Path]:
    folders = [*LAYERS, *OTHER_CODE]
    return [*ROOT.glob("*.py"), *(file for folder in folders for file in sorted((ROOT / folder).rglob("*.py")))]


@pytest.mark.parametrize("file", project_files(), ids=lambda file: str(file.relative_to(ROOT)))
def test_the_file_keeps_the_house_rules(file: Path) -> None:
    assert violations(PurePosixPath(file.relative_to(ROOT).as_posix()), file.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    ("path", "source", "says"),
    [
        ("parallel_runtime/mesh.py", "from ..launcher import pool", "imports point one way"),
        ("parallel_runtime/wire/arena.py", "def f():\n    from ...nodes.pool import Pool", "imports point one way"),
        ("launcher/pool.py", "from .. import nodes", "imports point one way"),
        ("parallel_runtime/client/session.py", "from ..worker.engine import Engine", "meet only in wire"),
        ("parallel_runtime/worker/engine.py", "from .. import client", "meet only in wire"),
        ("parallel_runtime/wire/arena.py", "from ..worker import main", "meet only in wire"),
        ("parallel_runtime/families/flux.py", "from ..methods import usp", "families imports"),
        ("parallel_runtime/families/flux.py", "from .wan import PLAN", "families imports"),
        ("parallel_runtime/families/plan.py", "import numpy", "torch and the standard library only"),
        ("parallel_runtime/comm/ring.py", "from ..layout import Layout", "comm imports"),
        ("parallel_runtime/comm/ring.py", "import msgspec", "torch and the standard library only"),
        ("parallel_runtime/layout.py", "import comfy.utils", "only the bridge modules"),
        ("launcher/pool.py", "if True:\n    from comfy_api.latest import io", "only the bridge modules"),
        ("parallel_runtime/mesh.py", "import nodes", "only the bridge modules"),
        ("nodes/pool.py", "from launcher.pool import Pool", "absolute name"),
        ("launcher/demo.py", "import pipemesh.launcher.host", "absolute name"),
        ("launcher/comfyui/install.py", "import requests", "standard library only"),
        ("nodes/pool.py", "\n" * 501, "at most 500"),
        ("tests/test_pool.py", "def long():\n" + "    pass\n" * 100, "long has 101 lines"),
        ("nodes/pool.py", "class A:\n    async def long(self):\n" + "        pass\n" * 100, "long has 101 lines"),
    ],
)
def test_a_broken_rule_is_found_and_named(path: str, source: str, says: str) -> None:
    (text,) = violations(PurePosixPath(path), source)
    assert text.startswith(path)
    assert says in text


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("nodes/pool.py", "import nodes\nfrom comfy_api.latest import io\nfrom ..launcher.pool import Pool\nfrom .report import Report"),
        ("launcher/pool.py", "import torch\nfrom ..parallel_runtime.wire import messages\nfrom ..parallel_runtime.client import session"),
        ("parallel_runtime/client/session.py", "import comfy.utils\nfrom ..wire import arena\nfrom ..errors import Refused"),
        ("parallel_runtime/comfy_bridge/source.py", "import comfy\nfrom ..wire.arena import Arena\nfrom ..families import FAMILIES"),
        ("parallel_runtime/families/flux.py", "import torch\nfrom .plan import Plan\nfrom . import plan\nfrom ..errors import Refused"),
        ("parallel_runtime/families/__init__.py", "from .flux import FLUX\nfrom .plan import Plan"),
        ("parallel_runtime/comm/ring.py", "import math\nimport torch\nfrom .exchange import swap\nfrom .. import errors"),
        ("tests/test_pool.py", "import comfy\nfrom pipemesh.launcher import pool\nimport launcher"),
        ("__init__.py", "from comfy_api.latest import ComfyExtension\nfrom .nodes import extension"),
    ],
)
def test_what_the_rules_allow_passes(path: str, source: str) -> None:
    assert violations(PurePosixPath(path), source) == []


def test_no_checked_file_is_missed() -> None:
    assert {"launcher/comfyui/find.py", "tests/test_architecture.py"} <= {file.relative_to(ROOT).as_posix() for file in project_files()}
