"""Which prompts in ComfyUI's queue sample the same as the one that runs, but for the seed of their
noise: pure functions of graphs, which are nodes by id, whose inputs are literals or links.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

Graph = Mapping[str, Any]
InputPlace = tuple[str, str]  # a node's id, and the name of its input
SEEDS = {
    "KSampler": "seed",
    "KSamplerAdvanced": "noise_seed",
    "PipeMeshKSampler": "seed",
    "PipeMeshKSamplerAdvanced": "noise_seed",
    "SamplerCustom": "noise_seed",
}
OF_NOISE, SEED_OF_NOISE = {"SamplerCustomAdvanced": "noise"}, {"RandomNoise": "noise_seed"}
LATENT = "latent_image"


class Pending(NamedTuple):
    """A prompt that waits: its id and graph. ComfyUI will execute the nodes ``outputs`` and all
    that they need, which may be a part of the graph.
    """

    prompt: str
    graph: Graph
    outputs: tuple[str, ...]

    def executes(self, node: str) -> bool:
        return any(node in before(self.graph, output) for output in self.outputs)


@dataclass(frozen=True)
class Moment:
    """The ``node`` of a ``prompt`` that ComfyUI executes now, for the list item ``index``, its
    ``graph``, and the ``others`` that wait, in the order of the queue.
    """

    prompt: str
    node: str
    index: int | None
    graph: Graph
    others: tuple[Pending, ...]


def is_link(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and isinstance(value[0], str)


def inputs_of(graph: Graph, node: str) -> Mapping[str, Any]:
    return graph[node].get("inputs", {}) if node in graph else {}


def linked_to(graph: Graph, node: str, name: str) -> str:
    """Returns the node that an input is linked to; empty if it has no link."""
    value: Any = inputs_of(graph, node).get(name)
    return value[0] if is_link(value) else ""


def seed_place(graph: Graph, node: str) -> InputPlace | None:
    """Returns the input that holds the seed of a sampler's noise as a number; None if there is no
    such input.
    """
    kind = graph[node].get("class_type") if node in graph else None
    place = None
    if kind in SEEDS:
        place = node, SEEDS[kind]
    elif kind in OF_NOISE:
        source = linked_to(graph, node, OF_NOISE[kind])
        made_by = graph[source].get("class_type") if source in graph else None
        place = (source, SEED_OF_NOISE[made_by]) if made_by in SEED_OF_NOISE else None
    return place if place is not None and seed_at(graph, place) is not None else None


def seed_at(graph: Graph, place: InputPlace) -> int | None:
    value = inputs_of(graph, place[0]).get(place[1])
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def before(graph: Graph, node: str) -> Iterator[str]:
    """Yields a node and all that it needs, each once."""
    seen, following = set(), [node]
    while following:
        at = following.pop()
        if at not in seen:
            seen.add(at)
            yield at
            following += [value[0] for value in inputs_of(graph, at).values() if is_link(value)]


def readers(graph: Graph, node: str, source: str) -> set[str]:
    """Returns which of a node and all that it needs are linked to ``source``."""
    return {
        at
        for at in before(graph, node)
        if any(is_link(value) and value[0] == source for value in inputs_of(graph, at).values())
    }


def differences(mine: Graph, other: Graph, node: str) -> frozenset[InputPlace] | None:
    """Returns the inputs whose literals differ between two graphs, of a node and of all nodes that
    it needs. None if the graphs differ in more than that.
    """
    found: set[InputPlace] = set()
    for at in before(mine, node):
        if at not in mine or at not in other or mine[at].get("class_type") != other[at].get("class_type"):
            return None
        own, theirs = inputs_of(mine, at), inputs_of(other, at)
        if own.keys() != theirs.keys():
            return None
        # By their text, which tells 1, 1.0 and True apart
        places = {(at, name) for name, value in own.items() if repr(value) != repr(theirs[name])}
        if any(is_link(own[name]) or is_link(theirs[name]) for _, name in places):
            return None
        found |= places
    return frozenset(found)
