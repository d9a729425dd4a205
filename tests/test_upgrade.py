"""Files and prompts that version 0.3.0 wrote: this version reads them, or voids them with a line in
the log.

``saved/version_0_3_0.json`` has them as that version wrote them, and the inputs of its nodes as its
``/object_info`` told them.
"""

import asyncio
import json
from pathlib import Path

import pytest
import torch
from pipemesh.nodes.auto.switch import FILE, Switch
from pipemesh.nodes.extension import PipeMeshExtension
from pipemesh.nodes.planning import DEVICES
from pipemesh.nodes.settings import PoolSettings
from pipemesh.parallel_runtime.planner.measurements import read_devices
from pipemesh.parallel_runtime.watch.fingerprint import HostFiles
from pipemesh.pool.trial.host_trials import FOLDER, Verdicts

from .conftest import COMFYUI

SAVED = json.loads((Path(__file__).parent / "saved" / "version_0_3_0.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def nodes_now():
    nodes = asyncio.run(PipeMeshExtension().get_node_list())
    return {node.GET_SCHEMA().node_id: node.GET_NODE_INFO_V1() for node in nodes}


def inputs_of(info):
    return {
        name: (part, *told) for part in ("required", "optional") for name, told in info["input"][part].items()
    }


@pytest.mark.parametrize("name", SAVED["nodes"])
def test_a_saved_prompt_and_a_workflow_fit_the_node(nodes_now, name):
    """A workflow has the values of widgets by position alone: an input that is new comes last."""
    before, now = SAVED["nodes"][name], nodes_now[name]
    inputs = inputs_of(now)
    assert list(inputs)[: len(before["inputs"])] == list(before["inputs"])
    for one, was in before["inputs"].items():
        part, kind, *more = inputs[one]
        if isinstance(was["takes"], list):
            assert set(was["takes"]) <= set(more[0]["options"])
        else:
            assert kind == was["takes"]
        assert part == "optional" or was["required"]
        if "default" in was and one != "sampler_name":
            assert more[0]["default"] == was["default"]
    assert all(part == "optional" for one, (part, *_) in inputs.items() if one not in before["inputs"])
    assert now["output"][: len(before["outputs"])] == before["outputs"]


def test_the_inputs_of_a_saved_pool_are_all_read():
    read = PoolSettings.checked(SAVED["pool"])
    assert {name: getattr(read, name) for name in SAVED["pool"]} == SAVED["pool"]


def test_the_settings_are_read(tmp_path):
    file = tmp_path / FILE
    file.write_text(json.dumps(SAVED["settings"]))
    switch = Switch({}, lambda: file)
    assert (switch.is_on(), switch.looks_ahead()) == (True, False)


def test_measured_speeds_are_read(tmp_path, monkeypatch):
    monkeypatch.setattr(torch, "__version__", "2.11.0")
    (tmp_path / DEVICES).write_text(json.dumps(SAVED["cache"][DEVICES]))
    assert read_devices(tmp_path / DEVICES) == {"NVIDIA GeForce RTX 4090": 1.6e14}


def test_a_verdict_on_a_class_of_comfyui_is_void(tmp_path):
    """``test_host_trials`` has the line that the log gets of each that is void."""
    (name,) = (name for name in SAVED["cache"] if name.startswith(f"{FOLDER}/"))
    kept = SAVED["cache"][name]
    file = tmp_path / name
    file.parent.mkdir()
    file.write_text(json.dumps(kept, indent=1))
    verdicts = Verdicts(tmp_path / FOLDER)
    found = HostFiles(Path(COMFYUI)).fingerprint(kept["kind"])
    assert verdicts.of(found) is None
    assert verdicts.void_on(found) == [file]
