"""What a function or a class is, by the Python file that has it: where it was compiled, what its
module imports, which attributes its methods assign, and whether the file has its code.

A value alone does not say who put it where it stands.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import inspect
import sys
import types
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

LIBRARIES = frozenset(
    {"comfy", "comfy_aimdo", "comfy_extras", "comfy_kitchen", "einops", "torch", "torchvision"}
)
STANDARD = sys.stdlib_module_names | {"builtins", ""}
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


class Method(NamedTuple):
    """``assigned``: the attributes of its object that it assigns; ``named``: all attributes that it
    names.
    """

    name: str
    assigned: frozenset[str]
    named: frozenset[str]


class PythonFile(NamedTuple):
    """``imported``: name -> the (module, name) that it may stand for. ``roots``: first parts of the
    names of imported modules. ``bound``: all names that the module binds, None where the file
    cannot tell. ``methods``: of each class, by its qualified name.
    """

    imported: dict[str, list[tuple[str, str]]]
    roots: frozenset[str]
    bound: frozenset[str] | None = None
    classes: frozenset[str] = frozenset()
    methods: Mapping[str, tuple[Method, ...]] = MappingProxyType({})


def module_of(thing: Any) -> types.ModuleType | None:
    """Returns a module itself, or the one that has a function or a class; None where it has no
    file.
    """
    name = getattr(thing, "__module__", None) or ""
    module = thing if isinstance(thing, types.ModuleType) else sys.modules.get(name)
    return module if getattr(module, "__file__", None) is not None else None


def root_of(thing: Any) -> str:
    """Returns the package that a class or a function is of, by the name of its module."""
    return str(getattr(thing, "__module__", None) or "").partition(".")[0]


def attribute_of(module: types.ModuleType, name: str) -> Any:
    """Returns what a module has under a name with dots; None for nothing."""
    found: Any = module
    for part in name.split("."):
        found = getattr(found, part, None)
    return found


def is_code(value: Any) -> bool:
    return callable(value) or isinstance(value, (staticmethod, classmethod, property))


def compiled_elsewhere(value: Any, trusted: frozenset[str]) -> Any:
    """Returns the function, at any depth of decorators, that was compiled in no trusted package;
    None for none.
    """
    for _ in range(8):
        if isinstance(value, (staticmethod, classmethod, types.MethodType)):
            value = value.__func__
        elif isinstance(value, property):
            value = value.fget
        if value is None:
            return None
        package = _compiled_in(value).partition(".")[0]
        if package not in trusted and package not in STANDARD:
            return value
        inner = getattr(value, "__wrapped__", None) or getattr(value, "func", None)
        if inner is None or inner is value:
            return None
        value = inner
    return None


def _compiled_in(value: Any) -> str:
    if isinstance(value, types.FunctionType):
        where = str(value.__globals__.get("__name__", "?"))
        return "collections" if where.startswith("namedtuple_") else where
    return str((value if isinstance(value, type) else type(value)).__module__)


def functions_of(thing: Any) -> Iterator[types.FunctionType]:
    """Yields the functions of a module or of a class, of the classes in it too, below their
    decorators; of a function, itself.
    """
    if isinstance(thing, (staticmethod, classmethod, types.MethodType)):
        thing = thing.__func__
    thing = inspect.unwrap(thing) if callable(thing) else thing
    if isinstance(thing, types.FunctionType):
        yield thing
    elif isinstance(thing, property):
        for accessor in (thing.fget, thing.fset, thing.fdel):
            if accessor is not None:
                yield from functions_of(accessor)
    elif isinstance(thing, (types.ModuleType, type)):
        inside = f"{full_name(thing)}."
        for value in list(vars(thing).values()):
            if not isinstance(value, type) or full_name(value).startswith(inside):
                yield from () if isinstance(value, types.ModuleType) else functions_of(value)


def full_name(thing: types.ModuleType | type) -> str:
    return f"{thing.__module__}.{thing.__qualname__}" if isinstance(thing, type) else thing.__name__


def names_in(code: types.CodeType) -> set[str]:
    """Returns the names that a code object, and those in it, look up."""
    inner = [names_in(constant) for constant in code.co_consts if isinstance(constant, types.CodeType)]
    return set(code.co_names).union(*inner)


# -- the code of a file as it is now


def file_hash(file: Path) -> str:
    stat = file.stat()
    return _hash_of(str(file), stat.st_mtime_ns, stat.st_size)


@lru_cache(maxsize=256)
def _hash_of(file: str, _modified: int, _size: int) -> str:
    return hashlib.blake2b(Path(file).read_bytes(), digest_size=16).hexdigest()


@lru_cache(maxsize=64)
def codes_in(file: str, _hash: str) -> list[types.CodeType]:
    """Returns all code objects of a file, in the order in which they stand in it; the module's own
    last.
    """

    def inside(code: types.CodeType) -> Iterator[types.CodeType]:
        for constant in code.co_consts:
            if isinstance(constant, types.CodeType):
                yield constant
                yield from inside(constant)

    own = compile(Path(file).read_bytes(), file, "exec", dont_inherit=True)
    return [*inside(own), own]


def edited_function(module: types.ModuleType, hash_: str) -> types.FunctionType | None:
    """Returns a function of a module whose code its file does not have by now; None for none.
    ``hash_``: the file's.
    """
    known = _code_set(str(module.__file__), hash_)
    for function in functions_of(module):
        is_of_file = function.__globals__ is vars(module) and function.__code__.co_filename[:1] != "<"
        if is_of_file and function.__code__ not in known:
            return function
    return None


@lru_cache(maxsize=64)
def _code_set(file: str, hash_: str) -> frozenset[types.CodeType]:
    return frozenset(codes_in(file, hash_))


# -- the text of a file as it was when it was first asked for


def file_of(module: types.ModuleType | None) -> PythonFile:
    path = getattr(module, "__file__", None)
    if module is None or path is None or not path.endswith(".py"):
        return PythonFile({}, frozenset())
    return _read(path, module.__package__ or "")


@lru_cache(maxsize=256)
def _read(path: str, package: str) -> PythonFile:
    tree = ast.parse(Path(path).read_bytes())
    names: dict[str, list[tuple[str, str]]] = {}
    roots, bound, classes, imported = set(), set(), set(), set()
    waiting: list[ast.AST] = [tree]
    while waiting:
        node = waiting.pop()
        if isinstance(node, (*FUNCTIONS, ast.ClassDef)):
            bound.add(node.name)
            classes |= {node.name} if isinstance(node, ast.ClassDef) else set()
            bound |= {name for one in ast.walk(node) if isinstance(one, ast.Global) for name in one.names}
            continue
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            bound.add(node.id)
        elif isinstance(node, ast.Import):
            roots |= {one.name.partition(".")[0] for one in node.names}
            imported |= {one.asname or one.name.partition(".")[0] for one in node.names}
        elif isinstance(node, ast.ImportFrom) and (package or not node.level):
            where = "." * node.level + (node.module or "")
            where = importlib.util.resolve_name(where, package) if node.level else where
            roots.add(where.partition(".")[0])
            for one in node.names:
                names.setdefault(one.asname or one.name, []).append((where, one.name))
        waiting += ast.iter_child_nodes(node)
    return PythonFile(
        {name: places for name, places in names.items() if name not in bound},
        frozenset(roots),
        None if "*" in names else frozenset(bound | imported | names.keys()),
        frozenset(classes),
        dict(_classes(tree, "")),
    )


def _classes(tree: ast.AST, prefix: str) -> Iterator[tuple[str, tuple[Method, ...]]]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.ClassDef):
            yield prefix + node.name, tuple(_method(one) for one in node.body if isinstance(one, FUNCTIONS))
            yield from _classes(node, f"{prefix}{node.name}.")
        elif isinstance(node, (ast.If, ast.Try)):
            yield from _classes(node, prefix)


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
            holder = target.value if isinstance(target, ast.Attribute) else None
            if isinstance(target, ast.Attribute) and isinstance(holder, ast.Name) and holder.id == own:
                yield target.attr


@lru_cache(maxsize=1024)
def assigned_later(kind: type) -> frozenset[str]:
    """Returns the attributes that methods of a class of ComfyUI's assign as they compute, such as a
    cache: not ``__init__``, nor the methods that it calls.
    """
    return frozenset(name for method in _methods_of(kind)[1] for name in method.assigned)


@lru_cache(maxsize=1024)
def assigned_first(kind: type) -> frozenset[str]:
    """Returns the attributes that ``__init__`` of a class of ComfyUI's assigns, or a method that it
    calls. Whatever else an object of that class has, somebody else put there.
    """
    return frozenset(name for method in _methods_of(kind)[0] for name in method.assigned)


def _methods_of(kind: type) -> tuple[list[Method], list[Method]]:
    """Returns the methods of a class of ComfyUI's: ``__init__`` with those that it calls, and the
    others.
    """
    own = [one for one in kind.__mro__ if one.__module__.startswith("comfy.")]
    methods = [method for one in own for method in file_of(module_of(one)).methods.get(one.__qualname__, ())]
    building, waiting = set(), {"__init__"}
    while waiting:
        name = waiting.pop()
        building.add(name)
        waiting |= {other for method in methods if method.name == name for other in method.named} - building
    first = [method for method in methods if method.name in building]
    return first, [method for method in methods if method.name not in building]
