"""Clients of ComfyUI's API that are no pages: of a prompt they are sent what they are sent without
the pack, and so what they make of that is the same.
"""

import asyncio
import json
import subprocess
from itertools import count
from pathlib import Path

import aiohttp
import numpy
import pytest
from PIL import Image
from pipemesh.lab.comfyui.api import node

from ..fixtures import COMFYUI
from ..kit.api_clients import CLIENTS
from ..kit.served import graph, start
from .test_end_to_end_auto import runs, switch
from .test_end_to_end_decoding import write_vae
from .test_end_to_end_page import numbered

SEEDS = count(700)  # ComfyUI runs again what is new alone
PATCHED = [("TestAttentionPatch", {})]  # which ranks are not given


@pytest.fixture(scope="module", autouse=True)
def with_vae(server):
    write_vae(server, "of_clients")


@pytest.fixture
def auto(server):
    switch(server, True)
    yield
    switch(server, False)


def workflow(by_hand=False, between=()):
    nodes = graph("clients", parallel=by_hand, seed=next(SEEDS), between=between)
    nodes["vae"] = node("VAELoader", vae_name="of_clients.safetensors")
    nodes["decode"] = node("VAEDecode", samples=["sampler", 0], vae=["vae", 0])
    nodes["save"] = node("SaveImage", images=["decode", 0], filename_prefix="client")
    if by_hand:
        nodes["parallel vae"] = node("PipeMeshParallelizeVAE", vae=["vae", 0], pool=["pool", 0])
        nodes["decode"]["inputs"]["vae"] = ["parallel vae", 0]
    return nodes


def sent(server, nodes, previews="latent2rgb"):
    """What a client that says nothing of itself is sent of a prompt, as it reads it."""

    async def read():
        async with (
            aiohttp.ClientSession() as session,
            session.ws_connect(f"http://{server.address}/ws?clientId=silent", max_msg_size=0) as socket,
        ):
            asked = {"prompt": nodes, "client_id": "silent", "extra_data": {"preview_method": previews}}
            prompt, frames = server.post("/prompt", asked)["prompt_id"], []
            while not frames or frames[-1] != end_of(prompt):
                one = await socket.receive()
                frames.append(one.data if one.type == aiohttp.WSMsgType.BINARY else json.loads(one.data))
            return frames

    return asyncio.run(asyncio.wait_for(read(), 120))


def end_of(prompt):
    return {"type": "executing", "data": {"node": None, "prompt_id": prompt}}


def told(frames):
    """Of each frame its kind, and what it says of nodes and steps; from the sampler on, as nodes of
    the pack come before it.
    """
    found = [told_by(frame) for frame in frames]
    return found[found.index(("executing", "sampler")) :]


def told_by(frame):
    if isinstance(frame, bytes):
        return int.from_bytes(frame[:4], "big"), frame[8:10]  # of a picture the begin of its format
    kind, data = frame["type"], frame["data"]
    if kind == "progress_state":
        bars = ((name, bar["value"], bar["max"], bar["state"]) for name, bar in data["nodes"].items())
        return kind, *(bar for bar in bars if bar[0] in ("sampler", "decode", "save"))
    return kind, *(data[name] for name in ("node", "value", "max") if name in data)


def stop_workers(server):
    for pool in server.get("/pipemesh/status")["pools"]:
        server.post(f"/pipemesh/pools/{pool['id']}/release", {})


@pytest.mark.parametrize("by_hand", [False, True], ids=["auto", "by hand"])
def test_a_client_that_is_no_page_is_sent_the_frames_of_stock_with_cold_workers_and_with_warm_ones(
    server, request, by_hand
):
    stock = told(sent(server, workflow()))
    if not by_hand:
        request.getfixturevalue("auto")
    stop_workers(server)
    assert told(sent(server, workflow(by_hand))) == stock, "cold"
    assert told(sent(server, workflow(by_hand))) == stock, "warm"
    assert {kind for kind, *_ in stock} >= {"progress", "progress_state", 1}, "bars and previews"


def test_a_client_that_is_no_page_and_wants_no_previews_is_sent_json_alone_also_with_a_notice(server, auto):
    """What else came, some such clients take for their picture, and others for an error."""
    before = server.get("/pipemesh/status")["notices"][:1]
    stop_workers(server)
    for between in ((), PATCHED):
        frames = sent(server, workflow(between=between), previews="none")
        assert not [frame for frame in frames if isinstance(frame, bytes)]
        assert not [frame for frame in frames if "pipemesh" in frame["type"]]
    assert server.get("/pipemesh/status")["notices"][:1] != before


@pytest.fixture(scope="module")
def as_users(host, models, pytestconfig):
    """A server that sends no previews, as where nobody asks ComfyUI for them."""
    if not pytestconfig.getoption("--clients"):
        pytest.skip("needs a Python that has the clients: --clients PYTHON")
    with start(host, models, args=["--preview-method", "none"]) as running:
        write_vae(running, "of_clients")
        yield running


@pytest.mark.parametrize("client", CLIENTS)
def test_a_client_itself_gets_what_it_gets_of_stock(as_users, client, tmp_path, pytestconfig):
    nodes = numbered(workflow())
    for one in nodes.values():
        one["_meta"] = {"title": "Save Image" if one["class_type"] == "SaveImage" else one["class_type"]}
    (tmp_path / "graph.json").write_text(json.dumps(nodes))

    def result(name):
        as_users.free()
        script = str(Path(__file__).parents[1] / "kit" / "api_clients.py")
        files = tmp_path / "graph.json", tmp_path / name, Path(COMFYUI) / "script_examples"
        command = [pytestconfig.getoption("--clients"), script, client, as_users.address, *map(str, files)]
        ran = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert ran.returncode == 0, ran.stderr
        told = json.loads(ran.stdout.splitlines()[-1])
        told = [one for one in told if one[-2] in (0, 1, one[-1])]  # steps between come as time permits
        return numpy.asarray(Image.open(tmp_path / name)).astype(int), told

    stock, told = result("stock.png")
    switch(as_users, True)
    try:
        stop_workers(as_users)
        for name in ("cold.png", "warm.png"):
            ours, own = result(name)
            assert abs(ours - stock).max() <= 1 and own == told
        assert runs(as_users) > 0.0
    finally:
        switch(as_users, False)
