"""Auto mode on a real server: stock graphs in, over the API, and back to stock with one switch."""

import json
import time
from urllib.request import urlopen

import pytest
import torch
from PIL import Image, ImageChops
from pipemesh.lab.comfyui.api import node
from pipemesh.lab.commands.parity import BOUND, relative_error

from ..fixtures import ALL
from ..kit.served import STEPS, custom, graph, latent, start

WORKFLOW = {
    "nodes": [{"id": 7, "type": "KSampler", "widgets_values": [5, "fixed", 3, 2.0, "euler"]}],
    "extra": {"ds": {"scale": 0.5}},
}


def switch(server, on):
    server.post("/settings/PipeMesh.Auto", on)


@pytest.fixture
def auto(server):
    """The shared server, its switch on; off again afterwards."""
    switch(server, True)
    yield server
    switch(server, False)


def runs(server):
    """When the last run of any pool began."""
    return max((run["began"] for run in server.get("/pipemesh/status")["last_runs"]), default=0.0)


def in_subgraph(nodes, path="12:"):
    """The same graph as the frontend sends it where the sampler is in a subgraph."""
    moved = json.loads(json.dumps(nodes).replace('["sampler", 0]', f'["{path}sampler", 0]'))
    moved[f"{path}sampler"] = moved.pop("sampler")
    return moved


def anew(nodes):
    """The same sampling with other inputs, so that ComfyUI has no result of it kept."""
    made = json.loads(json.dumps(nodes))
    inputs = next(one["inputs"] for key, one in made.items() if key in ("sigmas", "sampler", "12:sampler"))
    inputs |= {"denoise": 0.99995} if "denoise" in inputs else {"end_at_step": 9999}
    return made


@pytest.mark.parametrize("sampler", ["KSampler", "KSamplerAdvanced"])
def test_a_stock_graph_runs_in_the_pool_without_an_edit_and_its_client_is_told_the_same(auto, sampler):
    nodes = in_subgraph(graph(f"auto_{sampler}", parallel=False, sampler=sampler, seed=31))
    before, (ours, parallel) = runs(auto), latent(auto, nodes)
    assert runs(auto) > before
    began = runs(auto)
    # Nothing has changed, so ComfyUI runs nothing again
    assert not auto.run(nodes).ticks and runs(auto) == began
    switch(auto, False)
    truth, stock = latent(auto, anew(nodes))
    assert runs(auto) == began
    assert relative_error(ours, truth) <= BOUND
    told, expected = (
        [(tick.value, tick.maximum) for tick in result.ticks if tick.node == "12:sampler"]
        for result in (parallel, stock)
    )
    assert told == expected
    assert len(parallel.previews) == len(stock.previews) >= STEPS


def guided(name, seed):
    inputs = {"positive": ["positive", 0], "negative": ["negative", 0], "cfg": 3.0}
    return custom(name, "CFGGuider", inputs, seed=seed, parallel=False)


def test_a_guider_that_comfyui_kept_from_when_it_was_off_is_parallel_once_it_is_on(server, request):
    latent(server, guided("kept", 42))
    request.getfixturevalue("auto")
    before, (ours, result) = runs(server), latent(server, guided("kept_on", 41))
    assert "guider" not in {event.data.get("node") for event in result.events if event.type == "executing"}
    assert runs(server) > before
    switch(server, False)
    assert relative_error(ours, latent(server, anew(guided("kept_stock", 41)))[0]) <= BOUND


def picture(server, nodes, name):
    """Queues with a workflow, as the frontend does; returns the pictures that were saved."""
    nodes["picture"] = node("TestPicture", samples=["sampler", 0])
    nodes["png"] = node("SaveImage", images=["picture", 0], filename_prefix=name)
    asked = {"prompt": nodes, "extra_data": {"extra_pnginfo": {"workflow": WORKFLOW}}}
    prompt = server.post("/prompt", asked)["prompt_id"]
    until = time.monotonic() + 60
    while not (done := server.get(f"/history/{prompt}")):
        assert time.monotonic() < until
        time.sleep(0.02)  # each question is answered by the server
    (saved,) = done[prompt]["outputs"]["png"]["images"]
    image = Image.open(server.output / saved["filename"])
    image.load()
    return image


def test_a_picture_carries_the_prompt_and_the_workflow_that_were_queued_byte_for_byte(auto, host, models):
    nodes = graph("png", parallel=False, seed=51)
    before, ours = runs(auto), picture(auto, nodes, "auto")
    assert runs(auto) > before
    assert ours.text["workflow"] == json.dumps(WORKFLOW)
    assert queued(ours) == json.dumps(nodes)
    switch(auto, False)
    stock = picture(auto, anew(nodes), "auto")
    assert stock.text["prompt"].replace("0.99995", "1.0") == ours.text["prompt"]
    assert difference(stock, ours) <= 1
    if ALL:
        with start(host, models, pack=False) as without:
            stock = picture(without, nodes, "auto")
        assert stock.text["workflow"] == ours.text["workflow"] and queued(stock) == queued(ours)
        assert difference(stock, ours) <= 1


