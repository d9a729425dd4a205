"""Turns a workflow of ComfyUI's frontend into the prompt that its server takes, as `graphToPrompt`
of the frontend does (comfyui-frontend-package@1.47.12).

Subgraphs are laid out flat, bypassed nodes passed through, muted ones left out. A switch is a node
like any other: the server runs only the side that is chosen.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from .promoted import PRIMITIVE, promoted
from .widgets import boxed, configured, prompt_value
from .workflow import BYPASSED, INPUTS, MUTED, ROOT, UNSET, GraphError, Graphs, Link, Node, Raw, read

ONLY_IN_THE_FRONTEND = ("Reroute", PRIMITIVE, "Note", "MarkdownNote")
ANY = frozenset(("*", "", "0"))


def api_prompt(workflow: dict[str, Any], object_info: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Node id -> its ``class_type`` and ``inputs``; nodes inside subgraphs as "12:34".

    Raises GraphError, which names the class that ``object_info`` lacks or the link that leads
    nowhere.
    """
    graphs = {
        name: replace(graph, nodes={node.id: _configured(node, object_info) for node in graph.nodes.values()})
        for name, graph in read(workflow).items()
    }
    flat = flattened(_with_primitives(promoted(graphs)))
    prompt = {
        id: _in_prompt(flat, id, object_info)
        for id, placed in flat.placed.items()
        if not flat.is_left_out(placed.node)
    }
    for node in prompt.values():
        node["inputs"] = {
            name: value for name, value in node["inputs"].items() if not _is_loose(value, prompt)
        }
    return prompt


def _configured(node: Node, object_info: Raw) -> Node:
    """A class that is not known keeps its saved inputs: it may be bypassed."""
    return configured(node, object_info[node.type]) if node.type in object_info else node


def _is_loose(value: Any, prompt: Raw) -> bool:
    return value is UNSET or (isinstance(value, list) and value[0] not in prompt)


def _in_prompt(flat: Flat, id: str, object_info: Raw) -> dict[str, Any]:
    node = flat.placed[id].node
    if node.type not in object_info:
        raise GraphError(
            f"Node {id} is a {node.type}, which this ComfyUI does not have: install the pack that has it, or"
            " bypass the node."
        )
    inputs = {widget.name: prompt_value(node, widget) for widget in node.widgets if widget.in_prompt}
    for index, slot in enumerate(node.inputs):
        found = flat.source(id, index)
        if isinstance(found, Value):
            inputs[slot.name] = boxed(found.value)
        elif found is not None:
            inputs[slot.name] = [found.id, found.slot]
    return {"class_type": node.type, "inputs": inputs}


def _with_primitives(graphs: Graphs) -> Graphs:
    """The graphs with the value of each PrimitiveNode in the widgets that it is linked to."""
    for name, graph in graphs.items():
        for node in graph.nodes.values():
            values = node.saved.get("widgets_values")
            if node.type == PRIMITIVE and isinstance(values, list) and values:
                for link in graph.links.values():
                    target = graph.target(link.id) if link.origin == node.id else None
                    if target and target[1].widget and target[0].widget(target[1].widget):
                        graph = graph.with_node(target[0].with_value(target[1].widget, values[0]))
        graphs = {**graphs, name: graph}
    return graphs


@dataclass(frozen=True)
class Output:
    """An output of a node in the prompt."""

    id: str
    slot: int


@dataclass(frozen=True)
class Value:
    """The value of a promoted widget."""

    value: Any


Source = Output | Value | None


@dataclass(frozen=True)
class Placed:
    """A node, the graph it stands in, and the ids of the nodes of subgraphs around it."""

    node: Node
    graph: str
    path: tuple[str, ...]

    def id_of(self, node: str) -> str:
        """The id of another node of the same graph."""
        return ":".join((*self.path, node))


