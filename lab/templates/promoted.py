"""Values that a subgraph's node shows of the nodes inside it: promoted widgets.

Today an input of the subgraph carries such a value, one for each node of the subgraph. Older files
have a list of them, the property proxyWidgets; it is turned into inputs as the frontend
(comfyui-frontend-package@1.47.12) does when it loads the file, links that it cuts included.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from .workflow import INPUTS, Graph, Graphs, Link, Node, Port, Slot, Widget, saved_slots

PRIMITIVE = "PrimitiveNode"
BYPASSED_TO = "proxyBypassedToSubgraphInput"  # property of a primitive whose links an input has taken over
PREFIX = re.compile(r"\s*\d+\s*:\s*(.+)")
ON_THE_BORDER = "-1"  # in an entry of proxyWidgets: the node is the subgraph's border


@dataclass(frozen=True)
class Entry:
    """A promoted widget of an old file: of which node inside, and its value, None for none."""

    node: str
    widget: str
    through: str  # the node inside a nested subgraph that has it; "" where it does not matter
    value: Any


def promoted(graphs: Graphs) -> Graphs:
    """The graphs with every subgraph's node as it stands once the file is loaded: an input for each
    port, and a widget for each promoted one.
    """
    for name in graphs:
        for node in graphs[name].nodes.values():
            if node.type in graphs:
                graphs = _with_node(graphs, name, _settled(graphs, node))
        for node in graphs[name].nodes.values():
            if node.type in graphs:
                graphs = _migrated(graphs, name, node)
    return graphs


def _with_node(graphs: Graphs, name: str, node: Node) -> Graphs:
    return {**graphs, name: graphs[name].with_node(node)}


def _settled(graphs: Graphs, node: Node) -> Node:
    """The node with its subgraph's ports; saved values go to promoted ports in their order."""
    graph = graphs[node.type]
    links = {slot.name: slot.link for slot in saved_slots(node.saved)}
    sources = {port.name: _source_widget(graph, port) for port in graph.inputs}
    inputs = tuple(
        Slot(port.name, port.type, links.get(port.name), port.name if sources[port.name] else "")
        for port in graph.inputs
    )
    widgets = tuple(replace(source, name=name) for name, source in sources.items() if source)
    values = node.saved.get("widgets_values")
    by_name = _quarantined(node)
    given = [*(values if isinstance(values, list) else ())]
    for index, widget in enumerate(widgets):
        if widget.name in by_name:
            widgets = _with_value(widgets, widget.name, by_name[widget.name])
        elif index < len(given):
            widgets = _with_value(widgets, widget.name, given[index])
    return replace(node, inputs=inputs, outputs=tuple(port.type for port in graph.outputs), widgets=widgets)


def _with_value(widgets: tuple[Widget, ...], name: str, value: Any) -> tuple[Widget, ...]:
    def settle(widget: Widget) -> Widget:
        return replace(widget, value=widget.choices[0] if value is None and widget.choices else value)

    return tuple(settle(widget) if widget.name == name else widget for widget in widgets)


def _quarantined(node: Node) -> Mapping[str, Any]:
    """Values of the border that an earlier loading could not place; the first of a name holds."""
    entries = (node.saved.get("properties") or {}).get("proxyWidgetErrorQuarantine") or ()
    return {
        entry["originalEntry"][1]: entry["hostValue"]
        for entry in reversed(entries)
        if entry["originalEntry"][0] == ON_THE_BORDER and entry.get("hostValue") is not None
    }


def _source_widget(graph: Graph, port: Port) -> Widget | None:
    """The widget whose value a port carries: that of the first input it leads to that has one."""
    for link in port.links:
        if (
            (target := graph.target(link))
            and target[1].widget
            and (widget := target[0].widget(target[1].widget))
        ):
            return widget
    return None


