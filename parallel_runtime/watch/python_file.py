"""Reads the Python file of a function or a class: where it was compiled, which names its module
imports, which attributes its methods assign, and whether the file has its code.

A value alone does not say who put it in its place.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import sys
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

LIBRARIES = frozenset(
    {"comfy", "comfy_aimdo", "comfy_extras", "comfy_kitchen", "einops", "torch", "torchvision"}
)
STANDARD = sys.stdlib_module_names | {"builtins", ""}
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


Place = tuple[str, str]  # a module, and a name that it binds


@dataclass(frozen=True)
class PythonFile:
    """The content of a module's file. ``bound`` maps a name to the statements of the module that
    bind it. ``imported`` maps a name to (module, name there) of each import of that name, outermost
    imports first, imports in functions included; the name there is empty if it is the module
    itself. ``all_of`` are modules whose names are all imported. ``rest`` are the other statements
    of the module as text, such as a loop that sets methods.
    """

    bound: Mapping[str, Sequence[ast.stmt]]
    imported: Mapping[str, Sequence[Place]]
    all_of: Sequence[str]
    rest: Sequence[str]

    @property
    def roots(self) -> frozenset[str]:
        """Returns the first parts of the names of imported modules."""
        named = {module for places in self.imported.values() for module, _ in places}
        return frozenset(module.partition(".")[0] for module in {*named, *self.all_of})


NOTHING = PythonFile({}, {}, (), ())


class MethodCode(NamedTuple):
    """A method: ``assigned`` are the attributes of its object that it assigns, ``named`` all
    attributes that it names.
    """

    name: str
    assigned: frozenset[str]
    named: frozenset[str]


def host_folder() -> Path:
    """Returns the folder of the ComfyUI that runs here."""
    import comfy

    return Path(comfy.__path__[0]).resolve().parent


def module_of(thing: Any) -> types.ModuleType | None:
    """Returns a module itself, or the module of a function or class; None if it has no file."""
    name = getattr(thing, "__module__", None) or ""
    module = thing if isinstance(thing, types.ModuleType) else sys.modules.get(name)
    return module if getattr(module, "__file__", None) is not None else None


def root_of(thing: Any) -> str:
    """Returns the name of the package that a class or a function belongs to."""
    return str(getattr(thing, "__module__", None) or "").partition(".")[0]


def attribute_of(module: types.ModuleType, name: str) -> Any:
    """Returns a module's attribute by a dotted name; None if there is none."""
    found: Any = module
    for part in name.split("."):
        found = getattr(found, part, None)
    return found


def is_code(value: Any) -> bool:
    return callable(value) or isinstance(value, (staticmethod, classmethod, property))


def compiled_elsewhere(value: Any, trusted: frozenset[str]) -> Any:
    """Returns the function, at any depth of decorators, that was compiled outside of all trusted
    packages; None if there is none.
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
    """Yields the functions of a module, or of a class and the classes in it, without their
    decorators. A function yields itself.
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
    """Returns the names that a code object looks up, and those inside it."""
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
    """Returns a function of a module whose code is no longer in the module's file, of this hash."""
    known = _code_set(str(module.__file__), hash_)
    for function in functions_of(module):
        is_of_file = function.__globals__ is vars(module) and function.__code__.co_filename[:1] != "<"
        if is_of_file and function.__code__ not in known:
            return function
    return None


@lru_cache(maxsize=64)
def _code_set(file: str, hash_: str) -> frozenset[types.CodeType]:
    return frozenset(codes_in(file, hash_))


# -- the text of a file


def python_file(module: types.ModuleType | None) -> PythonFile:
    """Returns a module's file as it was when it was first asked for."""
    path = getattr(module, "__file__", None)
    if module is None or path is None or not path.endswith(".py"):
        return NOTHING
    return _read_once(Path(path), module.__package__ or "")


