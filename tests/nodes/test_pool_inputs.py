"""What PipeMesh Pool refuses: when it is queued, through ComfyUI's own validation, and when it
runs, where a linked input has its value.
"""

import asyncio
from pathlib import Path

import pytest
from pipemesh.nodes.ksampler import sampler_nodes
from pipemesh.nodes.pool import pool_nodes
from pipemesh.nodes.report.node import report_node
from pipemesh.nodes.runtime import Runtime
from pipemesh.nodes.settings import PoolSettings
from pipemesh.parallel_runtime.errors import LayoutError
from pipemesh.parallel_runtime.texts import english

from ..kit.fake_pools import fake_setup

INPUTS = {"devices": "cpu", "layout": "by hand", "ulysses": 1, "ring": 1, "pipefusion": 2}
INPUTS |= {"backend": "auto", "patches": 0, "warm_up": 1, "stages": ""}
LISTED = "list one device per rank, or choose"
NO_LIST = "is no list of block counts: write how many blocks each stage gets, for example 20,37, or leave stages empty."
BACKENDS = "is not known: choose auto, nccl or gloo."
REFUSED = [
    (
        {"devices": "cpu,cpu,cpu"},
        f"pipefusion 2 = 2 ranks, 3 devices listed (cpu, cpu, cpu): {LISTED} pipefusion 3 or ulysses 3.",
    ),
    (
        {"devices": "cpu,cpu", "ring": 2},
        f"ring 2 x pipefusion 2 = 4 ranks, 2 devices listed (cpu, cpu): {LISTED} ring 2 or pipefusion 2.",
    ),
    (
        {"pipefusion": 4, "patches": 2},
        "patches 2, pipefusion 4: some stages would always wait, choose at least as many patches as stages.",
    ),
    (
        {"stages": "9,10,3"},
        "stages 9,10,3 has 3 numbers, and pipefusion is 2: write one number of blocks for each stage, or leave"
        " stages empty.",
    ),
    *(
        ({"stages": one}, f"stages {one!r} {NO_LIST}")
        for one in ("9,", "half,half", "0,19", "-1,20", "9.5,9.5")
    ),
    ({"ulysses": 33, "pipefusion": 1}, "ulysses 33 is out of range: choose 1 to 32."),
    ({"ulysses": 0}, "ulysses 0 is out of range: choose 1 to 32."),
    ({"ring": 33, "pipefusion": 1}, "ring 33 is out of range: choose 1 to 32."),
    ({"pipefusion": 0}, "pipefusion 0 is out of range: choose 1 to 32."),
    ({"patches": 65}, "patches 65 is out of range: choose 0 to 64."),
    ({"backend": "mpi"}, f"backend 'mpi' {BACKENDS}"),
]
UNLIKE = [  # what only a link can bring
    ({"ulysses": 2.5}, "ulysses 2.5 is no whole number: choose one from 1 to 32."),
    ({"ulysses": None}, "ulysses None is no whole number: choose one from 1 to 32."),
    ({"patches": True}, "patches True is no whole number: choose one from 0 to 64."),
    ({"warm_up": 0}, "warm_up 0 is out of range: choose 1 to 10000."),
    ({"warm_up": -3}, "warm_up -3 is out of range: choose 1 to 10000."),
    ({"backend": 1}, f"backend 1 {BACKENDS}"),
    ({"stages": 20}, "stages 20 is no text: connect text, or type it in."),
    ({"stages": "9" * 5000 + ",1"}, NO_LIST),
]


def made_nodes():
    """Every node by its id, of a runtime that can start nothing."""
    runtime = Runtime(fake_setup())
    made = (*pool_nodes(lambda: runtime), *sampler_nodes(lambda: runtime), report_node(lambda: runtime))
    return {one.GET_SCHEMA().node_id: one for one in made}


@pytest.fixture(scope="module")
def pool_node():
    """PipeMesh Pool."""
    return made_nodes()["PipeMeshPool"]


