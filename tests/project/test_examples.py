"""The example workflows: each has a picture of its own and a page. Runs without ComfyUI; that they
load is tested on a running server.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from PIL import Image

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "example_workflows"
NAMES = sorted(file.stem for file in FOLDER.glob("*.json"))
BY_HAND = {"ulysses", "ring", "pipefusion", "cfg", "data", "patches", "warm_up", "stages", "backend"}
PAGES = {page.name: page.read_text(encoding="utf-8") for page in (ROOT / "docs" / "examples").glob("*.md")}


@pytest.mark.parametrize("name", NAMES)
def test_an_example_has_a_thumbnail_a_page_and_a_note_of_the_files_that_it_needs(name):
    with Image.open(FOLDER / f"{name}.jpg") as picture:
        assert picture.size == (288, 288)
    assert len([page for page, text in PAGES.items() if f"*{name}*" in text]) == 1
    nodes = json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))["nodes"]
    (note,) = [one["widgets_values"][0] for one in nodes if one.get("title") == "Files"]
    needed = [file for one in nodes for file in one["properties"].get("models", ())]
    assert needed
    for file in needed:
        assert (
            file["url"].endswith(f"/{file['name']}")
            and file["url"] in note
            and f"models/{file['directory']}" in note
        )


@pytest.mark.parametrize("name", NAMES)
def test_a_note_tells_of_no_input_of_the_pool_that_the_node_does_not_show(name):
    nodes = json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))["nodes"]
    (note,) = [one["widgets_values"][0] for one in nodes if one.get("title") == "Read me"]
    folded = [one for one in nodes if one["type"] == "PipeMeshPool" and one["widgets_values"][1] == "auto"]
    told = set(re.findall(r"\*(\w+)\*", note)) & BY_HAND
    assert not (folded and told), told


def test_there_is_an_example_for_each_kind_of_use_and_no_page_without_one():
    assert PAGES.keys() == {"image.md", "video.md", "edit.md", "approximate.md", "auto.md"} and len(
        NAMES
    ) == len(PAGES)
