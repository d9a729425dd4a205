"""Whose code of what ranks run may read an option of a MODEL: code that has the option's name, or a
part of it as code that puts names together.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Collection, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from ..refusals import patch_name
from ..watch.fingerprint import DEEP, HostFiles
from ..watch.python_file import STANDARD, codes_in, file_hash, module_of
from .code import CUSTOM_NODES, HOST_FOLDERS, host_folder, name_of

EXTRAS = HOST_FOLDERS[-1]
LIBRARIES_IN = {"site-packages", "dist-packages"}
SHORTEST = 3  # characters of a part of a name that says anything


class Readers:
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
        if not words or is_named(option, words):
            return self._transformer.__name__
        if self._code and is_named(option, {*words_of_code(self._code), *texts_in(self._taken)}):
            return patch_name(self._code[0])
        return ""


def is_named(option: str, words: Collection[str]) -> bool:
    """True where one of ``words`` is the option's name, or begins or ends it, as in ``"its_" +
    name``.
    """
    parts = [word for word in words if len(word) >= SHORTEST and "_" in (word[0], word[-1])]
    return option in words or any(
        (word[-1] == "_" and option.startswith(word)) or (word[0] == "_" and option.endswith(word))
        for word in parts
    )


@cache
def words_of_class(kind: str) -> frozenset[str]:
    """Returns the words in what a class of ComfyUI's, ``module:Class``, may run; none where its
    files do not have the class.
    """
    return HostFiles(host_folder()).words(kind)


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
        words.update(value for value in vars(module).values() if isinstance(value, str))
        words.update(word for code in codes for word in (*texts_in(code.co_consts), *code.co_varnames))
        if not module.__name__.startswith(DEEP):
            waiting += named_in(module, codes)
    return words


def named_in(module: types.ModuleType, codes: Sequence[types.CodeType]) -> Iterator[types.ModuleType | None]:
    """Yields the modules that have what a module names, or that its code names from ``comfy``
    on.
    """
    names = {name for code in codes for name in code.co_names}
    inside = [one for one in list(sys.modules) if one.startswith(DEEP) and names >= {*one.split(".")[1:]}]
    found = [module_of(value) for value in vars(module).values()]
    yield from (*found, *map(sys.modules.get, inside))


def is_read(module: types.ModuleType) -> bool:
    """True for modules of nodes, and for those of ComfyUI that transformers run."""
    file = Path(str(module.__file__))
    if module.__name__.startswith(DEEP):
        return True
    is_library = module.__name__.partition(".")[0] in STANDARD or LIBRARIES_IN & {*file.parts}
    of_host = file.is_relative_to(host_folder()) and not {EXTRAS, CUSTOM_NODES} & {*file.parts}
    return not is_library and not of_host and file.suffix == ".py"


def texts_in(value: Any) -> Iterator[str]:
    """Yields the texts in plain data."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        yield from texts_in([*value.items()])
    elif isinstance(value, (list, tuple, set, frozenset)):
        for one in value:
            yield from texts_in(one)
