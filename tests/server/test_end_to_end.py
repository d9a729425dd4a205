"""A real ComfyUI server, spoken to as a browser would: the pack's nodes, the pool behind them,
cancel, faults, two instances.
"""

import json
import os
import signal
from functools import partial
from itertools import combinations, product
from urllib.request import urlopen

import psutil
import pytest
import torch
from pipemesh.lab.comfyui.api import node
from pipemesh.lab.comfyui.server import CUSTOM_NODES
from pipemesh.lab.commands.parity import BOUND, relative_error

from ..fixtures import ALL, ROOT
from ..kit.models import write_model
from ..kit.served import (
    LARGE,
    STEPS,
    accepts,
    box,
    graph,
    latent,
    linked,
    live_pool,
    once_it_samples,
    overlap,
    pids,
    ranks_of,
    start,
    wait_for_phase,
    widgets,
)
from ..project.test_package import base

__all__ = ["base"]  # a fixture

TEXT = 3  # comfyui: protocol.BinaryEventTypes


# -- the same result


def test_cancel_while_the_pool_starts_and_the_next_run_is_right(server, truth):
    """First of all tests here: no pool is up yet."""
    stopped = server.run(graph("stopped"), on_event=once_it_samples(server.interrupt))
    assert stopped.error.kind == "interrupted"
    ours, result = latent(server, graph("started"))
    assert relative_error(ours, truth) <= BOUND
    assert len(result.previews) >= STEPS


def test_previews_and_progress_arrive_as_from_the_stock_sampler(server, truth):
    _, stock = latent(server, graph("ticks_stock", parallel=False, seed=6))
    _, ours = latent(server, graph("ticks_pool", seed=6))
    assert [(tick.node, tick.value, tick.maximum) for tick in ours.ticks] == [
        (tick.node, tick.value, tick.maximum) for tick in stock.ticks
    ]
    assert len(ours.previews) == len(stock.previews) >= STEPS


@pytest.mark.parametrize("sampler", ["PipeMeshKSampler", "PipeMeshKSamplerAdvanced", "KSamplerAdvanced"])
def test_every_sampler_node_gives_the_stock_latent(server, truth, sampler):
    assert relative_error(latent(server, graph(f"by_{sampler}", sampler=sampler))[0], truth) <= BOUND


def test_a_lora_strength_changed_between_two_queued_prompts_needs_no_reload(server, truth):
    def of(name, **options):
        return latent(server, graph(f"lora_{name}", **options))[0]

    truths = {strength: of("stock", parallel=False, lora=strength) for strength in (1.0, 0.3)}
    assert relative_error(truths[1.0], truth) > 0.05
    of("loaded")
    before = live_pool(server)
    for after, strength in product((False, True), truths):
        patches = live_pool(server)["patchings"]
        assert relative_error(of("pool", lora=strength, lora_after=after), truths[strength]) <= BOUND
        assert live_pool(server)["patchings"] == patches + 1
    assert relative_error(of("off"), truth) <= BOUND
    now = live_pool(server)
    assert (ranks_of(now), now["loads"]) == (ranks_of(before), before["loads"])


# -- in patches


def test_a_pipeline_is_exact_while_it_warms_up_says_how_it_samples_and_gives_the_same_twice(server, truth):
    _, stock = latent(server, graph("ticks_of_stock", parallel=False, seed=25))
    steps = [(tick.value, tick.maximum) for tick in stock.ticks]

    def sampled(name, **pool):
        nodes = graph(name)
        nodes["pool"]["inputs"] |= {"ulysses": 1, "pipefusion": 2, **pool}
        nodes["report"] = node("PipeMeshReport", latent=["sampler", 0], pool=["pool", 0])
        ours, result = latent(server, nodes)
        assert [(tick.value, tick.maximum) for tick in result.ticks if tick.node == "sampler"] == steps
        assert len(result.previews) >= STEPS
        texts = [event.image for event in result.events if event.type == f"binary {TEXT}"]
        return ours, result.outputs["report"]["text"][0], texts, pids(server)

    whole, text, texts, ranks = sampled("warm_pipeline", warm_up=100)
    for why in (b"starting workers, ", b"workers are ready"):  # a user sees why nothing moves yet
        assert any(b"samplerPipeMesh: " + why in said for said in texts)
    assert relative_error(whole, truth) <= BOUND
    assert "stage 1:   1 cpu" in text and ", sampled whole" in text
    first, text, texts, same = sampled("pipeline", warm_up=1)
    assert "sampled in 3 patches, free-running" in text
    assert any(b"samplerPipeMesh samples in patches, free-running" in said for said in texts)
    assert same == ranks, "another warm_up needs no other ranks"
    assert 0 < relative_error(first, truth) < 0.5
    # What auto is here, so computed anew by the same pool
    again, _, _, same = sampled("pipeline_again", warm_up=1, backend="gloo")
    assert torch.equal(again, first)
    assert same == ranks


