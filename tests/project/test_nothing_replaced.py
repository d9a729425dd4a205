"""ComfyUI's process serves many threads, so the pack replaces no function of ComfyUI's or torch's
there: what it must, stands in ``SEAMS`` with its reason.

Rules on sources are here; that no function is another while a layout is chosen, in test_counting.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache

import pytest

from .test_architecture import COMFYUI, FUNCTION, ROOT
from .test_imports_at_work import chains

HOST = {*COMFYUI, "torch"}
SEAMS = {  # file, function -> why it may
    ("parallel_runtime/client/remote_forward.py", "uncompiled"): "ComfyUI's option, put back after a run",
    ("parallel_runtime/client/tiles.py", "no_progress_shown"): "one thread's bars show nothing for a while",
    ("parallel_runtime/crossing/source.py", "resolving_as"): "runs in ranks",
    ("parallel_runtime/crossing/named_code.py", "options_made"): "runs in ranks",
}
SETTERS = ("setattr", "delattr", "standing_in")  # the last is stand_ins.py's
MOCKS = ("unittest.mock", "pytest", "mock")


def replacing(source: str) -> Iterator[tuple[str, int]]:
    """The function and line of every replacement of what belongs to ComfyUI or torch."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            module = getattr(node, "module", None) or ""
            for name in [f"{module}.{alias.name}".strip(".") for alias in node.names]:
                if any(f"{name}.".startswith(f"{mock}.") for mock in MOCKS):
                    yield "import", node.lineno
    theirs = bound(tree)
    for function in [one for one in ast.walk(tree) if isinstance(one, FUNCTION)]:
        known = aliases(function, theirs)
        yield from (
            (function.name, node.lineno) for node in ast.walk(function) if is_replacement(node, known)
        )
    for node in tree.body:
        if not isinstance(node, (*FUNCTION.__args__, ast.ClassDef)):
            yield from (("module", one.lineno) for one in ast.walk(node) if is_replacement(one, theirs))


def bound(tree: ast.AST) -> set[str]:
    """Names that imports of ComfyUI or torch bind to modules and classes."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [(alias.name, alias.asname or alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names = [(node.module or "", alias.asname or alias.name) for alias in node.names]
        else:
            continue
        found |= {name.partition(".")[0] for module, name in names if module.partition(".")[0] in HOST}
    return found


def aliases(function: ast.AST, theirs: set[str]) -> set[str]:
    """Those, and what a function names anew of them, such as a class of a module."""
    known = set(theirs)
    for node in ast.walk(function):
        if isinstance(node, ast.Assign) and root_of(node.value) in known:
            known |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return known


def root_of(node: ast.AST) -> str:
    while isinstance(node, (ast.Attribute, ast.Subscript)):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def is_replacement(node: ast.AST, theirs: set[str]) -> bool:
    if isinstance(node, (ast.Assign, ast.AugAssign, ast.AnnAssign, ast.Delete)):
        targets = node.targets if isinstance(node, (ast.Assign, ast.Delete)) else [node.target]
        flat = [one for target in targets for one in getattr(target, "elts", [target])]
        return any(isinstance(one, (ast.Attribute, ast.Subscript)) and holder(one) in theirs for one in flat)
    is_setting = isinstance(node, ast.Call) and getattr(node.func, "id", "") in SETTERS and node.args
    return bool(is_setting) and any(getattr(one, "id", "") in theirs for one in ast.walk(node.args[0]))


def holder(target: ast.AST) -> str:
    """The name that a target hangs on; also of ``vars(module)["name"]``."""
    inner = target.value if isinstance(target, ast.Subscript) else target
    is_of_vars = isinstance(inner, ast.Call) and getattr(inner.func, "id", "") == "vars" and inner.args
    return root_of(inner.args[0] if is_of_vars else target)


@cache
def files_served() -> tuple[str, ...]:
    """Every file that ComfyUI's process can import, from the entry point on, inside functions
    too.
    """
    return tuple(sorted(chains(("__init__.py",))))


def test_no_file_that_comfyui_imports_replaces_anything_of_comfyuis_or_torchs():
    found = {
        (path, name): line
        for path in files_served()
        for name, line in replacing((ROOT / path).read_text(encoding="utf-8"))
    }
    assert {place: line for place, line in found.items() if place not in SEAMS} == {}


def test_every_seam_is_needed():
    for path, name in SEAMS:
        assert name in dict(replacing((ROOT / path).read_text(encoding="utf-8"))), (path, name)


def test_the_files_that_replace_functions_are_not_among_those_that_comfyui_imports():
    replace = {"planner/dry_device", "planner/counting", "planner/host_call"}
    assert "nodes/planning.py" in files_served() and "pool/counter.py" in files_served()
    assert not {f"parallel_runtime/{name}.py" for name in replace} & set(files_served())


REPLACING = [
    "from unittest.mock import patch",
    "import unittest.mock",
    "import torch\ntorch.cuda.synchronize = None",
    "import comfy.ops\ndef f():\n    standing_in(comfy.ops, 'cast_bias_weight', None)",
    "import torch\ndef f():\n    torch.cuda.Event, a = None, 1",
    "import comfy.model_management as mm\ndef f():\n    mm.unet_dtype = None",
    "def f():\n    import comfy.samplers\n    setattr(comfy.samplers, 'sample', None)",
    "import comfy.samplers\ndef f():\n    of = comfy.samplers.CFGGuider\n    setattr(of, 'sample', None)",
    "from comfy.model_base import BaseModel\ndef f():\n    BaseModel.load_model_weights = None",
    "import comfy.ops\ndef f():\n    vars(comfy.ops)['cast_bias_weight'] = None",
    "import comfy.ops\ndef f():\n    del comfy.ops.cast_bias_weight",
]
KEEPING = [
    "import torch\nclass A:\n    def f(self, model):\n        self.x = torch.zeros(1)\n        model.y = 2",
    "import torch\ndef f():\n    x = torch.ones(1)\n    x[0] = 2",
    "import torch\ndef f(module, name, value):\n    setattr(module, name, torch.nn.Parameter(value))",
]


@pytest.mark.parametrize(
    ("source", "is_found"), [*((one, True) for one in REPLACING), *((one, False) for one in KEEPING)]
)
def test_a_replacement_is_found_and_what_is_none_is_not(source, is_found):
    assert bool(list(replacing(source))) is is_found