@dataclass(frozen=True)
class Flat:
    """All nodes of a workflow under their ids, and where the value of an input comes from."""

    graphs: Graphs
    placed: Mapping[str, Placed]

    def is_left_out(self, node: Node) -> bool:
        return node.is_off or self.is_virtual(node)

    def is_virtual(self, node: Node) -> bool:
        return node.type in self.graphs or node.type in ONLY_IN_THE_FRONTEND

    def source(
        self,
        id: str,
        slot: int,
        wanted: str | None = None,
        seen: frozenset[tuple[str, str, int]] = frozenset(),
    ) -> Source:
        """Where the input ``slot`` of a node gets its value, None for nowhere. ``wanted``: the type
        of the input at the end of the way.
        """
        seen = _once(seen, id, "input", slot)
        placed = self.placed[id]
        given = placed.node.inputs[slot]
        if given.link is None:
            return None
        link = self._link(placed, given.link)
        if placed.path and link.origin == INPUTS:
            return self._from_outside(placed, link, seen)
        return self._from(
            placed.id_of(link.origin), link.origin_slot, given.type if wanted is None else wanted, seen
        )

    def _link(self, placed: Placed, link: int) -> Link:
        found = self.graphs[placed.graph].links.get(link)
        if found is None:
            raise GraphError(
                f"An input of node {placed.id_of(placed.node.id)} has link {link}, which the workflow does"
                " not have."
            )
        return found

    def _from_outside(self, placed: Placed, link: Link, seen: frozenset[tuple[str, str, int]]) -> Source:
        """From the input of the subgraph's node, or its promoted value."""
        around = ":".join(placed.path)
        host = self.placed[around].node
        if not 0 <= link.origin_slot < len(host.inputs):
            raise GraphError(
                f"Node {around} has no input {link.origin_slot}, which is linked inside its subgraph."
            )
        given = host.inputs[link.origin_slot]
        if given.link is not None:
            return self.source(around, link.origin_slot, seen=seen)
        widget = host.widget(given.widget) if given.widget else None
        return Value(widget.value) if widget else None

    def _from(self, id: str, slot: int, wanted: str, seen: frozenset[tuple[str, str, int]]) -> Source:
        """What the output ``slot`` of a node gives."""
        seen = _once(seen, id, "output", slot)
        if id not in self.placed:
            raise GraphError(f"A link leads from node {id}, which the workflow does not have.")
        placed = self.placed[id]
        node = placed.node
        if node.mode == MUTED:
            return None
        if node.mode == BYPASSED:
            passed = passed_through(node, slot, wanted)
            return None if passed is None else self.source(id, passed, seen=seen)
        if node.type in self.graphs:
            link = self._inner_link(node, slot)
            return None if link is None else self._from(f"{id}:{link.origin}", link.origin_slot, wanted, seen)
        if self.is_virtual(node):
            return self.source(id, slot, wanted, seen) if slot < len(node.inputs) else None
        return Output(id, slot)

    def _inner_link(self, node: Node, slot: int) -> Link | None:
        """The link inside to an output of a subgraph."""
        graph = self.graphs[node.type]
        if slot >= len(graph.outputs):
            raise GraphError(f"Node {node.id} has no output {slot}, which is linked.")
        links = (graph.links[link] for link in graph.outputs[slot].links if link in graph.links)
        return next(links, None)


def _once(seen: frozenset[tuple[str, str, int]], *step: Any) -> frozenset[tuple[str, str, int]]:
    if step in seen:
        raise GraphError(f"The links through the {step[1]} {step[2]} of node {step[0]} go in a circle.")
    return seen | {step}


def flattened(graphs: Graphs) -> Flat:
    """What is inside a muted or bypassed node at the root is left out. Deeper inside, only nodes
    that are so themselves are, as in the frontend.
    """
    placed = {}
    for node in graphs[ROOT].nodes.values():
        placed[node.id] = Placed(node, ROOT, ())
        if not node.is_off:
            placed |= {place.id_of(place.node.id): place for place in _inside(graphs, node, ())}
    return Flat(graphs, placed)


def _inside(
    graphs: Graphs, host: Node, path: tuple[str, ...], around: tuple[str, ...] = ()
) -> Iterator[Placed]:
    if host.type not in graphs:
        return
    if host.type in around:
        raise GraphError(f"Node {host.id} is a node of the subgraph that it stands in.")
    for node in graphs[host.type].nodes.values():
        yield Placed(node, host.type, (*path, host.id))
        yield from _inside(graphs, node, (*path, host.id), (*around, host.type))


def passed_through(node: Node, slot: int, wanted: str) -> int | None:
    """Which input of a bypassed node stands for its output ``slot`` where an input of the type
    ``wanted`` is at the end: the one opposite if it fits, else the first that does.
    """
    inputs = node.inputs
    if wanted in ANY:
        return slot if slot < len(inputs) else 0
    given = node.outputs[slot] if slot < len(node.outputs) else "*"

    def fits(index: int) -> bool:
        return types_fit(inputs[index].type, given) and types_fit(inputs[index].type, wanted)

    if slot < len(inputs) and fits(slot):
        return slot
    same = (index for index, one in enumerate(inputs) if one.type == wanted)
    return next(same, next((index for index in range(len(inputs)) if fits(index)), None))


def types_fit(one: str, other: str) -> bool:
    """True if an output of one type can be linked to an input of the other."""
    ours, others = set(one.lower().split(",")), set(other.lower().split(","))
    return bool(ours & others or ours & ANY or others & ANY)