# -- cancel


def test_cancel_inside_a_forward_leaves_the_pool_warm(server, truth):
    latent(server, graph("warm"))
    before = pids(server)

    def cancel():
        wait_for_phase(server, "computing")
        server.interrupt()

    large = graph("stopped", pixels=LARGE, steps=20)
    stopped = server.run(large, on_event=once_it_samples(cancel))
    assert stopped.error.kind == "interrupted"
    assert not stopped.ticks, "a whole step passed before the cancel was heard"
    assert pids(server) == before
    assert relative_error(latent(server, graph("after"))[0], truth) <= BOUND


def test_cancel_while_loading_leaves_the_pool_warm(server):
    write_model(server.models / "diffusion_models" / "many.safetensors", heads=1, blocks=(2, 120))
    many = partial(graph, unet="many", steps=1)
    expected, _ = latent(server, many("many_stock", parallel=False))
    latent(server, graph("warm"))
    before = live_pool(server)

    def cancel():
        wait_for_phase(server, "loading", of=any)
        server.interrupt()

    stopped = server.run(many("stopped"), on_event=once_it_samples(cancel))
    assert stopped.error.kind == "interrupted"
    assert live_pool(server)["loads"] == before["loads"], "the load had ended before the cancel was heard"
    assert relative_error(latent(server, many("after_load"))[0], expected) <= BOUND
    now = live_pool(server)
    assert (now["loads"], ranks_of(now)) == (before["loads"] + 1, ranks_of(before))


# -- memory


def test_free_reaches_the_pool(server, truth):
    latent(server, graph("held", seed=21))
    held = live_pool(server)
    assert held["models"] and held["ranks"][0]["memory"]["model"] > 0
    server.free()
    for seed in (22, 25):  # ComfyUI frees between two prompts: at the latest before the second of these
        latent(server, graph(f"stock_after_free_{seed}", parallel=False, seed=seed))
    assert live_pool(server)["models"] == []
    assert relative_error(latent(server, graph("after_free"))[0], truth) <= BOUND


def test_a_node_that_runs_out_of_memory_frees_what_the_pool_holds(server, truth):
    nodes = graph("out_of_memory", seed=23)
    nodes["more"] = node("TestOutOfMemory", samples=["sampler", 0])
    seen = []

    def look(event):
        if event.type == "progress":  # once the node runs, it frees them at once
            seen.append(live_pool(server)["models"])

    error = server.run(nodes, on_event=look).error
    assert error.kind == "failed" and "Allocation on device" in error.message
    assert any(seen)
    latent(server, graph("stock_after_memory", parallel=False, seed=24))
    assert live_pool(server)["models"] == []
    assert relative_error(latent(server, graph("after_memory"))[0], truth) <= BOUND


# -- errors


