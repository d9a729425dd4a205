"""Refer to code by the file that has it, so that a rank can import its own copy: a file of
ComfyUI's, or of a node pack that the user lets ranks import. Nothing but the name crosses, and the
hash of the file, which must be the same on both sides.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import os
import sys
import types
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from ..errors import Refused

PACKS_VARIABLE = "PIPEMESH_PATCH_PACKS"
HOST, TORCH = "ComfyUI", "torch"  # roots of references; others are folders of node packs
HOST_FOLDERS = ("comfy", "comfy_extras")
CUSTOM_NODES = "custom_nodes"
PACKAGE = "pipemesh_pack"  # a node pack's name in a rank; its own top level, with its nodes, is not run there

Reference = list  # [root, path below it, hash of the file, name in the module or number of the code object]


class NotReferable(Exception):
    """Code that ranks may not import; says why, and what to do."""


def named(thing: Any) -> Reference:
    """In the UI: refers to a class, or to a function that its module has under its name. Raises
    NotReferable.
    """
    module = _module_of(thing)
    if attribute_of(module, thing.__qualname__) is not thing:
        raise NotReferable(f"{module.__name__} has it under no name")
    return [*place_of(module), thing.__qualname__]


def name_of(thing: Any) -> str:
    """Returns the name of a function, or of an object's class, as plans have it: that of its module
    as an import has it, wherever it was loaded from, or of its node pack in small letters; and its
    own.
    """
    thing = getattr(thing, "__func__", thing)
    kind = thing if hasattr(thing, "__qualname__") else type(thing)
    where = kind.__module__
    file = getattr(sys.modules.get(where), "__file__", None)
    parts = Path(file or where).with_suffix("").parts
    if CUSTOM_NODES in parts:
        where = parts[parts.index(CUSTOM_NODES) + 1].lower()
    elif file is not None and where.startswith(os.sep):  # as ComfyUI's server loads its extra nodes
        where = ".".join(parts[parts.index(HOST_FOLDERS[-1]) :])
    return f"{where}:{kind.__qualname__}"


def compiled(function: types.FunctionType) -> Reference:
    """In the UI: refers to the code of a function, which its module need not have under a name: one
    that another function made. Raises NotReferable.
    """
    module = _module_of(function)
    place = place_of(module)
    codes = codes_in(str(module.__file__), place[2])
    if function.__code__ not in codes:
        raise NotReferable(f"the file of {module.__name__} has no such code by now")
    return [*place, codes.index(function.__code__)]


def resolved(reference: Reference) -> Any:
    """In a rank: returns what ``named`` or ``compiled`` (a code object) refers to. Raises
    Refused.
    """
    module = imported(reference[:3])
    name = reference[3]
    return (
        codes_in(str(module.__file__), reference[2])[name]
        if isinstance(name, int)
        else attribute_of(module, name)
    )


def imported(place: Reference) -> types.ModuleType:
    """In a rank: returns the module of a reference, imported from this machine's own copy. Raises
    Refused where that is another one, or none that ranks may import.
    """
    root, path, expected = place
    if root == TORCH and path.partition(".")[0] == TORCH:
        if expected != torch.__version__:
            raise Refused(
                f"A rank has torch {torch.__version__}, ComfyUI has {expected}: install the same version on"
                " every machine."
            )
        return importlib.import_module(path)
    folder = host_folder() if root == HOST else Path(root)
    if root != HOST and folder not in packs():
        raise Refused(
            f"A rank may not import the node pack at {folder}: name it in {PACKS_VARIABLE} on every machine."
        )
    if ".." in Path(path).parts or (root == HOST and Path(path).parts[0] not in HOST_FOLDERS):
        raise Refused(
            f"A rank imports no {path} of {root}: install the same version of PipeMesh on every machine."
        )
    file = folder / path
    if not file.is_file() or file_hash(file) != expected:
        raise Refused(
            f"{file} is missing here, or another version than ComfyUI runs: install the same one and restart"
            " ComfyUI."
        )
    dotted = ".".join(Path(path).with_suffix("").parts).removesuffix(".__init__")
    if root != HOST:
        package = f"{PACKAGE}_{hashlib.blake2b(root.encode(), digest_size=8).hexdigest()}"
        if package not in sys.modules:
            sys.modules[package] = types.ModuleType(package)
            sys.modules[package].__path__ = [str(folder)]
        dotted = f"{package}.{dotted}"
    try:
        return importlib.import_module(dotted)
    except ImportError as error:
        raise Refused(f"{file} cannot be imported in a rank ({error}): install what it requires.") from error


def host_folder() -> Path:
    import comfy

    return Path(comfy.__path__[0]).resolve().parent


def packs() -> tuple[Path, ...]:
    """Returns the folders of the node packs that ranks may import: their names in custom_nodes,
    which may lie in a base directory of its own, or paths, with commas between them.
    """
    import folder_paths

    wanted = [name.strip() for name in os.environ.get(PACKS_VARIABLE, "").split(",") if name.strip()]
    return tuple(
        Path(os.path.join(folder, name)).resolve()
        for name in wanted
        for folder in folder_paths.get_folder_paths(CUSTOM_NODES)
    )


def file_hash(file: Path) -> str:
    stat = file.stat()
    return _hash_of(str(file), stat.st_mtime_ns, stat.st_size)


@lru_cache(maxsize=256)
def _hash_of(file: str, _modified: int, _size: int) -> str:
    return hashlib.blake2b(Path(file).read_bytes(), digest_size=16).hexdigest()


@lru_cache(maxsize=64)
def codes_in(file: str, _hash: str) -> list[types.CodeType]:
    """Returns all code objects of a file, in the order in which they stand in it."""

    def inside(code: types.CodeType) -> Iterator[types.CodeType]:
        for constant in code.co_consts:
            if isinstance(constant, types.CodeType):
                yield constant
                yield from inside(constant)

    return list(inside(compile(Path(file).read_bytes(), file, "exec", dont_inherit=True)))


def module_of(thing: Any) -> types.ModuleType | None:
    """Returns the module that has a function or a class, where it was imported from a file."""
    module = sys.modules.get(getattr(thing, "__module__", None) or "")
    return module if getattr(module, "__file__", None) is not None else None


def is_of_pack(module: types.ModuleType | None) -> bool:
    """Returns whether a module is of a node pack that ranks may import."""
    file = getattr(module, "__file__", None)
    return file is not None and any(Path(file).resolve().is_relative_to(folder) for folder in packs())


def _module_of(thing: Any) -> types.ModuleType:
    module = module_of(thing)
    if module is None:
        raise NotReferable(f"{thing.__module__} has no file")
    return module


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
        inside = (
            f"{thing.__module__}.{thing.__qualname__}." if isinstance(thing, type) else f"{thing.__name__}."
        )
        for value in list(vars(thing).values()):
            if not isinstance(value, type) or f"{value.__module__}.{value.__qualname__}".startswith(inside):
                yield from () if isinstance(value, types.ModuleType) else functions_of(value)


def place_of(module: types.ModuleType) -> Reference:
    """In the UI: refers to a module's file. Raises NotReferable, also for a file that was edited
    since it was imported: a rank would import other code than ComfyUI runs.
    """
    place = _place_of(module)
    if place[0] != TORCH:
        known = _all_codes(str(module.__file__), place[2])
        for function in functions_of(module):
            is_of_file = function.__globals__ is vars(
                module
            ) and not function.__code__.co_filename.startswith("<")
            if is_of_file and function.__code__ not in known:
                name = function.__qualname__
                raise NotReferable(
                    f"{module.__file__} was edited after ComfyUI imported it ({name} differs): restart"
                    " ComfyUI"
                )
    return place


@lru_cache(maxsize=64)
def _all_codes(file: str, hash_: str) -> frozenset[types.CodeType]:
    return frozenset(codes_in(file, hash_))


def _place_of(module: types.ModuleType) -> Reference:
    if module.__name__.partition(".")[0] == TORCH:
        return [TORCH, module.__name__, str(torch.__version__)]
    file = Path(str(module.__file__)).resolve()
    host = host_folder()
    if any(file.is_relative_to(host / folder) for folder in HOST_FOLDERS):
        return [HOST, str(file.relative_to(host)), file_hash(file)]
    for folder in packs():
        if file.is_relative_to(folder):
            return [str(folder), str(file.relative_to(folder)), file_hash(file)]
    raise NotReferable(
        f"ranks import code of ComfyUI and of node packs that you name in {PACKS_VARIABLE}, and {file} is"
        " neither"
    )


def attribute_of(module: types.ModuleType, name: str) -> Any:
    """Returns what a module has under a name with dots; None for nothing."""
    found: Any = module
    for part in name.split("."):
        found = getattr(found, part, None)
    return found
