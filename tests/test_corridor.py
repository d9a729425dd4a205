"""The way of one evaluation through the pack, as docs/ARCHITECTURE.md shows it."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from pipemesh.parallel_runtime.client.remote_patcher import Patching, parallelize

from .conftest import running_clients
from .models import load, run
from .traces import ROOT, traced

WARM = 2  # evaluations before the one that is looked at


@pytest.fixture(scope="module")
def traced_clients(setup, tmp_path_factory):
    file = tmp_path_factory.mktemp("traces") / "rank"
    argv = (sys.executable, str(ROOT / "tests" / "traces.py"), str(file), "{fd}", "{parent}")
    with running_clients(replace(setup, argv=argv)) as client:
        yield client, file


def evaluation(clients, file, model, degrees, patching=None):
    """What the UI and rank 0 call in one evaluation in the middle of a run, in their order."""
    parallel = parallelize(model, clients(*degrees), 1.0, patching)
    seen = []

    def look(executor, *args, **kwargs):
        seen.append(None)
        if len(seen) != WARM + 1:
            return executor(*args, **kwargs)
        before = {rank: rank.stat().st_size for rank in file.parent.glob("rank.*")}
        with traced() as ui:
            out = executor(*args, **kwargs)
        seen[WARM] = ui, before
        return out

    from comfy.patcher_extension import WrappersMP

    parallel.add_wrapper(WrappersMP.PREDICT_NOISE, look)
    run(parallel, steps=6)
    ui, before = seen[WARM]
    for rank, size in before.items():
        lines = rank.read_text(encoding="utf-8")[size:].splitlines()
        yield ui, [json.loads(line) for line in lines]


def test_show(traced_clients, files):
    clients, file = traced_clients
    for degrees, patching in (((2,), None), ((1, 1, 2), Patching(3))):
        for ui, lines in evaluation(clients, file, load(files["model"]), degrees, patching):
            rank = lines[0]
            both = list(dict.fromkeys([*ui, *rank]))
            print(
                "=====",
                degrees,
                len(ui),
                [len(x) for x in lines][:5],
                "functions",
                len(both),
                "files",
                len({one.partition(":")[0] for one in both}),
            )
            print("UI", *dict.fromkeys(ui), sep="\n  ")
            print("RANK", *dict.fromkeys(rank), sep="\n  ")
            break
    Path("/work/changes/trace.txt")
