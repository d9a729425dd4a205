"""Imported by the process that ranks of the tests' own pools are forked from: ComfyUI on the CPU,
which each rank of a user's pool imports for itself.
"""

import json
import os
import sys

sys.path.insert(0, json.loads(os.environ["PIPEMESH_HOST"])["comfyui"])
import comfy.cli_args

comfy.cli_args.args.cpu = True
import comfy.sd  # noqa: E402
import torch  # noqa: E402
from pipemesh.parallel_runtime.worker import handler, main, prepare  # noqa: E402, F401

torch.set_num_threads(1)  # no thread of torch's is there when it forks
