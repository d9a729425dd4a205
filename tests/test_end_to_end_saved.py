"""Workflows that an earlier version saved, run on the server: the latent is stock's, and that of
the workflow as it is made today. What ComfyUI's page queues is in test_end_to_end_page.py.
"""

import json
from itertools import count
from pathlib import Path

import pytest
import torch
from pipemesh.launcher.commands.parity import BOUND, relative_error
from pipemesh.launcher.templates.graph import api_prompt
from pipemesh.launcher.templates.surgery import file_name, made_small, recorded, samplers
from safetensors.torch import load_file

SAVED = {  # of 0.1, when the pool had three inputs -> the same workflow of today
    "workflow_0_1": "PipeMesh Flux text to image",
}
FOLDERS = Path(__file__).with_name("saved"), Path(__file__).parents[1] / "example_workflows"
TESTED = {file.stem for file in FOLDERS[0].glob("workflow_*.json")}
WHOLE = 1.0  # denoise; a little less is the same to ComfyUI, but for what it keeps of a prompt before


@pytest.fixture
def sampled(server):
    """The latent of a workflow on small stand-ins for its models, and whether a pool sampled it."""
    info, runs = server.get("/object_info"), count()

    def began():
        return {run["began"] for run in server.get("/pipemesh/status")["last_runs"]}

    def latent(folder, name, change=lambda _nodes: None):
        workflow = json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))
        nodes = made_small(api_prompt(workflow, info), info)
        ((sampler, _output),) = samplers(nodes, info).items()
        run = next(runs)
        nodes[sampler]["inputs"]["denoise"] = WHOLE - run * 2e-5
        change(nodes)
        before, result = began(), server.run(recorded(nodes, info, f"saved{run}"))
        assert result.error is None, f"{result.error}\n{server.log_tail()}"
        (found,) = load_file(server.output / f"saved{run}-{file_name(sampler)}").values()
        return found, bool(began() - before)

    return latent


def by_hand(nodes):
    (pool,) = (node for node in nodes.values() if node["class_type"] == "PipeMeshPool")
    pool["inputs"]["layout"] = "by hand"


def without_the_pack(nodes):
    """Every MODEL comes as it is before PipeMesh Parallelize."""
    before = {key: node["inputs"]["model"] for key, node in nodes.items() if node["class_type"] == "PipeMeshParallelize"}
    for key in [*before, *(key for key, node in nodes.items() if node["class_type"] == "PipeMeshPool")]:
        del nodes[key]
    for node in nodes.values():
        for name, link in node["inputs"].items():
            if isinstance(link, list) and link[0] in before:
                node["inputs"][name] = before[link[0]]


@pytest.mark.parametrize("name", SAVED)
def test_a_workflow_that_0_1_saved_gives_stocks_latent_in_the_pool_as_todays_does(sampled, name):
    assert SAVED.keys() == TESTED
    ours, in_pool = sampled(FOLDERS[0], name)
    todays, today_in_pool = sampled(FOLDERS[1], SAVED[name], by_hand)
    stock, stock_in_pool = sampled(FOLDERS[0], name, without_the_pack)
    assert (in_pool, today_in_pool, stock_in_pool) == (True, True, False)
    assert torch.equal(ours, todays)
    assert relative_error(ours, stock) <= BOUND
