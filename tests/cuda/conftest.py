"""Pools whose ranks share one GPU, and the figures that the report shows."""

import os
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from pipemesh.lab.first_day.place import SHARES_A_GPU, nccl_version
from pipemesh.parallel_runtime.methods.recordings import VARIABLE

from ..fixtures import COMFYUI

ALLOWED = "NCCL_MULTI_RANK_GPU_ENABLE"  # ranks that share a GPU, where there are fewer GPUs


def pytest_collection_modifyitems(items):
    items.sort(key=lambda item: item.function.__code__.co_firstlineno)  # as the report is read


@pytest.fixture(scope="session")
def device(pytestconfig):
    """``cuda``; or ``cpu``, to work on these checks without a GPU."""
    return pytestconfig.getoption("--cuda-as")


@pytest.fixture(scope="session")
def setup(device):
    from pipemesh.nodes.local_devices import rank_setup

    made = rank_setup({})
    assert made.comfyui == COMFYUI and made.comfy_args["cpu"] == (device == "cpu")
    return made


@pytest.fixture(scope="session")
def pools(setup, device):
    """layout, backend -> a RemotePool and its placement. Over gloo all ranks are on one device;
    over NCCL each has its own, and records CUDA graphs. A pool ends when another starts.
    """
    os.environ.setdefault(VARIABLE, "1")
    from pipemesh.parallel_runtime.client.remote_pool import RemotePool
    from pipemesh.pool.devices import place, visible_gpus
    from pipemesh.pool.handle import PoolKeeper

    keeper, made = PoolKeeper(setup), {}

    def pool(layout, backend="gloo"):
        names = ["cuda:0" if backend == "gloo" else f"cuda:{rank}" for rank in range(layout.world_size)]
        if device == "cpu":
            backend, names = "gloo", ["cpu"] * layout.world_size
        shares = backend == "nccl" and torch.cuda.device_count() < layout.world_size
        if shares and not (os.environ.get(ALLOWED) == "1" and nccl_version() >= SHARES_A_GPU):
            pytest.skip(f"needs {layout.world_size} GPUs, and torch sees {torch.cuda.device_count()}")
        names = ["cuda:0"] * len(names) if shares else names
        placement = place(
            layout, ",".join(names), "gloo" if shares else backend, visible_gpus(device == "cpu")
        )
        placement = replace(placement, backend=backend)
        if placement not in made:
            made[placement] = RemotePool(keeper.handle(placement))
        return SimpleNamespace(remote=made[placement], placement=placement, handle=keeper.handle(placement))

    yield pool
    keeper.close()


@pytest.fixture(scope="session")
def parallel(pools):
    """stock MODEL, layout, backend, patching, weights -> the parallel MODEL in such a pool."""
    from pipemesh.nodes.settings import Choice
    from pipemesh.parallel_runtime.client.remote_patcher import parallelize

    def make(stock, layout, backend="gloo", patching=None, weights="whole"):
        import comfy.model_management as mm

        pool = pools(layout, backend)
        choice, here = Choice(pool.placement, patching), str(mm.get_torch_device())
        held, computed = choice.held_on(here), choice.computed_on(here)
        return parallelize(stock, pool.remote, held, patching, activations=computed, weights=weights)

    return make


@pytest.fixture
def figure(record_property):
    """A line for the report."""
    return lambda line: record_property("figure", line)


@pytest.fixture
def wait_for_device(device):
    return torch.cuda.synchronize if device == "cuda" else lambda: None
