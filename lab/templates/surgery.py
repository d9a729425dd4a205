"""A template's graph as it is tried: what samples is recorded, what nothing sampled depends on is
left out, and PipeMesh Parallelize stands before each sampler. Pure.

``info`` is what ComfyUI says of its nodes (``/object_info``): which inputs and outputs are MODELs.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from functools import partial
from typing import Any

from .cut import HELD_NODE, RECORD_NODE, ROUNDED_NODE, Graph, cut, is_link

Link = tuple[str, int]
POOL, PARALLEL, RECORD, HELD = "pipemesh pool", "pipemesh parallelize", "pipemesh record", "pipemesh held"
EXACT = "?exact"  # behind a model file's name: its weights before they were quantised
MODEL_FILES = {"UNETLoader": "unet_name", "CheckpointLoaderSimple": "ckpt_name"}

Info = Mapping[str, Any]


def declaration(info: Info, class_type: str, name: str) -> tuple[Any, Mapping[str, Any]]:
    """The type of a node's input and what else is said of it; None where it has none of that
    name.
    """
    groups = info.get(class_type, {}).get("input", {})
    found = next((options[name] for options in groups.values() if name in options), (None,))
    return found[0], found[1] if len(found) > 1 else {}


def declared(info: Info, class_type: str, name: str) -> Any:
    return declaration(info, class_type, name)[0]


def least(info: Info, class_type: str, name: str) -> float:
    return declaration(info, class_type, name)[1].get("min", 0)


def takes_number(info: Info, class_type: str, name: str) -> bool:
    """Also for inputs that are shown once another chooses them, whose type stands nowhere plain."""
    kind = declared(info, class_type, name)
    return kind is None or (isinstance(kind, str) and bool({"INT", "FLOAT"} & set(kind.split(","))))


def outputs(info: Info, node: Mapping[str, Any]) -> list[str]:
    """The types of a node's outputs; none of a class that this ComfyUI does not have."""
    return info.get(node.get("class_type", ""), {}).get("output", [])


def links(node: Mapping[str, Any]) -> Iterator[tuple[str, Link]]:
    for name, value in node["inputs"].items():
        if is_link(value):
            yield name, (value[0], value[1])


def sampled_models(graph: Graph, info: Info) -> list[tuple[str, str, Link]]:
    """Every (node, input, link) by which a MODEL reaches what samples it, or makes a guider of it:
    a node that hands the MODEL on only changes it, and a scheduler only asks it for sigmas.
    """
    return [
        (key, name, link)
        for key, node in graph.items()
        if "MODEL" not in (given := outputs(info, node)) and {"LATENT", "GUIDER"} & {*given}
        for name, link in links(node)
        if declared(info, node["class_type"], name) == "MODEL"
    ]


def samplers(graph: Graph, info: Info) -> dict[str, int]:
    """The nodes that give sampled latents, and which output that is."""
    found = {}
    for key, node in graph.items():
        made, given = outputs(info, node), {declared(info, node["class_type"], one) for one, _ in links(node)}
        if "LATENT" in made and "MODEL" not in made and given & {"MODEL", "GUIDER"}:
            found[key] = made.index("LATENT")
    return found


def needed(graph: Graph, ends: list[str]) -> Graph:
    """The nodes that ``ends`` depend on, in the order of the graph."""
    reached: set[str] = set()
    left = list(ends)
    while left:
        key = left.pop()
        if key not in reached and key in graph:
            reached.add(key)
            left += [link[0] for _name, link in links(graph[key])]
    return {key: node for key, node in graph.items() if key in reached}


def made_small(graph: Graph, info: Info) -> Graph:
    """What the samplers need, with small sizes and few steps."""
    return cut(needed(graph, list(samplers(graph, info))), partial(takes_number, info), partial(least, info))


def held(graph: Graph, info: Info) -> Graph:
    """With a node before every conditioning that a MODEL is sampled with, which holds the MODEL's
    class to what nodes put in there. Of several MODELs the one is meant whose input has the
    conditioning's name in its own (``model_negative``), or the first.
    """
    made = {key: {**one, "inputs": dict(one["inputs"])} for key, one in graph.items()}
    models: dict[str, dict[str, Link]] = {}
    for key, name, link in sampled_models(graph, info):
        models.setdefault(key, {})[name] = link
    for key, sampled in models.items():
        for name, link in links(graph[key]):
            if declared(info, graph[key]["class_type"], name) == "CONDITIONING":
                model = next(
                    (one for taken, one in sampled.items() if name in taken), next(iter(sampled.values()))
                )
                between = f"{HELD} {key} {name}"
                made[between] = {
                    "class_type": HELD_NODE,
                    "inputs": {"model": list(model), "conditioning": list(link)},
                }
                made[key]["inputs"][name] = [between, 0]
    return made


def recorded(graph: Graph, info: Info, run: str) -> Graph:
    """With a node behind each sampler that writes its latent into the file ``RUN-NODE``."""
    records = {
        f"{RECORD} {key}": {
            "class_type": RECORD_NODE,
            "inputs": {"samples": [key, output], "name": f"{run}-{file_name(key)}"},
        }
        for key, output in samplers(graph, info).items()
    }
    return {**graph, **records}


def file_name(key: str) -> str:
    return "".join(letter if letter.isalnum() else "_" for letter in key)


def parallelized(graph: Graph, info: Info, pool: Mapping[str, Any], left_out: Mapping[Link, str]) -> Graph:
    """With PipeMesh Parallelize before everything that samples, but for the links ``left_out``."""
    made = _with_before_sampling(
        graph, info, PARALLEL, {"class_type": "PipeMeshParallelize", "inputs": {"pool": [POOL, 0]}}, left_out
    )
    return {**made, POOL: {"class_type": "PipeMeshPool", "inputs": dict(pool)}}


def rounded(graph: Graph, info: Info) -> Graph:
    """With every evaluation of every sampler off by one rounding."""
    return _with_before_sampling(graph, info, "pipemesh rounded", {"class_type": ROUNDED_NODE, "inputs": {}})


def _with_before_sampling(
    graph: Graph, info: Info, name: str, node: dict[str, Any], left_out: Container[Link] = ()
) -> Graph:
    """With a ``node`` from MODEL to MODEL, its ``model`` still to be linked, before everything that
    samples.
    """
    made = {key: {**one, "inputs": dict(one["inputs"])} for key, one in graph.items()}
    for key, taken, link in sampled_models(graph, info):
        if link not in left_out:
            between = key_before(link, name)
            made[between] = {**node, "inputs": {"model": list(link), **node["inputs"]}}
            made[key]["inputs"][taken] = [between, 0]
    return made


def key_before(link: Link, name: str = PARALLEL) -> str:
    return f"{name} {link[0]} {link[1]}"


def model_files(graph: Graph) -> list[str]:
    return [node["inputs"][name] for node in graph.values() if (name := MODEL_FILES.get(node["class_type"]))]


def exact(graph: Graph) -> Graph:
    """The same graph on weights that were never quantised."""
    made = dict(graph)
    for key, node in graph.items():
        if name := MODEL_FILES.get(node["class_type"]):
            made[key] = {**node, "inputs": {**node["inputs"], name: node["inputs"][name] + EXACT}}
    return made
