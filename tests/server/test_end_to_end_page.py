"""What a user sees in ComfyUI's own page: the switch of auto mode, official templates under it, the
badge of a node that sampled on one GPU, the folded pool node and its mistakes, the Report, and the
examples. By command: test --browser; those marked quick wherever there is a Chromium.
"""

import json
from pathlib import Path

import pytest
from PIL import Image, ImageStat
from pipemesh.lab.comfyui.api import node
from pipemesh.lab.comfyui.page import ComfyPage
from pipemesh.lab.templates.files import installed

from ..kit.served import graph, held
from .test_end_to_end_queue import IN_GROUPS

pytestmark = pytest.mark.browser

SUCCESS = ["execution_success", ""]
POOL = "app.graph.nodes.find(node => node.type == 'PipeMeshPool')"
SHOWN = (
    f"{POOL}.widgets.filter(widget => !widget.hidden && widget.name != 'pick').map(widget => [widget.name,"
    " widget.value])"
)
# The page keeps values by ids
CLEAR = "const last = app.graph.last_node_id; app.graph.clear(); app.graph.last_node_id = last + 1"
NEW = f"(() => {{ {CLEAR}; app.graph.add(LiteGraph.createNode('PipeMeshPool')); return true }})()"
CHOOSE = (
    f"(() => {{ const one = {POOL}.widgets.find(widget => widget.name == 'layout'); one.value = %s;"
    " one.callback(one.value) })()"
)
QUEUED = (
    "(async () => Object.values((await app.graphToPrompt()).output).find(one => one.class_type =="
    " 'PipeMeshPool').inputs)()"
)
OVERRULED = """(() => {
  const real = window.realFetch = window.fetch, said = JSON.stringify({ auto: { on: false, unavailable: { name: 'unavailable_host', values: [%s] } } })
  window.fetch = (path, ...rest) => String(path).includes('/pipemesh/status') ? Promise.resolve(new Response(said)) : real(path, ...rest)
  return true
})()"""
BADGED = """[app.rootGraph ?? app.graph, ...(app.rootGraph?.subgraphs?.values() ?? [])].flatMap(graph => graph.nodes)
  .filter(node => node.badges?.some(badge => (typeof badge == 'function' ? badge() : badge).text == 'no pool')).map(node => node.type)"""
FOLDED = [["devices", "auto"], ["layout", "auto"], ["quality", "exact"], ["weights", "auto"]]
FOLDED += [["queue", "all soonest"]]
MISTAKE = f"""(() => {{
  {CLEAR}
  const [pool, report] = ['PipeMeshPool', 'PipeMeshReport'].map(name => LiteGraph.createNode(name))
  for (const node of [pool, report]) app.graph.add(node)
  pool.connect(0, report, report.inputs.findIndex(one => one.name == 'pool'))
  const values = {{ layout: 'by hand', devices: 'cpu,cpu', ulysses: 3 }}
  for (const widget of pool.widgets) if (widget.name in values) widget.value = values[widget.name]
}})()"""

PLACED = """(async () => {
  const node = %s, frame = () => new Promise(requestAnimationFrame), { ds, canvas } = app.canvas
  ds.scale = 1
  ds.offset = [400 - node.pos[0], 160 - node.pos[1]]
  app.canvas.setDirty(true, true)
  for (let drawn = 0; drawn < 5; drawn++) await frame()
  const at = canvas.getBoundingClientRect(), shown = document.querySelector(`[data-node-id="${node.id}"]`)?.getBoundingClientRect()
  const box = shown ?? { x: at.x + 400, y: at.y + 130, width: node.size[0], height: node.size[1] + 30 }
  return [box.x - 16, box.y - 30, box.width + 32, box.height + 46]
})()"""  # brings a node into sight and returns the box around it


class PageWithoutThePack(ComfyPage):
    """As of a server where the pack failed behind ComfyUI's look at its page."""

    first = f"""{ComfyPage.first};(() => {{
      const real = window.fetch
      const isOurs = url => String(url).includes('/pipemesh/')
      window.fetch = (url, ...rest) => isOurs(url) ? Promise.resolve(new Response('', {{ status: 404 }})) : real(url, ...rest)
    }})()"""


