"""Measure a pool before its first step: the seconds until two ranks are ready, and the memory of
two ranks over that of one.

A cold start is a ComfyUI's first pool, a restart every later one; both also in imports, the
seconds that one process takes to import torch and ComfyUI. Memory is the proportional set
size (a page mapped by n processes counts 1/n in each) of the ranks and of the process they are
forked from, after a load and a forward, from a file of about 5 GB. ``rss_ratio`` compares all of
it, ``model_ratio`` only the memory that the model added. Of ranks with an equal part of each
block's weights, ``own_of_file`` is what the model added that is no page of its file, of all ranks
together, over the file: the system takes such pages back where memory is short.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

from ...parallel_runtime.errors import PipeMeshError
from ...parallel_runtime.families.catalogue import sample_with
from ...parallel_runtime.layout import Layout
from ...parallel_runtime.memory import system_memory
from ...pool.handle import PoolHandle
from .figures import CaseFigures, Figure, Goal, Options, of_phase, ratio
from .lockstep import timed
from .pools import cpu_pool

RANKS = 2
COLD_STARTS = 5
SAMPLE, SIZE = sample_with("large")  # 4.9 GiB in fp32, small for a released model
LEAST = replace(SIZE, heads=1, blocks=(1, 1))
CASES = ("plain", "lora")
SHARDED = (2, 4)  # ranks
IMPORTS = "import comfy.cli_args as c; c.args.cpu = True; import comfy.sd"
IN_IMPORTS = 2.0  # goal of a cold start
DISK_BYTES, MEMORY_BYTES = 6 << 30, 16 << 30
MIB = 1 << 20


class Loads:
    """Pools of any size, one at a time, and their memory."""

    def __init__(self, options: Options):
        self._options = options
        self.first_pool()

    def first_pool(self) -> None:
        """Forget the fork server, as in a ComfyUI that has just been started: the next pool makes a
        new one.
        """
        from ...pool.fork_server import ForkServer

        self._server = ForkServer()

    def handle(self, ranks: int) -> PoolHandle:
        if self._options.smallest:
            return cpu_pool(self._options, Layout(ulysses=ranks))
        return cpu_pool(self._options, Layout(ulysses=ranks), start=self._server.start)

    def cold_start(self) -> float:
        self.first_pool()
        return self.restart()

    def restart(self) -> float:
        handle = self.handle(RANKS)
        try:
            return timed(handle.ensure)
        finally:
            handle.close()

    def imports(self) -> float:
        """Seconds of a process that imports what a rank does."""
        path = os.pathsep.join((self._options.comfyui, os.environ.get("PYTHONPATH", "")))
        environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
        return timed(lambda: subprocess.run([sys.executable, "-c", IMPORTS], env=environment, check=True))

    def memory(self, ranks: int, model: Any, weights: str = "whole") -> dict[str, int]:
        """Measure the bytes of all processes together: ``base`` before the model, ``loaded`` after
        one step of sampling; ``own``: what the model added that no file backs.
        """
        from ...parallel_runtime.client.remote_patcher import parallelize
        from ...parallel_runtime.client.remote_pool import RemotePool
        from ..commands.parity import Case, sample

        handle = self.handle(ranks)
        try:
            pids = handle.ensure().ranks.pids + self._server.pids
            base, before = sum(map(proportional_bytes, pids)), own_bytes(pids)
            remote = parallelize(model, RemotePool(handle), holds_ui_device=False, weights=weights)
            sample(
                remote, Case(SAMPLE.name, f"ulysses{ranks}", "even", SIZE.heads, 1.0, False, "euler"), steps=1
            )
            loaded, after = sum(map(proportional_bytes, pids)), own_bytes(pids)
            return {"base": base, "loaded": loaded, "own": after - before}
        finally:
            handle.close()


def proportional_bytes(pid: int) -> int:
    return mapped_bytes(pid, "Pss")


def own_bytes(pids: Iterable[int]) -> int:
    """Return the bytes of these processes that no file backs, with this one's share of the segments
    that it has in common with them.
    """
    return mapped_bytes(os.getpid(), "Pss_Shmem") + sum(
        mapped_bytes(pid, kind) for pid in pids for kind in ("Pss_Anon", "Pss_Shmem")
    )


def mapped_bytes(pid: int, kind: str) -> int:
    (kilobytes,) = re.findall(
        rf"^{kind}:\s+(\d+) kB", Path(f"/proc/{pid}/smaps_rollup").read_text(), re.MULTILINE
    )
    return 1024 * int(kilobytes)


def require_room(folder: str) -> None:
    """Raise PipeMeshError if the disk or the memory is too small for the file."""
    disk, (memory, _total) = shutil.disk_usage(folder).free, system_memory()
    if disk < DISK_BYTES or memory < MEMORY_BYTES:
        raise PipeMeshError(
            f"The load bench needs {DISK_BYTES / 1e9:.0f} GB in {folder} and {MEMORY_BYTES / 1e9:.0f} GB of"
            f" memory, there are {disk / 1e9:.0f} and {memory / 1e9:.0f}: free some, or set TMPDIR to another"
            " disk."
        )


def memory_figures(case: str, one: dict[str, int], two: dict[str, int]) -> Iterator[Figure]:
    made, models = CaseFigures("load", case), [held["loaded"] - held["base"] for held in (one, two)]
    goal = Goal(at_most=1.1) if case == "plain" else None  # each rank merges a LoRA into weights of its own
    yield made.counted("rss_ratio", two["loaded"] / one["loaded"], "ratio", goal)
    yield made.counted("model_ratio", models[1] / models[0], "ratio")
    for ranks, held in ((1, one), (2, two)):
        made = CaseFigures("load", f"{case}_{ranks}_ranks")
        yield made.counted("rss_mib", held["loaded"] / MIB, "MiB")
        yield made.counted("rss_base_mib", held["base"] / MIB, "MiB")


def bench(options: Options) -> Iterator[Figure]:
    import comfy.sd
    import comfy.utils

    from ..random_files import write_lora, write_model

    loads = Loads(options)
    size, starts, cases, sharded = options.choose(
        (SIZE, COLD_STARTS, CASES, SHARDED), (LEAST, 1, CASES[-1:], SHARDED[:1])
    )
    rounds = [
        {"import": loads.imports(), "cold_start": loads.cold_start(), "restart": loads.restart()}
        for _ in range(starts)
    ]
    made = CaseFigures("load", f"{RANKS}_ranks", rounds)
    for phase, goal in (("cold_start", Goal(at_most=IN_IMPORTS)), ("restart", None)):
        yield made.estimated(f"{phase}_s", of_phase(phase), "s")
        yield made.estimated(f"{phase}_in_imports", ratio(phase, "import"), "x", goal)
    with tempfile.TemporaryDirectory(prefix="pipemesh-bench-") as folder:
        if not options.smallest:
            require_room(folder)
        assert SAMPLE.form.file is not None, f"{SAMPLE.name} has no file form"
        model = write_model(Path(folder, "model.safetensors"), SAMPLE.form, size)
        lora = write_lora(Path(folder, "lora.safetensors"), model, SAMPLE.form.file.lora_targets)
        stock = comfy.sd.load_diffusion_model(str(model))
        patched, _ = comfy.sd.load_lora_for_models(
            stock, None, comfy.utils.load_torch_file(str(lora)), 1.0, 0.0
        )
        for case in cases:
            one, two = (loads.memory(ranks, patched if case == "lora" else stock) for ranks in (1, RANKS))
            yield from memory_figures(case, one, two)
        for case, ranks in product(cases, sharded):
            added = loads.memory(ranks, patched if case == "lora" else stock, "sharded")["own"]
            made = CaseFigures("load", f"sharded_{case}_{ranks}_ranks")
            yield made.counted("own_of_file", added / model.stat().st_size, "ratio", Goal(at_most=1.15))
