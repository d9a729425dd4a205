"""What users read of the nodes: every language says everything, about nothing else, in a form that
ComfyUI's frontend can read; the help pages know every input and every message.
"""

import json
import re
from pathlib import Path
from typing import get_args

import pytest

from ..project.test_docs import FILLED_IN, halves, sentences

ROOT = Path(__file__).resolve().parents[2]
LOCALES = ROOT / "locales"
HELP = {page.stem: page.read_text(encoding="utf-8") for page in (ROOT / "web" / "docs").glob("*.md")}
LANGUAGES = sorted(folder.name for folder in LOCALES.iterdir())
JOINED = re.compile(r'"\s*\+\s*"')  # where a text of a script goes on in the next line
VUE_I18N_SYNTAX = set("{}@$|")  # the frontend compiles texts as messages, in which these have a meaning


@pytest.fixture(scope="module")
def nodes():
    """The input and output names of every node, by its id."""
    from pipemesh.nodes.ksampler import sampler_nodes
    from pipemesh.nodes.pool import pool_nodes
    from pipemesh.nodes.report.node import report_node

    classes = (*pool_nodes(None), *sampler_nodes(None), report_node(None))  # a schema asks no runtime
    made = {cls.GET_SCHEMA().node_id: cls.GET_NODE_INFO_V1() for cls in classes}
    return {
        name: {one for kind in ("required", "optional") for one in info["input"].get(kind, {})}
        for name, info in made.items()
    }


def texts_in(language, file):
    return json.loads((LOCALES / language / f"{file}.json").read_text(encoding="utf-8"))


def leaves(tree, path=""):
    """Path and text of everything a tree says."""
    if isinstance(tree, str):
        return {path: tree}
    return {
        place: text for key, branch in tree.items() for place, text in leaves(branch, f"{path}/{key}").items()
    }


def test_nodes_are_marked_as_experimental_until_the_table_of_what_ran_has_several_gpus():
    """By its third column, which begins with their number."""
    from pipemesh.nodes.sockets import UNTRIED

    page = (ROOT / "lab" / "docs" / "CUDA.md").read_text(encoding="utf-8")
    table = page.partition("\n## What ran")[2].partition("\n\n`python3")[0]
    ran = re.findall(r"^\| \d{4}-\d\d-\d\d \|[^|]*\| (one|\d+) ", table, re.M)
    assert len(ran) == len(re.findall(r"^\| \d{4}-", table, re.M)) > 0
    assert any(one.isdigit() for one in ran) != UNTRIED


def test_the_texts_of_nodes_are_of_the_inputs_that_there_are(nodes):
    texts = texts_in("en", "nodeDefs")
    assert {name: set(one["inputs"]) for name, one in texts.items()} == nodes


@pytest.mark.parametrize("file", ["nodeDefs", "settings", "main"])
@pytest.mark.parametrize("language", LANGUAGES)
def test_every_text_is_translated_with_the_same_places_for_values(language, file):
    """Names and single words may stay as they are, sentences may not."""
    texts, english = leaves(texts_in(language, file)), leaves(texts_in("en", file))
    assert texts.keys() == english.keys()
    for place, text in texts.items():
        assert text.strip() and not VUE_I18N_SYNTAX & set(text), place
        assert sorted(re.findall(r"%\d", text)) == sorted(re.findall(r"%\d", english[place])), place
        assert language == "en" or text != english[place] or len(text) < 30, place


def test_the_setting_is_called_in_the_script_as_in_its_texts():
    script = JOINED.sub("", (ROOT / "web" / "auto.js").read_text(encoding="utf-8"))
    texts = {**leaves(texts_in("en", "settings")), **leaves(texts_in("en", "main")["settingsCategories"])}
    assert not [text for text in texts.values() if f'"{text}"' not in script]


def test_the_options_of_a_setting_are_those_of_the_script():
    script = (ROOT / "web" / "auto.js").read_text(encoding="utf-8")
    listed = [json.loads(options) for options in re.findall(r"options: (\[.*?\])", script)]
    assert listed == [list(one["options"]) for one in texts_in("en", "settings").values() if "options" in one]