class PageOfABadMoment(ComfyPage):
    """Its first question for the status and for the texts has no answer, as behind a busy proxy."""

    first = f"""{ComfyPage.first};(() => {{
      const real = window.fetch, once = ['/pipemesh/status', '/i18n']
      window.fetch = (url, ...rest) => {{
        const place = once.findIndex(path => String(url).includes(path))
        if (place >= 0) return once.splice(place, 1), Promise.resolve(new Response('', {{ status: 503 }}))
        return real(url, ...rest)
      }}
    }})()"""


@pytest.fixture(scope="module")
def page(server, opened_page):
    yield opened_page
    server.post("/settings/PipeMesh.Auto", False)


@pytest.fixture
def auto(page):
    """Switches auto mode on by the page, and off again."""
    page.set("PipeMesh.Auto", True)
    yield
    page.set("PipeMesh.Auto", False)


def numbered(nodes):
    """The page takes numbers for ids only."""
    ids, text = {name: str(number) for number, name in enumerate(nodes, 1)}, json.dumps(nodes)
    for name, number in ids.items():
        text = text.replace(f'["{name}", 0]', f'["{number}", 0]').replace(
            f'"{name}": {{"class_type"', f'"{number}": {{"class_type"'
        )
    return json.loads(text)


def without_plan(seed):
    """``seed``: of no other test, or ComfyUI has kept the latent and samples nothing."""
    nodes = numbered(graph("page", parallel=False, seed=seed))
    return {**nodes, "1": {"class_type": "TestWithoutPlan", "inputs": {"unet_name": "model.safetensors"}}}


# -- auto mode


HAS_TAB = "app.extensionManager.getSidebarTabs().some(tab => tab.id == 'pipemesh')"
HAS_SETTING = "'PipeMesh.Auto' in app.ui.settings.settingsLookup"


def test_a_page_of_a_server_where_the_pack_failed_has_no_sidebar_and_no_setting_of_it(server, page):
    assert page.evaluate(f"[{HAS_TAB}, {HAS_SETTING}]") == [True, True]
    with PageWithoutThePack(server.address) as without:
        assert without.evaluate(f"[{HAS_TAB}, {HAS_SETTING}]") == [False, False]


def test_a_server_that_failed_to_answer_once_costs_the_page_neither_panel_nor_setting_nor_texts(server):
    with PageOfABadMoment(server.address) as page:
        assert page.evaluate(f"[{HAS_TAB}, {HAS_SETTING}]") == [True, True]
        page.evaluate("app.extensionManager.sidebarTab.toggleSidebarTab('pipemesh')")
        page.until("document.querySelector('.pipemesh').innerText.includes('Nothing samples in a pool.')")


@pytest.mark.quick
def test_the_switch_in_the_settings_reaches_the_server_and_a_node_on_one_gpu_has_a_badge(server, page):
    assert page.evaluate("app.extensionManager.setting.get('PipeMesh.Auto')") is False
    page.set("PipeMesh.Auto", True)
    assert (
        server.get("/settings")["PipeMesh.Auto"] is True
        and server.get("/pipemesh/status")["auto"]["on"] is True
    )
    page.load(without_plan(seed=201), "switch")
    assert page.evaluate(BADGED) == []
    assert page.run() == SUCCESS
    assert page.evaluate(BADGED) == ["KSampler"]
    page.set("PipeMesh.Auto", False)
    assert page.run() == SUCCESS
    assert page.evaluate(BADGED) == []


def test_a_badge_stays_with_its_workflow_and_is_there_again_when_its_tab_is(page, auto):
    page.load(without_plan(seed=202), "badged")
    assert page.run() == SUCCESS
    page.load(numbered(graph("page", parallel=False)), "another")  # whose nodes have the same ids
    assert page.evaluate(BADGED) == []
    page.evaluate("app.extensionManager.command.execute('Workspace.PreviousOpenedWorkflow')")
    page.until(f"({BADGED}).length")


@pytest.fixture
def template(page, host, auto):
    """Opens an official template as it is."""
    workflows = {one.name: one for one in installed(host)}
    return lambda name: page.evaluate(f"app.loadGraphData({json.dumps(workflows[name].workflow())})")


def last_runs(server):
    return {run["began"] for run in server.get("/pipemesh/status")["last_runs"]}


def test_an_official_template_runs_on_all_devices_as_it_is_where_auto_mode_is_on(server, page, template):
    template("image_z_image_turbo")
    before = last_runs(server)
    assert page.run() == SUCCESS
    assert last_runs(server) - before and page.evaluate(BADGED) == []


