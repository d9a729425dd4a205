"""Reads a workflow as ComfyUI's frontend saves it, litegraph's JSON, into frozen graphs.

A node inside a subgraph keeps its id only if no other node of the file has it. A new id is counted
on as the frontend (comfyui-frontend-package@1.47.12) counts it: it is part of the id in a prompt.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ...launcher.errors import LaunchError

ROOT = ""  # the graph that is no subgraph
INPUTS, OUTPUTS = "-10", "-20"  # the ids that links have at a subgraph's border
MUTED, BYPASSED = 2, 4
UNSET = object()  # the value of a widget that has none: a prompt leaves the input out

Raw = Mapping[str, Any]


class GraphError(LaunchError, ValueError):
    """A workflow that cannot become a prompt, by the node or the link that is wrong in it."""


@dataclass(frozen=True)
class Slot:
    """An input of a node. ``widget``: the name of the widget that gives it its value as long as
    nothing is linked to it.
    """

    name: str
    type: str
    link: int | None = None
    widget: str = ""


@dataclass(frozen=True)
class Widget:
    """A value that users set on a node. ``is_saved``: it has a place in ``widgets_values``.
    ``choices``: of a combo.
    """

    name: str
    value: Any
    is_saved: bool = True
    in_prompt: bool = True
    is_dynamic_prompt: bool = False
    choices: tuple[Any, ...] = ()


@dataclass(frozen=True)
class Node:
    """``outputs``: their types. ``saved``: the node in the file."""

    id: str
    type: str
    mode: int
    inputs: tuple[Slot, ...]
    outputs: tuple[str, ...]
    saved: Raw = field(repr=False)
    widgets: tuple[Widget, ...] = ()

    @property
    def is_off(self) -> bool:
        return self.mode in (MUTED, BYPASSED)

    def widget(self, name: str) -> Widget | None:
        return next((widget for widget in self.widgets if widget.name == name), None)

    def slot_of_link(self, link: int) -> Slot | None:
        return next((slot for slot in self.inputs if slot.link == link), None)

    def with_value(self, name: str, value: Any) -> Node:
        """Sets the first widget of that name, if there is one."""
        found = self.widget(name)
        return replace(
            self,
            widgets=tuple(
                replace(widget, value=value) if widget is found else widget for widget in self.widgets
            ),
        )


@dataclass(frozen=True)
class Link:
    id: int
    origin: str
    origin_slot: int
    target: str
    target_slot: int


@dataclass(frozen=True)
class Port:
    """An input or an output of a subgraph, and its links inside."""

    name: str
    type: str
    links: tuple[int, ...] = ()


@dataclass(frozen=True)
class Graph:
    nodes: Mapping[str, Node]
    links: Mapping[int, Link]
    inputs: tuple[Port, ...] = ()
    outputs: tuple[Port, ...] = ()

    def with_node(self, node: Node) -> Graph:
        return replace(self, nodes={**self.nodes, node.id: node})

    def target(self, link: int) -> tuple[Node, Slot] | None:
        """The node and the input that this link of a port leads to."""
        node = self.nodes.get(self.links[link].target) if link in self.links else None
        slot = node.slot_of_link(link) if node else None
        return (node, slot) if node and slot else None


Graphs = Mapping[str, Graph]  # ROOT and every subgraph, each after those that it has nodes of


def read(workflow: Raw) -> Graphs:
    """Raises GraphError where the file is no workflow."""
    if not isinstance(workflow.get("nodes"), list):
        raise GraphError(
            "The workflow has no list of nodes: save it from ComfyUI's menu, not as an API file."
        )
    subgraphs = list(_definitions(workflow))
    ids = _own_ids(workflow, subgraphs)
    named = {subgraph["id"]: subgraph for subgraph in subgraphs}
    graphs = {name: _graph(named[name], ids[name], named.keys(), ids) for name in _inner_first(named)}
    return {**graphs, ROOT: _graph(workflow, {}, named.keys(), ids)}


def _definitions(graph: Raw) -> Iterable[Raw]:
    for subgraph in (graph.get("definitions") or {}).get("subgraphs") or ():
        yield subgraph
        yield from _definitions(subgraph)


def _own_ids(workflow: Raw, subgraphs: Sequence[Raw]) -> dict[str, dict[str, str]]:
    """Subgraph -> id in the file -> id that no other node has; only those that differ."""
    used = {str(node["id"]) for node in workflow["nodes"] if isinstance(node["id"], int)}
    last = int(workflow.get("last_node_id") or 0)
    changed: dict[str, dict[str, str]] = {}
    for subgraph in subgraphs:
        changes = changed.setdefault(subgraph["id"], {})
        for node in subgraph.get("nodes") or ():
            given = str(node["id"])
            if given not in used:
                last = max(last, int(given)) if given.isdigit() else last
                used.add(given)
                continue
            last += 1
            while str(last) in used:
                last += 1
            changes[given] = str(last)
            used.add(str(last))
    return changed


def _inner_first(subgraphs: Mapping[str, Raw]) -> list[str]:
    """Every subgraph after those that it has nodes of; the file's order where they go in a
    circle.
    """
    inside = {
        name: [node["type"] for node in graph.get("nodes") or () if node["type"] in subgraphs]
        for name, graph in subgraphs.items()
    }
    ordered = [name for name, inner in inside.items() if not inner]
    for done in ordered:  # grows meanwhile
        for name in subgraphs:
            if done in inside[name]:
                inside[name] = [inner for inner in inside[name] if inner != done]
                if not inside[name]:
                    ordered.append(name)
    return ordered if len(ordered) == len(subgraphs) else list(subgraphs)


def _graph(
    raw: Raw, ids: Mapping[str, str], subgraphs: Iterable[str], all_ids: Mapping[str, Mapping[str, str]]
) -> Graph:
    nodes = (_node(node, ids, all_ids.get(node["type"], {})) for node in raw["nodes"])
    links = (_link(link, ids) for link in raw.get("links") or () if link)
    return Graph(
        nodes={node.id: node for node in nodes},
        links={link.id: link for link in links},
        inputs=tuple(_port(port) for port in raw.get("inputs") or ()),
        outputs=tuple(_port(port) for port in raw.get("outputs") or ()),
    )


def _node(raw: Raw, ids: Mapping[str, str], inner_ids: Mapping[str, str]) -> Node:
    """``inner_ids``: changes of ids in the subgraph that it is a node of."""
    properties = raw.get("properties") or {}
    if inner_ids and isinstance(properties.get("proxyWidgets"), list):
        renamed = [
            [inner_ids.get(str(entry[0]), entry[0]), *entry[1:]] for entry in properties["proxyWidgets"]
        ]
        raw = {**raw, "properties": {**properties, "proxyWidgets": renamed}}
    given = str(raw["id"])
    return Node(
        id=ids.get(given, given),
        type=str(raw["type"]),
        mode=raw.get("mode") or 0,
        inputs=saved_slots(raw),
        outputs=tuple(str(output["type"]) for output in raw.get("outputs") or ()),
        saved=raw,
    )


def saved_slots(raw: Raw) -> tuple[Slot, ...]:
    return tuple(
        Slot(slot["name"], str(slot["type"]), slot.get("link"), (slot.get("widget") or {}).get("name", ""))
        for slot in raw.get("inputs") or ()
    )


def _link(raw: Raw | Sequence[Any], ids: Mapping[str, str]) -> Link:
    if isinstance(raw, Mapping):
        raw = [raw[key] for key in ("id", "origin_id", "origin_slot", "target_id", "target_slot")]
    origin, target = str(raw[1]), str(raw[3])
    return Link(raw[0], ids.get(origin, origin), int(raw[2]), ids.get(target, target), int(raw[4]))


def _port(raw: Raw) -> Port:
    return Port(raw["name"], str(raw["type"]), tuple(raw.get("linkIds") or ()))