def _source(graphs: Graphs, graph: Graph, port: Port) -> tuple[str, str] | None:
    """Which widget of which node a port stands for."""
    for link in port.links:
        if target := graph.target(link):
            node, slot = target
            if node.type in graphs:
                return node.id, slot.name
            if slot.widget and node.widget(slot.widget):
                return node.id, slot.widget
    return None


# -- old files


def _migrated(graphs: Graphs, name: str, host: Node) -> Graphs:
    entries = _entries(graphs, host)
    plans = [_plan(graphs, host, entry, entries) for entry in entries]  # all before anything changes
    by_primitive: dict[str, list[Entry]] = {}
    for entry, plan in zip(entries, plans, strict=True):
        host = graphs[name].nodes[host.id]
        if isinstance(plan, str):
            by_primitive.setdefault(entry.node, []).append(entry)
        elif isinstance(plan, Port):
            graphs = _with_node(graphs, name, _told(host, plan.name, [entry]))
        elif plan is not None:
            graphs, port = _with_port(graphs, host.type, entry.widget, [plan])
            graphs = _with_node(graphs, name, _told(graphs[name].nodes[host.id], port, [entry]))
    for primitive, cohort in by_primitive.items():
        graphs, port = _taken_over(graphs, host.type, primitive, cohort[0].widget)
        graphs = _with_node(graphs, name, _told(graphs[name].nodes[host.id], port, cohort))
    host = graphs[name].nodes[host.id]
    for entry in entries:
        if entry.node == ON_THE_BORDER:
            host = _told(host, entry.widget, [entry])
    return _with_node(graphs, name, host)


def _told(host: Node, port: str, entries: Sequence[Entry]) -> Node:
    """The host with the first value that the entries have for the port."""
    value = next((entry.value for entry in entries if entry.value is not None), None)
    return host if value is None or not host.widget(port) else host.with_value(port, value)


def _entries(graphs: Graphs, host: Node) -> list[Entry]:
    raw = (host.saved.get("properties") or {}).get("proxyWidgets")
    if not isinstance(raw, list) or not all(isinstance(part, str) for entry in raw for part in entry):
        return []
    values = host.saved.get("widgets_values")
    values = values if isinstance(values, list) else []
    entries = []
    for index, (node, widget, *through) in enumerate(raw):
        if not _is_there(graphs, host.type, node, widget):
            while match := PREFIX.fullmatch(widget):
                through, widget = [widget.split(":")[0].strip()], match[1]
        entries.append(
            Entry(node, widget, through[0] if through else "", values[index] if index < len(values) else None)
        )
    return entries


def _is_there(graphs: Graphs, graph: str, node_id: str, widget: str) -> bool:
    """True if the node inside, or the node that it promotes the widget of, has that widget."""
    node = graphs[graph].nodes.get(node_id)
    if node is None:
        return False
    if node.type not in graphs:
        return node.widget(widget) is not None
    port = next((port for port in graphs[node.type].inputs if port.name == widget), None)
    source = _source(graphs, graphs[node.type], port) if port else None
    return source is not None and _is_there(graphs, node.type, *source)


def _plan(
    graphs: Graphs, host: Node, entry: Entry, entries: Sequence[Entry]
) -> Port | tuple[Node, Slot] | str | None:
    """What becomes of an entry: the port that it has already; the input inside that needs one; the
    links of a primitive; or nothing.
    """
    graph = graphs[host.type]
    for port in graph.inputs:
        if _source(graphs, graph, port) == (entry.node, entry.widget):
            return port
    node = graph.nodes.get(entry.node)
    if node is None:
        return None
    if node.type == PRIMITIVE:
        taken = (node.saved.get("properties") or {}).get(BYPASSED_TO)
        if port := next((port for port in graph.inputs if port.name == taken), None):
            return port
        return PRIMITIVE if _links_of(graph, node) else None
    slot = _slot_of(graphs, node, entry)
    return None if slot is None or entry.widget.startswith("$$") else (node, slot)


