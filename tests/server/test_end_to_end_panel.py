"""The panel in ComfyUI's own page: what it shows of a run while it goes on, a worker that dies and
comes back by its buttons, in light and dark, narrow, by keyboard. By command: test --browser.
"""

import json
import os
import re
import signal
from dataclasses import asdict
from itertools import pairwise

import pytest
from pipemesh.parallel_runtime.comm import traffic
from pipemesh.parallel_runtime.texts import Text

from ..fixtures import ROOT
from ..kit.served import LARGE, graph, latent, live_pool, pids, wait_for_phase
from .test_end_to_end_page import SUCCESS, colour, numbered
from .test_end_to_end_status import example

pytestmark = pytest.mark.browser

PANEL = "document.querySelector('.pipemesh')"
TEXT = f"{PANEL}.innerText"
TABS = "app.extensionManager.sidebarTab"
OPEN = f"(tabs => tabs.activeSidebarTabId == 'pipemesh' || tabs.toggleSidebarTab('pipemesh'))({TABS})"
SEEN = """(() => {
  const at = document.querySelector('.pipemesh').getBoundingClientRect()
  return [at.x, at.y, at.width, Math.min(at.height, window.innerHeight - at.y)]
})()"""
ABOVE = "position: fixed; left: 0; top: 0; height: 100vh; z-index: 9999; background: var(--comfy-menu-bg)"
NARROW = f"{PANEL}.style.cssText = '{ABOVE}; width: %dpx'"
WIDE = f"{PANEL}.style.cssText = ''"
BUTTONS = "[...document.querySelectorAll('.pipemesh button')]"
ENABLED = f"{BUTTONS}.some(one => one.textContent == '%s' && !one.ariaDisabled)"
PRESS = f"{BUTTONS}.find(one => one.textContent == %s).click()"
UNCOUNTED = "(() => { window.fetch = window.realFetch })()"
SAYS = """(() => {
  const real = window.realFetch ??= window.fetch, said = JSON.stringify(%s)
  window.fetch = (path, ...rest) => String(path).includes('/pipemesh/status') ? Promise.resolve(new Response(said)) : real(path, ...rest)
})()"""
SHARES = (
    "[...document.querySelectorAll('.pipemesh .bar > [class^=axis]')].map(one => parseFloat(one.style.width))"
)
UNLIKE = (
    Text("share_tokens", ("cuda:1", "30 %", "2.3", "cuda:0")),
    Text("share_stage", ("1", "2.3")),
    Text("share_group", ("cuda:1", "2.3")),
)
FITS = "document.querySelector('.pipemesh').scrollWidth <= document.querySelector('.pipemesh').clientWidth"
LISTEN = """(() => {
  const api = window.comfyAPI.api.api, panel = document.querySelector('.pipemesh')
  window.moved = []  // [event, ms since the click] of all that shows a user that it goes on
  window.said = []  // every text of the panel
  window.clicked = performance.now()
  for (const name of ['executing', 'progress_state', 'progress', 'pipemesh.progress'])
    api.addEventListener(name, () => window.moved.push([name, performance.now() - window.clicked]))
  new MutationObserver(() => window.said.push(panel.innerText)).observe(panel, { childList: true, characterData: true, subtree: true })
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
  return Math.min(...[...document.querySelectorAll('.pipemesh p, .pipemesh h2, .pipemesh button:not([aria-disabled]), .pipemesh span')]
    .filter(one => one.textContent.trim()).map(ratio))
})()"""


@pytest.fixture(scope="module")
def page(opened_page):
    opened_page.resize(1280, 1200)
    opened_page.reload()
    open_panel(opened_page)
    return opened_page


@pytest.fixture
def says(page):
    """Has the panel read such a status; afterwards the server's own again."""
    yield lambda made: page.evaluate(SAYS % json.dumps(made))
    page.evaluate(WIDE)
    page.evaluate(UNCOUNTED)


@pytest.fixture
def counted(page):
    """Requests of the page are kept in ``window.asked``."""
    page.evaluate(COUNTED)
    yield
    page.evaluate(UNCOUNTED)


def open_panel(page):
    page.evaluate(OPEN)
    page.until(f"{PANEL} && {TEXT}.length > 20")


def shown(page, *texts):
    for text in texts:
        try:
            page.until(f"{TEXT}.includes({json.dumps(text)})")
        except TimeoutError as error:
            raise AssertionError(f"{text!r} is not in {page.evaluate(TEXT)!r}") from error


def gone(page, text):
    page.until(f"!{TEXT}.includes({json.dumps(text)})")


def narrow(page, file, width=320):
    page.evaluate(NARROW % width)
    assert page.evaluate(FITS)
    page.screenshot(file, page.evaluate(SEEN))


