"""The panel in ComfyUI's own page: what it shows of a run while it goes on, a worker that dies and
comes back by its buttons, in light and dark, narrow, by keyboard. By command: test --browser.
"""

import json
import os
import signal
from itertools import pairwise
from pathlib import Path

import pytest

from .chromium import Page
from .served import LARGE, graph, latent, live_pool, pids, wait_for_phase
from .test_end_to_end_page import READY, UNTIL, numbered

pytestmark = pytest.mark.browser

PANEL = "document.querySelector('.pipemesh')"
TEXT = f"{PANEL}.innerText"
OPEN = "app.extensionManager.sidebarTab.toggleSidebarTab('pipemesh')"
SEEN = "(() => { const at = document.querySelector('.pipemesh').getBoundingClientRect(); return [at.x, at.y, at.width, at.height] })()"
PRESS = "[...document.querySelectorAll('.pipemesh button')].find(one => one.textContent == %s).click()"
FITS = "document.querySelector('.pipemesh').scrollWidth <= document.querySelector('.pipemesh').clientWidth"
LISTEN = """(() => {
  window.waits = []
  window.app.api ??= null
  const api = window.comfyAPI?.api?.api ?? app.api
  api.addEventListener('pipemesh.progress', ({ detail }) => window.waits.push(detail))
})()"""
CONTRAST = """(() => {
  const numbers = colour => colour.match(/[\\d.]+/g).slice(0, 3).map(one => {
    const part = Number(one) / 255
    return part <= 0.03928 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4
  })
  const light = colour => { const [r, g, b] = numbers(colour); return 0.2126 * r + 0.7152 * g + 0.0722 * b }
  const behind = element => {
    for (let one = element; one; one = one.parentElement) {
      const colour = getComputedStyle(one).backgroundColor
      if (!/, 0\\)$|transparent/.test(colour)) return colour
    }
    return 'rgb(255, 255, 255)'
  }
  const ratio = element => {
    const one = light(getComputedStyle(element).color), other = light(behind(element))
    return (Math.max(one, other) + 0.05) / (Math.min(one, other) + 0.05)
  }
  return Math.min(...[...document.querySelectorAll('.pipemesh p, .pipemesh h2, .pipemesh button:not(:disabled), .pipemesh span')]
    .filter(one => one.textContent.trim()).map(ratio))
})()"""


@pytest.fixture(scope="module")
def page(server):
    server.post("/settings/Comfy.TutorialCompleted", True)
    with Page(f"http://{server.address}") as opened:
        opened.evaluate(READY)
        opened.resize(1280, 900)
        opened.evaluate(OPEN)
        opened.evaluate(UNTIL % f"{PANEL} && {TEXT}.length > 20")
        yield opened


@pytest.fixture(scope="module")
def screens(request, tmp_path_factory):
    folder = request.config.getoption("--screens")
    folder = Path(folder) if folder else tmp_path_factory.mktemp("screens")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def shown(page, text):
    page.evaluate(UNTIL % f"{TEXT}.includes({json.dumps(text)})")


def test_a_run_is_seen_to_go_on_from_the_click_until_its_first_step_and_then_in_the_panel(server, page):
    page.evaluate(LISTEN)
    nodes = numbered(graph("panel_run", pixels=LARGE, steps=4, seed=101))
    page.evaluate(f"app.loadApiJson({json.dumps(nodes)}, 'page')")
    page.evaluate("app.queuePrompt(0)")
    page.evaluate(UNTIL % "window.waits.length > 0")
    shown(page, "evaluations so far")
    shown(page, "Nothing samples in a pool.")
    shown(page, "s per step")
    seconds = page.evaluate("window.waits.map(one => one.seconds)")
    assert seconds == sorted(seconds) and seconds[0] < 2
    assert all(after - before < 2 for before, after in pairwise(seconds))
    for text in ("model.safetensors", "Rank 0 on cpu", "ready", "2 ranks share the tokens"):
        shown(page, text)


@pytest.mark.parametrize("palette", ["dark", "light"])
def test_it_can_be_read_in_light_and_dark_and_fits_320_pixels(server, page, screens, palette):
    latent(server, graph("panel_shown", seed=102))
    page.evaluate(f"app.extensionManager.setting.set('Comfy.ColorPalette', '{palette}')")
    shown(page, "Nothing samples in a pool.")
    assert page.evaluate(CONTRAST) >= 4.5
    page.screenshot(screens / f"panel-{palette}.png", page.evaluate(SEEN))
    for width in ("320px", "240px"):
        page.evaluate(f"{PANEL}.style.width = '{width}'")
        assert page.evaluate(FITS)
    page.evaluate(f"{PANEL}.style.width = ''")
    page.evaluate("app.extensionManager.setting.set('Comfy.ColorPalette', 'dark')")


def test_a_dead_worker_is_shown_and_started_again_from_there(server, page, screens):
    latent(server, graph("panel_killed", seed=103))
    before = pids(server)
    os.kill(before[1], signal.SIGKILL)
    shown(page, "Rank 1 on cpu was killed")
    shown(page, "Last lines of rank 1")
    shown(page, "Run again")
    page.screenshot(screens / "panel-dead.png", page.evaluate(SEEN))
    page.evaluate(PRESS % json.dumps("Restart"))
    wait_for_phase(server, "waiting")
    page.evaluate(UNTIL % f"!{TEXT}.includes('was killed')")
    assert not set(before) & set(pids(server)) and live_pool(server)["state"] == "ready"


def test_its_buttons_are_reached_by_keyboard_and_keep_the_focus(server, page):
    latent(server, graph("panel_keys", seed=104))
    shown(page, "Unload models")
    page.evaluate("[...document.querySelectorAll('.pipemesh button')].find(one => one.textContent == 'Unload models').focus()")
    page.evaluate("document.activeElement.click()")
    page.evaluate(UNTIL % f"!{TEXT}.includes('Models:')")
    page.evaluate(PRESS % json.dumps("Release devices"))
    shown(page, "not running")
    assert page.evaluate("[...document.querySelectorAll('.pipemesh button, .pipemesh summary')].every(one => one.tabIndex >= 0)")
