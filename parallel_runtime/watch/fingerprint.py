"""Finds all of ComfyUI's code that a transformer's forward may run, by ComfyUI's files alone:
nothing is imported, so it works for another ComfyUI as well.

A class name is no identity: ComfyUI releases weekly, and another version of a class may call its
blocks otherwise than the class's token plan says. A function is identified by the syntax tree of
its source without docstrings, which is the same under every Python that can read it.
"""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

from ..errors import Refused
from ..families import kept_by
from .python_file import FUNCTIONS, Place, PythonFile, read_module, tree_text

# What a transformer's forward runs
FOLLOWED = ("comfy.ldm.", "comfy.ops", "comfy.quant_ops", "comfy.rmsnorm", "comfy.float")
# Modules whose code is followed; of ComfyUI's others, what that code names is looked at and no more
DEEP = (*FOLLOWED, "comfy.patcher_extension", "comfy.model_prefetch", "comfy.text_encoders.")
# What every model runs although its code does not name it: ``operations`` is an argument
EVERYWHERE = (
    *(
        ("comfy.ops", name)
        for name in (
            *("cast_bias_weight", "disable_weight_init", "fp8_ops", "manual_cast"),
            *("mixed_precision_ops", "pick_operations"),
        )
    ),
    ("comfy.model_management", "cast_to"),
    ("comfy.patcher_extension", "WrapperExecutor"),
)


@dataclass(frozen=True)
class Fingerprint:
    """``kind``: ``module:Class``. ``functions``: ``module:qualified name`` -> 8 hex digits. What
    stands in a class beside its methods is under the name of the class.
    """

    kind: str
    functions: Mapping[str, str]

    @property
    def name(self) -> str:
        return self.kind.partition(":")[2]

    @cached_property
    def digest(self) -> str:
        """Returns 16 hex digits over all functions."""
        text = "\n".join(f"{name} {digest}" for name, digest in sorted(self.functions.items()))
        return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


@dataclass(frozen=True)
class BoundName:
    """The code that a module binds to a name: its ``digests``, the ``places`` that its code names,
    the ``names`` by which it looks for them in the module, and the ``words`` in it (texts and names
    of parameters) by which it may ask for an entry of a dictionary.
    """

    digests: Mapping[str, str]
    places: Sequence[Place] = ()
    names: frozenset[str] = frozenset()
    words: frozenset[str] = frozenset()


