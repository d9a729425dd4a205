"""A rank of a pool whose first rank's device alone multiplies in fp8, as a newer GPU would:
``unlike_worker.py SOCKET_FD PARENT_PID``.
"""

import torch.distributed as dist
from as_worker import register, run_worker


def unlike(init_process_group):
    def init(backend, *, rank, **rest):
        import comfy.model_management as mm

        mm.supports_fp8_compute = lambda device=None: rank == 0
        init_process_group(backend, rank=rank, **rest)

    return init


if __name__ == "__main__":
    register()
    dist.init_process_group = unlike(dist.init_process_group)
    run_worker()
