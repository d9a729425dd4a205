"""Refers to code by its file, so that a rank can import its own copy: a file of ComfyUI's, or of a
node pack that the user lets ranks import. Only names cross, and the hash of the file.
"""

from __future__ import annotations

import hashlib
import importlib
import os
import sys
import types
from pathlib import Path
from typing import Any

import torch

from ..errors import Refused
from ..watch.python_file import attribute_of, codes_in, edited_function, file_hash, host_folder, module_of

PACKS_VARIABLE = "PIPEMESH_PATCH_PACKS"
HOST, TORCH = "ComfyUI", "torch"  # roots of references; others are folders of node packs
HOST_FOLDERS = ("comfy", "comfy_extras")
# Packages whose attention kernels nodes call; also roots
KERNELS = frozenset({"flash_attn", "flash_attn_interface", "sageattention", "sageattn3", "xformers"})
CUSTOM_NODES = "custom_nodes"
PACKAGE = "pipemesh_pack"  # a node pack's name in a rank; its own top level, with its nodes, is not run there

Reference = list  # [root, path below it, hash of the file, name in the module or number of the code object]


class NotReferable(Exception):
    """Code that ranks may not import; its text says why, and what to do."""


def name_of(thing: Any) -> str:
    """Returns ``module:name`` of a function, or of an object's class, as token plans write it: the
    module's name as an import uses it, wherever it was loaded from; for a node pack, the pack's
    name in small letters.
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


# -- in the UI


def reference_to(thing: Any) -> Reference:
    """Refers to a class, or to a function that its module binds to the function's name. Raises
    NotReferable.
    """
    module = module_of(thing)
    if module is None:
        raise NotReferable(f"{thing.__module__} has no file")
    if attribute_of(module, thing.__qualname__) is not thing:
        raise NotReferable(f"{module.__name__} has it under no name")
    return [*place_of(module), thing.__qualname__]


def compiled(function: types.FunctionType) -> Reference:
    """Refers to the code of a function that another function made. Raises NotReferable."""
    module = module_of(sys.modules.get(function.__globals__.get("__name__", "")))
    if module is None:
        raise NotReferable("its module has no file")
    place = place_of(module)
    codes = codes_in(str(module.__file__), place[2])
    if function.__code__ not in codes:
        raise NotReferable(f"the file of {module.__name__} has no such code by now")
    return [*place, codes.index(function.__code__)]


def place_of(module: types.ModuleType) -> Reference:
    """Refers to a module's file. Raises NotReferable, also if the file was edited since it was
    imported: a rank would import other code than ComfyUI runs.
    """
    root = module.__name__.partition(".")[0]
    if root == TORCH:
        return [TORCH, module.__name__, str(torch.__version__)]
    file = Path(str(module.__file__)).resolve()
    if root in KERNELS:
        return [root, module.__name__, file_hash(file)]
    of_host = is_of_host(file)
    folder = host_folder() if of_host else next(filter(file.is_relative_to, packs()), None)
    if folder is None:
        raise NotReferable(
            f"ranks import code of ComfyUI and of node packs that you name in {PACKS_VARIABLE}, and {file} is"
            " neither"
        )
    hash_ = file_hash(file)
    if (edited := edited_function(module, hash_)) is not None:
        raise NotReferable(
            f"{module.__file__} was edited after ComfyUI imported it ({edited.__qualname__} differs): restart"
            " ComfyUI"
        )
    return [HOST if of_host else str(folder), str(file.relative_to(folder)), hash_]


def is_of_host(file: Path) -> bool:
    """Returns whether a file is ComfyUI's own code, which ranks have too."""
    return any(file.is_relative_to(host_folder() / folder) for folder in HOST_FOLDERS)


def is_of_pack(module: types.ModuleType | None) -> bool:
    """Returns whether a module is of a node pack that ranks may import."""
    file = getattr(module, "__file__", None)
    return file is not None and any(Path(file).resolve().is_relative_to(folder) for folder in packs())


def packs() -> tuple[Path, ...]:
    """Returns the folders of the node packs that ranks may import, from a list with commas: names
    in custom_nodes, which may lie in a base directory of its own, or paths.
    """
    import folder_paths

    wanted = [name.strip() for name in os.environ.get(PACKS_VARIABLE, "").split(",") if name.strip()]
    folders = folder_paths.get_folder_paths(CUSTOM_NODES) if wanted else []
    return tuple(Path(os.path.join(folder, name)).resolve() for name in wanted for folder in folders)


# -- in a rank


def resolved(reference: Reference) -> Any:
    """Returns the object that a reference of ``reference_to`` or ``compiled`` (a code object)
    names. Raises Refused.
    """
    *place, name = reference
    module = imported(place)
    if isinstance(name, int):
        return codes_in(str(module.__file__), place[2])[name]
    return attribute_of(module, name) if name else module


def imported(place: Reference) -> types.ModuleType:
    """Returns the module of a reference, imported from this machine's own copy. Raises Refused if
    that differs, or if ranks may not import it.
    """
    root, path, expected = place
    if root == TORCH and path.partition(".")[0] == TORCH:
        if expected != torch.__version__:
            raise Refused(
                f"A rank has torch {torch.__version__}, ComfyUI has {expected}: install the same version on"
                " every machine."
            )
        return importlib.import_module(path)
    if root in KERNELS and path.partition(".")[0] == root:
        return _kernels(path, expected)
    folder = host_folder() if root == HOST else Path(root)
    if root != HOST and folder not in packs():
        raise Refused(
            f"A rank may not import the node pack at {folder}: name it in {PACKS_VARIABLE} on every machine."
        )
    if ".." in Path(path).parts or (root == HOST and Path(path).parts[0] not in HOST_FOLDERS):
        raise Refused(
            f"A rank cannot import {path} of {root}: install the same version of PipeMesh on every machine."
        )
    file = folder / path
    if not file.is_file() or file_hash(file) != expected:
        raise Refused(
            f"{file} is missing here, or another version than ComfyUI runs: install the same version and"
            " restart ComfyUI."
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


def _kernels(path: str, expected: str) -> types.ModuleType:
    """Returns a module of a package of kernels. Raises Refused."""
    try:
        module = importlib.import_module(path)
        found = file_hash(Path(str(module.__file__)))
    except (ImportError, OSError) as error:
        raise Refused(
            f"A rank cannot import {path} ({error}), the attention kernel that a node uses: install it there."
        ) from error
    if found != expected:
        raise Refused(f"A rank has another version of {path} than ComfyUI: install the same version.")
    return module
