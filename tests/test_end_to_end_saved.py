"""Workflows that an earlier version saved, run on the server: the latent is that of the workflow as
it is made today and, where that is exact, stock's. What ComfyUI's page queues is in
test_end_to_end_page.py.
"""

import json
from itertools import count
from pathlib import Path
from unittest.mock import ANY

import pytest
import torch
from pipemesh.lab.commands.parity import BOUND, relative_error
from pipemesh.lab.templates.graph import api_prompt
from pipemesh.lab.templates.surgery import file_name, made_small, recorded, samplers
from pipemesh.nodes.settings import BY_HAND, PoolSettings
from safetensors.torch import load_file

KEPT, EXAMPLES = Path(__file__).with_name("saved"), Path(__file__).parents[1] / "example_workflows"
SAVED = {  # of 0.1 -> the layout that it says, and the same workflow as it is made today
    # When the pool had three inputs
    "workflow_0_1": ("ulysses 2 = 2 ranks", EXAMPLES / "PipeMesh Flux text to image.json"),
    # With eight, and the pack's own sampler
    "workflow_0_1_stages": ("pipefusion 2 = 2 ranks", KEPT / "workflow_0_1_stages.json"),
}
WHOLE = 1.0  # denoise; a little less is the same to ComfyUI, but for what it keeps of a prompt before


@pytest.fixture
def sampled(server):
    """The latent of a workflow on small stand-ins for its models, and the run of the pool that
    sampled it; None where none has.
    """
    info, numbers = server.get("/object_info"), count()

    def ran():
        return {run["began"]: run for run in server.get("/pipemesh/status")["last_runs"]}

    def latent(file, change=lambda _nodes: None):
        workflow = json.loads(file.read_text(encoding="utf-8"))
        nodes = made_small(api_prompt(workflow, info), info)
        ((sampler, _output),) = samplers(nodes, info).items()
        number = next(numbers)
        nodes[sampler]["inputs"]["denoise"] = WHOLE - number * 2e-5
        change(nodes)
        before, result = ran(), server.run(recorded(nodes, info, f"saved{number}"))
        assert result.error is None, f"{result.error}\n{server.log_tail()}"
        (found,) = load_file(server.output / f"saved{number}-{file_name(sampler)}").values()
        return found, next((run for began, run in ran().items() if began not in before), None)

    return latent


def of_today(nodes):
    """Every input of the pool is there, as today's page queues it."""
    (pool,) = (node for node in nodes.values() if node["class_type"] == "PipeMeshPool")
    defaults = {name: takes.default for name, takes in PoolSettings.inputs().items()}
    pool["inputs"] = {**defaults, **pool["inputs"], "layout": BY_HAND}


def without_the_pack(nodes):
    """Every MODEL comes as it is before PipeMesh Parallelize, and goes to a stock sampler."""
    before = {
        key: node["inputs"]["model"]
        for key, node in nodes.items()
        if node["class_type"] == "PipeMeshParallelize"
    }
    for key in [*before, *(key for key, node in nodes.items() if node["class_type"] == "PipeMeshPool")]:
        del nodes[key]
    for node in nodes.values():
        node["class_type"] = node["class_type"].removeprefix("PipeMesh")
        node["inputs"].pop("pool", None)
        for name, link in node["inputs"].items():
            if isinstance(link, list) and link[0] in before:
                node["inputs"][name] = before[link[0]]


def test_every_workflow_that_is_kept_is_run():
    assert SAVED.keys() == {file.stem for file in KEPT.glob("workflow_*.json")}


@pytest.mark.parametrize("name", SAVED)
def test_a_workflow_that_0_1_saved_runs_in_its_layout_and_gives_the_latent_that_it_gives_today(
    server, sampled, name
):
    file, (layout, today) = KEPT / f"{name}.json", SAVED[name]
    ours, run = sampled(file)
    assert {pool["id"]: pool["layout"] for pool in server.get("/pipemesh/status")["pools"]}[
        run["pool"]
    ] == layout
    todays, another = sampled(today, of_today)
    assert another["pool"] == run["pool"] and torch.equal(ours, todays)
    in_patches = run["figures"]["in_patches"]
    if in_patches is not None:
        assert (
            in_patches == another["figures"]["in_patches"] | {"of_schedule": ANY, "lost_ms": ANY}
            and in_patches["patches"] == 4
        )
        return
    stock, in_no_pool = sampled(file, without_the_pack)
    assert in_no_pool is None and relative_error(ours, stock) <= BOUND
