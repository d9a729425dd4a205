"""A queue of seeds on a real server, sampled two at once: names, order, metadata, events, previews
and history are those of ComfyUI, and so is every image.
"""

import asyncio
import json

import aiohttp
import pytest
from PIL import Image
from pipemesh.lab.comfyui.api import PAGE, node
from pipemesh.lab.commands.parity import BOUND, relative_error
from safetensors.torch import load_file

from ..fixtures import ALL
from ..kit.served import custom, graph, held
from .test_end_to_end_auto import difference, queued

IN_GROUPS = {"ulysses": 1, "data": 2, "queue": "all soonest"}


def of_a_masked_batch(name, seed, parallel):
    nodes = graph(name, seed=seed, parallel=parallel)
    nodes["sampler"]["inputs"] |= {"latent_image": ["masked", 0], "sampler_name": "dpmpp_2m_sde"}
    nodes["empty"]["inputs"]["batch_size"] = 2
    nodes["mask"] = node("SolidMask", value=0.6, width=128, height=128)
    nodes["masked"] = node("SetLatentNoiseMask", samples=["empty", 0], mask=["mask", 0])
    return nodes


def two_in_a_row(name, seed, parallel):
    nodes = graph(name, seed=seed, parallel=parallel, sampler="KSamplerAdvanced", steps=4)
    second = json.loads(json.dumps(nodes["sampler"]))
    nodes["sampler"]["inputs"] |= {"end_at_step": 2, "return_with_leftover_noise": "enable"}
    second["inputs"] |= {"add_noise": "disable", "start_at_step": 2, "latent_image": ["sampler", 0]}
    nodes["second"] = second
    nodes["save"]["inputs"]["samples"] = ["second", 0]
    return nodes


def sampler_custom(name, seed, parallel):
    nodes = with_guider(name, seed, parallel)
    model = nodes["guider"]["inputs"]["model"]
    prompts = {"positive": ["positive", 0], "negative": ["negative", 0], "cfg": 3.0}
    links = {"sampler": ["solver", 0], "sigmas": ["sigmas", 0], "latent_image": ["empty", 0]}
    nodes["sampler"] = node("SamplerCustom", model=model, add_noise=True, noise_seed=seed, **prompts, **links)
    del nodes["guider"], nodes["noise"]
    return nodes


def with_guider(name, seed, parallel):
    inputs = {"positive": ["positive", 0], "negative": ["negative", 0], "cfg": 3.0}
    return custom(name, "CFGGuider", inputs, seed=seed, parallel=parallel)


# Graph, prompts, and those that are sampled ahead by as many samplers
CASES = {"a masked batch": (of_a_masked_batch, 4, 2), "two in a row": (two_in_a_row, 4, 4)}
if ALL:
    CASES |= {
        "KSampler": (graph, 8, 4),
        "SamplerCustom": (sampler_custom, 4, 2),
        "SamplerCustomAdvanced": (with_guider, 4, 2),
    }


def queued_together(server, graphs, first_begins=lambda: None):
    """Queues all while another prompt runs; returns their ids, and all events until the last has
    ended.
    """

    async def follow():
        async with (
            aiohttp.ClientSession() as session,
            session.ws_connect(f"http://{server.address}/ws?clientId=queue", max_msg_size=0) as socket,
        ):
            await socket.send_json(PAGE)
            with held(server, IN_GROUPS):
                ids = [server.queue(nodes, "queue") for nodes in graphs]
            events = []
            while (
                not events or kind_and_prompt(events[-1]) != ("executing", ids[-1]) or not ended(events[-1])
            ):
                events.append(await server._receive(socket))
                if kind_and_prompt(events[-1]) == ("execution_start", ids[0]):
                    first_begins()
            return ids, events

    return asyncio.run(asyncio.wait_for(follow(), 120))


def kind_and_prompt(event):
    return event.type, event.data.get("prompt_id")


def ended(event):
    return event.data.get("node", "") is None


def told_of(events, prompt, nodes):
    """What a page is told of a prompt: which nodes ran, and every step of its samplers."""
    own = [event for event in events if event.data.get("prompt_id") == prompt]
    samplers = [name for name in nodes if "ampler" in nodes[name]["class_type"] and name != "solver"]
    steps = [
        (event.data["node"], event.data["value"], event.data["max"])
        for event in own
        if event.type == "progress" and event.data["node"] in samplers
    ]
    ends = ("execution_start", "execution_success", "execution_error", "execution_interrupted")
    kinds = [event.type for event in own if event.type in ends]
    previews = sum(event.type == "preview" for event in own)
    return kinds, steps, previews


