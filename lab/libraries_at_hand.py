"""Imported by the process that runs of tests are forked from (``forked_tests.py``): ComfyUI on the
CPU and what tests import besides, but nothing of the pack, which differs from checkout to checkout.
"""

import json
import os
import sys

sys.path.insert(0, json.loads(os.environ["PIPEMESH_HOST"])["comfyui"])
import comfy.cli_args

comfy.cli_args.args.cpu = True
import comfy.sample  # noqa: E402
import comfy.sd  # noqa: E402
import hypothesis  # noqa: E402, F401
import pytest  # noqa: E402, F401
import torch  # noqa: E402
import torch._dynamo  # noqa: E402

torch.set_num_threads(1)  # no thread of torch's is there when it forks
