"""A ComfyUI that samples on a pool over machines until somebody ends it: ``sampling_main.py ROOT
COMFYUI MODEL DEVICES``, with the variables of such a ComfyUI. It says when a step is done.
"""

import os
import sys

_, root, comfyui, model, devices = sys.argv
sys.path[0] = root + "/launcher"
from package import register_package  # noqa: E402

register_package(root)
sys.path[0] = comfyui

import comfy.cli_args  # noqa: E402

comfy.cli_args.args.cpu = True
from pipemesh.parallel_runtime.client.remote_patcher import parallelize  # noqa: E402
from pipemesh.parallel_runtime.client.remote_pool import RemotePool  # noqa: E402
from pipemesh.parallel_runtime.layout import Layout  # noqa: E402
from pipemesh.pool.devices import place  # noqa: E402
from pipemesh.pool.handle import PoolHandle  # noqa: E402
from pipemesh.pool.rank_setup import rank_setup_from  # noqa: E402
from pipemesh.tests.kit.models import load, run  # noqa: E402

setup = rank_setup_from(os.environ, comfyui, {"cpu": True})
handle = PoolHandle(place(Layout(ulysses=2), devices, "gloo", ()), setup)
parallel = parallelize(load(model), RemotePool(handle), holds_ui_device=False)
run(parallel, steps=1000, callback=lambda *_: print("a step", flush=True))