def queued(image):
    """The prompt that it carries, without what ComfyUI notes there of nodes that say whether they
    have changed: stand-ins of the tests do.
    """
    prompt = json.loads(image.text["prompt"])
    for one in prompt.values():
        one.pop("is_changed", None)
    return json.dumps(prompt)


def difference(one, other):
    """The largest of a colour of a pixel."""
    extremes = ImageChops.difference(one.convert("RGB"), other.convert("RGB")).getextrema()
    return max(most for _least, most in extremes)


def test_a_unets_prompts_go_to_groups_without_a_node_in_the_graph(auto):
    def nodes(name):
        return {**graph(name, parallel=False, seed=61), "unet": node("TestUNet")}

    before, ours = runs(auto), latent(auto, nodes("unet_auto"))[0]
    assert runs(auto) > before
    plan = auto.get("/pipemesh/status")["last_runs"][0]["plan"]
    assert plan["layout"] in ("cfg 2 = 2 ranks", "data 2 = 2 ranks") and plan["predicted_ms"]
    switch(auto, False)
    assert relative_error(ours, latent(auto, anew(nodes("unet_stock")))[0]) <= BOUND


def test_what_cannot_be_honoured_runs_on_one_gpu_and_its_node_says_why(auto):
    """test_auto.py has the other reasons."""

    def nodes(name):
        return graph(name, parallel=False, seed=61, between=[("TestAttentionPatch", {})])

    ours, result = latent(auto, nodes("patch_auto"))
    (notice,) = [event.data for event in result.events if event.type == "pipemesh.notice"]
    assert notice["node"] == "sampler" and notice["prompt"] == result.prompt_id
    assert notice["text"].startswith("On one GPU: ")
    assert "halved_keys (patches/attn1_patch) runs inside the model's blocks" in notice["text"]
    assert any(
        event.image.endswith(notice["text"].encode()) for event in result.events if event.type == "binary 3"
    )
    assert notice == auto.get("/pipemesh/status")["notices"][0]
    switch(auto, False)
    assert torch.equal(latent(auto, anew(nodes("patch_stock")))[0], ours)


def test_an_error_names_the_node_as_stock_does(auto):
    nodes = graph("wrong", parallel=False, seed=71)
    nodes["positive"]["inputs"]["context_dim"] = 63
    ours = auto.run(nodes).error
    switch(auto, False)
    stock = auto.run(anew(nodes)).error
    assert (ours.kind, ours.node, ours.class_type, ours.message) == (
        stock.kind,
        stock.node,
        stock.class_type,
        stock.message,
    )
    assert (stock.kind, stock.node) == ("failed", "sampler")


def test_the_browser_gets_the_packs_scripts_and_the_texts_of_the_switch(server):
    scripts = {f"/extensions/pipemesh/{name}.js" for name in ("auto", "panel", "pool", "report")}
    assert scripts <= set(server.get("/extensions"))
    script = urlopen(f"http://{server.address}/extensions/pipemesh/auto.js").read().decode()
    said = server.get("/i18n")["en"]["settings"]["PipeMesh_Auto"]
    assert f'name: "{said["name"]}"' in script


QUESTIONS = 1000 if ALL else 30
# Of all that is asked, what may differ from one moment to the next
FREE = ("free", "ram_free", "vram_free", "torch_vram_free")


def without_free(tree):
    if isinstance(tree, dict):
        return {name: without_free(one) for name, one in tree.items() if name not in FREE}
    return [without_free(one) for one in tree] if isinstance(tree, list) else tree


def memory(server):
    """What the routes say of this machine's memory: the answers, and the (free, total) in them."""
    stats, devices = server.get("/system_stats"), server.get("/pipemesh/status")["devices"]
    pairs = [(stats["system"]["ram_free"], stats["system"]["ram_total"])]
    pairs += [
        (one[f"{kind}_free"], one[f"{kind}_total"])
        for one in stats["devices"]
        for kind in ("vram", "torch_vram")
    ]
    return without_free([stats, devices]), pairs + [
        (one["free"], one["total"]) for one in devices if one["total"] is not None
    ]


def test_while_a_layout_is_chosen_all_routes_answer_as_when_nothing_is(auto):
    before, _ = memory(auto)
    answers, sizes = [], iter(range(136, 8192, 8))

    def ask(event):
        if event.type == "executing" and event.data.get("node") == "sampler":
            began = runs(auto)
            while len(answers) < QUESTIONS and runs(auto) == began:
                if auto.get("/pipemesh/status")["current_run"]:
                    return
                answers.append(memory(auto))

    while len(answers) < QUESTIONS:  # each size is counted anew
        began, pixels = len(answers), next(sizes)
        nodes = graph(f"asked_{pixels}", parallel=False, pixels=pixels, steps=2, seed=77)
        assert auto.run(nodes, on_event=ask).error is None
        assert len(answers) > began, "nobody was asked before the run began"
    assert all(said == before for said, _ in answers)
    assert all(0 <= free <= total for _, pairs in answers for free, total in pairs)
