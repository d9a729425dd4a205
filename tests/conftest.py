"""The pack as ``pipemesh``, ComfyUI on the CPU, and pools that are started once and shared by the whole run."""

import json
import os
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
COMFYUI = json.loads(os.environ.get("PIPEMESH_HOST", "{}")).get("comfyui", "")

sys.path.insert(0, str(ROOT / "launcher"))
from package import register_package  # noqa: E402

sys.path.pop(0)
register_package(ROOT)
if COMFYUI and COMFYUI not in sys.path:
    sys.path.insert(0, COMFYUI)

import torch  # noqa: E402

torch.set_num_threads(1)


def pytest_configure():
    import comfy.cli_args

    comfy.cli_args.args.cpu = True


@pytest.fixture(scope="session")
def setup():
    from pipemesh.launcher.pool import HostSetup

    return HostSetup(comfyui=COMFYUI, comfy_args={"cpu": True})


@pytest.fixture(scope="session")
def clients(setup):
    """(ulysses, ring) -> a Client of a running CPU pool of that layout."""
    from pipemesh.launcher.devices import place
    from pipemesh.launcher.pool import PoolHandle
    from pipemesh.parallel_runtime.client.remote_model import Client
    from pipemesh.parallel_runtime.layout import Layout

    made = {}

    def client(ulysses: int, ring: int = 1) -> Client:
        layout = Layout(ulysses=ulysses, ring=ring)
        if layout not in made:
            handle = PoolHandle(place(layout, "cpu", "gloo", ()), setup)
            made[layout] = (Client(handle, shares_weights=True), handle)
        return made[layout][0]

    yield client
    for _client, handle in made.values():
        handle.close()
