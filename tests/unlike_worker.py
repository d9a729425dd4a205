"""A rank of a pool whose first rank's device alone multiplies in fp8, as a newer GPU would:
``unlike_worker.py SOCKET_FD PARENT_PID``.
"""

import runpy
import sys
from pathlib import Path

import torch.distributed as dist

POOL = Path(__file__).resolve().parent.parent / "pool"


def unlike(init_process_group):
    def init(backend, *, rank, **rest):
        import comfy.model_management as mm

        mm.supports_fp8_compute = lambda device=None: rank == 0
        init_process_group(backend, rank=rank, **rest)

    return init


if __name__ == "__main__":
    sys.path.insert(0, str(POOL))
    from package import register_package

    register_package(POOL.parent)
    dist.init_process_group = unlike(dist.init_process_group)
    sys.argv[0] = str(POOL / "worker_main.py")
    runpy.run_path(sys.argv[0], run_name="__main__")
