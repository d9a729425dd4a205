"""A reader who searches for a top-level name of the product finds one definition."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PRODUCT = ("parallel_runtime", "pool", "nodes", "launcher")
SEVERAL = {  # name -> the files that may each have one, and why
    "config": (r"parallel_runtime/families/\w+\.py", "a Form names the function of its own family"),
    "main": (r"launcher/(__main__|commands/\w+)\.py|pool/\w+_main\.py", "Python starts each by its file"),
}
TYPE = re.compile(r"[A-Z]\w*[a-z]\w*")  # a constant may be called BYTES in several files


def top_level_names(source: str) -> Iterator[str]:
    """Yields the public functions, classes and named types of a module, but for type variables."""
    for node in ast.parse(source).body:
        match node:
            case ast.ClassDef(name=name) | ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                yield from () if name.startswith("_") else (name,)
            case ast.Assign(value=ast.Call(func=ast.Name(id="TypeVar" | "ParamSpec"))):
                pass
            case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)) if (
                TYPE.fullmatch(name)
            ):
                yield name


def defined_again(sources: Mapping[str, str]) -> dict[str, list[str]]:
    """Returns each name that several files define, and these files."""
    files = defaultdict(list)
    for path, source in sources.items():
        for name in top_level_names(source):
            if name not in SEVERAL or not re.fullmatch(SEVERAL[name][0], path):
                files[name].append(path)
    return {name: paths for name, paths in sorted(files.items()) if len(paths) > 1}


def test_each_top_level_name_is_defined_once() -> None:
    files = [ROOT / "__init__.py", *(file for folder in PRODUCT for file in (ROOT / folder).rglob("*.py"))]
    sources = {file.relative_to(ROOT).as_posix(): file.read_text(encoding="utf-8") for file in sorted(files)}
    assert defined_again(sources) == {}
    for name, (paths, why) in SEVERAL.items():
        found = [path for path in sources if re.fullmatch(paths, path)]
        assert sum(name in top_level_names(sources[path]) for path in found) > 1, f"not needed: {name}, {why}"


def test_a_name_of_two_files_is_found_whatever_it_names() -> None:
    one = "class A: ...\ndef f(): ...\nType = dict[str, int]\nMOST = 1\nT = TypeVar('T')\ndef _own(): ...\n"
    other = "async def A(): ...\nclass f: ...\nMOST: int = 2\nT = TypeVar('T')\ndef _own(): ...\n"
    other += "Type: TypeAlias = int\n"
    both = ["pool/a.py", "pool/b.py"]
    assert defined_again(dict(zip(both, (one, other), strict=True))) == dict.fromkeys(
        ("A", "Type", "f"), both
    )
    family = "parallel_runtime/families/flux.py"
    assert defined_again({family: "def config(): ...", "pool/a.py": "def config(): ..."}) == {}
    assert defined_again({name: "def main(): ..." for name in (family, *both)})["main"] == [family, *both]
