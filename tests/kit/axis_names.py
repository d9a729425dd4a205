"""Where the name of a parallel axis may stand in the pack's code, and where one stands in a source.
Whoever needs to know something of axes elsewhere asks the table of them, or the layout.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).resolve().parents[2]
RUNTIME = "parallel_runtime/"
TABLE = RUNTIME + "layout.py"
AXES = re.findall(r'\bAxis\(\s*"(\w+)"', (ROOT / TABLE).read_text(encoding="utf-8"))
ORDINARY = {"cfg", "data"}  # names of other things too, in sentences and as attributes
SPELLS_AXES = {  # file, or folder with a slash, that may name an axis -> why
    TABLE: "the table",
    f"{RUNTIME}comm/": "sends messages along an axis",
    f"{RUNTIME}methods/": "computes what ranks along an axis share",
    **{
        f"{RUNTIME}planner/{name}.py": "a formula of what an axis costs"
        for name in ("choice", "cost", "job", "messages", "prediction")
    },
    "pool/trial/comparisons.py": "tries a sequence and a pipeline",
    "nodes/settings.py": "the inputs of PipeMesh Pool",
    "nodes/timing.py": "cfg is an attribute of ComfyUI's guiders",
}
SAYS_AXES = {  # file whose sentences for users may name an axis -> what they tell
    "nodes/report/text.py": "the kernel of ring attention",
    f"{RUNTIME}client/timelines.py": "what a pipeline cannot compute",
    f"{RUNTIME}families/plan.py": "what a pipeline cannot compute",
    f"{RUNTIME}stages.py": "more stages than blocks",
}


@dataclass(frozen=True)
class SpelledAxis:
    line: int
    axis: str
    is_sentence: bool = False


@lru_cache(1)  # several rules ask for the same file in turn
def nodes_of(tree: ast.AST) -> tuple[ast.AST, ...]:
    return tuple(ast.walk(tree))


def spelled_axes(tree: ast.AST) -> Iterator[SpelledAxis]:
    """Axes as attributes, as keywords and in strings that are no docstring."""
    documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    bodies = [node.body for node in nodes_of(tree) if isinstance(node, documented) and node.body]
    docstrings = {body[0].value for body in bodies if isinstance(body[0], ast.Expr)}
    for node in nodes_of(tree):
        if isinstance(node, ast.Attribute) and node.attr in AXES:
            if node.attr not in ORDINARY or ast.unparse(node.value).endswith("layout"):
                yield SpelledAxis(node.lineno, node.attr)
        elif isinstance(node, ast.keyword) and node.arg in AXES:
            yield SpelledAxis(node.lineno, node.arg)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in docstrings:
            named = [axis for axis in AXES if axis in node.value and re.search(rf"\b{axis}\b", node.value)]
            if named != [node.value] and len(named) == 1 and named[0] in ORDINARY:
                continue  # the word, not the axis
            for axis in named:
                yield SpelledAxis(node.lineno, axis, is_sentence=" " in node.value)


def is_listed(path: PurePosixPath, place: str) -> bool:
    return str(path) == place or (place.endswith("/") and str(path).startswith(place))