class HostFiles:
    """The Python files of a ComfyUI in a folder. Each is read once, and each place in it."""

    def __init__(self, root: Path):
        self._root = root
        self._read: dict[str, PythonFile | None] = {}
        self._told: dict[Place, BoundName] = {}

    def fingerprint(self, kind: str) -> Fingerprint:
        """Returns the fingerprint of a class, ``module:Class``: of its code, and of all of
        ComfyUI's code that this code names, at any depth. It has no functions if the files do not
        have that class. Raises Refused if a file cannot be read.
        """
        functions: dict[str, str] = {}
        for told in self.reached(kind).values():
            functions.update(told.digests)
        return Fingerprint(kind, functions)

    def words(self, kind: str) -> frozenset[str]:
        """Returns the words of the same code; empty if the files do not have the class."""
        return frozenset[str]().union(*(told.words for told in self.reached(kind).values()))

    def reached(self, *kinds: str) -> dict[Place, BoundName]:
        """Returns all that these classes may run, by its place; nothing of a class that the files
        do not have.
        """
        waiting: list[Place] = []
        for kind in kinds:
            module, name = split(kind)
            file, kept = self._file(module), kept_by(kind)
            if file is not None and name in file.bound:
                waiting += [(module, name), *EVERYWHERE]
                # A node gives the cache to the model, whose code does not name it
                waiting += [split(kept.cache)] if kept is not None else []
        reached: dict[Place, BoundName] = {}
        while waiting:
            place = waiting.pop()
            if place not in reached and place[0].startswith("comfy."):
                if place not in self._told:
                    self._told[place] = self._tell(*place)
                reached[place] = self._told[place]
                waiting += self._told[place].places
        return reached

    def _tell(self, module: str, bound: str) -> BoundName:
        file = self._file(module)
        if file is None:
            return BoundName({})
        statements, is_followed = file.bound.get(bound, ()), module.startswith(DEEP)
        texts: dict[str, list[str]] = {f"{module}:": [*file.rest]} if is_followed and file.rest else {}
        names: set[tuple[str, ...]] = set()
        words: set[str] = set()
        for statement in statements:
            for part, node in _parts(statement, bound):
                inner = set(_dotted_names(node))
                texts.setdefault(f"{module}:{part}", []).extend([tree_text(node), *_libraries(file, inner)])
                names |= inner
                words.update(_words(node))
        if statements and not is_followed:
            names = set()
        elif not names:
            names = {(bound,)}
        places = [place for name in names if (place := self._place_of(module, file, name))]
        digests = {name: _short(of_part) for name, of_part in texts.items()}
        return BoundName(digests, places, frozenset({bound, *(name[0] for name in names)}), frozenset(words))

    def _place_of(self, module: str, file: PythonFile, dotted: tuple[str, ...]) -> Place | None:
        """Returns the place that a dotted name in a module's code refers to; None if it is no name
        of a module.
        """
        if dotted[0] in file.bound:
            return module, dotted[0]
        if dotted[0] not in file.imported:
            others = ((where, self._file(where)) for where in file.all_of)
            return next(
                ((where, dotted[0]) for where, other in others if other and dotted[0] in other.bound), None
            )
        where, name = file.imported[dotted[0]][0]
        parts = [*([name] if name else []), *dotted[1:]]
        while parts and self._path(f"{where}.{parts[0]}") is not None:
            where = f"{where}.{parts.pop(0)}"
        return (where, parts[0]) if parts else None

    def _path(self, module: str) -> Path | None:
        path = self._root.joinpath(*module.split("."))
        file = path.with_name(f"{path.name}.py")
        return file if file.is_file() else path / "__init__.py" if path.is_dir() else None

    def _file(self, module: str) -> PythonFile | None:
        if module not in self._read:
            path = self._path(module)
            package = module if path is not None and path.name == "__init__.py" else module.rpartition(".")[0]
            try:
                found = read_module(path, package) if path is not None and path.is_file() else None
            except (OSError, SyntaxError, ValueError) as error:
                raise Refused(
                    f"ComfyUI's file {path} cannot be read ({error}): repair the file, and restart ComfyUI."
                ) from error
            self._read[module] = found
        return self._read[module]


@cache
def host_files(root: Path) -> HostFiles:
    """Returns the files of the ComfyUI that runs here, as they were when they were first asked
    for.
    """
    return HostFiles(root)


def split(kind: str) -> Place:
    module, _, name = kind.partition(":")
    return module, name


def _libraries(file: PythonFile, names: Iterable[tuple[str, ...]]) -> list[str]:
    """Returns which of these names come from other libraries than ComfyUI, with their places."""
    heads = {dotted[0] for dotted in names} & file.imported.keys()
    places = {head: file.imported[head][0] for head in heads}
    return sorted(
        f"{head} is {':'.join(place)}" for head, place in places.items() if not place[0].startswith("comfy")
    )


def _parts(node: ast.stmt, name: str) -> Iterator[tuple[str, ast.AST]]:
    """Yields the methods of a class, and the rest of the class; anything else as it is."""
    if not isinstance(node, ast.ClassDef):
        yield name, node
        return
    inner = [one for one in node.body if isinstance(one, (*FUNCTIONS, ast.ClassDef))]
    rest = ast.ClassDef(
        name=node.name,
        bases=node.bases,
        keywords=node.keywords,
        body=[one for one in node.body if one not in inner],
        decorator_list=node.decorator_list,
    )
    yield name, rest
    for one in inner:
        yield from _parts(one, f"{name}.{one.name}")


def _dotted_names(node: ast.AST) -> Iterator[tuple[str, ...]]:
    for one in ast.walk(node):
        parts: list[str] = []
        while isinstance(one, ast.Attribute):
            parts.append(one.attr)
            one = one.value
        if isinstance(one, ast.Name):
            yield (one.id, *reversed(parts))


def _words(node: ast.AST) -> Iterator[str]:
    """Yields the texts in code, and the names of parameters: a function may be given the entries of
    a dictionary by their names.
    """
    for one in ast.walk(node):
        if isinstance(one, ast.Constant) and isinstance(one.value, str):
            yield one.value
        elif isinstance(one, ast.arg):
            yield one.arg


def _short(texts: Sequence[str]) -> str:
    return hashlib.blake2b("\n".join(texts).encode(), digest_size=4).hexdigest()
