"""The rules of the house that a machine can check: which room imports which, where ComfyUI is
touched, how long things get.

Every rule has a line in a table here and a source that breaks it. An exception is listed with its
reason, and goes when it is not needed any more.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from statistics import median

import pytest

from ..kit.axis_names import SAYS_AXES, SPELLS_AXES, TABLE, SpelledAxis, is_listed, nodes_of, spelled_axes
from ..kit.kept import kept_by, kept_by_all, named

ROOT = Path(__file__).resolve().parents[2]
# Each may import itself and what stands to its left
LAYERS = ("parallel_runtime", "pool", "launcher", "nodes")
OTHER_CODE = ("tests", "lab")  # imports whatever it measures or tests
ROOTS = (*LAYERS, *OTHER_CODE)


def words(text: str) -> list[str]:
    return text.split()


COMFYUI = {
    *words("comfy comfy_api comfy_config comfy_execution comfy_extras comfyui_version execution"),
    *words("folder_paths latent_preview node_helpers nodes server"),
}
BRIDGES = (  # files, and folders with a slash, that may import ComfyUI
    *("__init__.py", "needs.py", "nodes/", "launcher/commands/", "pool/trial/"),
    *(f"parallel_runtime/{room}/" for room in ("weights", "crossing", "watch")),
    *(
        f"parallel_runtime/client/{name}.py"
        for name in words(
            "interrupt sampler_arguments free_gpu remote_forward remote_patcher remote_upscaler remote_vae"
            " patch_sampling groups separability tiles windows"
        )
    ),
    "parallel_runtime/planner/host_call.py",
    "parallel_runtime/planner/meta_model.py",
    "parallel_runtime/worker/preparation.py",
)
BEFORE_COMFYUI = (
    *(f"launcher/{name}.py" for name in words("__init__ __main__ cache command_line errors")),
    *("launcher/comfyui/search.py", "launcher/comfyui/host_record.py", "pool/package.py"),
)
# Started by path: no relative imports
SCRIPTS = tuple(f"pool/{name}_main.py" for name in ("fork_server", "worker"))

RUNTIME = "parallel_runtime/"
SHARED = ("weights", "crossing", "watch")  # used by client and worker
SIDES = "client and worker meet only in wire, weights and crossing"
ONE_WAY = "imports go from crossing to watch to weights"
TENSORS = "a method knows tensors and plans only"
NEVER = (  # room, what it may not import, why
    ("client", "worker", SIDES),
    ("worker", "client", SIDES),
    ("worker", "watch", "the UI watches its own process"),
    ("weights", "watch", ONE_WAY),
    ("weights", "crossing", ONE_WAY),
    ("watch", "crossing", ONE_WAY),
    *(
        (room, other, f"both sides use {room}, so it uses neither")
        for room in SHARED
        for other in ("client", "worker")
    ),
    ("methods", "wire", "a method is called and never hears of messages"),
    *(("methods", room, TENSORS) for room in (*SHARED, "client", "worker")),
    ("client", "methods", "methods compute in ranks"),
    ("worker", "pool", "a rank is started by the pool and knows nothing of it"),
)
ONLY = {  # room -> what it may import of this project, and of all else but the standard library
    "comm": (("comm", "errors", "layout"), ("torch",)),
    "families": (("families/plan", "families/sample", "errors"), ("torch",)),
    "wire": (("wire", "errors", "patches"), ("torch", "msgspec")),
}
ALSO = {  # file -> what it may import although its room may not
    "families/__init__.py": ("families/unplanned_models",),
    "families/catalogue.py": ("families",),
    **{
        f"families/wan_{form}.py": ("families/wan",)
        for form in ("animate", "animate2", "camera", "dancer", "humo", "s2v", "scail", "vace")
    },  # Wan's derived classes
    **{f"families/{form}.py": ("families/flux",) for form in ("chroma", "hunyuan_video")},  # have its blocks
    "families/mage_flow.py": ("families/qwen_image",),
}
LAZILY = {"families": ("comfy", "comfyui_version")}  # room -> what it may import inside functions

MAX_FILE_LINES = 450  # of at most 110 columns
MAX_TEST_FILE_LINES = 650
MAX_FUNCTION_LINES = 110
MAX_CLASS_LINES, MAX_METHODS, MAX_FIELDS = 235, 15, 10
LIMITS = f"""\
code at {{columns}}.
- Files have at most {MAX_FILE_LINES} lines (tests {MAX_TEST_FILE_LINES}); classes {MAX_CLASS_LINES} lines, {MAX_METHODS} methods and {MAX_FIELDS} fields; functions {MAX_FUNCTION_LINES} lines."""
BEING_SPLIT = "being split"
EXCEPTIONS = {  # what breaks a rule all the same -> why
    "parallel_runtime/methods/hooks.py TokenHooks": BEING_SPLIT,
    "parallel_runtime/families/plan.py Blocks": "its fields are the words of a vocabulary",
    "parallel_runtime/wire/messages.py Start": "the fields of a message are its schema",
    "parallel_runtime/wire/messages.py Done": "the fields of a message are its schema",
    "parallel_runtime/vae_modules.py families": "names classes of VAEs, which no family has",
    "lab/dry_run/decoding.py families": "names latents, whose VAE no family has",
    "lab/bench/vae.py families": "measures two of these",
    "lab/bench/prompts.py families": "times stock graphs of three of these",
    "nodes/settings.py PoolSettings": "the fields are the node's inputs",
    "nodes/status/figures.py PoolStatus": "the fields are what a route answers with",
    "nodes/status/figures.py RunFigures": "the fields are what a route answers with",
    "lab/bench/diffusers_peer.py families": "the peer is one model of another library",
    "lab/commands/vaes.py families": "says which families' VAEs ranks compute",
    "lab/templates/stand_ins/names.py families": "says which family a file's name stands for",
    "lab/templates/stand_ins/nodes.py families": "replaces nodes of ComfyUI's that load for one family",
    "lab/templates/stand_ins/attached.py families": "makes ComfyUI's own networks that attach to one family",
    "lab/tests/test_dry_replays.py families": "counts what is computed most, and one that is not recorded",
    "tests/families/test_families.py families": "tries what one family alone has",
    "tests/methods/test_pieces.py families": "says which families are recorded as CUDA graphs",
    "tests/project/test_architecture.py families": "sources that break the rules",
}
FUNCTION = ast.FunctionDef | ast.AsyncFunctionDef
PACK = "pipemesh"
NAMED_MODULE = re.compile(rf"\b{PACK}((?:\.\w+)+)")
FAMILIES = sorted(
    {file.stem for file in (ROOT / RUNTIME / "families").glob("*.py")}
    - {"__init__", "catalogue", "files", "plan", "sample", "unplanned_models"}
)
NAMED_FAMILY = re.compile(
    rf"(?:(?<![a-zA-Z])(?i:{'|'.join(FAMILIES)})|(?<=[a-z])(?:{'|'.join(map(str.title, FAMILIES))}))(?![a-z])"
)
NAMED_SAMPLE = re.compile(rf"[\"'](?:{'|'.join(FAMILIES)})[\d.]*(?:-\w+)?[\"']")


@dataclass(frozen=True)
class Violation:
    """``what``: the file, or a class of it, or its imports; an exception is listed under it."""

    what: str
    text: str

    def __str__(self) -> str:
        return f"{self.what}: {self.text}"


@dataclass(frozen=True)
class Import:
    """One imported name. ``own``: inside this project, counted from its root. ``lazy``: inside a
    function.
    """

    line: int
    name: tuple[str, ...]
    own: bool
    lazy: bool

    def __str__(self) -> str:
        return ".".join(self.name)

    def within(self, room: str) -> bool:
        folder = tuple(room.split("/"))
        return self.own and self.name[: len(folder)] == folder

    @property
    def top(self) -> str:
        return "" if self.own else self.name[0]

    @property
    def is_standard(self) -> bool:
        return self.top in sys.stdlib_module_names


def imports_of(path: PurePosixPath, tree: ast.AST) -> Iterator[Import]:
    nodes = nodes_of(tree)
    functions = [range(one.lineno, one.end_lineno + 1) for one in nodes if isinstance(one, FUNCTION)]
    for node in nodes:
        if not isinstance(node, ast.Import | ast.ImportFrom):
            continue
        lazy, base, level = any(node.lineno in lines for lines in functions), (), 0
        if isinstance(node, ast.ImportFrom):
            level = node.level
            base = path.parts[: max(0, len(path.parts) - level)] if level else ()
            base += tuple(node.module.split(".")) if node.module else ()
        for alias in node.names:
            names = (alias.name,) if isinstance(node, ast.ImportFrom) else alias.name.split(".")
            yield Import(node.lineno, (*base, *names), own=level > 0, lazy=lazy)


def violations(path: PurePosixPath, source: str) -> list[Violation]:
    """Every rule that ``source``, as the file ``path`` of the project, breaks."""
    tree = ast.parse(source)
    found = [
        *length_violations(path, source, tree),
        *name_violations(path, source),
        *family_violations(path, source),
        *axis_violations(path, tree),
        *gpu_violations(path, tree),
        *(
            Violation(f"{path} imports", f"line {imported.line}: {text}")
            for imported in imports_of(path, tree)
            for text in import_violations(path, imported)
        ),
    ]
    classes = () if is_test(path) else (one for one in nodes_of(tree) if isinstance(one, ast.ClassDef))
    return [*found, *(one for node in classes for one in class_violations(path, node))]


# -- imports


def import_violations(path: PurePosixPath, imported: Import) -> Iterator[str]:
    layer = path.parts[0]
    if layer in OTHER_CODE:
        if path.parts[:2] == ("lab", "bench") and imported.within("nodes"):
            yield f"imports {imported}; benches measure what the nodes show"
        return
    if layer in LAYERS:
        for above in LAYERS[LAYERS.index(layer) + 1 :]:
            if imported.within(above):
                yield (
                    f"{layer} imports {imported}, but imports point one way: {' -> '.join(reversed(LAYERS))}"
                )
    for other in OTHER_CODE:
        if imported.within(other):
            yield f"imports {imported}; the pack works without its {other}"
    if imported.top in {*ROOTS, PACK} - {"nodes"} and str(path) not in SCRIPTS:
        yield f"imports {imported} by an absolute name; only relative imports work under ComfyUI"
    if imported.top in COMFYUI and not is_bridge(path) and not may_lazily(path, imported):
        yield f"imports ComfyUI's {imported}, which only the bridges do"
    if str(path) in BEFORE_COMFYUI and not imported.own and not imported.is_standard:
        yield f"imports {imported}, but runs before ComfyUI stands: standard library only"
    yield from room_violations(path, imported)


def room_violations(path: PurePosixPath, imported: Import) -> Iterator[str]:
    also = ALSO.get(str(path).removeprefix(RUNTIME), ())
    if path.parts[0] != "parallel_runtime" or any(imported.within(RUNTIME + one) for one in also):
        return
    room = path.parts[1]
    for one, other, why in NEVER:
        if room == one and imported.within(RUNTIME + other):
            yield f"{one} imports {imported}: {why}"
    own, others = ONLY.get(room, (None, ()))
    if own is None:
        return
    if imported.own and not any(imported.within(RUNTIME + allowed) for allowed in own):
        yield f"{room} imports {imported}, but may import {', '.join(own)} only"
    # ComfyUI has a rule of its own
    if not (imported.own or imported.is_standard or imported.top in (*others, *COMFYUI)):
        yield f"{room} imports {imported}, but may import {', '.join(others)} and the standard library only"


def is_test(path: PurePosixPath) -> bool:
    return "tests" in path.parts[:2]


def is_bridge(path: PurePosixPath) -> bool:
    return any(is_listed(path, bridge) for bridge in BRIDGES)


def may_lazily(path: PurePosixPath, imported: Import) -> bool:
    allowed = LAZILY.get(path.parts[1], ()) if path.parts[0] == "parallel_runtime" else ()
    return imported.lazy and imported.top in allowed


def name_violations(path: PurePosixPath, source: str) -> Iterator[Violation]:
    """Modules that a script in a string names: nothing else would notice that they moved."""
    for number, line in enumerate(source.splitlines(), 1):
        for name in NAMED_MODULE.findall(line):
            parts = name.strip(".").split(".")
            if parts[0] in ROOTS and not is_module(parts):
                yield Violation(str(path), f"line {number}: names {PACK}{name}, which is no module")


def family_violations(path: PurePosixPath, source: str) -> Iterator[Violation]:
    """Model families named outside their room: all else iterates the registry. Tests may speak of
    ComfyUI's classes, and choose no sample by its name.
    """
    if str(path.parent) == f"{RUNTIME}families":
        return
    named = NAMED_SAMPLE if is_test(path) else NAMED_FAMILY
    for number, line in enumerate(source.splitlines(), 1):
        for name in named.findall(line):
            yield Violation(
                f"{path} families", f"line {number}: names {name}, which only {RUNTIME}families does"
            )


def axis_violations(path: PurePosixPath, tree: ast.AST) -> Iterator[Violation]:
    if any(is_listed(path, place) for place in SPELLS_AXES):
        return
    for spelled in spelled_axes(tree) if path.parts[0] in LAYERS else ():
        if not (spelled.is_sentence and str(path) in SAYS_AXES):
            yield Violation(str(path), f"line {spelled.line}: names {spelled.axis}; ask {TABLE} instead")


def gpu_violations(path: PurePosixPath, tree: ast.AST) -> Iterator[Violation]:
    """A rank sees GPUs of others, so it names its own by number. It may compare kinds."""
    if not str(path).startswith(RUNTIME) or is_listed(path, f"{RUNTIME}planner/"):
        return
    compared = {part for node in nodes_of(tree) if isinstance(node, ast.Compare) for part in ast.walk(node)}
    for node in nodes_of(tree):
        if isinstance(node, ast.Constant) and node.value in ("cuda", "cuda:0") and node not in compared:
            yield Violation(str(path), f"line {node.lineno}: {node.value} may be the GPU of another rank")


def is_module(parts: list[str]) -> bool:
    """Or a name in one."""
    folder = ROOT
    for part in parts:
        if (folder / f"{part}.py").is_file():
            return True
        if not (folder / part).is_dir():
            return part in (folder / "__init__.py").read_text(encoding="utf-8")
        folder /= part
    return True


# -- lengths


def length_violations(path: PurePosixPath, source: str, tree: ast.AST) -> Iterator[Violation]:
    lines, most = len(source.splitlines()), MAX_TEST_FILE_LINES if is_test(path) else MAX_FILE_LINES
    if lines > most:
        yield Violation(str(path), f"{lines} lines, at most {most}")
    for node in nodes_of(tree):
        if isinstance(node, FUNCTION) and (length := length_of(node)) > MAX_FUNCTION_LINES:
            said = f"{node.name} has {length} lines, at most {MAX_FUNCTION_LINES}"
            yield Violation(str(path), f"line {node.lineno}: {said}")


def class_violations(path: PurePosixPath, node: ast.ClassDef) -> Iterator[Violation]:
    methods = [method for method in node.body if isinstance(method, FUNCTION)]
    counted = (
        ("lines", length_of(node), MAX_CLASS_LINES),
        ("methods", len(methods), MAX_METHODS),
        ("fields", len(fields_of(node, methods)), MAX_FIELDS),
    )
    for what, count, most in counted:
        if count > most:
            yield Violation(f"{path} {node.name}", f"{count} {what}, at most {most}")


def length_of(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> int:
    return (node.end_lineno or node.lineno) - node.lineno + 1


def fields_of(node: ast.ClassDef, methods: list[ast.FunctionDef | ast.AsyncFunctionDef]) -> set[str]:
    """Attributes that its methods assign, and the annotated ones of its body."""
    annotated = (line.target for line in node.body if isinstance(line, ast.AnnAssign))
    set_on = (
        (target.attr, target.value)
        for method in methods
        for target in ast.walk(method)
        if isinstance(target, ast.Attribute) and isinstance(target.ctx, ast.Store)
    )
    return {one.id for one in annotated if isinstance(one, ast.Name)} | {
        name for name, of in set_on if isinstance(of, ast.Name) and of.id == "self"
    }


# -- the project


def project_files() -> list[Path]:
    return [*ROOT.glob("*.py"), *(file for folder in ROOTS for file in sorted((ROOT / folder).rglob("*.py")))]


def test_every_file_keeps_the_house_rules_and_every_exception_is_needed() -> None:
    paths = {PurePosixPath(file.relative_to(ROOT).as_posix()): file for file in project_files()}
    broken = [
        one for path, file in paths.items() for one in violations(path, file.read_text(encoding="utf-8"))
    ]
    assert [str(violation) for violation in broken if violation.what not in EXCEPTIONS] == []
    needed = {what for what, why in EXCEPTIONS.items() if why != BEING_SPLIT}
    assert needed <= {violation.what for violation in broken}


# Of parallel_runtime/families: no family's own file
VOCABULARY = {"__init__", "catalogue", "plan", "sample", "files", "unplanned_models"}


def modules_named(path: PurePosixPath, tree: ast.AST, files: Collection[str]) -> Iterator[str]:
    """Those of the files that one imports, in functions and for types too."""
    for imported in imports_of(path, tree):
        if imported.own or imported.top in ROOTS:
            places = ("/".join(imported.name), "/".join(imported.name[:-1]))
            named = (f"{place}{end}" for place in places for end in (".py", "/__init__.py"))
            yield from [file for file in named if file in files][:1]


def in_circles(imports: dict[str, set[str]]) -> list[str]:
    """Files that import each other: what stays when files that import none of the rest, or that
    none of the rest imports, are left out again and again.
    """
    left, ends = imports, {""}
    while ends:
        named = set[str]().union(*left.values())
        ends = {file for file, others in left.items() if not others & left.keys() or file not in named}
        left = {file: others for file, others in left.items() if file not in ends}
    return sorted(left)


def test_no_files_import_each_other() -> None:
    files = {file.relative_to(ROOT).as_posix(): file for file in project_files()}
    imports = {
        name: {*modules_named(path, ast.parse(file.read_bytes()), files)} - {name}
        for name, file in files.items()
        if not is_test(path := PurePosixPath(name))
    }
    assert in_circles({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a"}}) == ["b", "c"]
    assert in_circles(imports) == []


def test_a_family_is_a_short_file() -> None:
    lines = {
        file.name: len(file.read_text(encoding="utf-8").splitlines())
        for file in (ROOT / "parallel_runtime" / "families").glob("*.py")
        if file.stem not in VOCABULARY
    }
    assert max(lines.values()) <= 190 and median(lines.values()) <= 70, lines


def test_every_place_that_may_name_an_axis_does() -> None:
    paths = [PurePosixPath(file.relative_to(ROOT).as_posix()) for file in project_files()]

    def named(path: PurePosixPath) -> Iterator[SpelledAxis]:
        return spelled_axes(ast.parse((ROOT / path).read_text(encoding="utf-8")))

    for place in SPELLS_AXES:
        assert any(True for path in paths if is_listed(path, place) for _ in named(path)), place
    for place in SAYS_AXES:
        assert any(one.is_sentence for one in named(PurePosixPath(place))), place


def many(line: str, count: int) -> str:
    return "class A:\n" + "".join(line.format(number) for number in range(count))


MANY_METHODS, MANY_FIELDS = many("    def m{}(self): ...\n", 16), many("    f{}: int\n", 11)
MANY_ATTRIBUTES = many("    def __init__(self): self.a{} = 1\n", 11)
BROKEN = [  # one for each rule
    ("parallel_runtime/layout.py", "from .. import pool", "imports point one way"),
    ("pool/pool.py", "def f():\n    from ... import nodes", "imports point one way"),
    ("parallel_runtime/client/session.py", "from ..worker.rank_loop import RankLoop", "meet only in wire"),
    ("parallel_runtime/crossing/source.py", "from ..client.session import Session", "it uses neither"),
    ("parallel_runtime/families/flux.py", "from .wan import PLAN", "families imports"),
    ("parallel_runtime/families/flux.py", "import comfy.supported_models", "only the bridges"),
    ("parallel_runtime/families/flux.py", "def f():\n    import folder_paths", "only the bridges"),
    ("parallel_runtime/wire/tree.py", "import numpy", "torch, msgspec and the standard library only"),
    ("parallel_runtime/methods/usp.py", "def f():\n    import comfy.ops", "only the bridges"),
    ("parallel_runtime/layout.py", "import nodes", "only the bridges"),
    ("launcher/commands/doctor.py", "from ...lab import in_process", "without its lab"),
    ("lab/bench/pipefusion.py", "def f():\n    from ...nodes.report import text", "what the nodes show"),
    ("nodes/pool.py", "from pool.pool import WorkerPool", "absolute name"),
    ("launcher/comfyui/search.py", "import requests", "standard library only"),
    ("nodes/pool.py", "shared = layout.ulysses", "names ulysses; ask"),
    ("pool/pool.py", "layout = Layout(cfg=2)", "names cfg; ask"),
    ("pool/pool.py", "place['ring'] = 1", "names ring; ask"),
    ("nodes/status/reasons.py", "say('set pipefusion to 1')", "names pipefusion; ask"),
    ("nodes/pool.py", "\n" * 451, "at most 450"),
    ("tests/nodes/test_pool_node.py", "\n" * 651, "at most 650"),
    ("nodes/pool.py", "class A:\n    async def long(self):\n" + "        pass\n" * 110, "long has 111 lines"),
    ("nodes/pool.py", "class A:\n" + "    # more\n" * 235 + "    a = 1", "237 lines, at most 235"),
    ("pool/pool.py", MANY_METHODS, "16 methods, at most 15"),
    ("pool/pool.py", MANY_FIELDS, "11 fields, at most 10"),
    ("pool/pool.py", MANY_ATTRIBUTES, "11 fields, at most 10"),
    ("parallel_runtime/comm/device_copies.py", "def f(d):\n    d.to('cuda')", "may be the GPU of another"),
    ("nodes/pool.py", "# as Wan does it", "names Wan, which only"),
    ("tests/nodes/test_pool_node.py", "case = Case('sd3.5-medium', 5)", "names 'sd3.5-medium', which only"),
    (
        "tests/nodes/test_pool_node.py",
        f'SCRIPT = "from {PACK}.launcher.gone import Pool"',
        "which is no module",
    ),
]


@pytest.mark.parametrize(("path", "source", "says"), BROKEN)
def test_a_broken_rule_is_found_and_named(path: str, source: str, says: str) -> None:
    assert (ROOT / path).is_file(), "an example names a file of today"
    (violation,) = violations(PurePosixPath(path), source)
    assert violation.what.startswith(path)
    assert says in str(violation)


def test_contributors_are_told_the_limits_that_there_are():
    columns = re.search(r"^line-length = (\d+)", (ROOT / "pyproject.toml").read_text(), re.M)
    page = " ".join((ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").split())
    assert columns and " ".join(LIMITS.format(columns=columns[1]).split()) in page


def test_what_classes_keep_in_collections_has_a_known_lifetime() -> None:
    known, found = [name.rstrip("*") for name in named()], kept_by_all()
    assert len(known) == len({*known})
    assert found - {*known} == set(), "say in tests/kit/kept.py how long it stays, in docs/MEMORY.md how much"
    assert {*known} - found == set(), "they keep nothing any more: tests/kit/kept.py"


@pytest.mark.parametrize(
    "text",
    [
        "class A:\n    def __init__(self):\n        self.a, self.b = 0, {}",
        "class A:\n    b: dict = field(default_factory=dict)",
        "class A:\n    def __init__(self):\n        self.b: dict[int, int] = OrderedDict()",
    ],
)
def test_a_collection_is_found_however_it_is_made(text: str) -> None:
    assert [*kept_by(text)] == ["A.b"]
