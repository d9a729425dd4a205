"""A rank of a pool in which what rank 0 sends arrives changed if it is long, as on some hosts what
GPUs send each other: ``corrupting_worker.py SOCKET_FD PARENT_PID``.
"""

import torch.distributed as dist
from as_worker import register, run_worker


def corrupting(isend):
    def send(tensor, *to):
        if dist.get_rank() == 0 and tensor.numel() > 1024:
            tensor = tensor.clone()
            tensor[-1] += 1
        return isend(tensor, *to)

    return send


if __name__ == "__main__":
    register()
    dist.isend = corrupting(dist.isend)
    run_worker()