def _slot_of(graphs: Graphs, node: Node, entry: Entry) -> Slot | None:
    if node.type in graphs:
        for slot, port in zip(node.inputs, graphs[node.type].inputs, strict=True):
            source = _source(graphs, graphs[node.type], port)
            stands_for = (
                source == (entry.through, entry.widget)
                if entry.through
                else entry.widget in (slot.name, (source or ("", ""))[1])
            )
            if stands_for and slot.widget:
                return slot
    return next(
        (slot for slot in node.inputs if slot.widget == entry.widget and node.widget(entry.widget)), None
    )


def _links_of(graph: Graph, node: Node) -> list[Link]:
    """The links of its first output, in their saved order."""
    output = next(iter(node.saved.get("outputs") or ()), {})
    return [graph.links[link] for link in output.get("links") or () if link in graph.links]


def _taken_over(graphs: Graphs, name: str, primitive: str, widget: str) -> tuple[Graphs, str]:
    """A new input of the subgraph has the primitive's links; the primitive keeps its name. Nothing
    changes, and the name is "", where a link leads to an input of another type, counted as saved.
    """
    graph = graphs[name]
    node = graph.nodes[primitive]
    kind = node.outputs[0]
    targets = []
    for link in _links_of(graph, node):
        target = graph.nodes.get(link.target)
        slot = target.inputs[link.target_slot] if target and link.target_slot < len(target.inputs) else None
        if target is None or slot is None or (slot.type != kind and "*" not in (slot.type, kind)):
            return graphs, ""
        targets.append((target, slot))
    title = node.saved.get("title") or "Primitive"
    graphs, port = _with_port(graphs, name, widget if title == PRIMITIVE else title, targets)
    properties = {**(node.saved.get("properties") or {}), BYPASSED_TO: port}
    return _with_node(graphs, name, replace(node, saved={**node.saved, "properties": properties})), port


def _with_port(
    graphs: Graphs, name: str, wanted: str, targets: Sequence[tuple[Node, Slot]]
) -> tuple[Graphs, str]:
    """Gives a subgraph one more input, linked to those targets instead of what they were linked to,
    and every node of it the widget.
    """
    graph = graphs[name]
    taken = {port.name for port in graph.inputs}
    port, number = wanted, 0
    while port in taken:
        number += 1
        port = f"{wanted}_{number}"
    cut = {slot.link for _, slot in targets}
    first = max(graph.links, default=0) + 1
    links = {link.id: link for link in graph.links.values() if link.id not in cut}
    nodes = dict(graph.nodes)
    for link, (target, slot) in enumerate(targets, first):
        node = nodes[target.id]
        links[link] = Link(link, INPUTS, len(graph.inputs), node.id, node.inputs.index(slot))
        nodes[node.id] = replace(
            node, inputs=tuple(replace(old, link=link) if old == slot else old for old in node.inputs)
        )
    kept = tuple(
        replace(old, links=tuple(link for link in old.links if link not in cut)) for old in graph.inputs
    )
    added = Port(port, targets[0][1].type, tuple(range(first, first + len(targets))))
    graph = replace(graph, nodes=nodes, links=links, inputs=(*kept, added))
    graphs = {**graphs, name: graph}
    widgets = {one.name: widget for one in graph.inputs if (widget := _source_widget(graph, one))}
    return {other: _with_ports(graphs[other], name, graph, widgets) for other in graphs}, port


def _with_ports(graph: Graph, name: str, definition: Graph, sources: Mapping[str, Widget]) -> Graph:
    """The graph with that subgraph's nodes brought to its ports; what they have keeps its value."""
    nodes = dict(graph.nodes)
    for node in graph.nodes.values():
        if node.type == name:
            links = {slot.name: slot.link for slot in node.inputs}
            inputs = tuple(
                Slot(port.name, port.type, links.get(port.name), port.name if port.name in sources else "")
                for port in definition.inputs
            )
            widgets = tuple(
                node.widget(port) or replace(source, name=port) for port, source in sources.items()
            )
            nodes[node.id] = replace(node, inputs=inputs, widgets=widgets)
    return replace(graph, nodes=nodes)