@pytest.mark.parametrize("case", CASES)
def test_a_queue_of_seeds_is_sampled_two_at_once_and_everything_of_it_is_comfyuis_own(server, case):
    make, count, ahead = CASES[case]
    seeds = range(100, 100 + count)

    def graphs(parallel):
        found = []
        for seed in seeds:
            name = f"queue_{case}_{seed}_{parallel}".replace(" ", "_")
            nodes = make(name, seed=seed, parallel=parallel)
            if parallel:
                nodes["pool"]["inputs"] |= IN_GROUPS
            nodes["picture"] = node("TestPicture", samples=nodes["save"]["inputs"]["samples"])
            nodes["png"] = node(
                "SaveImage", images=["picture", 0], filename_prefix=f"queue {case} {parallel}"
            )
            found.append(nodes)
        return found

    before = server.get("/pipemesh/status")["queue"]
    ours, stock = graphs(True), graphs(False)
    ids, events = queued_together(server, ours)
    status = server.get("/pipemesh/status")
    after = status["queue"]
    assert after["used"] - before["used"] == ahead and after["dropped"] == before["dropped"]
    stock_ids, stock_events = queued_together(server, stock)
    assert server.get("/pipemesh/status")["queue"] == after
    runs = status["last_runs"][:ahead]  # what was handed over is none
    assert [run["steps"]["queue"]["at_once"] for run in runs] == [2] * ahead
    steps = sum(
        len(told_of(stock_events, prompt, nodes)[1]) for prompt, nodes in zip(stock_ids, stock, strict=True)
    )
    assert 2 * sum(run["figures"]["evaluations"] for run in runs) == steps
    for number, (prompt, other) in enumerate(zip(ids, stock_ids, strict=True)):
        mine, theirs = (
            load_file(server.output / f"{one[number]['save']['inputs']['name']}.safetensors")
            for one in (ours, stock)
        )
        assert relative_error(mine["latent"], theirs["latent"]) <= BOUND
        assert told_of(events, prompt, ours[number]) == told_of(stock_events, other, stock[number])
        history, expected = server.history(prompt), server.history(other)
        assert history["status"]["status_str"] == "success" and history["status"]["completed"]
        assert history["prompt"][2] == ours[number]
        assert set(history["outputs"]) == set(expected["outputs"])
        saved = history["outputs"]["png"]["images"]
        assert [one["filename"] for one in saved] == [
            one["filename"].replace("False", "True") for one in expected["outputs"]["png"]["images"]
        ]
        for one, another in zip(saved, expected["outputs"]["png"]["images"], strict=True):
            picture, truth = (Image.open(server.output / each["filename"]) for each in (one, another))
            assert queued(picture) == json.dumps(ours[number])
            assert difference(picture, truth) <= 1
    starts = [event.data["prompt_id"] for event in events if event.type == "execution_start"]
    assert [prompt for prompt in starts if prompt in ids] == ids


@pytest.mark.parametrize("why", ["they share nothing", "first image soonest"])
def test_prompts_of_a_queue_are_sampled_one_after_the_other_where(server, why):
    before = server.get("/pipemesh/status")["queue"]
    graphs = []
    for seed in (200, 201):
        nodes = graph(f"{why}_{seed}".replace(" ", "_"), seed=seed)
        nodes["pool"]["inputs"] |= IN_GROUPS
        if why == "they share nothing":
            nodes["positive"]["inputs"]["seed"] = seed
        else:
            nodes["pool"]["inputs"]["queue"] = why
        graphs.append(nodes)
    queued_together(server, graphs)
    assert server.get("/pipemesh/status")["queue"] == before


def test_what_waits_is_freed_with_the_models_and_node_cache(server):
    before = server.get("/pipemesh/status")["queue"]
    graphs = [graph(f"free_{seed}", seed=seed) for seed in (220, 221)]
    for nodes in graphs:
        nodes["pool"]["inputs"] |= IN_GROUPS
    free = {"unload_models": True, "free_memory": True}
    queued_together(server, graphs, lambda: server.post("/free", free))
    after = server.get("/pipemesh/status")["queue"]
    assert after["dropped"] - before["dropped"] == 1 and after["used"] == before["used"]
    stock = graph("free_stock", seed=221, parallel=False)
    queued_together(server, [stock])
    mine, theirs = (
        load_file(server.output / f"{name}.safetensors")["latent"] for name in ("free_221", "free_stock")
    )
    assert relative_error(mine, theirs) <= BOUND


def test_in_auto_mode_a_queue_is_sampled_at_once_where_that_is_chosen_until_the_setting_says_no(server):
    def queued_seeds(first, count=4):
        graphs = [graph(f"auto_{seed}", seed=seed, parallel=False) for seed in range(first, first + count)]
        for nodes in graphs:
            nodes["sampler"]["inputs"]["cfg"] = 1.0
        before = server.get("/pipemesh/status")["queue"]["used"]
        queued_together(server, graphs)
        found = [load_file(server.output / f"{one['save']['inputs']['name']}.safetensors") for one in graphs]
        return server.get("/pipemesh/status")["queue"]["used"] - before, [one["latent"] for one in found]

    server.post("/settings/PipeMesh.Auto", True)
    server.post("/settings/PipeMesh.Queue", "all soonest")
    try:
        used, ours = queued_seeds(300)
        server.post("/settings/PipeMesh.Queue", "first image soonest")
        assert queued_seeds(310, 2)[0] == 0
    finally:
        server.post("/settings/PipeMesh.Auto", False)
    assert used == 2
    for one, other in zip(ours, queued_seeds(300)[1], strict=True):
        assert relative_error(one, other) <= BOUND
