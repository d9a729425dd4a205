"""Which prompts of a queue differ in the seed of their noise alone."""

from copy import deepcopy
from types import SimpleNamespace

import execution
import pytest
from comfy_execution.utils import CurrentNodeContext
from hypothesis import given
from hypothesis import strategies as st
from pipemesh.nodes import prompt_queue
from pipemesh.parallel_runtime.client.alike_prompts import (
    Moment,
    Pending,
    before,
    differences,
    readers,
    seed_at,
    seed_place,
)

from ..kit.queues import node

LITERALS = st.one_of(st.integers(0, 3), st.booleans(), st.sampled_from(["a", "b", 1.0, None]))
OURS = ("PipeMeshKSampler", "PipeMeshKSamplerAdvanced")


@st.composite
def graphs(draw):
    """Nodes whose links lead to earlier ones."""
    graph = {}
    for number in range(draw(st.integers(1, 7))):
        inputs = draw(st.dictionaries(st.sampled_from("abc"), LITERALS, max_size=2))
        for name in draw(st.sets(st.sampled_from("xyz"), max_size=2 if number else 0)):
            inputs[name] = [str(draw(st.integers(0, number - 1))), draw(st.integers(0, 1))]
        graph[str(number)] = {"class_type": draw(st.sampled_from(["A", "B"])), "inputs": inputs}
    return graph


@given(graphs(), st.data())
def test_a_literal_counts_where_the_sampler_needs_it_and_nowhere_else(graph, data):
    last = str(len(graph) - 1)
    places = [(at, name) for at, one in graph.items() for name in one["inputs"] if name in "abc"]
    changed = data.draw(st.sets(st.sampled_from(places))) if places else set()
    other = deepcopy(graph)
    for at, name in changed:
        other[at]["inputs"][name] = "another"
    needed = {*before(graph, last)}
    assert differences(graph, other, last) == {place for place in changed if place[0] in needed}


@given(graphs(), st.data())
def test_prompts_whose_nodes_or_links_differ_are_not_alike(graph, data):
    last, other = str(len(graph) - 1), deepcopy(graph)
    at = data.draw(st.sampled_from(sorted(before(graph, last))))
    links = [name for name in graph[at]["inputs"] if name in "xyz"]
    how = data.draw(st.sampled_from(["class", "more", "gone", *(["link"] if links else [])]))
    if how == "class":
        other[at]["class_type"] = "C"
    elif how == "more":
        other[at]["inputs"]["more"] = 1
    elif how == "gone":
        del other[at]
    else:
        other[at]["inputs"][links[0]] = data.draw(st.sampled_from([3, ["0", 7]]))
    assert differences(graph, other, last) is None


@pytest.mark.parametrize(("one", "other"), [(1, 1.0), (1, True), ("1", 1), ([1, 2], [1, 2.0])])
def test_numbers_of_other_kinds_are_other_literals_and_what_comfyui_notes_and_titles_are_none(one, other):
    graph, changed = ({"1": node("A", a=value)} for value in (one, other))
    assert differences(graph, changed, "1") == {("1", "a")}
    noted = {"1": {**graph["1"], "is_changed": [3], "_meta": {"title": "a"}}}
    assert differences(graph, noted, "1") == frozenset()


def test_the_place_of_a_seed_is_known_of_stocks_samplers_and_ours():
    for kind in ("KSampler", "KSamplerAdvanced", "SamplerCustom", *OURS):
        name = "seed" if kind.endswith("KSampler") else "noise_seed"
        graph = {"1": node(kind, **{name: 5})}
        assert seed_place(graph, "1") == ("1", name) and seed_at(graph, ("1", name)) == 5
    graph = {"1": node("RandomNoise", noise_seed=7), "2": node("SamplerCustomAdvanced", noise=["1", 0])}
    assert seed_place(graph, "2") == ("1", "noise_seed")


@pytest.mark.parametrize(
    "graph",
    [
        {},
        {"2": node("Another", seed=5)},
        {"2": node("KSampler", seed=["1", 0]), "1": node("PrimitiveInt", value=5)},
        {"2": node("KSampler", seed=True)},
        {"2": node("KSampler", seed="5")},
        {"2": node("KSampler")},
        {"2": node("SamplerCustomAdvanced", noise=["1", 0]), "1": node("DisableNoise")},
        {"2": node("SamplerCustomAdvanced", noise=["1", 0])},
    ],
)
def test_a_seed_that_is_no_number_in_a_known_place_is_not_known(graph):
    assert seed_place(graph, "2") is None


def test_who_reads_a_noise_is_found_among_what_a_sampler_needs():
    graph = {
        "noise": node("RandomNoise", noise_seed=7),
        "first": node("SamplerCustomAdvanced", noise=["noise", 0]),
        "second": node("SamplerCustomAdvanced", noise=["noise", 0], latent_image=["first", 0]),
        "apart": node("Another", noise=["noise", 0]),
    }
    assert readers(graph, "second", "noise") == {"first", "second"}
    assert readers(graph, "first", "noise") == {"first"}


@pytest.mark.host
def test_what_waits_is_told_with_the_outputs_that_comfyui_will_execute_of_it(monkeypatch):
    server = SimpleNamespace(queue_updated=lambda: None)
    queue = server.prompt_queue = execution.PromptQueue(server)
    monkeypatch.setattr(prompt_queue.PromptServer, "instance", server, raising=False)
    graphs = [{"1": node("KSampler", seed=seed), "2": node("Save")} for seed in range(3)]
    for number, outputs in ((0, ["2"]), (2, ["1", "2"]), (1, ["2"])):
        queue.put((number, f"prompt {number}", graphs[number], {}, outputs, {}))
    queue.get()
    with CurrentNodeContext("prompt 0", "1"):
        moment = prompt_queue.moment_now()
    waiting = Pending("prompt 1", graphs[1], ("2",)), Pending("prompt 2", graphs[2], ("1", "2"))
    assert moment == Moment("prompt 0", "1", None, graphs[0], waiting)
