"""Finds the code in the ranks that may read an option of a MODEL: ComfyUI's code that has the
option's name, and any code of a node pack.
"""

from __future__ import annotations

import re
import sys
import types
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from ..refusals import patch_name
from ..watch.fingerprint import host_files
from ..watch.python_file import host_folder, module_of, root_of
from .code import KERNELS, TORCH, is_of_host, name_of

DOTTED = re.compile(r"\bcomfy\w*(?:\.\w+)+")  # names of modules, among others


class OptionReaders:
    """The code that ranks run of a transformer's class, and of nodes: the functions and classes
    ``code``.
    """

    def __init__(self, transformer: type, code: Sequence[Any]):
        self._transformer = transformer
        self._code = code
        self.of = cache(self._of)

    def _of(self, option: Any) -> str:
        """Returns the name of the code that may read the option, for an error; empty if none may.
        ComfyUI's transformers never read an option whose name is no text.
        """
        if isinstance(option, str) and may_ask_for(name_of(self._transformer), option):
            return self._transformer.__name__
        return next((patch_name(one) for one in self._code if may_read(one, option)), "")


def may_ask_for(kind: str, option: str) -> bool:
    """True if the code that a class of ComfyUI's, ``module:Class``, may run has the option's name,
    with or without the number at its end. Also true if ComfyUI's files do not have the class.
    """
    words = words_of_class(kind)
    return not words or not words.isdisjoint({option, option.rstrip("0123456789")})


@cache
def words_of_class(kind: str) -> frozenset[str]:
    """Returns the words in the code that a class of ComfyUI's, ``module:Class``, may run; empty if
    its files do not have the class.
    """
    return host_files(host_folder()).words(kind)


def may_read(thing: Any, option: Any) -> bool:
    """True for a function or class of a node pack, which may put names together. For one of
    ComfyUI's, true if its file, or a file of ComfyUI's that it names, has the option's name, with
    or without the number at its end. torch and kernels read no option.
    """
    if root_of(thing) in (TORCH, *KERNELS):
        return False
    module = module_of(thing)
    if module is None or not is_of_host(_file_of(module)) or not isinstance(option, str):
        return True
    inside = map(sys.modules.get, DOTTED.findall(_file_of(module).read_text(encoding="utf-8")))
    files = {*map(_file_of, (module, *map(module_of, vars(module).values()), *inside))}
    name = re.compile(rf"\b{re.escape(option.rstrip('0123456789') or option)}\d*\b")
    return any(name.search(one.read_text(encoding="utf-8")) for one in files if is_of_host(one))


def _file_of(module: types.ModuleType | None) -> Path:
    return Path(str(getattr(module, "__file__", "")))