def test_numbers_and_texts_that_other_nodes_hold_choose_the_pool_or_are_refused_there(server, truth):
    numbers = {"ulysses": 2, "ring": 1, "pipefusion": 1, "patches": 0, "warm_up": 1}
    nodes = linked(graph("linked"), devices="cpu", stages="", **numbers)
    assert relative_error(latent(server, nodes)[0], truth) <= BOUND
    result = server.run(linked(graph("refused_link"), ulysses=4, devices="cpu,cpu,cpu"))
    error = result.error
    assert (error.kind, error.class_type) == ("failed", "PipeMeshPool")
    assert error.message == (
        "ulysses 4 = 4 ranks, 3 devices listed (cpu, cpu, cpu): list one device per rank, or choose ulysses 3"
        " or ring 3."
    )
    by_hand = graph("refused")
    by_hand["pool"]["inputs"] |= {"devices": "cpu,cpu", "ulysses": 1, "ring": 2, "pipefusion": 2}
    refused = server.run(by_hand).error  # at validation
    assert refused.kind == "refused" and "ring 2 x pipefusion 2 = 4 ranks, 2 devices" in refused.message
    # The frontend shows it before the sentence: no path of this machine
    kinds = {event.data["exception_type"] for event in result.events if event.type == "execution_error"}
    assert kinds == {"pipemesh.LayoutError"}


def test_a_packs_code_in_the_blocks_is_an_error_at_the_node_that_names_it(server, truth):
    error = server.run(graph("patched", between=[("TestAttentionPatch", {})])).error
    assert (error.kind, error.class_type) == ("failed", "KSampler")
    assert "halved_keys" in error.message and "remove the node" in error.message
    assert relative_error(latent(server, graph("after_patched"))[0], truth) <= BOUND


def test_a_rank_killed_inside_a_forward_is_named_and_the_next_run_starts_a_fresh_pool(server, truth):
    latent(server, graph("before_kill"))
    before = pids(server)

    def kill():
        wait_for_phase(server, "computing")
        os.kill(before[1], signal.SIGKILL)

    error = server.run(graph("killed", pixels=LARGE), on_event=once_it_samples(kill)).error
    assert error.kind == "failed"
    for words in ("Rank 1 on cpu was killed", "while computing", "run again"):
        assert words in error.message
    ours, result = latent(server, graph("after_kill"))
    assert relative_error(ours, truth) <= BOUND
    waits = [event.data for event in result.events if event.type == "pipemesh.progress"]
    assert {(one["node"], one["prompt"]) for one in waits} == {("sampler", result.prompt_id)}
    assert any("starting workers" in one["text"] and one["total"] == 2 for one in waits)
    nodes = [event.data["nodes"] for event in result.events if event.type == "progress_state"]
    # ComfyUI's own bar counts the workers, and its steps are as ever
    assert 2 in [one.get("sampler", {}).get("max") for one in nodes]
    assert [tick.value for tick in result.ticks if tick.node == "sampler"] == [*range(1, STEPS + 1)]
    assert not set(before) & set(pids(server))
    assert not any(psutil.pid_exists(pid) for pid in before)


# -- what a user sees of the nodes


NODES = [
    f"PipeMesh{name}"
    for name in ("Pool", "Parallelize", "ParallelizeVAE", "KSampler", "KSamplerAdvanced", "Report")
]


def test_the_report_shows_the_last_run_and_passes_the_latent_on_and_the_same_prompt_once_more_runs_nothing(
    server, truth
):
    def reported(name, seed=5, **inputs):
        nodes = graph(name, seed=seed)
        nodes["report"] = node("PipeMeshReport", latent=["sampler", 0], **inputs)
        nodes["save"]["inputs"]["samples"] = ["report", 0]
        ours, result = latent(server, nodes)
        assert seed != 5 or relative_error(ours, truth) <= BOUND
        executed = {event.data["node"] for event in result.events if event.type == "executing"}
        return result.outputs["report"]["text"][0], executed - {None}

    text, _ = reported("report_1")
    speed, waited, rest = text.split("\n\n", 2)
    # The truth was sampled by stock before
    assert " times as fast as one device: " in speed and speed.endswith("(timed here)")
    assert waited.startswith("What the prompt waited for") and "first evaluation" in waited
    assert rest.startswith("ulysses 2 = 2 ranks, gloo, ready")
    run = server.get("/pipemesh/status")["last_runs"][0]["figures"]
    assert f"Last run: {run['evaluations']} evaluations" in text and run["evaluations"] >= STEPS
    assert f"{100 * run['exchange_share']:.1f} %" in text and 0 < run["exchange_share"] < 1
    assert reported("report_1") == (text, set()), "the node shows its text, and nothing behind it runs"
    _, executed = reported("report_1", seed=91)
    assert {"sampler", "report", "save"} <= executed
    assert "\n\nulysses 2 = 2 ranks" in reported("report_2", pool=["pool", 0])[0]


