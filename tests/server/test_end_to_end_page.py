"""What a user sees in ComfyUI's own page: the switch of auto mode, official templates under it, the
badge of a node that sampled on one GPU, the folded pool node and its mistakes, the Report, and the
examples. By command: test --browser; those marked quick wherever there is a Chromium.
"""

import json

import pytest
from PIL import Image
from pipemesh.lab.comfyui.api import node
from pipemesh.lab.comfyui.page import ComfyPage
from pipemesh.lab.templates.files import installed

from ..fixtures import ROOT
from ..kit.served import graph, held
from .test_end_to_end_auto import runs
from .test_end_to_end_queue import IN_GROUPS

pytestmark = pytest.mark.browser

SUCCESS = ["execution_success", ""]
POOL = "app.graph.nodes.find(node => node.type == 'PipeMeshPool')"
SHOWN = f"{POOL}.widgets.filter(one => !one.hidden && one.name != 'pick').map(one => [one.name, one.value])"
PICK = f"{POOL}.widgets.find(one => one.name == 'pick')"
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


def page_whose_server(answers):
    """A page for which ``answers(url)`` decides: the status of an answer, or the server's own."""

    class Page(ComfyPage):
        first = f"""{ComfyPage.first};(() => {{
          const real = window.fetch, answers = {answers}
          window.fetch = (url, ...rest) => {{
            const status = answers(String(url))
            return status ? Promise.resolve(new Response('', {{ status }})) : real(url, ...rest)
          }}
        }})()"""

    return Page


PageWithoutThePack = page_whose_server("url => url.includes('/pipemesh/') && 404")
# Its first question for the status and for the texts has no answer, as behind a busy proxy
PageOfABadMoment = page_whose_server("""(once => url => {
  const place = once.findIndex(path => url.includes(path))
  return place >= 0 && (once.splice(place, 1), 503)
})(['/pipemesh/status', '/i18n'])""")


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


@pytest.fixture
def forms(page):
    """Yields ComfyUI's two forms of nodes, switched to; afterwards the first again."""

    def switched():
        for form in ("canvas", "vue"):
            page.set("Comfy.VueNodes.Enabled", form == "vue")
            yield form

    yield switched()
    page.set("Comfy.VueNodes.Enabled", False)


def numbered(nodes):
    """The page takes numbers for ids only."""
    ids = {name: str(number) for number, name in enumerate(nodes, 1)}

    def value(one):
        return [ids[one[0]], one[1]] if isinstance(one, list) and one[:1] and one[0] in ids else one

    return {
        ids[name]: {**one, "inputs": {key: value(each) for key, each in one["inputs"].items()}}
        for name, one in nodes.items()
    }


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
    assert server.get("/settings")["PipeMesh.Auto"] is server.get("/pipemesh/status")["auto"]["on"] is True
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


def test_an_official_template_that_cannot_runs_on_one_gpu_with_a_badge_and_a_notice_that_says_why(
    server, page, auto, host
):
    """Its sampler is in a subgraph."""
    workflow = next(one for one in installed(host) if one.name == "video_causal_forcing_i2v").workflow()
    page.evaluate(f"app.loadGraphData({json.dumps(workflow)})")
    before, prompt = runs(server), page.queue()
    page.until(f"({BADGED}).length")
    server.post("/interrupt", {})
    page.end(prompt)  # the stand-in of this model cannot be sampled to its end
    notice = server.get("/pipemesh/status")["notices"][0]
    assert notice["text"].startswith("On one GPU: CausalWanModel has no token plan") and notice["node"]
    assert runs(server) == before


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
    help_pages = {"ja": "モデルのローダーとサンプラーの間", "ru": "Put it between the model"}
    button = "document.querySelector('[data-testid=info-button]')"
    try:
        for language, says in help_pages.items():
            page.set("Comfy.Locale", language)
            page.reload()
            page.load(numbered(graph("page")), f"help {language}")
            page.click(*page.evaluate(TITLE_OF_PARALLELIZE))
            page.until(button)
            page.evaluate(f"{button}.click()")
            page.until(f"document.body.innerText.includes({json.dumps(says)})")
    finally:
        page.set("Comfy.Locale", "en")


REPORT = "app.rootGraph.nodes.find(node => node.type == 'PipeMeshReport')"
SAID = f"{REPORT}.widgets.find(widget => widget.name == 'text').value"


def reported(name, **kwargs):
    """A workflow of a run with its Report behind it."""
    nodes = graph(name, **kwargs)
    nodes["pool"]["inputs"]["layout"] = "by hand"
    return numbered(nodes | {"report": node("PipeMeshReport", latent=["sampler", 0])})


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
    asks = "for (let asked = 0; asked < 3; asked++) await fetch('/history?max_items=20')"
    page.evaluate(f"(async () => {{ {asks} }})()")
    assert not page.evaluate(SAID), "another workflow's"


