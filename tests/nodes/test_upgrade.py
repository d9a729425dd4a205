"""Files and prompts that version 0.3.0 wrote: this version reads them, or voids them with a line in
the log.

``saved/version_0_3_0.json`` has them as that version wrote them, and the inputs of its nodes as its
``/object_info`` told them.
"""

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from pipemesh.nodes.auto.switch import FILE, Switch
from pipemesh.nodes.extension import PipeMeshExtension
from pipemesh.nodes.planning import Planning
from pipemesh.nodes.settings import PoolSettings
from pipemesh.nodes.timing import StepTimes
from pipemesh.parallel_runtime.planner.measurements import DEVICES, read_devices
from pipemesh.parallel_runtime.watch.fingerprint import HostFiles
from pipemesh.pool.devices import Device
from pipemesh.pool.trial.host_trials import FOLDER, Verdict, Verdicts

from ..fixtures import COMFYUI

SAVED = json.loads(
    (Path(__file__).parents[1] / "kit" / "saved" / "version_0_3_0.json").read_text(encoding="utf-8")
)


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


@pytest.fixture
def cache(tmp_path):
    """The cache folder as that version left it."""
    for name, content in SAVED["cache"].items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(json.dumps(content, indent=1))
    return tmp_path


def test_measured_speeds_are_read_and_those_of_a_bench_stay_where_they_lie(cache, monkeypatch):
    """``speeds.json`` is of a bench alone: nothing reads it now, and nothing takes it away."""
    monkeypatch.setattr(torch, "__version__", "2.11.0")
    others = {one: one.read_bytes() for one in cache.rglob("*.json") if one.name != DEVICES}
    assert cache / "speeds.json" in others
    planning = Planning(StepTimes(), SimpleNamespace(), cache / DEVICES)
    (gpu,) = planning.measured.with_speeds((Device("cuda:0", title="NVIDIA GeForce RTX 4090"),))
    assert gpu.flops_per_s == 1.6e14
    planning.measured.keep(
        SimpleNamespace(ready=[SimpleNamespace(device_name="another", flops_per_s=2e14, links=())])
    )
    assert read_devices(cache / DEVICES) == {"NVIDIA GeForce RTX 4090": 1.6e14, "another": 2e14}
    assert {one: one.read_bytes() for one in cache.rglob("*") if one in others} == others


def test_a_verdict_on_a_class_of_comfyui_is_void_and_has_the_form_of_one_now(cache):
    """``test_host_trials`` has the line that the log gets of each that is void."""
    (name,) = (name for name in SAVED["cache"] if name.startswith(f"{FOLDER}/"))
    kept, verdicts = SAVED["cache"][name], Verdicts(cache / FOLDER)
    found = HostFiles(Path(COMFYUI)).fingerprint(kept["kind"])
    assert verdicts.of(found) is None, "its name is of that version's code"
    assert verdicts.void_on(found) == [cache / name]
    verdicts._file(found).write_text(json.dumps(kept))
    assert verdicts.of(found) == Verdict(**kept)
