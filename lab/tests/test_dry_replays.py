"""For an evaluation that is replayed, a rank's CPU starts a graph and a message in turn, and
between them what has a name here. Counted of released models with one block of each kind.
"""

import json

import pytest
from pipemesh.lab.dry_run.device import TO_CPU
from pipemesh.parallel_runtime.families.catalogue import PLANS, classes_of
from pipemesh.parallel_runtime.methods.recordings import why_not_recorded
from pipemesh.tests.fixtures import all_said_by

INPUT, OUTPUT, ARRIVED = "copy_", "clone", "Ring._finish"
RECORDED = ("flux1-dev", "qwen-image-20b", "z-image-6b", "ltx2-19b", "wan2.2-t2v-14b")
REFUSED = "minimax-h3-33b"


@pytest.fixture(scope="module")
def replays(command):
    process = command(
        "dryrun", "--replays", "--cover", *(f"--family={name}" for name in (*RECORDED, REFUSED))
    )
    said = all_said_by(process)
    assert process.wait() == 0, said
    found = [json.loads(line) for line in said.splitlines() if line.startswith("{")]
    return {one["model"]: one for one in found}


@pytest.mark.parametrize("model", RECORDED)
def test_a_replay_is_graphs_messages_and_what_has_a_name(replays, model):
    """A look at a flag for each attention that ranks share. A ring waits for each block that is on
    its way, and computes meanwhile, which is a graph more for each attention.
    """
    found = replays[model]
    eager, ulysses, ring = dict(found["eager"]), found["layout"]["ulysses"], found["layout"]["ring"]
    attentions, hops = eager.pop(TO_CPU), ring - 1
    assert attentions >= 1 and eager.pop(INPUT) >= 4 and eager.pop(OUTPUT) in (1, 2)
    assert eager == ({ARRIVED: hops * attentions} if hops else {}) and not found["unrecorded"]
    assert attentions < found["messages"] <= attentions * (2 * (ulysses > 1) + hops) + 1
    assert found["pieces"] == found["messages"] + hops * attentions + 1
    assert 1 < found["graph_launches"] <= found["messages"] + attentions * (hops > 0) + 1


def test_what_is_not_recorded_is_named(replays):
    assert replays[REFUSED]["unrecorded"] == "aten::item reads numbers of the GPU"
    (plan,) = [one for one in PLANS if "QwenImage21" in str(classes_of(one))]
    assert "keeps tokens" in why_not_recorded(plan)
