"""A rank of a pool in which what rank 0 sends arrives changed if it is long, as on some hosts what
GPUs send each other: ``corrupting_worker.py SOCKET_FD PARENT_PID``.
"""

import runpy
import sys
from pathlib import Path

import torch.distributed as dist

POOL = Path(__file__).resolve().parent.parent / "pool"


def corrupting(isend):
    def send(tensor, *to):
        if dist.get_rank() == 0 and tensor.numel() > 1024:
            tensor = tensor.clone()
            tensor[-1] += 1
        return isend(tensor, *to)

    return send


if __name__ == "__main__":
    sys.path.insert(0, str(POOL))
    from package import register_package

    register_package(POOL.parent)
    dist.isend = corrupting(dist.isend)
    sys.argv[0] = str(POOL / "worker_main.py")
    runpy.run_path(sys.argv[0], run_name="__main__")