def texts_of(language):
    return json.loads((ROOT / "locales" / language / "main.json").read_text(encoding="utf-8"))["pipemesh"]


@pytest.mark.parametrize("layout", ["by hand", "auto"])
def test_a_run_is_seen_to_go_on_from_the_click_until_its_first_step_and_then_in_the_panel(
    server, page, layout
):
    """Where workers have to start, and a layout to be chosen. That the cadence is kept whatever
    takes long is in test_waiting.py.
    """
    for pool in server.get("/pipemesh/status")["pools"]:
        server.post(f"/pipemesh/pools/{pool['id']}/release", {})
    nodes = graph("panel_run", pixels=LARGE, steps=4, seed=101 + 10 * (layout == "auto"))
    nodes["pool"]["inputs"]["layout"] = layout
    page.load(numbered(nodes), f"run {layout.split()[0]}")
    page.evaluate(LISTEN)
    assert page.run() == SUCCESS
    moved = page.evaluate("window.moved")
    first_step = [name for name, _ in moved].index("progress")
    times = [0, *(ms for _, ms in moved[: first_step + 1])]
    own = [ms for name, ms in moved[:first_step] if name == "pipemesh.progress"]
    assert own[0] - moved[0][1] < 1000, "from the first event of ComfyUI's own"
    assert times[1] < 1000 and max(after - before for before, after in pairwise(times)) < 2000
    # Where it is, how long it takes still, and what is waited for
    for said in (r"/: step \d of 4/", "/About /", "/PipeMesh: /"):
        assert page.evaluate(f"window.said.some(text => {said}.test(text))"), said
    why = "2 workers compute one image together" if layout == "by hand" else "Layout: "
    shown(
        page, "Nothing samples in a pool.", "s per step", "model.safetensors", "Rank 0 on cpu", "ready", why
    )


def timed_alone(server):
    """Stock samples an image of which two ranks make something, on the one thread that each has."""
    latent(server, graph("panel_alone", parallel=False, pixels=LARGE, seed=109))


@pytest.mark.parametrize("palette", ["dark", "light"])
def test_it_can_be_read_in_light_and_dark_and_fits_320_pixels(server, page, screens, palette):
    timed_alone(server)
    latent(server, graph("panel_shown", pixels=LARGE, seed=102))
    page.set("Comfy.ColorPalette", palette)
    shown(page, "timed here", "Nothing samples in a pool.", "2 workers compute one image together")
    shown(page, "ready", "Models:")
    assert page.evaluate(CONTRAST) >= 4.5
    page.screenshot(screens / f"panel-{palette}.png", page.evaluate(SEEN))
    for width in (320, 240):
        narrow(page, screens / f"panel-{palette}-{width}.png", width)
    page.evaluate(WIDE)
    page.set("Comfy.ColorPalette", "dark")


def test_why_a_layout_was_chosen_and_others_were_not_is_shown_in_every_language(server, page, screens):
    timed_alone(server)
    nodes = graph("panel_plan", pixels=LARGE, seed=105)
    nodes["pool"]["inputs"]["layout"] = "auto"
    latent(server, nodes)
    try:
        for language in ("fr", "ja", "zh", "en"):
            said = speak(page, language)
            parts = ("known_plain", "plan_predicted", "plan_achieved", "plan_losers")
            shown(page, *(said[text].partition("%")[0] for text in parts))
            page.evaluate(f"{PANEL}.querySelector('details[data-key=plan]').open = true")
            shown(page, said["lost_approximate"])
            narrow(page, screens / f"panel-plan-{language}.png")
    finally:
        speak(page, "en")


def speak(page, language):
    """Without loading the page anew: what is open follows."""
    page.set("Comfy.Locale", language)
    shown(page, texts_of(language)["auto_off"])
    return texts_of(language)


def test_what_unlike_gpus_take_and_which_messages_are_waited_for_are_shown(page, screens, says):
    """What no test machine has: the status is made up."""
    made, texts = example(), texts_of("en")
    pool, figures = made["pools"][0], made["last_runs"][0]["figures"]
    pool["shares"] = [asdict(share) for share in UNLIKE]
    pool["models"][0]["graphs"] = [asdict(Text("graphs_replayed", ("17", "40")))]
    pool["ranks"][0]["memory"]["graphs"] = 200 << 20
    by_axis = {axis: 0.01 * number for number, axis in enumerate(traffic.COUNTED, 1)}
    figures |= {"exchange_share": 0.15, "exchange_by_axis": by_axis}
    says(made)
    shown(page, *(filled(texts[share.name], share.values) for share in UNLIKE))
    shown(page, *(f"{texts[f'axis_{axis}']}\n{number}.0 %" for number, axis in enumerate(by_axis, 1)))
    # The bar has each, the largest first
    assert page.evaluate(SHARES) == pytest.approx([5, 4, 3, 2, 1], abs=0.1)
    replayed = "CUDA graphs: in the last run workers replayed 17 of 40 evaluations"
    shown(page, f"flux1-dev.safetensors: {replayed}", "by models, 0.20 GiB by CUDA graphs")
    shown(page, "Communication: 15 % of the time")
    for palette in ("light", "dark"):
        colour(page, palette)
        narrow(page, screens / f"panel-unlike-{palette}.png")
        assert page.evaluate(CONTRAST) >= 4.5
    figures["exchange_share"] = None
    says(made)
    shown(page, "Waiting for messages: 15 % of the time")


