"""Every template becomes the prompt that ComfyUI's own page makes of it."""

import json

import pytest
from pipemesh.lab.templates.files import templates
from pipemesh.lab.templates.graph import ONLY_IN_THE_FRONTEND, api_prompt
from pipemesh.lab.templates.workflow import GraphError, read

pytestmark = pytest.mark.browser

DRAWN = ("Painter", "mask")  # the page uploads what is drawn and puts its name there


def test_every_template_becomes_the_prompt_that_the_page_makes_of_it(page, page_server, host):
    object_info = page_server.get("/object_info")
    wrong = {}
    found = templates(host)
    for template in found:
        theirs = page.prompt(template.workflow())
        if differences := list(compare(template.workflow(), theirs, object_info)):
            wrong[template.name] = differences
    assert not wrong, f"{len(wrong)} of {len(found)}: {json.dumps(wrong, indent=1)}"


def compare(workflow, theirs, object_info):
    """Sentences about what is not the same. Of a class that is not installed the page has the
    links, and no name.
    """
    nameless = {id for id, node in theirs.items() if not node.get("class_type")}
    if nameless:
        with pytest.raises(GraphError, match=" is a "):
            api_prompt(workflow, object_info)
        object_info = {**object_info, **{name: {} for name in foreign(workflow, object_info)}}
    ours = api_prompt(workflow, object_info)
    for id in sorted({*ours, *theirs} - nameless):
        mine, other = ours.get(id, {}), theirs.get(id, {})
        if mine.get("class_type") != other.get("class_type"):
            yield f"{id}: {mine.get('class_type')}, the page {other.get('class_type')}"
            continue
        inputs, others = mine["inputs"], other["inputs"]
        for name in sorted({*inputs, *others}):
            if (mine["class_type"], name) != DRAWN and json.dumps(inputs.get(name, "absent")) != json.dumps(
                others.get(name, "absent")
            ):
                yield (
                    f"{id} {mine['class_type']} {name}: {inputs.get(name, 'absent')!r}, the page"
                    f" {others.get(name, 'absent')!r}"
                )


def foreign(workflow, object_info):
    """The classes that a workflow names and the server does not have."""
    graphs = read(workflow)
    named = {node.type for graph in graphs.values() for node in graph.nodes.values()}
    return named - object_info.keys() - graphs.keys() - {*ONLY_IN_THE_FRONTEND}
