"""Start a process of ``lockstep.run``: ``lockstep_main.py PARENT_PID WORD``, with one thread and
ComfyUI on the CPU. One that is a fork has a third argument, the descriptor over which it asks for
more of them.
"""

import importlib
import json
import os
import sys
from pathlib import Path


def main() -> None:
    root = Path(__file__).resolve().parents[2]
    sys.path[0] = str(root / "pool")
    from package import register_package

    register_package(root)
    word = json.loads(sys.argv[2])
    sys.path[0] = word["comfyui"]
    from pipemesh.pool.worker_main import die_with_parent

    die_with_parent(int(sys.argv[1]))
    import comfy.cli_args
    import torch

    comfy.cli_args.args.cpu = True
    torch.set_num_threads(1)
    from pipemesh.lab.bench.forked import above
    from pipemesh.lab.bench.lockstep import Ranks

    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else ()
    server = above(int(sys.argv[3])) if sys.argv[3:] else None
    store, where = str(Path(word["folder"], "store")), (word["comfyui"], word["smallest"], server)
    ranks = Ranks(store, word["rank"], word["size"], cores, *where)
    module, name = word["function"].split(":")
    with torch.inference_mode():
        result = getattr(importlib.import_module(f"pipemesh.lab.bench.{module}"), name)(
            ranks, **word["arguments"]
        )
    Path(word["folder"], f"{word['rank']}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main()