@pytest.fixture
def complaints(pool_node, monkeypatch):
    """What ComfyUI has to say of these inputs when they are queued; a link is written as in a
    prompt.
    """
    import execution

    import nodes

    class Source:
        RETURN_TYPES, FUNCTION = ("*",), "run"
        INPUT_TYPES = staticmethod(lambda: {"required": {}})

    for name, one in {**made_nodes(), "PipeMeshPool": pool_node, "Source": Source}.items():
        monkeypatch.setitem(nodes.NODE_CLASS_MAPPINGS, name, one)

    def validated(class_type="PipeMeshPool", **inputs):
        asked = ("1", class_type, dict(inputs)), ("2", "Source", {})
        prompt = {number: {"class_type": kind, "inputs": given} for number, kind, given in asked}
        valid, errors, _ = asyncio.run(execution.validate_inputs("id", prompt, "1", {}))
        assert valid == (not errors)
        return {f"{error['message']}: {error['details']}".rpartition(" - ")[2] for error in errors}

    return validated


LINK = ["2", 0]


# Of each input a value that is not its default
OTHERS = {"devices": "cpu,cpu,cpu", "weights": "sharded", "quality": "approximate allowed"}
OTHERS |= {"backend": "gloo", "stages": "1,2", "ulysses": 3, "ring": 2, "pipefusion": 2, "patches": 5}
OTHERS |= {"warm_up": 3, "cfg": 2, "data": 2, "queue": "first image soonest"}
AUTO = {"layout": "auto", "devices": "cpu"}


def test_a_queue_is_sampled_at_once_unless_the_pool_or_without_one_the_setting_says_no():
    runtime = Runtime(fake_setup())
    chosen = runtime.choose(**AUTO).looks_ahead
    assert chosen and not runtime.choose(**AUTO, queue="first image soonest").looks_ahead
    for says in (True, False):
        wanted = Runtime(fake_setup(), looks_ahead=lambda says=says: says).planning.ahead.is_wanted
        assert wanted(runtime.default_choice().looks_ahead) is says, "without a pool"
        assert wanted(chosen)


def test_the_tooltip_of_layout_names_the_inputs_that_count_where_it_is_auto_and_no_other():
    runtime = Runtime(fake_setup())
    assert OTHERS.keys() == PoolSettings.inputs().keys() - {"layout"}
    plain = runtime.choose(**AUTO)
    count = {name for name, value in OTHERS.items() if runtime.choose(**{**AUTO, name: value}) != plain}
    said = english("nodeDefs")["PipeMeshPool"]["inputs"]["layout"]["tooltip"].partition(" count")[0]
    assert {name for name in OTHERS if name in said} == count
    page = (Path(__file__).parents[2] / "docs" / "PIPEFUSION.md").read_text(encoding="utf-8")
    assert "`layout` to `by hand`" in page.partition("It is off until")[2].partition(".")[0]
    assert runtime.choose(**AUTO, pipefusion=2).patching is None


SAMPLED = dict.fromkeys(("model", "positive", "negative", "latent_image"), LINK)
SAMPLED |= {"steps": 4, "cfg": 1.0, "sampler_name": "euler", "scheduler": "simple"}
ADVANCED = {"add_noise": "enable", "noise_seed": 1, "start_at_step": 0, "end_at_step": 9}
SOCKETS = {
    "PipeMeshParallelize": {"model": LINK},
    "PipeMeshParallelizeVAE": {"vae": LINK},
    "PipeMeshReport": {"latent": LINK},
    "PipeMeshKSampler": {**SAMPLED, "seed": 1, "denoise": 1.0},
    "PipeMeshKSamplerAdvanced": {**SAMPLED, **ADVANCED, "return_with_leftover_noise": "disable"},
}


@pytest.mark.parametrize("class_type", SOCKETS)
def test_a_value_in_place_of_a_link_is_refused_when_queued_with_one_sentence(complaints, class_type):
    inputs = SOCKETS[class_type]
    assert complaints(class_type, **inputs, pool=LINK) == complaints(class_type, **inputs) == set()
    move = "but takes only a link: connect"
    for value in ("cuda:0,cuda:1", 2, {"ulysses": 2}):
        assert complaints(class_type, **inputs, pool=value) == {
            f"pool is {value!r}, {move} pool of PipeMesh Pool."
        }
    socket = next(iter(inputs))
    (sentence,) = complaints(class_type, **{**inputs, socket: "a name"})
    assert sentence.startswith(f"{socket} is 'a name', {move} {socket} of ")


