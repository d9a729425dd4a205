"""The way of one evaluation through the pack is the one that docs/ARCHITECTURE.md shows."""

import json
import re
import sys
from dataclasses import replace
from functools import cache

import pytest
from comfy.patcher_extension import WrappersMP
from pipemesh.parallel_runtime.client.interrupt import interrupted
from pipemesh.parallel_runtime.client.remote_patcher import Patching, parallelize
from pipemesh.parallel_runtime.wire.messages import Done, Failed, Forward
from pipemesh.pool import conversation

from ..fixtures import running_clients
from ..kit.models import load, run
from ..kit.traces import ROOT, traced

MIDDLE = 7  # the call of the model that is looked at: a patch then sees stale neighbours
WRITES = "parallel_runtime/worker/arena_io.py:ArenaIO.write"  # of one rank of a group
KINDS = {"Ulysses": ((2,), None), "PipeFusion": ((1, 1, 2), Patching(3))}


@pytest.fixture(scope="module")
def evaluation(setup, files, tmp_path_factory):
    """Kind -> what the UI and one rank call in an evaluation in the middle of a run, in order."""
    file = tmp_path_factory.mktemp("traces") / "rank"
    argv = (sys.executable, str(ROOT / "tests" / "kit" / "traces.py"), str(file), "{fd}", "{parent}")

    @cache
    def traced_evaluation(kind):
        degrees, patching = KINDS[kind]
        pool = clients(*degrees)
        parallel = parallelize(load(files["model"]), pool, 1.0, patching)
        seen = []

        def look(executor, *args, **kwargs):
            seen.append(None)
            if len(seen) != MIDDLE:
                return executor(*args, **kwargs)
            with traced() as seen[-1]:
                return executor(*args, **kwargs)

        parallel.add_wrapper(WrappersMP.PREDICT_NOISE, look)
        run(parallel, steps=MIDDLE + 2)
        pool.sessions.settle(interrupted)
        pool.runs.end_owed()
        pool.sessions.settle(interrupted)  # ranks write down what they called before they answer
        calls, requests = seen[MIDDLE - 1]
        ranks = [
            dict(map(json.loads, written.read_text(encoding="utf-8").splitlines()))
            for written in file.parent.glob("rank.*")
        ]
        of_each = [
            [call for one in requests for call in rank[one]] for rank in ranks if {*requests} <= {*rank}
        ]
        (writer,) = (rank for rank in of_each if WRITES in rank)
        for rank in file.parent.glob("rank.*"):
            rank.unlink()
        return calls, writer

    with running_clients(replace(setup, argv=argv)) as clients, pytest.MonkeyPatch.context() as patch:
        patch.setattr(conversation, "POLL_S", 60.0)  # what looks at ranks that are slow is no part of it
        yield traced_evaluation


PAGE = (ROOT / "docs" / "ARCHITECTURE.md").read_text(encoding="utf-8")
ROW = re.compile(r"^\| `([^`]+\.py:[^`]+)` \| (?:`([^`]+)`)? ?\| .+ \|$", re.M)
# Files and functions of one evaluation in the UI and a rank together. A change that adds to them
# says why: comm/parts.py lays out an exchange with as many kernels for any number of ranks;
# client/conds.py knows conditioning by the cond's own tensors, which spares comparisons on a GPU;
# weights/background_check.py says whether a weight was written to since ranks got it;
# Traffic.message counts messages, so that answers say at which one a rank is.
MOST = {"Ulysses": (51, 178), "PipeFusion": (59, 212)}


# Fields of an evaluation's messages, of which the page says who reads each. Another one says why
# ranks cannot deduce it. The last of Done answer other requests. A rank whose GPU waits for slower
# ranks does not see that these wait for their CPUs: idle tells ComfyUI's process, and record tells
# all ranks
FIELDS = {Forward: (9, set()), Done: (12, {"unread", "lacks", "recorded"}), Failed: (8, set())}


@pytest.mark.parametrize("message", FIELDS, ids=lambda one: one.__name__)
def test_the_page_says_who_reads_each_field_of_an_evaluations_messages(message):
    most, others = FIELDS[message]
    (row,) = re.findall(rf"^\| `{message.__name__}` \| (.+) \|$", PAGE, re.M)
    fields = {*message.__struct_fields__} - others
    assert fields <= {*re.findall(r"`(\w+)`", row)} and len(fields) <= most


def shown(kind):
    """The functions that the page shows, in its order."""
    rows = ROW.findall(PAGE.partition("## The life of an evaluation")[2].partition("\n## ")[0])
    return [(other if kind == "PipeFusion" and other else usual) for usual, other in rows]


@pytest.mark.parametrize("kind", KINDS)
def test_an_evaluation_goes_the_way_that_the_page_shows(evaluation, kind):
    ui, rank = evaluation(kind)
    names = shown(kind)
    assert len(names) >= 20
    there, back = names[: len(names) - 2], names[-2:]
    sent = next(at for at, one in enumerate(there) if one.startswith("worker/"))
    for part, calls in ((there[:sent], ui), (there[sent:], rank), (back, ui)):
        firsts = [one.removeprefix("parallel_runtime/") for one in dict.fromkeys(calls)]
        missing = [one for one in part if one not in firsts]
        assert not missing, f"not called: {missing}"
        assert sorted(part, key=firsts.index) == part, "in another order"


@pytest.mark.parametrize("kind", KINDS)
def test_an_evaluation_takes_no_more_files_and_functions_than_it_did(evaluation, kind):
    ui, rank = evaluation(kind)
    functions = {*ui, *rank}
    files = {one.partition(":")[0] for one in functions}
    assert len(files) <= MOST[kind][0] and len(functions) <= MOST[kind][1], " ".join(sorted(functions))


def test_the_names_of_the_layers_mean_nothing_else_on_the_way(evaluation):
    for kind in KINDS:
        functions = {one for calls in evaluation(kind) for one in calls}
        for layer in ("sample_call", "dispatch", "on_rank"):
            assert sum(one.endswith(f".{layer}") for one in functions) <= 1, layer
