"""What a user sees in ComfyUI's own page: the switch of auto mode, the badge of a node that sampled
on one GPU, the folded pool node and its mistakes, and the examples. By command: test --browser.
"""

import json
from pathlib import Path

import pytest

from .chromium import Page
from .served import graph

pytestmark = pytest.mark.browser

READY = """new Promise(done => {
  const look = () => window.app?.extensionManager?.workflow?.activeWorkflow ? done(true) : requestAnimationFrame(look)
  look()
})"""
UNTIL = """new Promise(done => {
  const seen = () => { try { return %s } catch { return false } }  // what is looked at may not be there yet
  const look = () => seen() ? done(true) : requestAnimationFrame(look)
  look()
})"""
POOL = "app.graph.nodes.find(node => node.type == 'PipeMeshPool')"
SHOWN = f"{POOL}.widgets.filter(widget => !widget.hidden && widget.name != 'pick').map(widget => [widget.name, widget.value])"
CLEAR = "const last = app.graph.last_node_id; app.graph.clear(); app.graph.last_node_id = last + 1"  # the page keeps values by ids
NEW = f"(() => {{ {CLEAR}; app.graph.add(LiteGraph.createNode('PipeMeshPool')); return true }})()"
CHOOSE = f"(() => {{ const one = {POOL}.widgets.find(widget => widget.name == 'layout'); one.value = %s; one.callback(one.value) }})()"
QUEUED = "(async () => Object.values((await app.graphToPrompt()).output).find(one => one.class_type == 'PipeMeshPool').inputs)()"
BADGES = "app.graph.nodes.find(node => node.type == 'KSampler').badges.map(badge => (typeof badge == 'function' ? badge() : badge).text)"
OVERRULED = """(() => {
  const real = window.realFetch = window.fetch, said = JSON.stringify({ auto: { on: false, unavailable: %s } })
  window.fetch = (path, ...rest) => String(path).includes('/pipemesh/status') ? Promise.resolve(new Response(said)) : real(path, ...rest)
  return true
})()"""
FOLDED = [["devices", "auto"], ["layout", "auto"], ["weights", "auto"], ["quality", "exact"]]


MISTAKE = f"""(() => {{
  {CLEAR}
  const [pool, report] = ['PipeMeshPool', 'PipeMeshReport'].map(name => LiteGraph.createNode(name))
  for (const node of [pool, report]) app.graph.add(node)
  pool.connect(0, report, report.inputs.findIndex(one => one.name == 'pool'))
  const values = {{ layout: 'by hand', devices: 'cpu,cpu', ulysses: 3 }}
  for (const widget of pool.widgets) if (widget.name in values) widget.value = values[widget.name]
}})()"""


@pytest.fixture(scope="module")
def page(server):
    server.post("/settings/Comfy.TutorialCompleted", True)
    with Page(f"http://{server.address}") as opened:
        opened.evaluate(READY)
        yield opened
    server.post("/settings/PipeMesh.Auto", False)


def numbered(nodes):
    """The page takes numbers for ids only."""
    ids, text = {name: str(number) for number, name in enumerate(nodes, 1)}, json.dumps(nodes)
    for name, number in ids.items():
        text = text.replace(f'["{name}", 0]', f'["{number}", 0]').replace(f'"{name}": {{"class_type"', f'"{number}": {{"class_type"')
    return json.loads(text)


def test_the_switch_in_the_settings_reaches_the_server_and_a_node_on_one_gpu_has_a_badge(server, page):
    assert page.evaluate("app.extensionManager.setting.get('PipeMesh.Auto')") is False
    page.evaluate("app.extensionManager.setting.set('PipeMesh.Auto', true)")
    assert server.get("/settings")["PipeMesh.Auto"] is True and server.get("/pipemesh/status")["auto"]["on"] is True
    nodes = numbered(graph("page", parallel=False))
    nodes["1"] = {"class_type": "TestWithoutPlan", "inputs": {"unet_name": "model.safetensors"}}
    page.evaluate(f"app.loadApiJson({json.dumps(nodes)}, 'page')")
    assert "1 GPU" not in page.evaluate(BADGES)
    page.evaluate("app.queuePrompt(0)")
    page.evaluate(UNTIL % f"{BADGES}.includes('1 GPU')")
    page.evaluate("app.extensionManager.setting.set('PipeMesh.Auto', false)")
    page.evaluate("app.queuePrompt(0)")
    page.evaluate(UNTIL % f"!{BADGES}.includes('1 GPU')")


