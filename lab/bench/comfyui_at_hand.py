"""Imported by the process that smallest cases are forked from: ComfyUI on the CPU, which attends as
``lockstep.attend_with_sdpa`` has it, and what benches import most.
"""

import json
import os
import sys

sys.path.insert(0, json.loads(os.environ["PIPEMESH_HOST"])["comfyui"])
import comfy.cli_args

comfy.cli_args.args.cpu = comfy.cli_args.args.use_pytorch_cross_attention = True
import comfy.sample  # noqa: E402
import comfy.sd  # noqa: E402
import torch  # noqa: E402
import torch._dynamo  # noqa: E402
from pipemesh.lab.bench import forwards, lockstep, plan, pools  # noqa: E402, F401
from pipemesh.parallel_runtime.client import queue_lookahead, remote_patcher, remote_pool  # noqa: E402, F401
from pipemesh.parallel_runtime.worker import handler, main, preparation  # noqa: E402, F401

torch.set_num_threads(1)  # no thread of torch's is there when it forks