def test_an_official_template_that_cannot_runs_on_one_gpu_with_a_badge_and_a_notice_that_says_why(
    server, page, template
):
    template("video_causal_forcing_i2v")
    before, prompt = last_runs(server), page.queue()
    page.until(f"({BADGED}).length")
    server.post("/interrupt", {})
    page.end(prompt)  # the stand-in of this model cannot be sampled to its end
    notice = server.get("/pipemesh/status")["notices"][0]
    assert notice["text"].startswith("On one GPU: CausalWanModel has no token plan") and notice["node"]
    assert last_runs(server) == before


def test_a_switch_without_effect_says_so_when_it_is_changed_and_not_before(page):
    page.evaluate(OVERRULED % json.dumps("PIPEMESH_AUTO=0 is set"))
    assert "PIPEMESH_AUTO=0" not in page.evaluate("document.body.innerText")
    page.set("PipeMesh.Auto", True)
    page.until("document.body.innerText.includes('PIPEMESH_AUTO=0 is set')")
    page.set("PipeMesh.Auto", False)
    page.evaluate("(() => { window.fetch = window.realFetch })()")


# -- nodes


@pytest.mark.quick
def test_a_new_pool_node_is_folded_and_unfolds(page):
    page.evaluate(NEW)
    assert page.evaluate(SHOWN) == FOLDED
    page.evaluate(CHOOSE % "'by hand'")
    unfolded = dict(page.evaluate(SHOWN))
    assert {"ulysses", "pipefusion", "stages", "backend"} <= unfolded.keys() and "quality" not in unfolded
    page.evaluate(CHOOSE % "'auto'")
    assert page.evaluate(SHOWN) == FOLDED


def test_the_title_of_parallelize_has_room(page):
    page.load(numbered(graph("page")), "title")
    size, title = page.evaluate("""(() => {
          const node = app.graph.nodes.find(node => node.type == 'PipeMeshParallelize')
          const pen = document.createElement('canvas').getContext('2d')
          pen.font = node.titleFontStyle ?? '14px Arial'
          return [node.size[0], pen.measureText(node.title).width]
        })()""")
    assert size >= title + 60  # the button before it and the margin behind it


TITLE_OF_PARALLELIZE = """(() => {
  const node = app.graph.nodes.find(node => node.type == 'PipeMeshParallelize')
  const box = app.canvas.canvas.getBoundingClientRect()
  app.canvas.ds.scale = 1
  app.canvas.ds.offset = [box.width / 2 - node.pos[0], box.height / 2 - node.pos[1]]
  app.canvas.draw(true, true)
  return [box.x + box.width / 2 + 60, box.y + box.height / 2 - 12]
})()"""


def test_a_nodes_help_page_is_in_the_pages_language_else_in_english(page):
    try:
        for language, says in (
            ("ja", "モデルのローダーとサンプラーの間"),
            ("ru", "Put it between the model"),
        ):
            page.set("Comfy.Locale", language)
            page.reload()
            page.load(numbered(graph("page")), f"help {language}")
            page.click(*page.evaluate(TITLE_OF_PARALLELIZE))
            page.until("document.querySelector('[data-testid=info-button]')")
            page.evaluate("document.querySelector('[data-testid=info-button]').click()")
            page.until(f"document.body.innerText.includes({json.dumps(says)})")
    finally:
        page.set("Comfy.Locale", "en")


REPORT = "app.rootGraph.nodes.find(node => node.type == 'PipeMeshReport')"
SAID = f"{REPORT}.widgets.find(widget => widget.name == 'text').value"


def reported(name, **kwargs):
    """A workflow of a run with its Report behind it."""
    nodes = graph(name, **kwargs)
    nodes["pool"]["inputs"]["layout"] = "by hand"
    return numbered(
        {**nodes, "report": {"class_type": "PipeMeshReport", "inputs": {"latent": ["sampler", 0]}}}
    )


