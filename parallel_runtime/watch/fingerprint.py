"""What a transformer's forward may run of ComfyUI's code, told by ComfyUI's files alone: nothing is
imported, so that another ComfyUI's can be told as well.

A class name is no identity: ComfyUI releases weekly, and another version of a class may call its
blocks otherwise than the class's token plan says. A function is told by the syntax tree of its
source without docstrings, which is the same under every Python that can read it.
"""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path

from ..errors import Refused
from ..families import kept_by
from .host_code import FOLLOWED
from .python_file import FUNCTIONS

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
Place = tuple[str, str]  # a module, and a name that it binds


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
class SourceFile:
    """A module by its file. ``bound``: name -> the statements of the module that bind it.
    ``imported``: name -> the module that it comes from, and its name there, empty for the module;
    those of functions too. ``all_of``: modules of which all names are imported. ``rest``: what the
    module runs beside, such as a loop that sets methods, as text.
    """

    bound: Mapping[str, Sequence[ast.stmt]]
    imported: Mapping[str, Place]
    all_of: Sequence[str]
    rest: list[str]


@dataclass(frozen=True)
class Told:
    """What a module binds to a name: its ``digests``, the ``places`` that its code names, and the
    ``words`` in it by which it may ask for an entry of a dictionary: texts and names of parameters.
    """

    digests: Mapping[str, str]
    places: Sequence[Place]
    words: frozenset[str]


class HostFiles:
    """The Python files of a ComfyUI in a folder. Each is read once, and each place in it."""

    def __init__(self, root: Path):
        self._root = root
        self._read: dict[str, SourceFile | None] = {}
        self._told: dict[Place, Told] = {}

    def fingerprint(self, kind: str) -> Fingerprint:
        """Returns the fingerprint of a class, ``module:Class``: of its code, and of all of ComfyUI
        that this code names, at any depth; one without functions where the files do not have that
        class. Raises Refused where a file cannot be read.
        """
        functions: dict[str, str] = {}
        for told in self._reached(kind):
            functions.update(told.digests)
        return Fingerprint(kind, functions)

    def words(self, kind: str) -> frozenset[str]:
        """Returns the words of all that code, likewise; none where the files do not have the
        class.
        """
        return frozenset[str]().union(*(told.words for told in self._reached(kind)))

    def _reached(self, kind: str) -> Iterator[Told]:
        module, _, name = kind.partition(":")
        file = self._file(module)
        if file is None or name not in file.bound:
            return
        kept = kept_by(kind)
        # A node gives the cache to the model, whose code does not name it
        cache = tuple(kept.cache.split(":")) if kept is not None else (module, name)
        reached: set[Place] = set()
        waiting: list[Place] = [(module, name), (cache[0], cache[1]), *EVERYWHERE]
        while waiting:
            place = waiting.pop()
            if place not in reached and place[0].startswith("comfy."):
                reached.add(place)
                if place not in self._told:
                    self._told[place] = self._tell(*place)
                yield self._told[place]
                waiting += self._told[place].places

    def classes_in(self, module: str) -> set[str]:
        """Returns the names of the classes of a module; none where the files do not have it."""
        file = self._file(module)
        bound = {} if file is None else file.bound
        return {name for name, found in bound.items() if any(isinstance(one, ast.ClassDef) for one in found)}

    def _tell(self, module: str, bound: str) -> Told:
        file = self._file(module)
        if file is None:
            return Told({}, (), frozenset())
        statements, is_followed = file.bound.get(bound, ()), module.startswith(DEEP)
        texts: dict[str, list[str]] = {f"{module}:": file.rest} if is_followed and file.rest else {}
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
        return Told({name: _short(of_part) for name, of_part in texts.items()}, places, frozenset(words))

    def _place_of(self, module: str, file: SourceFile, dotted: tuple[str, ...]) -> Place | None:
        """Returns what a name with dots in a module's code stands for; None for no name of a
        module's.
        """
        if dotted[0] in file.bound:
            return module, dotted[0]
        if dotted[0] not in file.imported:
            others = ((where, self._file(where)) for where in file.all_of)
            return next(
                ((where, dotted[0]) for where, other in others if other and dotted[0] in other.bound), None
            )
        where, name = file.imported[dotted[0]]
        parts = [*([name] if name else []), *dotted[1:]]
        while parts and self._path(f"{where}.{parts[0]}") is not None:
            where = f"{where}.{parts.pop(0)}"
        return (where, parts[0]) if parts else None

    def _path(self, module: str) -> Path | None:
        path = self._root.joinpath(*module.split("."))
        file = path.with_name(f"{path.name}.py")
        return file if file.is_file() else path / "__init__.py" if path.is_dir() else None

    def _file(self, module: str) -> SourceFile | None:
        if module not in self._read:
            path = self._path(module)
            package = module if path is not None and path.name == "__init__.py" else module.rpartition(".")[0]
            try:
                found = _source_file(path, package) if path is not None and path.is_file() else None
            except (OSError, SyntaxError, ValueError) as error:
                raise Refused(
                    f"ComfyUI's file {path} cannot be read ({error}): mend it, and restart ComfyUI."
                ) from error
            self._read[module] = found
        return self._read[module]


def _source_file(path: Path, package: str) -> SourceFile:
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
    # Of the same name, the one that stands further out
    imports = [one for node in ast.walk(tree) for one in _imports(node, package)][::-1]
    imported = {name: place for name, place in imports if name != "*"}
    all_of = [place[0] for name, place in imports if name == "*"]
    return SourceFile(bound, imported, all_of, [tree_text(node) for node in rest])


def _libraries(file: SourceFile, names: Iterable[tuple[str, ...]]) -> list[str]:
    """Returns which of these names are those of other libraries than ComfyUI, and what they stand
    for.
    """
    heads = {dotted[0] for dotted in names} & file.imported.keys()
    return sorted(
        f"{head} is {':'.join(file.imported[head])}"
        for head in heads
        if not file.imported[head][0].startswith("comfy")
    )


def _imports(node: ast.AST, package: str) -> Iterator[tuple[str, Place]]:
    """Yields each name that an import binds, and what it stands for."""
    if isinstance(node, ast.Import):
        for one in node.names:
            first = one.name.partition(".")[0]
            yield one.asname or first, (one.name if one.asname else first, "")
    elif isinstance(node, ast.ImportFrom):
        above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
        where = ".".join([*above, *([node.module] if node.module else [])])
        for one in node.names:
            yield one.asname or one.name, (where, one.name)


@lru_cache(maxsize=64)
def imported_by(module: str, file: str, _hash: str) -> frozenset[tuple[str, str]]:
    """Returns what a module's file imports, in functions too: module and name."""
    package = module if Path(file).name == "__init__.py" else module.rpartition(".")[0]
    tree = ast.parse(Path(file).read_bytes())
    return frozenset(place for node in ast.walk(tree) for _, place in _imports(node, package))


def _parts(node: ast.stmt, name: str) -> Iterator[tuple[str, ast.AST]]:
    """Yields the methods of a class, and what is left of the class; anything else as it is."""
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


def tree_text(node: ast.AST) -> str:
    """Returns a syntax tree as text, without docstrings, and without what is empty there: later
    Pythons have more fields.
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


def _short(texts: Sequence[str]) -> str:
    return hashlib.blake2b("\n".join(texts).encode(), digest_size=4).hexdigest()
