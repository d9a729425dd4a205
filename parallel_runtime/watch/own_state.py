"""Tells which attributes ComfyUI's own classes assign as they compute, such as a cache of keys and
values: by the source of the class, as a value alone does not say who put it there.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


class Method(NamedTuple):
    """A method in the source: the attributes of its object that it assigns, and all names of
    attributes in it.
    """

    name: str
    assigned: frozenset[str]
    named: frozenset[str]


@lru_cache(maxsize=1024)
def assigned_later(kind: type) -> frozenset[str]:
    """Returns the attributes that methods of a class of ComfyUI's assign, but for ``__init__`` and
    the methods that it calls.
    """
    methods = [
        method for one in kind.__mro__ if one.__module__.startswith("comfy.") for method in _methods_of(one)
    ]
    building, waiting = set(), {"__init__"}
    while waiting:
        name = waiting.pop()
        building.add(name)
        waiting |= {other for method in methods if method.name == name for other in method.named} - building
    return frozenset(name for method in methods if method.name not in building for name in method.assigned)


def _methods_of(kind: type) -> tuple[Method, ...]:
    file = getattr(sys.modules.get(kind.__module__), "__file__", None)
    return _of_file(file).get(kind.__qualname__, ()) if file and file.endswith(".py") else ()


@lru_cache(maxsize=256)
def _of_file(file: str) -> dict[str, tuple[Method, ...]]:
    return dict(_of_classes(ast.parse(Path(file).read_bytes()), ""))


def _of_classes(tree: ast.AST, prefix: str) -> Iterator[tuple[str, tuple[Method, ...]]]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.ClassDef):
            yield prefix + node.name, tuple(_method(one) for one in node.body if isinstance(one, FUNCTIONS))
            yield from _of_classes(node, f"{prefix}{node.name}.")
        elif isinstance(node, (ast.If, ast.Try)):
            yield from _of_classes(node, prefix)


def _method(node: ast.FunctionDef | ast.AsyncFunctionDef) -> Method:
    own = node.args.args[0].arg if node.args.args else ""
    named = frozenset(one.attr for one in ast.walk(node) if isinstance(one, ast.Attribute))
    return Method(node.name, frozenset(_assigned(node, own)), named)


def _assigned(method: ast.AST, own: str) -> Iterator[str]:
    """Yields the attributes of ``own`` that are assigned there, or an item of which is."""
    for node in ast.walk(method):
        if isinstance(node, (ast.Attribute, ast.Subscript)) and isinstance(node.ctx, ast.Store):
            target: ast.AST = node
            while isinstance(target, ast.Subscript):
                target = target.value
            if (
                isinstance(target, ast.Attribute)
                and isinstance(target.value, ast.Name)
                and target.value.id == own
            ):
                yield target.attr