def filled(text, values):
    return re.sub(r"%(\d)", lambda place: values[int(place[1]) - 1], text)


@pytest.mark.parametrize("button", ["Restart", "Run again"])
def test_a_dead_worker_is_shown_and_started_again_from_there(server, page, screens, button):
    """Also where ComfyUI has kept the image, and samples nothing for it."""
    timed_alone(server)
    nodes = graph("panel_killed", pixels=LARGE, seed=103)
    latent(server, nodes)
    page.load(numbered(nodes), f"killed {button.split()[-1]}")
    before = pids(server)
    os.kill(before[1], signal.SIGKILL)
    shown(page, "Rank 1 on cpu was killed")
    assert "failed" in [pool["state"] for pool in server.get("/pipemesh/status")["pools"]]
    assert page.evaluate(f"{BUTTONS}.filter(one => one.closest('.fault') && !one.ariaDisabled).length") == 3
    page.screenshot(screens / "panel-dead.png", page.evaluate(SEEN))
    page.evaluate(PRESS % json.dumps(button))
    gone(page, "was killed")
    shown(page, "Nothing samples in a pool.")
    wait_for_phase(server, "waiting")
    assert not set(before) & set(pids(server)) and live_pool(server)["state"] in ("ready", "busy")


def test_layouts_that_are_not_running_are_gone(server, page):
    for ring, seed in ((1, 106), (2, 107)):
        nodes = graph("panel_layouts", seed=seed)
        nodes["pool"]["inputs"] |= {"layout": "by hand", "ulysses": 2 // ring, "ring": ring}
        latent(server, nodes)
    shown(page, "ring 2 = 2 ranks")
    cards = "[...document.querySelectorAll('.pipemesh .card strong')].map(one => one.textContent)"
    assert page.evaluate(cards) == ["ring 2 = 2 ranks"]
    pools = server.get("/pipemesh/status")["pools"]
    ready = next(pool["id"] for pool in pools if pool["state"] == "ready")
    server.post(f"/pipemesh/pools/{ready}/release", {})
    shown(page, "No workers are running")


COUNTED = """(() => {
  const real = window.realFetch ??= window.fetch
  window.asked = []
  window.fetch = (path, ...rest) => (window.asked.push([rest[0]?.method ?? 'GET', String(path)]), real(path, ...rest))
})()"""
ASKED = "window.asked.filter(([method, path]) => method == '%s' && path.includes('/pipemesh/%s')).length"
GETS, POSTS = ASKED % ("GET", "status"), ASKED % ("POST", "pools")
HIDDEN = (
    "(Object.defineProperty(document, 'hidden', { value: %s, configurable: true }),"
    " document.dispatchEvent(new Event('visibilitychange')))"
)
EVENT = "window.comfyAPI.api.api.dispatchEvent(new CustomEvent('status', { detail: null }))"


def waited_out(page):
    """Past the time within which the panel asks after an event."""
    page.evaluate("new Promise(done => setTimeout(done, 700))")


def test_the_status_is_asked_for_only_while_the_panel_is_open_and_the_page_is_seen(page, counted):
    def never_asked(why):
        waited_out(page)
        page.evaluate("window.asked.length = 0")
        page.evaluate(EVENT)
        waited_out(page)
        assert page.evaluate(GETS) == 0, why

    shown(page, "Devices")
    try:
        page.evaluate(EVENT)
        page.until(f"{GETS} > 0")
        page.evaluate(HIDDEN % "true")
        never_asked("nobody sees it")
        page.evaluate(HIDDEN % "false")
        page.until(f"{GETS} > 0")
        page.evaluate(f"{TABS}.toggleSidebarTab('pipemesh')")
        page.until(f"!{PANEL}")
        never_asked("it is closed")
    finally:
        page.evaluate("void delete document.hidden")
        open_panel(page)


REFUSES = """(() => {
  const before = window.fetch
  window.fetch = (path, ...rest) => rest[0]?.method == 'POST' ? Promise.resolve(new Response('', { status: window.code })) : before(path, ...rest)
})()"""


def test_a_double_click_acts_once_and_a_refusal_without_a_sentence_is_one(server, page, counted):
    latent(server, graph("panel_clicked", seed=108))
    page.until(ENABLED % "Unload models")
    unload = f"{BUTTONS}.find(one => one.textContent == 'Unload models')"
    page.evaluate(f"((one) => (one.click(), one.click()))({unload})")
    gone(page, "Models:")
    assert page.evaluate(POSTS) == 1
    page.evaluate(REFUSES)
    for code, says in ((403, "ComfyUI refused this page (HTTP 403)"), (502, "The server refused (HTTP 502)")):
        page.evaluate(f"window.code = {code}")
        page.until(ENABLED % "Restart")
        page.evaluate(PRESS % json.dumps("Restart"))
        shown(page, says)


def test_no_button_can_be_pressed_while_a_pool_is_at_work(page, says):
    made = example()
    made["pools"][0]["state"] = "busy"
    for busy in (True, False):
        says(made | {"busy": busy})
        page.until(
            f"{BUTTONS}.length == 3 && {BUTTONS}.every(one => !!one.ariaDisabled == {json.dumps(busy)})"
        )


def test_a_run_that_ended_early_says_so_and_why_in_place_of_a_speed(page, screens, says):
    made, fault = example(), "Rank 1 on cpu was killed: run again, a fresh pool will be started."
    made["last_runs"][0]["steps"] = {"done": 3, "total": 20, "left_s": None, "fault": fault}
    says(made)
    shown(page, "Ended after step 3 of 20", fault)
    assert "s per step" not in page.evaluate(TEXT)
    page.screenshot(screens / "panel-ended.png", page.evaluate(SEEN))


def test_this_comfyui_what_was_tested_and_what_was_verified_here_are_named(page, says):
    made = example()
    tested = {"version": made["host"]["tested"][0]}
    other = {"version": "9.9", "verified": ["Flux"], "refused": ["Wan"], "pending": ["LTXVModel", "Lens"]}
    for host, said in (
        (tested, "PipeMesh was tested with ComfyUI {version}."),
        (
            other,
            "PipeMesh was not tested with ComfyUI {version}. Verified here on the CPU: Flux. Not computed by the"
            " pool, because the images differ: Wan. Being compared with stock: LTXVModel, Lens.",
        ),
    ):
        says(made | {"host": made["host"] | host})
        shown(page, said.format(**host))


LOG = "document.querySelector('.pipemesh .fault pre')"
READING = f"""(() => {{
  const log = window.log = {LOG}
  log.scrollTop = 40
  log.focus()
  window.getSelection().setBaseAndExtent(log.firstChild, 3, log.firstChild, 30)
}})()"""
STILL = f"""[{LOG} == window.log, {LOG}.scrollTop, document.activeElement == {LOG}, window.getSelection().toString()]"""


def test_what_a_user_reads_of_a_dead_workers_log_stays_while_everything_else_changes(page, says):
    """Its place, the focus, and what is selected to be copied; also while no status comes."""
    made = example()
    log = "\n".join(f"line {number} of its log" for number in range(60))
    made["pools"][0]["fault"] = f"Rank 1 on cpu was killed: run again.\n{log}"
    says(made)
    page.until(f"!!{LOG}")
    page.evaluate(READING)
    before = page.evaluate(STILL)
    assert before[0] and before[2] and before[3] and before[1] > 0
    notice = {"at": 1.0, "node": "7", "text": "One more", "detail": "", "count": 1, "one_gpu": False}
    made |= {"notices": [notice], "devices": made["devices"] * 2, "last_runs": []}
    says(made)
    shown(page, "One more")
    assert page.evaluate(STILL) == before
    page.evaluate("void (window.fetch = () => Promise.reject(new Error('gone')))")
    shown(page, "The status of PipeMesh could not be read: gone")
    assert page.evaluate(STILL) == before
    says(made)
    gone(page, "could not be read")
    assert page.evaluate(STILL) == before


FOCUSED = "document.activeElement.dataset.key ?? ''"


def test_its_buttons_are_reached_and_pressed_by_keyboard_and_keep_the_focus(server, page):
    def tab_to(key):
        for _ in range(30):
            if page.evaluate(FOCUSED).endswith(key):
                page.until(f"({FOCUSED}).endsWith('{key}') && !document.activeElement.ariaDisabled")
                return
            page.press("Tab")
        raise AssertionError(f"Tab does not come to {key}")

    latent(server, graph("panel_keys", seed=104))
    shown(page, "Unload models")
    page.evaluate(f"{PANEL}.focus()")
    tab_to("-unload")
    page.press("Enter")
    gone(page, "Models:")
    assert page.evaluate(FOCUSED).endswith("-unload"), "though it has nothing to unload now"
    tab_to("-release")
    page.press("Enter")
    gone(page, "Release devices")
    assert page.evaluate(f"document.activeElement == {PANEL}"), "where its pool was"
