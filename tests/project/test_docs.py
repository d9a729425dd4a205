"""What the documents name exists: paths, commands, options, environment variables, routes, links.

Runs without ComfyUI. A rule is a function from a document's text to sentences, so that each can be
shown to fail.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
REFERENCE = ROOT / "docs" / "REFERENCE.md"
DOCUMENTS = (
    *sorted(ROOT.glob("*.md")),
    *(file for folder in ("docs", "web", "lab") for file in sorted((ROOT / folder).rglob("*.md"))),
)
CODE = ("launcher", "pool", "parallel_runtime", "nodes", "lab")
CODE += ("tests/fixtures.py", "tests/conftest.py", "__init__.py", "needs.py")
SUFFIXES = (".py", ".md", ".js", ".json", ".svg", ".png", ".toml", ".txt")
OTHERS_FILES = ("main.py", "dynamic_rendezvous.py")  # of ComfyUI, of torch
COMFYUI_FOLDERS = ("comfy/", "custom_nodes", "models")
SOCKET_TYPES = {"PIPEMESH_POOL"}  # of the nodes; no environment variable
TOO_LONG = 110
PAGE_LINES, CELL = 125, 400  # lines, and characters of a table's cell, that one page has at most

Rule = Callable[[str, Path], Iterator[str]]

FENCE = re.compile(r"^```.*?^```", re.S | re.M)
SPAN = re.compile(r"`([^`\n]+)`")
LINK = re.compile(r"\]\(([^)\s]+)\)")
VARIABLE = re.compile(r"\bPIPEMESH_[A-Z][A-Z_]*[A-Z]\b")
COMMAND = re.compile(r"python3? -m (launcher|lab) ([a-z-]+)")
OPTION = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]+")
# Where documents of the published pack find what it leaves out
ADDRESS = re.compile(
    r"https://(?:github\.com/pipemesh/pipemesh/blob|raw\.githubusercontent\.com/pipemesh/pipemesh)/main/"
)
ROUTE = re.compile(r"(?<!github\.com)/pipemesh/[a-zID./]+")  # ID: of a pool
MESSAGES = re.compile(r"^\|(?: What you read[^|]*)\|.*\n((?:\|.*\n?)+)", re.M)
FILLED_IN = re.compile(r"\.\.\.|`[^`]*`|\bnode1\S*|\S*\d\S*")  # in a message: what the code puts there
JOINED = re.compile(r'"\s*\n\s*f?"')  # where a string goes on in the next line
ADDED_OPTION = re.compile(r'add_argument\(\s*"(--[a-z0-9-]+)"')
ADDED_ROUTE = re.compile(r'"(/pipemesh/[a-z./{}]+)"')


@cache
def repository() -> frozenset[str]:
    """Every file and folder of the checkout that git would keep, as paths from its root."""
    command = ("git", "-C", str(ROOT), "ls-files", "-co", "--exclude-standard")
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    files = [name for name in listed if (ROOT / name).exists()]
    folders = {parent.as_posix() for name in files for parent in Path(name).parents}
    return frozenset((*files, *folders))


@cache
def code() -> str:
    """The text of every module that is not a test."""
    files = [
        file
        for name in CODE
        for file in ([ROOT / name] if name.endswith(".py") else sorted((ROOT / name).rglob("*.py")))
    ]
    return "\n".join(file.read_text(encoding="utf-8") for file in files)


@cache
def commands(package: str) -> frozenset[str]:
    """The commands that the usage of `launcher` or `lab` lists."""
    usage = subprocess.run(
        [sys.executable, "-m", package, "--help"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    return frozenset(re.findall(r"^  ([a-z-]+) {2,}\S", usage, re.M))


def variables_of_code() -> set[str]:
    return set(VARIABLE.findall(code())) - SOCKET_TYPES


def routes_of_code() -> set[str]:
    return {route.replace("{id}", "ID") for route in ADDED_ROUTE.findall(code())}


def paths_exist(text: str, _document: Path) -> Iterator[str]:
    """A code span that looks like a path of the repository is one, from the root or as the end of a
    path.
    """
    for span in SPAN.findall(FENCE.sub("", text)):
        if looks_like_a_path(span) and not any(
            path == span.rstrip("/") or path.endswith(f"/{span.rstrip('/')}") for path in repository()
        ):
            yield f"`{span}` is no file or folder of the repository"


def looks_like_a_path(span: str) -> bool:
    is_path = re.fullmatch(r"[\w.-]+(/[\w.-]+)*/?", span)
    if not is_path or span in OTHERS_FILES or span.startswith(COMFYUI_FOLDERS):
        return False
    return span.endswith((*SUFFIXES, "/")) or ("/" in span and span.partition("/")[0] in repository())


def commands_exist(text: str, _document: Path) -> Iterator[str]:
    for package, command in COMMAND.findall(text):
        if command not in commands(package):
            yield f"`python3 -m {package} {command}` is no command of `{package}`"


def variables_exist(text: str, _document: Path) -> Iterator[str]:
    for name in sorted(set(VARIABLE.findall(text)) - SOCKET_TYPES - variables_of_code()):
        yield f"{name} is read nowhere in the code"


def routes_exist(text: str, _document: Path) -> Iterator[str]:
    for route in ROUTE.findall(ADDRESS.sub("", text)):
        if route.rstrip(".") not in routes_of_code():
            yield f"{route} is no route of the extension"


def messages_exist(text: str, _document: Path) -> Iterator[str]:
    """What a table says that users read is said by the code: half of the longest words without
    numbers and names, at least.
    """
    for table in MESSAGES.findall(text):
        for cell in re.findall(r"^\|([^|]*)\|", table, re.M):
            for message in SPAN.findall(cell):
                longest = max((piece.strip() for piece in FILLED_IN.split(message)), key=len)
                if " " in longest and not any(half in sentences() for half in halves(longest.split())):
                    yield f"no message of the code says `{longest}`"


def halves(words: list[str]) -> list[str]:
    """Every run of half of them, of two at least."""
    size = max(2, len(words) // 2)
    return [" ".join(words[start : start + size]) for start in range(len(words) - size + 1)]


@cache
def sentences() -> str:
    """The code with its strings joined where they go on in the next line, and the English texts."""
    texts = (ROOT / "locales" / "en" / "main.json").read_text(encoding="utf-8")
    return JOINED.sub("", code()) + texts


def links_resolve(text: str, document: Path) -> Iterator[str]:
    """Relative links, and the addresses of the repository's files, lead to a file, and their
    anchor to a heading of it.
    """
    for target in LINK.findall(FENCE.sub("", text)):
        folder, path = (ROOT, ADDRESS.sub("", target)) if ADDRESS.match(target) else (document.parent, target)
        if "://" in path:
            continue
        name, _, anchor = path.partition("#")
        file = (folder / name).resolve() if name else document
        if not file.exists():
            yield f"the link {target} leads nowhere"
        elif anchor and anchor not in anchors(text if file == document else file.read_text(encoding="utf-8")):
            yield f"the link {target} leads to no heading"


def anchors(text: str) -> set[str]:
    """The names that a forge gives to the headings of a document."""
    headings = re.findall(r"^#+ (.+)$", FENCE.sub("", text), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-") for heading in headings}


def lines_wrap(text: str, document: Path) -> Iterator[str]:
    """At 100 columns, except tables, pictures, code, addresses and help pages."""
    if document.is_relative_to(ROOT / "web"):
        return
    outside = FENCE.sub(lambda fence: "\n" * fence[0].count("\n"), text)
    for number, line in enumerate(outside.splitlines(), 1):
        may_be_long = line.lstrip().startswith(("|", "![")) or "://" in line or line.startswith("    ")
        if len(line) > TOO_LONG and not may_be_long:
            yield f"line {number} has {len(line)} columns, at most {TOO_LONG}"


def one_device_is_said_with_auto_mode(text: str, _document: Path) -> Iterator[str]:
    """Who bypasses a node to have one device, while auto mode is on, has all of them again."""
    for sentence in re.split(r"(?<=[.:])\s+|\n\n|\|", FENCE.sub("", text)):
        compares = re.search(r"bypass", sentence, re.I) and re.search(r"one (GPU|device)|speed-up", sentence)
        if compares and not re.search(r"auto\s+mode", sentence, re.I):
            yield f"with auto mode on this compares the pool with itself: {sentence.strip()}"


RULES = (one_device_is_said_with_auto_mode, paths_exist, commands_exist, variables_exist, routes_exist)
RULES += (messages_exist, links_resolve, lines_wrap)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda document: document.relative_to(ROOT).as_posix())
def test_the_document_keeps_the_rules(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    assert [broken for rule in RULES for broken in rule(text, document)] == []


BYPASSED = "Bypass Parallelize to go back to one GPU."
MESSAGE = "| What you read |\n|---|\n| `Rank 1 sang loudly` |"
AWAY = "https://github.com/pipemesh/pipemesh/blob/main/lab/NOWHERE.md"
BROKEN_TEXTS = [
    (paths_exist, "See `parallel_runtime/nowhere.py`.", "`parallel_runtime/nowhere.py` is no file"),
    (paths_exist, "See `nowhere.py`.", "`nowhere.py` is no file"),
    (commands_exist, "```\npython3 -m launcher dance\n```", "`python3 -m launcher dance` is no command"),
    (variables_exist, "Set `PIPEMESH_NOTHING`.", "PIPEMESH_NOTHING is read nowhere"),
    (routes_exist, "Open `/pipemesh/nothing`.", "/pipemesh/nothing is no route"),
    (messages_exist, MESSAGE, "says `sang loudly`"),
    (links_resolve, "[There](NOWHERE.md)", "NOWHERE.md leads nowhere"),
    (links_resolve, "# Here\n[there](#nowhere)", "#nowhere leads to no heading"),
    (links_resolve, f"[There]({AWAY})", "NOWHERE.md leads nowhere"),
    (one_device_is_said_with_auto_mode, f"{BYPASSED} In auto mode it waits.", f"with itself: {BYPASSED}"),
    (lines_wrap, "word " * 23, "line 1 has 115 columns"),
]


@pytest.mark.parametrize(("rule", "text", "says"), BROKEN_TEXTS)
def test_a_broken_rule_is_found_and_named(rule: Rule, text: str, says: str) -> None:
    (sentence,) = rule(text, ROOT / "README.md")
    assert says in sentence


def test_the_reference_has_every_environment_variable() -> None:
    assert variables_of_code() - set(VARIABLE.findall(REFERENCE.read_text(encoding="utf-8"))) == set()


def test_every_command_and_option_has_its_row() -> None:
    of_users = REFERENCE.read_text(encoding="utf-8").partition("## Commands")[2].partition("\n## ")[0]
    of_the_laboratory = (ROOT / "lab" / "README.md").read_text(encoding="utf-8")
    for package, rows in (("launcher", of_users), ("lab", of_the_laboratory)):
        assert {command for command in commands(package) if f"| `{command}" not in rows} == set()
    assert set(ADDED_OPTION.findall(code())) == set(OPTION.findall(of_users + of_the_laboratory))


def test_the_reference_has_every_route() -> None:
    assert routes_of_code() <= set(ROUTE.findall(REFERENCE.read_text(encoding="utf-8")))


def test_the_architecture_is_one_page() -> None:
    lines = (ROOT / "docs" / "ARCHITECTURE.md").read_text(encoding="utf-8").splitlines()
    assert len(lines) <= PAGE_LINES and max(len(cell) for line in lines for cell in line.split("|")) <= CELL