def test_the_report_is_there_again_after_the_page_was_loaded_anew(page):
    page.load(reported("report_kept", seed=203), "report")
    saved = page.evaluate(
        "(() => { const saved = app.rootGraph.serialize(); saved.id = crypto.randomUUID(); return saved })()"
    )
    page.evaluate(f"app.loadGraphData({json.dumps(saved)})")
    assert not page.evaluate(SAID)
    assert page.run() == SUCCESS
    said = page.evaluate(SAID)
    assert "Last run: " in said
    page.reload()
    page.evaluate(f"app.loadGraphData({json.dumps(saved)})")
    page.until(f"{SAID} == {json.dumps(said)}")
    page.evaluate(f"app.loadGraphData({json.dumps({**saved, 'id': '11111111-1111-4111-8111-111111111111'})})")
    page.evaluate(
        "(async () => { for (let asked = 0; asked < 3; asked++) await fetch('/history?max_items=20') })()"
    )
    assert not page.evaluate(SAID), "another workflow's"


def test_the_report_keeps_its_size_and_wraps_long_sentences_in_both_forms_of_nodes(page, screens):
    page.resize(1280, 1200)
    try:
        for form in ("canvas", "vue"):
            page.set("Comfy.VueNodes.Enabled", form == "vue")
            page.load(reported("report_shown", seed=204), f"report {form}")
            assert page.run() == SUCCESS
            page.evaluate(PLACED % REPORT)  # the page shows only what is in sight
            page.until(f"{SAID}.includes('Last run: ')")
            area = f"[...document.querySelectorAll('textarea')].find(area => area.value == {SAID})"
            page.until(f"{area}.offsetHeight >= 300")
            style = page.evaluate(
                f"(({{ whiteSpace, fontFamily }}) => [whiteSpace, fontFamily])(getComputedStyle({area}))"
            )
            assert style == ["pre-wrap", "monospace"]
            pictured(page, REPORT, screens / f"report-{form}.png")
    finally:
        page.set("Comfy.VueNodes.Enabled", False)


@pytest.mark.parametrize("palette", ["dark", "light"])
def test_a_pool_node_shows_its_inputs_folded_and_by_hand_in_both_forms_of_nodes(page, screens, palette):
    page.resize(1280, 900)
    page.set("Comfy.ColorPalette", palette)
    page.until(
        f"document.documentElement.classList.contains('dark-theme') == {json.dumps(palette == 'dark')}"
    )
    try:
        for form in ("canvas", "vue"):
            page.set("Comfy.VueNodes.Enabled", form == "vue")
            page.evaluate(NEW)
            page.until(f"{POOL}.widgets.some(widget => widget.name == 'pick')")
            page.evaluate(CHOOSE % "'auto'")
            folded = pictured(page, POOL, screens / f"pool-{palette}-{form}-auto.png")
            page.evaluate(CHOOSE % "'by hand'")
            unfolded = pictured(page, POOL, screens / f"pool-{palette}-{form}-by-hand.png")
            assert unfolded.height > folded.height + 60
            assert all((brightness(one) > 128) == (palette == "light") for one in (folded, unfolded))
    finally:
        page.set("Comfy.VueNodes.Enabled", False)
        page.set("Comfy.ColorPalette", "dark")


def pictured(page, node, file):
    """Takes a picture of a node alone."""
    page.screenshot(file, page.evaluate(PLACED % node))
    return Image.open(file).convert("L")


def brightness(picture):
    return ImageStat.Stat(picture).median[0]


REACHED = """(() => {
  const button = [...document.querySelectorAll('button')].find(one => one.textContent.trim() == 'View details')
  const at = button.getBoundingClientRect()
  return button.contains(document.elementFromPoint(at.x + at.width / 2, at.y + at.height / 2))
})()"""


@pytest.mark.quick
def test_a_mistake_in_the_pool_is_one_sentence_that_is_seen(page):
    page.evaluate(MISTAKE)
    page.evaluate("(() => { app.queuePrompt(0) })()")
    sentence = (
        "ulysses 3 = 3 ranks, 2 devices listed (cpu, cpu): list one device per rank, or choose ulysses 2 or"
        " ring 2."
    )
    page.until(f"document.body.innerText.includes({json.dumps(sentence)})")
    page.until(
        "[...document.querySelectorAll('button')].some(one => one.textContent.trim() == 'View details')"
    )
    assert page.evaluate(REACHED), "what ComfyUI itself says of it is not covered"
    page.evaluate("document.querySelector('.pipemesh-mistake button').click()")
    assert sentence not in page.evaluate("document.body.innerText")
    (errors,) = page.evaluate(
        "Object.values(app.lastNodeErrors).map(node => node.errors.map(error => error.details))"
    )
    assert len(errors) == 1 and errors[0].endswith(sentence)


