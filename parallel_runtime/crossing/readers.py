"""Whose code of what ranks run may read an option of a MODEL: code that has the option's name, or a
part of it as code that puts names together.
"""

from __future__ import annotations

import re
import sys
import types
from collections.abc import Collection, Iterator, Sequence
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ..refusals import patch_name
from ..watch.fingerprint import DEEP, host_files
from ..watch.python_file import (
    STANDARD,
    codes_in,
    file_hash,
    functions_of,
    host_folder,
    module_of,
    python_file,
)
from .code import CUSTOM_NODES, HOST_FOLDERS, name_of

EXTRAS = HOST_FOLDERS[-1]
LIBRARIES_IN = {"site-packages", "dist-packages"}
SHORTEST = 3  # characters of a part of a name that says anything
NAMES = re.compile(r"\w+(?:[\s,]+\w+)+")  # several in one text
PLACES = re.compile(r"\{[^{}]*\}|%(?:\(\w*\))?[-#0 +.\d]*[a-zA-Z]")  # of what a text is filled with


class OptionReaders:
    """What ranks run of a transformer's class, and of nodes: ``code`` has functions and classes,
    ``taken`` the objects that bring them, taken apart.
    """

    def __init__(self, transformer: type, code: Sequence[Any], taken: Any):
        self._transformer = transformer
        self._code = code
        self._taken = taken
        self.of = cache(self._of)

    def _of(self, option: Any) -> str:
        """Returns whose code may read the option, to be told; empty where none may. For one that is
        no text ComfyUI's transformers do not ask.
        """
        if not isinstance(option, str):
            return patch_name(self._code[0]) if self._code else ""
        words = words_of_class(name_of(self._transformer))
        if not words or is_asked_for(option, words):
            return self._transformer.__name__
        if self._code and is_asked_for(option, {*words_of_code(self._code), *texts_in(self._taken)}):
            return patch_name(self._code[0])
        return ""


def is_asked_for(option: str, words: Collection[str]) -> bool:
    """True if one of ``words`` is the option's name, with or without a number, or begins or ends
    it, as in ``"its_" + name`` and ``"its_%s" % name``, or has it among several.
    """
    without = option.rstrip("0123456789")
    parts = [part for word in words for part in PLACES.split(word) if len(part) >= SHORTEST]
    return (
        option in words
        or (len(without) >= SHORTEST and without in words)
        or any(option in re.findall(r"\w+", word) for word in words if NAMES.fullmatch(word))
        or any(
            (part[-1] == "_" and option.startswith(part))
            or (part[0] == "_" and (option.endswith(part) or (part[-1] == "_" and part in option)))
            for part in parts
        )
    )


@cache
def words_of_class(kind: str) -> frozenset[str]:
    """Returns the words in what a class of ComfyUI's, ``module:Class``, may run; none where its
    files do not have the class.
    """
    return host_files(host_folder()).words(kind)


def words_of_code(things: Sequence[Any]) -> set[str]:
    """Returns the words in the modules of these functions and classes, and in those that they name,
    at any depth, but for libraries and for what of ComfyUI no transformer runs.
    """
    words, seen = set[str](), set[str]()
    waiting = [module_of(thing) for thing in things]
    while waiting:
        module = waiting.pop()
        if module is None or module.__name__ in seen or not is_read(module):
            continue
        seen.add(module.__name__)
        codes = codes_in(str(module.__file__), file_hash(Path(str(module.__file__))))
        words.update(words_held(module))
        words.update(word for code in codes for word in (*texts_in(code.co_consts), *code.co_varnames))
        if not module.__name__.startswith(DEEP):
            waiting += named_in(module, codes)
    return words


def named_in(module: types.ModuleType, codes: Sequence[types.CodeType]) -> Iterator[types.ModuleType | None]:
    """Yields the modules that have what a module names, that its code imports as it runs, or that
    its code names from ``comfy`` on.
    """
    names = {name for code in codes for name in code.co_names}
    inside = [one for one in list(sys.modules) if one.startswith(DEEP) and names >= {*one.split(".")[1:]}]
    found = [module_of(value) for value in vars(module).values()]
    yield from (*found, *(module_of(sys.modules.get(one)) for one in inside))
    for where, name in python_file(module).imports:
        yield module_named(f"{where}.{name}") or module_named(where)


def module_named(name: str) -> types.ModuleType | None:
    """Returns a module; of a package, one that nobody has imported yet as an empty one that has its
    file.
    """
    if name in sys.modules:
        return module_of(sys.modules[name])
    root, *inside = name.split(".")
    for folder in getattr(sys.modules.get(root), "__path__", ()) if inside else ():
        path = Path(folder, *inside)
        for file in (path.with_name(f"{path.name}.py"), path / "__init__.py"):
            if file.is_file():
                made = types.ModuleType(name)
                made.__file__ = str(file)
                return made
    return None


def words_held(module: types.ModuleType) -> Iterator[str]:
    """Yields the texts that a module's values and classes have by now, whichever code put them
    together, and the names of its classes, their fields and its functions.
    """
    own = {name: value for name, value in vars(module).items() if not name.startswith("__")}
    yield from texts_in([*own.values()])
    for kind in own.values():
        if isinstance(kind, type) and kind.__module__ == module.__name__:
            yield from texts_in([kind.__name__, vars(kind)])
    for function in functions_of(module):
        if function.__module__ == module.__name__:
            yield from texts_in([function.__name__, function.__defaults__, function.__kwdefaults__])


def is_read(module: types.ModuleType) -> bool:
    """True for modules of nodes, and for those of ComfyUI that transformers run."""
    file = Path(str(module.__file__))
    if module.__name__.startswith(DEEP):
        return True
    is_library = module.__name__.partition(".")[0] in STANDARD or LIBRARIES_IN & {*file.parts}
    of_host = file.is_relative_to(host_folder()) and not {EXTRAS, CUSTOM_NODES} & {*file.parts}
    return not is_library and not of_host and file.suffix == ".py"


def texts_in(value: Any) -> Iterator[str]:
    """Yields the texts in plain data, which may hold itself."""
    waiting, seen = [value], dict[int, Any]()
    while waiting:
        one = waiting.pop()
        if isinstance(one, str):
            yield one
        elif isinstance(one, (dict, MappingProxyType, list, tuple, set, frozenset)) and id(one) not in seen:
            seen[id(one)] = one
            waiting += [*one, *one.values()] if isinstance(one, (dict, MappingProxyType)) else one
