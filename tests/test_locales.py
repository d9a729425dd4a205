"""What users read of the nodes: every language says everything, about nothing else, in a form that
ComfyUI's frontend can read; the help pages know every input and every message.
"""

import json
import re
from pathlib import Path
from typing import get_args

import pytest

from .test_docs import FILLED_IN, halves, sentences

ROOT = Path(__file__).resolve().parent.parent
LOCALES = ROOT / "locales"
HELP = {page.stem: page.read_text(encoding="utf-8") for page in (ROOT / "web" / "docs").glob("*.md")}
HOST = {"en": "host", "fr": "hôte", "ja": "ホスト", "zh": "主机"}  # ComfyUI alone; a computer is a machine
LANGUAGES = sorted(folder.name for folder in LOCALES.iterdir())
JOINED = re.compile(r'"\s*\+\s*"')  # where a text of a script goes on in the next line
VUE_I18N_SYNTAX = set("{}@$|")  # the frontend compiles names as messages, in which these have a meaning


@pytest.fixture(scope="module")
def nodes():
    """What the nodes' own schemas say, in the form of a nodeDefs.json."""
    from pipemesh.nodes.ksampler import sampler_nodes
    from pipemesh.nodes.pool import pool_nodes
    from pipemesh.nodes.report.node import report_node

    never_asked = None  # a schema needs no runtime
    classes = (*pool_nodes(never_asked), *sampler_nodes(never_asked), report_node(never_asked))
    return {cls.GET_SCHEMA().node_id: said_by(cls.GET_NODE_INFO_V1()) for cls in classes}


def said_by(info):
    """An output has a name to translate only where it is not that of its type, which the frontend
    translates.
    """
    sockets = {**info["input"].get("required", {}), **info["input"].get("optional", {})}
    outputs = zip(info["output"], info["output_name"], info["output_tooltips"], strict=True)
    return {
        "display_name": info["display_name"],
        "description": info["description"],
        "inputs": {
            name: {"name": socket[1].get("display_name") or name, "tooltip": socket[1]["tooltip"]}
            for name, socket in sockets.items()
        },
        "outputs": {
            str(index): {"tooltip": tooltip} if name == kind else {"name": name, "tooltip": tooltip}
            for index, (kind, name, tooltip) in enumerate(outputs)
        },
    }


def translation(language):
    return json.loads((LOCALES / language / "nodeDefs.json").read_text(encoding="utf-8"))


def leaves(tree, path=""):
    """Path and text of everything a tree says."""
    if isinstance(tree, str):
        return {path: tree}
    return {
        place: text for key, branch in tree.items() for place, text in leaves(branch, f"{path}/{key}").items()
    }


def test_nodes_are_marked_as_experimental_until_the_table_of_what_ran_has_a_gpu():
    from pipemesh.nodes.ksampler import sampler_nodes
    from pipemesh.nodes.pool import pool_nodes
    from pipemesh.nodes.report.node import report_node

    table = (
        (ROOT / "lab" / "docs" / "CUDA.md")
        .read_text(encoding="utf-8")
        .partition("\n## What ran")[2]
        .partition("\n\n`python3")[0]
    )
    ran = re.findall(r"^\| \d{4}-\d\d-\d\d \|", table, re.M)
    assert ran or "Nothing yet." in table
    marked = {
        one.GET_SCHEMA().is_experimental
        for one in (*pool_nodes(None), *sampler_nodes(None), report_node(None))
    }
    assert marked == {not ran}


def test_english_is_what_the_schemas_say(nodes):
    """The frontend shows the file instead of the schema, so a text that is changed in a node is to
    be changed here too.
    """
    assert translation("en") == nodes


@pytest.mark.parametrize("language", LANGUAGES)
def test_every_node_input_and_output_is_translated_and_nothing_that_is_not_there(nodes, language):
    said = leaves(translation(language))
    assert said.keys() == leaves(nodes).keys()
    assert all(text.strip() for text in said.values())


@pytest.mark.parametrize("language", LANGUAGES)
def test_no_text_holds_signs_that_the_frontend_would_interpret(language):
    assert not {
        place: text for place, text in leaves(translation(language)).items() if VUE_I18N_SYNTAX & set(text)
    }


@pytest.mark.parametrize("language", [language for language in LANGUAGES if language != "en"])
def test_a_translation_is_one(nodes, language):
    """Tooltips and descriptions are in the language; names may stay as they are."""
    said, english = leaves(translation(language)), leaves(nodes)
    assert not [
        place
        for place, text in said.items()
        if place.endswith(("/tooltip", "/description")) and text == english[place]
    ]