def test_devices_are_chosen_from_a_list_of_those_that_are_there_and_the_list_is_in_no_workflow(page):
    page.evaluate(NEW)
    page.until(f"{POOL}.widgets.some(widget => widget.name == 'pick')")
    choices = page.evaluate(f"{POOL}.widgets.find(widget => widget.name == 'pick').options.values")
    shown, everything, cpu = choices
    assert shown == page.evaluate(f"{POOL}.widgets.find(widget => widget.name == 'pick').value"), (
        "what is shown is one of the choices"
    )
    assert cpu.startswith("cpu · CPU, ") and cpu.endswith(" GiB")
    said = []
    for choice in (cpu, cpu, cpu, everything):
        page.evaluate(f"{POOL}.widgets.find(widget => widget.name == 'pick').callback({json.dumps(choice)})")
        said.append(page.evaluate(QUEUED)["devices"])
    assert said == ["cpu", "auto", "cpu", "auto"]
    assert "pick" not in page.evaluate(QUEUED)
    saved = page.evaluate(f"{POOL}.serialize().widgets_values")
    assert len([value for value in saved if value is not None]) == len(
        page.evaluate(f"Object.keys(await {QUEUED})".join(["(async () => ", ")()"]))
    )


@pytest.mark.parametrize("layout", ["auto", "by hand"])
def test_a_prompt_opens_as_the_layout_that_it_runs_in_on_the_server(page, layout):
    prompt = reported("opened", seed=205)
    (number,) = (number for number, node in prompt.items() if node["class_type"] == "PipeMeshPool")
    prompt[number]["inputs"]["layout"] = layout
    page.load(prompt, "opened " + layout)
    queued = page.evaluate(QUEUED)
    assert {name: queued[name] for name in prompt[number]["inputs"]} == prompt[number]["inputs"]


EXAMPLES = Path(__file__).parents[2] / "example_workflows"


@pytest.mark.parametrize("name", sorted(file.stem for file in EXAMPLES.glob("*.json")))
def test_an_example_opens_with_every_node_and_link_and_is_queued_as_it_says(page, name):
    saved = json.loads((EXAMPLES / f"{name}.json").read_text(encoding="utf-8"))
    page.evaluate(f"app.loadGraphData({json.dumps(saved)})")
    assert page.evaluate("app.graph.nodes.map(node => node.type).sort()") == sorted(
        one["type"] for one in saved["nodes"]
    )
    assert page.evaluate("[...app.graph.links.values()].length") == len(saved["links"])
    queued = page.evaluate("(async () => (await app.graphToPrompt()).output)()")
    linked = sum(isinstance(value, list) for one in queued.values() for value in one["inputs"].values())
    assert linked == len(saved["links"])
    for one in saved["nodes"]:
        if one["type"] == "PipeMeshPool":
            assert list(queued[str(one["id"])]["inputs"].values()) == one["widgets_values"]


BATCH = """(async () => {
  for (const node of app.graph.nodes)
    for (const widget of node.widgets ?? [])
      for (const control of widget.linkedWidgets ?? []) control.value = node.type == 'KSampler' ? 'increment' : 'fixed'
  await app.queuePrompt(0, 4)
  return true
})()"""


def test_the_pages_batch_count_is_sampled_at_once_and_each_picture_has_a_workflow_with_its_own_seed(
    server, page
):
    nodes = graph("page", seed=300)
    nodes["pool"]["inputs"] |= IN_GROUPS
    nodes["picture"] = node("TestPicture", samples=["sampler", 0])
    nodes["png"] = node("SaveImage", images=["picture", 0], filename_prefix="of the page")
    page.load(numbered(nodes), "batch")
    used = server.get("/pipemesh/status")["queue"]["used"]
    with held(server, IN_GROUPS):
        assert page.evaluate(BATCH)
    server.run(graph("behind the page", seed=10))
    assert server.get("/pipemesh/status")["queue"]["used"] - used == 2
    seeds = []
    for file in sorted(server.output.glob("of the page*.png")):
        text = Image.open(file).text
        shown = next(one for one in json.loads(text["workflow"])["nodes"] if one["type"] == "KSampler")
        (asked,) = [one for one in json.loads(text["prompt"]).values() if one["class_type"] == "KSampler"]
        assert asked["inputs"]["seed"] in shown["widgets_values"]
        seeds.append(asked["inputs"]["seed"])
    assert seeds == [300, 301, 302, 303]
