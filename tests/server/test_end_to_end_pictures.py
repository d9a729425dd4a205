"""The pictures of the documents show the panel and the pool node as they are now.

Each picture holds the text that it shows. ``python3 -m launcher test --browser --screens=docs -q -m
browser tests/server/test_end_to_end_pictures.py`` takes both pictures anew.
"""

import json
import re

import pytest
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from ..fixtures import ROOT
from ..kit.screens import sheet
from .test_end_to_end_page import CHOOSE, NEW, PLACED, POOL, colour
from .test_end_to_end_panel import SAYS, SEEN, TEXT, UNCOUNTED, gone, open_panel, shown
from .test_end_to_end_status import example

pytestmark = [pytest.mark.browser, pytest.mark.quick]

ANEW = "its picture in docs/ is of another page: take it anew (the command stands in this file's docstring)"
FAULT = (
    "Rank 1 on cuda:1 was killed (signal 9; the system does this when memory runs out) while waiting: run"
    " again, a fresh pool will be started.\nThe last lines of its log:\nloaded flux1-dev.safetensors"
)
CLOCK = re.compile(r"\d{1,2}:\d\d:\d\d(\s[AP]M)?")  # of this machine's time zone
LABELLED = f"{POOL}.widgets.filter(one => !one.hidden).map(one => [one.label ?? one.name, String(one.value)])"
OPEN_PLAN = "document.querySelector('.pipemesh details[data-key=plan]').open = %s"


@pytest.fixture(scope="module")
def page(opened_page, pytestconfig):
    opened_page.resize(1280, 1700)
    if pytestconfig.getoption("--browser"):  # else no test of the panel came before
        opened_page.reload()
    yield opened_page
    opened_page.leave()


def dead():
    made = example()
    pool = made["pools"][0]
    pool["state"], pool["fault"], made["last_runs"] = "failed", FAULT, []
    return made


def compared(name, said, pictures, request):
    """Holds what the page shows to the picture in docs/, which is made anew first if asked for."""
    if folder := request.config.getoption("--screens"):
        info = PngInfo()
        info.add_text("shown", json.dumps(said))
        sheet(pictures).save(f"{folder}/{name}.png", pnginfo=info, optimize=True)
    with Image.open(ROOT / "docs" / f"{name}.png") as picture:
        assert json.loads(picture.info.get("shown", "null")) == said, ANEW


def test_the_panel(page, request, tmp_path):
    """Of the status that the reference has, and of one whose worker died; with the other layouts
    open in one.
    """
    open_panel(page)
    said, pictures = [], []
    for palette, status, plan in (
        ("dark", example(), "false"),
        ("light", example(), "true"),
        ("dark", dead(), None),
    ):
        colour(page, palette)
        page.evaluate(SAYS % json.dumps(status))
        if plan is None:
            shown(page, "was killed")
        else:
            shown(page, "flux1-dev.safetensors")
            gone(page, "was killed")
            page.evaluate(OPEN_PLAN % plan)
        said.append(CLOCK.sub("", page.evaluate(TEXT)))
        page.screenshot(tmp_path / f"{len(said)}.png", page.evaluate(SEEN))
        pictures.append(Image.open(tmp_path / f"{len(said)}.png"))
    page.evaluate(UNCOUNTED)
    colour(page, "dark")
    compared("panel", said, [pictures], request)


def test_the_pool_node(page, request, tmp_path):
    """Folded and by hand; for the picture in both of ComfyUI's forms of nodes, dark and light."""
    said, rows = {}, []
    taken = bool(request.config.getoption("--screens"))
    try:
        for palette in ("dark", "light")[: 1 + taken]:
            colour(page, palette)
            rows.append([])
            for layout in ("auto", "by hand"):
                for form in ("canvas", "vue")[: 1 + taken]:
                    page.set("Comfy.VueNodes.Enabled", form == "vue")
                    page.evaluate(NEW)
                    page.until(f"{POOL}.widgets.some(widget => widget.name == 'pick')")
                    page.evaluate(CHOOSE % f"'{layout}'")
                    said[layout] = page.evaluate(LABELLED)
                    file = tmp_path / f"{palette} {layout} {form}.png"
                    page.screenshot(file, page.evaluate(PLACED % POOL))
                    rows[-1].append(Image.open(file))
    finally:
        page.set("Comfy.VueNodes.Enabled", False)
        colour(page, "dark")
    compared("pool", said, rows, request)