def test_the_report_keeps_its_size_and_wraps_long_sentences_in_both_forms_of_nodes(page, screens, forms):
    page.resize(1280, 1200)
    area = f"[...document.querySelectorAll('textarea')].find(area => area.value == {SAID})"
    style = f"(({{ whiteSpace, fontFamily }}) => [whiteSpace, fontFamily])(getComputedStyle({area}))"
    for form in forms:
        page.load(reported("report_shown", seed=204), f"report {form}")
        assert page.run() == SUCCESS
        page.evaluate(PLACED % REPORT)  # the page shows only what is in sight
        page.until(f"{SAID}.includes('Last run: ')")
        page.until(f"{area}.offsetHeight >= 300")
        assert page.evaluate(style) == ["pre-wrap", "monospace"]
        page.screenshot(screens / f"report-{form}.png", page.evaluate(PLACED % REPORT))


def colour(page, palette):
    page.set("Comfy.ColorPalette", palette)
    dark = json.dumps(palette == "dark")
    page.until(f"document.documentElement.classList.contains('dark-theme') == {dark}")


DETAILS = "[...document.querySelectorAll('button')].find(one => one.textContent.trim() == 'View details')"
REACHED = f"""(button => {{
  const at = button.getBoundingClientRect()
  return button.contains(document.elementFromPoint(at.x + at.width / 2, at.y + at.height / 2))
}})({DETAILS})"""


@pytest.mark.quick
def test_a_mistake_in_the_pool_is_one_sentence_that_is_seen(page):
    page.evaluate(MISTAKE)
    page.evaluate("(() => { app.queuePrompt(0) })()")
    sentence = (
        "ulysses 3 = 3 ranks, 2 devices listed (cpu, cpu): list one device per rank, or choose ulysses 2 or"
        " ring 2."
    )
    page.until(f"document.body.innerText.includes({json.dumps(sentence)})")
    page.until(f"!!{DETAILS}")
    assert page.evaluate(REACHED), "what ComfyUI itself says of it is not covered"
    page.evaluate("document.querySelector('.pipemesh-mistake button').click()")
    assert sentence not in page.evaluate("document.body.innerText")
    errors = "Object.values(app.lastNodeErrors).flatMap(node => node.errors.map(error => error.details))"
    (error,) = page.evaluate(errors)
    assert error.endswith(sentence)


def test_devices_are_chosen_from_a_list_of_those_that_are_there_and_the_list_is_in_no_workflow(page):
    page.evaluate(NEW)
    page.until(f"!!{PICK}")
    shown, everything, cpu = page.evaluate(f"{PICK}.options.values")
    assert shown == page.evaluate(f"{PICK}.value"), "what is shown is one of the choices"
    assert cpu.startswith("cpu · CPU, ") and cpu.endswith(" GiB")
    for choice, said in ((cpu, "cpu"), (cpu, "auto"), (cpu, "cpu"), (everything, "auto")):
        page.evaluate(f"{PICK}.callback({json.dumps(choice)})")
        assert page.evaluate(QUEUED)["devices"] == said
    assert "pick" not in page.evaluate(QUEUED)
    saved = page.evaluate(f"{POOL}.serialize().widgets_values")
    assert len([value for value in saved if value is not None]) == len(page.evaluate(QUEUED))


@pytest.mark.parametrize("layout", ["auto", "by hand"])
def test_a_prompt_opens_as_the_layout_that_it_runs_in_on_the_server(page, layout):
    prompt = reported("opened", seed=205)
    (number,) = (number for number, node in prompt.items() if node["class_type"] == "PipeMeshPool")
    prompt[number]["inputs"]["layout"] = layout
    page.load(prompt, "opened " + layout)
    queued = page.evaluate(QUEUED)
    assert {name: queued[name] for name in prompt[number]["inputs"]} == prompt[number]["inputs"]


EXAMPLES = ROOT / "example_workflows"


@pytest.mark.parametrize("name", sorted(file.stem for file in EXAMPLES.glob("*.json")))
def test_an_example_opens_with_every_node_and_link_and_is_queued_as_it_says(page, name):
    saved = json.loads((EXAMPLES / f"{name}.json").read_text(encoding="utf-8"))
    page.evaluate(f"app.loadGraphData({json.dumps(saved)})")
    types = sorted(one["type"] for one in saved["nodes"])
    assert page.evaluate("app.graph.nodes.map(node => node.type).sort()") == types
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