@pytest.mark.parametrize(("changes", "sentence"), REFUSED)
def test_what_cannot_be_is_refused_when_queued_with_one_sentence(complaints, changes, sentence):
    assert complaints(**INPUTS | changes) == {sentence}


@pytest.mark.parametrize(("changes", "sentence"), [*REFUSED, *UNLIKE])
def test_what_a_link_brings_is_refused_when_it_runs_with_the_same_sentence(pool_node, changes, sentence):
    with pytest.raises(LayoutError) as caught:
        pool_node.execute(**INPUTS | changes)
    assert str(caught.value).endswith(sentence) and "\n" not in str(caught.value)


LINKED = [  # the inputs with a link, what else changes -> how the sentence begins, or none if it is queued
    *(([name], {}, None) for name in INPUTS),
    ([*INPUTS], {}, None),
    (["ulysses"], {"backend": "mpi"}, "backend 'mpi' is not known"),
    (["stages"], {"ulysses": 33}, "ulysses 33 is out of range"),
    (["backend"], {"devices": "cpu,cpu,cpu"}, "pipefusion 2 = 2 ranks, 3 devices listed"),
    (["ulysses"], {"pipefusion": 4, "patches": 2}, "patches 2, pipefusion 4"),
    (["patches"], {"stages": "9,10,3"}, "stages 9,10,3 has 3 numbers, and pipefusion is 2"),
    (["pipefusion"], {"stages": "9,"}, "stages '9,' is no list of block counts"),
    (["ulysses"], {"devices": "cpu,cpu,cpu"}, None),
    (["layout"], {"devices": "cpu,cpu,cpu"}, None),
    (["devices"], {"ulysses": 3}, None),
    (["pipefusion"], {"stages": "9,10,3"}, None),
    (["pipefusion"], {"patches": 1}, None),
]


@pytest.mark.parametrize(("linked", "changes", "start"), LINKED, ids=str)
def test_what_a_link_may_put_right_is_queued_and_what_can_never_be_is_refused(
    complaints, linked, changes, start
):
    said = complaints(**INPUTS | changes | dict.fromkeys(linked, LINK))
    assert [one.startswith(start) for one in said] == [True] if start else said == set()


def test_inputs_stand_in_the_order_in_which_a_user_needs_them_and_none_has_to_be_given(pool_node):
    """Saved workflows keep values by place: an input that is new comes last."""
    sockets = pool_node.GET_NODE_INFO_V1()["input"]
    assert not sockets.get("required")
    assert list(sockets["optional"]) == [
        *("devices", "layout", "quality", "weights"),
        *("ulysses", "ring", "cfg", "data"),
        *("pipefusion", "patches", "warm_up", "stages"),
        *("backend", "queue"),
    ]
    assert sockets["optional"]["layout"][1]["default"] == "auto"


def test_a_label_that_is_not_the_inputs_id_has_it_in_brackets():
    """Messages and prompts say the id."""
    texts = english("nodeDefs")["PipeMeshPool"]["inputs"]
    labels = {name: one["name"] for name, one in texts.items() if one["name"] != name}
    assert labels and all(label.endswith(f"({name})") for name, label in labels.items())


def test_an_input_that_a_newer_comfyui_gives_its_sampler_is_there_with_its_own_text(monkeypatch):
    import nodes

    stock = nodes.KSampler.INPUT_TYPES()
    stock["required"]["momentum"] = ("FLOAT", {"default": 0.5, "tooltip": "How much it keeps."})
    monkeypatch.setattr(nodes.KSampler, "INPUT_TYPES", lambda: stock)
    made = made_nodes()["PipeMeshKSampler"].GET_SCHEMA()
    new = next(one for one in made.inputs if one.id == "momentum")
    assert new.tooltip == "How much it keeps."