def made_names():
    """The names of texts that are put together of a word of the status."""
    from pipemesh.parallel_runtime.client.session import ResidentState
    from pipemesh.parallel_runtime.comm.traffic import COUNTED
    from pipemesh.parallel_runtime.layout import AXES
    from pipemesh.parallel_runtime.planner.machine import HowKnown
    from pipemesh.parallel_runtime.wire.arena import PHASES

    words = {
        "phase": PHASES,
        "state": ["starting", "ready", "busy", "failed", "closed"],
        "model": [state.name.lower() for state in ResidentState],
        "known": get_args(HowKnown),
        "axis": COUNTED,
        "why": [axis.name for axis in AXES],
        "slowed": ["sharded", "offloaded"],
        "prompt": ["before", "loading", "first", "sampling", "decode", "encode", "upscale", "total", "left"],
        "lost": ["compute", "imbalance", "ulysses", "ring", "weights", "launches", "pipeline", "hop"],
    }
    return {f"{kind}_{word}" for kind, some in words.items() for word in some}


def test_every_text_that_the_pack_asks_for_is_there_and_no_other():
    files = [*(ROOT / "web").glob("*.js"), *(ROOT / "nodes").rglob("*.py")]
    files += (ROOT / "parallel_runtime" / "planner").glob("*.py")
    named = {name for file in files for name in re.findall(r'"([a-z_]+)"', file.read_text(encoding="utf-8"))}
    scripts = "".join(file.read_text(encoding="utf-8") for file in (ROOT / "web").glob("*.js"))
    texts = texts_in("en", "main")["pipemesh"].keys()
    assert made_names() | set(re.findall(r'\bt\("([a-z_]+)"', scripts)) <= texts
    assert texts - made_names() <= named


def test_every_node_has_a_help_page_with_a_row_for_each_of_its_inputs(nodes):
    described = {}
    for name, page in HELP.items():
        described[name] = {given for row in rows_of_inputs(page) for given in re.findall(r"`(\w+)`", row)}
    assert described == nodes


def rows_of_inputs(page):
    """The first cells of the first table, which is that of the inputs."""
    return re.findall(r"^\| ([^|]*`[^|]*) \|", page.split("\n## ")[1], re.M)


@pytest.mark.parametrize("node", sorted(HELP))
@pytest.mark.parametrize("language", LANGUAGES)
def test_a_help_page_names_the_node_and_its_inputs_as_the_node_does_in_that_language(language, node):
    texts, page = texts_in(language, "nodeDefs")[node], page_in(language, node)
    assert page.startswith(f"# {texts['display_name']}\n")
    names = {part for row in rows_of_inputs(page) for part in re.split(", |、", row.replace("`", ""))}
    for given, text in texts["inputs"].items():
        name = text["name"]
        assert (name if name == given or name.endswith(f"({given})") else f"{name} ({given})") in names


@pytest.mark.parametrize("node", sorted(HELP))
@pytest.mark.parametrize("language", sorted({*LANGUAGES} - {"en"}))
def test_a_translated_help_page_has_line_by_line_the_form_the_code_and_the_links_of_the_english_one(
    language, node
):
    page = page_in(language, node)
    assert [form(line) for line in page.splitlines()] == [form(line) for line in HELP[node].splitlines()]
    messages = re.findall(r"\*\*([^*]+\.)\*\*", HELP[node].partition("\n## Errors")[2])
    assert not [message for message in messages if f"**{message}**" not in page]
    words = [line for line in page.splitlines() if len(re.sub(r"`[^`]+`|\*\*.+?\*\*", "", line)) > 30]
    assert not {*words} & {*HELP[node].splitlines()}, "nothing is left in English"


def page_in(language, node):
    if language == "en":
        return HELP[node]
    return (ROOT / "web" / "docs" / node / f"{language}.md").read_text(encoding="utf-8")


def form(line):
    """What a line is, how many cells it has if it is a row, and the code and the links in it."""
    kind = re.match(r"#+ |\||- |", line)[0] or ("text" if line else "")
    code, links = re.findall(r"`[^`]+`", line), re.findall(r"\]\(([^)]+)\)", line)
    return kind, line.count("|"), sorted(code), links


def test_every_message_that_a_help_page_explains_is_one_of_the_codes():
    quoted = [
        words
        for page in HELP.values()
        for words in re.findall(r"^- \*\*(.+?)\.\*\*", page.partition("## Errors")[2], re.M)
    ]
    assert len(quoted) > 10
    longest = [
        max((piece.strip() for piece in re.split(rf"{FILLED_IN.pattern}|'.*?'", words)), key=len)
        for words in quoted
    ]
    assert not [
        words
        for words in longest
        if " " in words and not any(half in sentences() for half in halves(words.split()))
    ]