def test_the_log_says_at_the_start_which_devices_there_are(server):
    said = "[PipeMesh] No GPU here: 2 ranks on the CPU stand for GPUs. Auto mode is off."
    assert said in server.log.read_text(encoding="utf-8")


def test_a_report_alone_says_the_next_move_and_hands_no_latent_on(server):
    nodes = {"pool": node("PipeMeshPool", devices="cpu", layout="by hand", ulysses=3)}
    nodes["report"] = node("PipeMeshReport", pool=["pool", 0])
    (text,) = server.run(nodes).outputs["report"]["text"]
    assert "The pool ulysses 3 = 3 ranks on cpu (gloo) has sampled nothing" in text
    nodes["save"] = node("PipeMeshDemoSaveLatent", samples=["report", 0], name="none")
    assert "connect the sampler's LATENT" in server.run(nodes).error.message


@pytest.mark.parametrize("node_id", NODES)
def test_every_node_has_tooltips_on_all_sockets_and_a_help_page(server, node_id):
    info = server.get(f"/object_info/{node_id}")[node_id]
    assert info["display_name"] and info["description"]
    for options in (
        value for group in ("required", "optional") for value in info["input"].get(group, {}).values()
    ):
        assert options[1].get("tooltip"), options
    assert all(info["output_tooltips"])
    for page, title in ((f"{node_id}.md", f"# {info['display_name']}\n"), (f"{node_id}/ja.md", "# ")):
        address = f"http://{server.address}/extensions/pipemesh/docs/{page}"
        assert urlopen(address).read().decode().startswith(title)


def test_the_example_workflows_are_in_the_template_browser_with_known_nodes_and_values_they_take(server):
    """No node of theirs lies over another."""
    known, names = server.get("/object_info"), server.get("/workflow_templates")["pipemesh"]
    assert names
    for name in names:
        nodes = json.loads((ROOT / "example_workflows" / f"{name}.json").read_text())["nodes"]
        assert {item["type"] for item in nodes} <= {*known, "MarkdownNote", "Note"}
        assert any(item["type"].startswith("PipeMesh") for item in nodes)
        for item in (item for item in nodes if item["type"] in known):
            takes, given = list(widgets(known[item["type"]])), item.get("widgets_values") or []
            assert len(given) <= len(takes), item
            assert len(given) == len(takes) or not item["type"].startswith("PipeMesh"), item
            for widget, value in zip(takes, given, strict=False):
                assert accepts(*widget, value), (item["type"], widget, value)
        boxes = [(item["type"], box(item, known.get(item["type"]))) for item in nodes]
        assert not [
            (one, other) for (one, here), (other, there) in combinations(boxes, 2) if overlap(here, there)
        ]


# -- two instances, and the end


@pytest.mark.skipif(not ALL, reason="starts a server of its own: by PIPEMESH_TEST_ALL")
def test_a_second_instance_with_the_published_pack_works_beside_the_first_and_its_ranks_die_with_it(
    server, host, models, truth, base
):
    with start(host, models, packs={"pipemesh_demo": CUSTOM_NODES["pipemesh_demo"]}, base=base) as second:
        known = second.get("/object_info")
        assert {known[one]["python_module"] for one in NODES} == {"custom_nodes.pipemesh"}
        assert relative_error(latent(second, graph("second"))[0], truth) <= BOUND
        assert relative_error(latent(server, graph("first", seed=5))[0], truth) <= BOUND
        workers = [psutil.Process(pid) for pid in pids(second)]
        assert len(workers) == 2
        assert all(str(base / "custom_nodes" / "pipemesh") in " ".join(one.cmdline()) for one in workers)
        os.kill(second.pid, signal.SIGKILL)
        _gone, alive = psutil.wait_procs(workers, timeout=20)
        assert not alive
    assert relative_error(latent(server, graph("first_again"))[0], truth) <= BOUND
    assert torch.isfinite(truth).all()
