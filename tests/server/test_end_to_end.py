"""A real ComfyUI server, spoken to as a browser would: the pack's nodes, the pool behind them,
cancel, faults, two instances.
"""

import json
import os
import signal
from itertools import combinations
from pathlib import Path
from urllib.request import urlopen

import psutil
import pytest
import torch
from pipemesh.lab.comfyui.api import node
from pipemesh.lab.comfyui.server import CUSTOM_NODES
from pipemesh.lab.commands.parity import BOUND, relative_error

from ..fixtures import ALL
from ..kit.models import write_model
from ..kit.served import (
    LARGE,
    STEPS,
    accepts,
    box,
    custom,
    graph,
    latent,
    linked,
    live_pool,
    overlap,
    pids,
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

    def cancel(event):
        if event.type == "executing" and event.data.get("node") == "sampler":
            server.interrupt()

    stopped = server.run(graph("stopped"), on_event=cancel)
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


def test_custom_sampling_with_a_stock_guider_gives_the_stock_latent(server):
    inputs = {"cond1": ["positive", 0], "cond2": ["negative", 0], "negative": ["negative", 0]}
    inputs |= {"cfg_conds": 3.0, "cfg_cond2_negative": 2.0, "style": "regular"}
    ours, stock = (
        latent(server, custom(f"dual_{parallel}", "DualCFGGuider", inputs, seed=4, parallel=parallel))[0]
        for parallel in (True, False)
    )
    assert relative_error(ours, stock) <= BOUND


def test_a_lora_strength_changed_between_two_queued_prompts_needs_no_reload(server, truth):
    truths = [
        latent(server, graph("lora_stock", parallel=False, lora=strength))[0] for strength in (1.0, 0.3)
    ]
    assert relative_error(truths[0], truth) > 0.05
    latent(server, graph("lora_loaded"))
    before = live_pool(server)
    for after in (False, True):
        for strength, expected in zip((1.0, 0.3), truths, strict=True):
            patches = live_pool(server)["patchings"]
            assert (
                relative_error(
                    latent(server, graph("lora_pool", lora=strength, lora_after=after))[0], expected
                )
                <= BOUND
            )
            assert live_pool(server)["patchings"] == patches + 1
    assert relative_error(latent(server, graph("lora_off"))[0], truth) <= BOUND
    assert (pids(server), live_pool(server)["loads"]) == (
        [rank["pid"] for rank in before["ranks"]],
        before["loads"],
    )


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
    assert any(b"samplerPipeMesh: starting workers, " in said for said in texts), (
        "a user sees why nothing moves yet"
    )
    assert any(b"samplerPipeMesh: workers are ready" in said for said in texts)
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

    def cancel(event):
        if event.type == "executing" and event.data.get("node") == "sampler":
            wait_for_phase(server, "computing")
            server.interrupt()

    stopped = server.run(graph("stopped", pixels=LARGE, steps=20), on_event=cancel)
    assert stopped.error.kind == "interrupted"
    assert not stopped.ticks, "a whole step passed before the cancel was heard"
    assert pids(server) == before
    assert relative_error(latent(server, graph("after"))[0], truth) <= BOUND


def test_cancel_while_loading_leaves_the_pool_warm(server):
    write_model(server.models / "diffusion_models" / "many.safetensors", heads=1, blocks=(2, 120))
    expected, _ = latent(server, graph("many_stock", unet="many", parallel=False, steps=1))
    latent(server, graph("warm"))
    before = live_pool(server)

    def cancel(event):
        if event.type == "executing" and event.data.get("node") == "sampler":
            wait_for_phase(server, "loading", of=any)
            server.interrupt()

    stopped = server.run(graph("stopped", unet="many", steps=1), on_event=cancel)
    assert stopped.error.kind == "interrupted"
    assert live_pool(server)["loads"] == before["loads"], "the load had ended before the cancel was heard"
    assert relative_error(latent(server, graph("after_load", unet="many", steps=1))[0], expected) <= BOUND
    assert live_pool(server)["loads"] == before["loads"] + 1
    assert pids(server) == [rank["pid"] for rank in before["ranks"]]


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


def test_an_impossible_layout_is_refused_at_validation_with_the_equation(server):
    nodes = graph("refused")
    nodes["pool"]["inputs"] |= {"devices": "cpu,cpu", "ulysses": 1, "ring": 2, "pipefusion": 2}
    error = server.run(nodes).error
    assert error.kind == "refused"
    assert "ring 2 x pipefusion 2 = 4 ranks, 2 devices listed" in error.message


def test_numbers_and_texts_that_other_nodes_hold_choose_the_pool(server, truth):
    nodes = linked(
        graph("linked"), devices="cpu", ulysses=2, ring=1, pipefusion=1, patches=0, warm_up=1, stages=""
    )
    assert relative_error(latent(server, nodes)[0], truth) <= BOUND


def test_what_other_nodes_hold_and_no_pool_can_be_is_refused_at_the_pool(server):
    result = server.run(linked(graph("refused_link"), ulysses=4, devices="cpu,cpu,cpu"))
    error = result.error
    assert (error.kind, error.class_type) == ("failed", "PipeMeshPool")
    assert error.message == (
        "ulysses 4 = 4 ranks, 3 devices listed (cpu, cpu, cpu): list one device per rank, or choose ulysses 3"
        " or ring 3."
    )
    kinds = {event.data["exception_type"] for event in result.events if event.type == "execution_error"}
    assert kinds == {"pipemesh.LayoutError"}, (
        "the frontend shows it before the sentence: no path of this machine"
    )


def test_a_packs_code_in_the_blocks_is_an_error_at_the_node_that_names_it(server, truth):
    error = server.run(graph("patched", between=[("TestAttentionPatch", {})])).error
    assert error.kind == "failed"
    assert error.class_type == "KSampler"
    assert "halved_keys" in error.message and "remove the node" in error.message
    assert relative_error(latent(server, graph("after_patched"))[0], truth) <= BOUND


def test_a_rank_killed_inside_a_forward_is_named_and_the_next_run_starts_a_fresh_pool(server, truth):
    latent(server, graph("before_kill"))
    before = pids(server)

    def kill(event):
        if event.type == "executing" and event.data.get("node") == "sampler":
            wait_for_phase(server, "computing")
            os.kill(before[1], signal.SIGKILL)

    error = server.run(graph("killed", pixels=LARGE), on_event=kill).error
    assert error.kind == "failed"
    assert (
        "Rank 1 on cpu was killed" in error.message
        and "while computing" in error.message
        and "run again" in error.message
    )
    ours, result = latent(server, graph("after_kill"))
    assert relative_error(ours, truth) <= BOUND
    waits = [event.data for event in result.events if event.type == "pipemesh.progress"]
    assert {one["node"] for one in waits} == {"sampler"} and {one["prompt"] for one in waits} == {
        result.prompt_id
    }
    assert any("starting workers" in one["text"] and one["total"] == 2 for one in waits)
    bars = [
        event.data["nodes"].get("sampler", {}) for event in result.events if event.type == "progress_state"
    ]
    assert 2 in [bar.get("max") for bar in bars], "ComfyUI's own bar counts the workers"
    assert [tick.value for tick in result.ticks if tick.node == "sampler"] == [*range(1, STEPS + 1)], (
        "and its steps are as ever"
    )
    assert not set(before) & set(pids(server))
    assert not any(psutil.pid_exists(pid) for pid in before)


# -- what a user sees of the nodes


NODES = (
    "PipeMeshPool",
    "PipeMeshParallelize",
    "PipeMeshParallelizeVAE",
    "PipeMeshKSampler",
    "PipeMeshKSamplerAdvanced",
    "PipeMeshReport",
)


def test_the_report_shows_the_last_run_and_passes_the_latent_on_and_the_same_prompt_once_more_runs_nothing(
    server, truth
):
    def reported(name, seed=5, **inputs):
        nodes = graph(name, seed=seed)
        nodes["report"] = node("PipeMeshReport", latent=["sampler", 0], **inputs)
        nodes["save"]["inputs"]["samples"] = ["report", 0]
        ours, result = latent(server, nodes)
        assert seed != 5 or relative_error(ours, truth) <= BOUND
        return result.outputs["report"]["text"][0], {
            event.data["node"] for event in result.events if event.type == "executing"
        } - {None}

    text, _ = reported("report_1")
    speed, waited, rest = text.split("\n\n", 2)
    assert " times as fast as one device: " in speed and speed.endswith("(timed here)"), (
        "the truth was sampled by stock before"
    )
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
    assert (
        "[PipeMesh] No GPU here: 2 ranks on the CPU stand for GPUs. Auto mode is off."
        in server.log.read_text(encoding="utf-8")
    )


def test_a_report_alone_says_the_next_move_and_hands_no_latent_on(server):
    nodes = {"pool": node("PipeMeshPool", devices="cpu", layout="by hand", ulysses=3)}
    nodes["report"] = node("PipeMeshReport", pool=["pool", 0])
    assert (
        "The pool ulysses 3 = 3 ranks on cpu (gloo) has sampled nothing"
        in server.run(nodes).outputs["report"]["text"][0]
    )
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


def examples(server):
    """The workflows that the template browser offers."""
    names = server.get("/workflow_templates")["pipemesh"]
    assert names
    return [
        json.loads((Path(__file__).parents[2] / "example_workflows" / f"{name}.json").read_text())
        for name in names
    ]


def test_the_example_workflow_is_in_the_template_browser_with_known_nodes_and_values_they_take(server):
    known = server.get("/object_info")
    for workflow in examples(server):
        assert all(
            item["type"] in known or item["type"] in ("MarkdownNote", "Note") for item in workflow["nodes"]
        )
        assert any(item["type"].startswith("PipeMesh") for item in workflow["nodes"])
        for item in workflow["nodes"]:
            if item["type"] in known:
                takes, given = list(widgets(known[item["type"]])), item.get("widgets_values") or []
                assert len(given) <= len(takes), item
                assert len(given) == len(takes) or not item["type"].startswith("PipeMesh"), item
                for widget, value in zip(takes, given, strict=False):
                    assert accepts(*widget, value), (item["type"], widget, value)


def test_no_node_of_the_example_workflow_lies_over_another(server):
    known = server.get("/object_info")
    for workflow in examples(server):
        boxes = [(item["type"], box(item, known.get(item["type"]))) for item in workflow["nodes"]]
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
