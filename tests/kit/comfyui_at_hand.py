"""Imported by the process that ranks of the tests' pools are forked from, and the tests themselves
where all of them run: what a user's ranks are forked with, and ComfyUI on the CPU, which each of
those imports for itself. Ranks of a server attend as it does, which ComfyUI chooses when it is
imported.
"""

import json
import os
import sys

sys.path.insert(0, json.loads(os.environ["PIPEMESH_HOST"])["comfyui"])
import comfy.cli_args

comfy.cli_args.args.cpu = True
comfy.cli_args.args.use_pytorch_cross_attention = "PIPEMESH_TESTS_SERVED" in os.environ
import comfy.sd  # noqa: E402
import torch  # noqa: E402
from pipemesh.parallel_runtime.worker import handler, main, preparation  # noqa: E402, F401
from pipemesh.pool.fork_server import PRELOADED  # noqa: E402
from pipemesh.pool.fork_server_main import preload  # noqa: E402

preload(PRELOADED)

torch.set_num_threads(1)  # no thread of torch's is there when it forks