def read_module(path: Path, package: str) -> PythonFile:
    """Returns a module's file. ``package`` is the package of the module. Raises OSError,
    SyntaxError, ValueError.
    """
    tree = ast.parse(path.read_bytes())
    bound: dict[str, list[ast.stmt]] = {}
    rest: list[ast.AST] = []
    waiting = list(tree.body)
    while waiting:
        node = waiting.pop(0)
        if isinstance(node, (*FUNCTIONS, ast.ClassDef)):
            bound.setdefault(node.name, []).append(node)
        elif isinstance(node, (ast.Assign, ast.AnnAssign, ast.AugAssign)):
            for one in node.targets if isinstance(node, ast.Assign) else [node.target]:
                for name in (inner.id for inner in ast.walk(one) if isinstance(inner, ast.Name)):
                    bound.setdefault(name, []).append(node)
        elif isinstance(node, (ast.If, ast.Try, ast.With)):
            rest += [node.test] if isinstance(node, ast.If) else []
            inner = [node, *getattr(node, "handlers", [])]
            waiting += [
                one
                for outer in inner
                for part in ("body", "orelse", "finalbody")
                for one in getattr(outer, part, [])
            ]
        elif not isinstance(node, (ast.Import, ast.ImportFrom)) and not _is_docstring([node]):
            rest.append(node)
    imported: dict[str, list[Place]] = {}
    for node in ast.walk(tree):
        for name, place in _imports(node, package):
            imported.setdefault(name, []).append(place)
    all_of = [module for module, _ in imported.pop("*", [])][::-1]
    return PythonFile(bound, imported, all_of, [tree_text(node) for node in rest])


_read_once = lru_cache(maxsize=64)(read_module)


def _imports(node: ast.AST, package: str) -> Iterator[tuple[str, Place]]:
    """Yields each name that an import binds, and the place that it refers to."""
    if isinstance(node, ast.Import):
        for one in node.names:
            first = one.name.partition(".")[0]
            yield one.asname or first, (one.name if one.asname else first, "")
    elif isinstance(node, ast.ImportFrom):
        above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
        where = ".".join([*above, *([node.module] if node.module else [])])
        for one in node.names:
            yield one.asname or one.name, (where, one.name)


def tree_text(node: ast.AST) -> str:
    """Returns a syntax tree as text, without docstrings, and without empty fields, because later
    Pythons have more of them.
    """
    words: list[str] = []

    def visit(value: object) -> None:
        if isinstance(value, ast.AST):
            words.append(type(value).__name__)
            for name in value._fields:
                field = getattr(value, name, None)
                if name == "body" and isinstance(field, list) and _is_docstring(field[:1]):
                    field = field[1:]
                if field not in (None, []) and name not in ("ctx", "kind", "type_comment"):
                    words.append(name)
                    visit(field)
            words.append(")")
        elif isinstance(value, list):
            for one in value:
                visit(one)
            words.append("]")
        else:
            words.append(repr(value))

    visit(node)
    return " ".join(words)


def _is_docstring(first: Sequence[ast.AST]) -> bool:
    return any(
        isinstance(one, ast.Expr) and isinstance(one.value, ast.Constant) and isinstance(one.value.value, str)
        for one in first
    )


# -- what the methods of a class assign


def _method(node: ast.FunctionDef | ast.AsyncFunctionDef) -> MethodCode:
    own = node.args.args[0].arg if node.args.args else ""
    named = frozenset(one.attr for one in ast.walk(node) if isinstance(one, ast.Attribute))
    return MethodCode(node.name, frozenset(_assigned(node, own)), named)


def _assigned(method: ast.AST, own: str) -> Iterator[str]:
    """Yields the attributes of ``own`` that are assigned there, or whose items are."""
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


def _methods_of(kind: type) -> tuple[list[MethodCode], list[MethodCode]]:
    """Returns the methods of a class of ComfyUI's: ``__init__`` with the methods that it calls, and
    the others.
    """
    own = [one for one in kind.__mro__ if one.__module__.startswith("comfy.")]
    nodes = [node for one in own for node in _class_of(one.__qualname__, python_file(module_of(one)))]
    methods = [_method(one) for node in nodes for one in node.body if isinstance(one, FUNCTIONS)]
    building, waiting = set(), {"__init__"}
    while waiting:
        name = waiting.pop()
        building.add(name)
        waiting |= {other for method in methods if method.name == name for other in method.named} - building
    first = [method for method in methods if method.name in building]
    return first, [method for method in methods if method.name not in building]


def _class_of(name: str, file: PythonFile) -> list[ast.ClassDef]:
    """Returns the statements by which a file makes a class, by its name with dots."""
    first, *inside = name.split(".")
    found = list(file.bound.get(first, ()))
    for inner in inside:
        found = [
            one
            for outer in found
            if isinstance(outer, ast.ClassDef)
            for one in outer.body
            if isinstance(one, ast.ClassDef) and one.name == inner
        ]
    return [one for one in found if isinstance(one, ast.ClassDef)]