def test_a_switch_without_effect_says_so_when_it_is_changed_and_not_before(page):
    page.evaluate(OVERRULED % json.dumps("PIPEMESH_AUTO=0 is set"))
    assert "PIPEMESH_AUTO=0" not in page.evaluate("document.body.innerText")
    page.evaluate("app.extensionManager.setting.set('PipeMesh.Auto', true)")
    page.evaluate(UNTIL % "document.body.innerText.includes('PIPEMESH_AUTO=0 is set')")
    page.evaluate("app.extensionManager.setting.set('PipeMesh.Auto', false)")
    page.evaluate("(() => { window.fetch = window.realFetch })()")


def test_a_new_pool_node_is_folded_and_unfolds(page):
    page.evaluate(NEW)
    assert page.evaluate(SHOWN) == FOLDED
    page.evaluate(CHOOSE % "'by hand'")
    unfolded = dict(page.evaluate(SHOWN))
    assert {"ulysses", "pipefusion", "stages", "backend"} <= unfolded.keys() and "quality" not in unfolded
    page.evaluate(CHOOSE % "'auto'")
    assert page.evaluate(SHOWN) == FOLDED


def test_the_title_of_parallelize_has_room(page):
    page.evaluate(f"app.loadApiJson({json.dumps(numbered(graph('page')))}, 'page')")
    size, title = page.evaluate(
        """(() => {
          const node = app.graph.nodes.find(node => node.type == 'PipeMeshParallelize')
          const pen = document.createElement('canvas').getContext('2d')
          pen.font = node.titleFontStyle ?? '14px Arial'
          return [node.size[0], pen.measureText(node.title).width]
        })()"""
    )
    assert size >= title + 60  # the button before it and the margin behind it


def test_a_mistake_in_the_pool_is_one_sentence_that_is_seen(page):
    page.evaluate(MISTAKE)
    page.evaluate("(() => { app.queuePrompt(0) })()")
    sentence = "ulysses 3 = 3 ranks, 2 devices listed (cpu, cpu): list one device per rank."
    page.evaluate(UNTIL % f"document.body.innerText.includes({json.dumps(sentence)})")
    (errors,) = page.evaluate("Object.values(app.lastNodeErrors).map(node => node.errors.map(error => error.details))")
    assert len(errors) == 1 and errors[0].endswith(sentence)


def test_devices_are_chosen_from_a_list_of_those_that_are_there_and_the_list_is_in_no_workflow(page):
    page.evaluate(NEW)
    page.evaluate(UNTIL % f"{POOL}.widgets.some(widget => widget.name == 'pick')")
    choices = page.evaluate(f"{POOL}.widgets.find(widget => widget.name == 'pick').options.values")
    shown, everything, cpu = choices
    assert shown == page.evaluate(f"{POOL}.widgets.find(widget => widget.name == 'pick').value"), "what is shown is one of the choices"
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


def test_a_workflow_saved_by_0_1_opens_unfolded_and_is_queued_as_it_was(page):
    saved = json.loads((Path(__file__).parent / "saved" / "workflow_0_1.json").read_text(encoding="utf-8"))
    page.evaluate(f"app.loadGraphData({json.dumps(saved)})")
    inputs = page.evaluate(QUEUED)
    assert (inputs["layout"], inputs["devices"], inputs["ulysses"], inputs["backend"]) == ("by hand", "auto", 2, "auto")
    assert ["ulysses", 2] in page.evaluate(SHOWN)


EXAMPLES = Path(__file__).parents[1] / "example_workflows"


@pytest.mark.parametrize("name", sorted(file.stem for file in EXAMPLES.glob("*.json")))
def test_an_example_opens_with_every_node_and_link_and_is_queued_as_it_says(page, name):
    saved = json.loads((EXAMPLES / f"{name}.json").read_text(encoding="utf-8"))
    page.evaluate(f"app.loadGraphData({json.dumps(saved)})")
    assert page.evaluate("app.graph.nodes.map(node => node.type).sort()") == sorted(node["type"] for node in saved["nodes"])
    assert page.evaluate("[...app.graph.links.values()].length") == len(saved["links"])
    queued = page.evaluate("(async () => (await app.graphToPrompt()).output)()")
    linked = sum(isinstance(value, list) for node in queued.values() for value in node["inputs"].values())
    assert linked == len(saved["links"])
    for node in saved["nodes"]:
        if node["type"] == "PipeMeshPool":
            assert list(queued[str(node["id"])]["inputs"].values()) == node["widgets_values"]