@pytest.mark.parametrize("file", ["settings.json", "main.json"])
def test_the_settings_are_translated_into_every_language_and_english_is_what_the_script_says(file):
    said = {
        language: json.loads((LOCALES / language / file).read_text(encoding="utf-8"))
        for language in LANGUAGES
    }
    for one in said.values():
        one.pop("pipemesh", None)
    assert {frozenset(leaves(one)) for one in said.values()} == {frozenset(leaves(said["en"]))}
    texts = [text for one in said.values() for text in leaves(one).values()]
    assert len(set(texts) - {"PipeMesh"}) == len([text for text in texts if text != "PipeMesh"]), (
        "one is not translated"
    )
    assert not [text for text in texts if VUE_I18N_SYNTAX & set(text)]
    script = JOINED.sub("", (ROOT / "web" / "auto.js").read_text(encoding="utf-8"))
    assert not [text for text in leaves(said["en"]).values() if f'"{text}"' not in script]


def panel_texts():
    return {
        language: json.loads((LOCALES / language / "main.json").read_text(encoding="utf-8"))["pipemesh"]
        for language in LANGUAGES
    }


def words_of_the_status():
    """Every word that the panel makes a text's name of."""
    from pipemesh.nodes.auto.switch import UNAVAILABLE
    from pipemesh.nodes.report.causes import SLOWED, WHY
    from pipemesh.nodes.report.shares import TAKES
    from pipemesh.parallel_runtime.client.run_picture import COLOURS
    from pipemesh.parallel_runtime.client.session import ResidentState
    from pipemesh.parallel_runtime.planner.choose import LOST
    from pipemesh.parallel_runtime.planner.machine import Known
    from pipemesh.parallel_runtime.wire.arena import PHASES

    return {
        "why": [*WHY],
        "slowed": [*SLOWED],
        "phase": [*PHASES],
        "unavailable": [one for one in UNAVAILABLE if one != "host"],
        "state": ["starting", "ready", "busy", "failed", "closed"],
        "model": [state.name.lower() for state in ResidentState],
        "lost": [*LOST],
        "known": [*get_args(Known)],
        "share": [*TAKES],
        "axis": [*COLOURS],
    }


def test_every_text_of_the_panel_is_there_in_every_language_and_none_that_is_not_shown():
    scripts = "".join(file.read_text(encoding="utf-8") for file in (ROOT / "web").glob("*.js"))
    named = set(re.findall(r'"([a-z_]+)"', scripts))
    made = {f"{kind}_{word}" for kind, words in words_of_the_status().items() for word in words}
    for language, said in panel_texts().items():
        assert made <= said.keys(), language
        assert said.keys() - made <= named, language
        assert set(re.findall(r'\bt\("([a-z_]+)"', scripts)) <= said.keys(), language


@pytest.mark.parametrize("language", LANGUAGES)
def test_a_text_of_the_panel_is_translated_with_the_same_places_for_values(language):
    said, english = panel_texts()[language], panel_texts()["en"]
    for name, text in said.items():
        assert sorted(re.findall(r"%\d", text)) == sorted(re.findall(r"%\d", english[name])), name
        assert not VUE_I18N_SYNTAX & set(text), name
        assert language == "en" or text != english[name] or len(text) < 15, name


@pytest.mark.parametrize("language", LANGUAGES)
def test_a_computer_is_no_host(language):
    said = {**leaves(translation(language)), **(HELP if language == "en" else {})}
    assert not {place: text for place, text in said.items() if HOST[language] in text.lower()}


def test_every_node_has_a_help_page_with_a_row_for_each_of_its_inputs(nodes):
    described = {}
    for name, page in HELP.items():
        rows = re.findall(r"^\| (`.*?) \|", page.partition("## Inputs")[2].partition("\n## ")[0], re.M)
        described[name] = {given for row in rows for given in re.findall(r"`(\w+)`", row)}
    assert described == {name: set(said["inputs"]) for name, said in nodes.items()}


def test_every_message_that_a_help_page_explains_is_one_of_the_codes():
    quoted = [
        words
        for page in HELP.values()
        for words in re.findall(r"^- \*\*(.+?)\.\*\*", page.partition("## Errors")[2], re.M)
    ]
    assert len(quoted) > 20
    longest = [
        max((piece.strip() for piece in re.split(rf"{FILLED_IN.pattern}|'.*?'", words)), key=len)
        for words in quoted
    ]
    assert not [
        words
        for words in longest
        if " " in words and not any(half in sentences() for half in halves(words.split()))
    ]
