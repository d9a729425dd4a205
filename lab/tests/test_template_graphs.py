"""Workflows of the frontend become prompts: each rule on a graph of a few nodes. With --browser the
page itself has to give the same, so that what is expected here is what the frontend does.
"""

from __future__ import annotations

import pytest
from pipemesh.lab.templates.dynamic_prompt import first_choice
from pipemesh.lab.templates.files import samples_transformer
from pipemesh.lab.templates.graph import api_prompt
from pipemesh.lab.templates.workflow import GraphError

IMAGE_LIST = {"input": {"required": {"image": ["IMAGE", {}]}}, "prefix": "image", "min": 1, "max": 3}
LETTERS = {
    "input": {"required": {"value": ["FLOAT,INT", {"forceInput": True}]}},
    "names": ["a", "b", "c"],
    "min": 1,
}
FORMATS = [
    {"key": "png", "inputs": {"required": {"depth": ["INT", {"default": 8}]}}},
    {
        "key": "video",
        "inputs": {
            "required": {
                "codec": [
                    "COMFY_DYNAMICCOMBO_V3",
                    {
                        "options": [
                            {"key": "h264", "inputs": {"required": {"crf": ["INT", {"default": 23}]}}},
                            {"key": "none", "inputs": {}},
                        ]
                    },
                ],
                "audio": ["AUDIO", {}],
            }
        },
    },
]


def declared(outputs=(), optional=None, **required):
    return {"input": {"required": required, "optional": optional or {}}, "output": list(outputs)}


INFO = {
    "Loader": declared(["MODEL", "CLIP"], file=[["first", "second"], {}]),
    "Text": declared(["CONDITIONING"], text=["STRING", {"dynamicPrompts": True}], clip=["CLIP", {}]),
    "Sampler": declared(
        ["LATENT"],
        model=["MODEL", {}],
        positive=["CONDITIONING", {}],
        seed=["INT", {"default": 3, "control_after_generate": True}],
        steps=["INT", {"default": 20}],
        name=["COMBO", {"options": ["euler", "heun"]}],
    ),
    "Patch": declared(["MODEL"], clip=["CLIP", {}], model=["MODEL", {}], amount=["FLOAT", {"default": 1.5}]),
    "Noise": declared(
        ["NOISE"],
        seed=["INT", {"control_after_generate": True}],
        forced=["INT", {"forceInput": True}],
        last=["STRING", {}],
    ),
    "Seed": declared(["NOISE"], noise_seed=["INT", {}], last=["STRING", {}]),
    "Picture": declared(
        ["IMAGE"],
        {"scale": ["FLOAT", {"default": 2.0}]},
        image=["COMBO", {"options": ["x.png"], "image_upload": True}],
    ),
    "LoadAudio": {
        **declared(["AUDIO"], audio=["COMBO", {"options": ["a.wav"], "audio_upload": True}]),
        "name": "LoadAudio",
    },
    "Record": declared(["AUDIO"], audio=["AUDIO_RECORD", {}]),
    "Crop": declared(["IMAGE"], box=["BOUNDING_BOX", {}], after=["STRING", {"default": "z"}]),
    "Compare": declared(
        [], image=["IMAGE", {}], view=["IMAGECOMPARE", {}], after=["STRING", {"default": "z"}]
    ),
    "Batch": declared(["IMAGE"], images=["COMFY_AUTOGROW_V3", {"template": IMAGE_LIST}]),
    "Math": declared(
        ["FLOAT", "INT"],
        text=["STRING", {"default": "a"}],
        values=["COMFY_AUTOGROW_V3", {"template": LETTERS}],
    ),
    "Switch": declared(
        ["COMFY_MATCHTYPE_V3"],
        switch=["BOOLEAN", {}],
        on_false=["COMFY_MATCHTYPE_V3", {"template": {"template_id": "t", "allowed_types": "*"}}],
        on_true=["COMFY_MATCHTYPE_V3", {"template": {"template_id": "t", "allowed_types": "*"}}],
    ),
    "Save": declared(
        [],
        format=["COMFY_DYNAMICCOMBO_V3", {"options": FORMATS}],
        filename_prefix=["STRING", {"default": "out"}],
    ),
    "CustomCombo": declared(["STRING", "INT"], choice=["COMBO", {"options": []}]),
    "Lists": declared([], many=["COMBO", {"options": ["p", "q"], "multi_select": {}}], color=["COLOR", {}]),
    "Decode": declared(["IMAGE"], samples=["LATENT", {}]),
    "Decode3D": declared(["VOXEL"], samples=["LATENT", {}]),
    "Number": declared(["INT"], value=["INT", {}]),
}


PLACE = {"pos": [0, 0], "size": [200, 100], "flags": {}, "order": 0}
OF_COMFYUI = ("LoadAudio", "CustomCombo")


def node(id, type, values=(), *, mode=0, inputs=(), outputs=None, **properties):
    """``inputs``: names, or (name, type, name of its widget)."""
    declared_outputs = (
        INFO[type]["output"] if type in INFO else ["*"] if type in ("Reroute", "PrimitiveNode") else []
    )
    return {
        "id": id,
        "type": type,
        "mode": mode,
        "inputs": [slot(one) for one in inputs],
        "outputs": [
            {"name": "", "type": kind, "links": []}
            for kind in (declared_outputs if outputs is None else outputs)
        ],
        "widgets_values": values if isinstance(values, dict) else list(values),
        "properties": properties,
        **PLACE,
    }


def slot(one):
    name, kind, widget = one if isinstance(one, tuple) else (one, "*", "")
    return {"name": name, "type": kind, "link": None, **({"widget": {"name": widget}} if widget else {})}


def linked(nodes, links):
    """Gives each of the links (origin, output, target, input) an id, and the nodes theirs."""
    known = {one["id"]: one for one in nodes}
    made = []
    for id, (origin, output, target, name) in enumerate(links, 1):
        if target in known:
            inputs = known[target]["inputs"]
            if all(one["name"] != name for one in inputs):
                inputs.append(slot(name))
            index = next(index for index, one in enumerate(inputs) if one["name"] == name)
            inputs[index]["link"] = id
        else:
            index = name
        if origin in known:
            known[origin]["outputs"][output]["links"].append(id)
        made.append([id, origin, output, target, index, "*"])
    return made


def workflow(*nodes, links=(), subgraphs=(), **more):
    return {
        "nodes": list(nodes),
        "links": linked(nodes, links),
        "definitions": {"subgraphs": list(subgraphs)},
        "version": 0.4,
        "last_link_id": 99,
        **more,
    }


def subgraph(id, *nodes, links=(), inputs=(), outputs=()):
    """Links from -10 come from an input, links to -20 go to an output, by index."""
    made = linked(nodes, links)

    def port(index, name, kind, border, column):
        return {
            "id": f"{border} {index}",
            "name": name,
            "type": kind,
            "linkIds": [link[0] for link in made if link[column] == border and link[column + 1] == index],
        }

    return {
        "id": id,
        "name": id,
        "version": 1,
        "inputNode": {"id": -10, "bounding": [0, 0, 9, 9]},
        "outputNode": {"id": -20, "bounding": [0, 0, 9, 9]},
        "nodes": list(nodes),
        "links": [
            dict(
                zip(("id", "origin_id", "origin_slot", "target_id", "target_slot", "type"), link, strict=True)
            )
            for link in made
        ],
        "inputs": [port(index, *one, -10, 1) for index, one in enumerate(inputs)],
        "outputs": [port(index, *one, -20, 3) for index, one in enumerate(outputs)],
    }


@pytest.fixture
def ours():
    return lambda workflow: api_prompt(workflow, INFO)


@pytest.fixture(params=["ours", pytest.param("the page", marks=pytest.mark.browser)])
def convert(request, ours):
    """A workflow's prompt, by our conversion or by ComfyUI's page."""
    if request.param == "ours":
        return ours
    page = request.getfixturevalue("page")
    page.register({name: info for name, info in INFO.items() if name not in OF_COMFYUI})
    return lambda workflow: {
        id: {key: node[key] for key in ("class_type", "inputs")} for id, node in page.prompt(workflow).items()
    }


def inputs_of(convert, *nodes, id="1", **more):
    return convert(workflow(*nodes, **more))[id]["inputs"]


LOADER = ("Loader", ["second"])


def with_sampler(convert, *nodes, links):
    """The sampler's inputs in the prompt; it is node 9."""
    return inputs_of(
        convert, node(1, *LOADER), *nodes, node(9, "Sampler", [5, "fixed", 4, "heun"]), links=links, id="9"
    )


# -- values


def test_values_go_to_widgets_in_their_order_and_control_widgets_take_one_too(convert):
    assert inputs_of(convert, node(1, "Sampler", [5, "fixed", 4, "heun"])) == {
        "seed": 5,
        "steps": 4,
        "name": "heun",
    }


def test_what_a_file_does_not_say_is_the_default(convert):
    assert inputs_of(convert, node(1, "Sampler", [5])) == {"seed": 5, "steps": 20, "name": "euler"}


def test_a_combo_without_a_value_has_its_first(convert):
    assert inputs_of(convert, node(1, "Loader", [None])) == {"file": "first"}


def test_values_can_be_saved_by_name(ours):
    """As the scripts of some packs do; the page alone knows nothing of it."""
    assert inputs_of(ours, node(1, "Sampler", {"steps": 7, "unknown": 1})) == {
        "seed": 3,
        "steps": 7,
        "name": "euler",
    }


@pytest.mark.parametrize(
    "values", [[5, "fixed", "x"], [5, "fixed", 77, "x"]], ids=["today", "with a place for the forced input"]
)
def test_a_forced_input_has_no_widget_but_had_a_place_in_old_files(convert, values):
    assert inputs_of(convert, node(1, "Noise", values)) == {"seed": 5, "last": "x"}


def test_a_seed_has_a_control_by_its_name(convert):
    assert inputs_of(convert, node(1, "Seed", [5, "fixed", "x"])) == {"noise_seed": 5, "last": "x"}


def test_buttons_and_players_are_not_in_the_prompt(convert):
    assert inputs_of(convert, node(1, "Picture", ["x.png", "image", 3.0])) == {"image": "x.png", "scale": 3.0}
    assert inputs_of(convert, node(1, "LoadAudio", ["a.wav", ""])) == {"audio": "a.wav"}
    assert inputs_of(convert, node(1, "Record", ["old", ""])) == {"audio": ""}


def test_a_box_takes_five_places_and_a_comparison_none(convert):
    box = {"x": 1, "y": 2, "width": 3, "height": 4}
    assert inputs_of(convert, node(1, "Crop", [box, 1, 2, 3, 4, "end"])) == {"box": box, "after": "end"}
    assert inputs_of(convert, node(1, "Compare", ["end"])) == {
        "view": {"__value__": ["", ""]},
        "after": "end",
    }


def test_a_list_is_no_link(convert):
    assert inputs_of(convert, node(1, "Lists", [["p"]])) == {"many": {"__value__": ["p"]}, "color": "#000000"}


def test_the_chosen_option_brings_its_own_inputs(convert):
    assert inputs_of(convert, node(1, "Save", ["png", 16, "name"])) == {
        "format": "png",
        "format.depth": 16,
        "filename_prefix": "name",
    }
    sound = node(2, "Record", ["", ""])
    found = inputs_of(
        convert, node(1, "Save", ["video", "h264", 18, "name"]), sound, links=[(2, 0, 1, "format.audio")]
    )
    assert found == {
        "format": "video",
        "format.codec": "h264",
        "format.codec.crf": 18,
        "format.audio": ["2", 0],
        "filename_prefix": "name",
    }


def test_inputs_of_an_option_that_is_not_chosen_are_gone_links_too(convert):
    found = inputs_of(
        convert, node(1, "Save", ["png", 16, "name"]), node(2, "Record"), links=[(2, 0, 1, "format.audio")]
    )
    assert found == {"format": "png", "format.depth": 16, "filename_prefix": "name"}


def test_groups_grow_with_their_links(convert):
    pictures = [node(id, "Picture") for id in (2, 3, 4)]
    links = [(2, 0, 1, "images.image0"), (3, 0, 1, "images.image1"), (4, 0, 1, "images.image2")]
    assert inputs_of(convert, node(1, "Batch"), *pictures, links=links) == {
        f"images.image{index}": [str(index + 2), 0] for index in range(3)
    }
    found = inputs_of(
        convert, node(1, "Math", ["a+b"]), node(2, "Number", [4]), links=[(2, 0, 1, "values.b")]
    )
    assert found == {"text": "a+b", "values.b": ["2", 0]}


def test_the_options_that_a_user_wrote_are_inputs(convert):
    found = inputs_of(convert, node(1, "CustomCombo", ["two", 0, "one", "two", ""]))
    assert found == {"choice": "two", "index": 1, "option1": "one", "option2": "two", "option3": ""}


def test_a_choice_of_nothing_is_left_out(convert):
    assert inputs_of(convert, node(1, "CustomCombo")) == {"index": -1, "option1": ""}


def test_an_input_that_the_class_has_no_more_is_kept_if_it_is_linked_and_no_widget(convert):
    old = node(1, "Number", [1], inputs=["gone", ("value_old", "INT", "value_old")])
    assert inputs_of(convert, old, node(2, "Number"), links=[(2, 0, 1, "gone"), (2, 0, 1, "value_old")]) == {
        "value": 1,
        "gone": ["2", 0],
    }


@pytest.mark.parametrize(
    ("text", "prompt"),
    [
        ("a {red|blue} ball", "a red ball"),
        ("{a {b|c}|d}", "a b"),
        ("{|x}end", "end"),
        ("cat // a note\ndog /* and\nmore */.", "cat \ndog ."),
        (r"\{not\|this\}", "{not|this}"),
        ("{open|never", "open"),
    ],
)
def test_of_choices_the_first_is_taken_and_comments_go(convert, text, prompt):
    assert first_choice(text) == prompt
    assert inputs_of(convert, node(1, "Text", [text])) == {"text": prompt}


# -- links


def test_a_link_wins_over_the_widget(convert):
    assert with_sampler(convert, node(2, "Number"), links=[(2, 0, 9, "steps")])["steps"] == ["2", 0]


def test_a_switch_is_a_node_like_any_other(convert):
    found = inputs_of(
        convert,
        node(1, "Switch", [True]),
        node(2, *LOADER),
        node(3, *LOADER),
        links=[(2, 0, 1, "on_false"), (3, 0, 1, "on_true")],
    )
    assert found == {"switch": True, "on_false": ["2", 0], "on_true": ["3", 0]}


def test_reroutes_notes_and_primitives_are_not_in_the_prompt(convert):
    nodes = (
        node(2, "Reroute", inputs=[("", "*", "")]),
        node(3, "PrimitiveNode", [33, "fixed"]),
        node(4, "Note"),
        node(5, "MarkdownNote"),
    )
    widget = node(9, "Sampler", [5, "fixed", 4, "heun"], inputs=["model", ("steps", "INT", "steps")])
    links = [(1, 0, 2, ""), (2, 0, 9, "model"), (3, 0, 9, "steps")]
    prompt = convert(workflow(node(1, *LOADER), *nodes, widget, links=links))
    assert prompt.keys() == {"1", "9"}
    assert prompt["9"]["inputs"] == {"model": ["1", 0], "seed": 5, "steps": 33, "name": "heun"}


def test_a_muted_node_gives_nothing(convert):
    assert with_sampler(
        convert, node(2, "Patch", mode=2), links=[(1, 0, 2, "model"), (2, 0, 9, "model")]
    ) == {
        "seed": 5,
        "steps": 4,
        "name": "heun",
    }


@pytest.mark.parametrize("between", ["Patch", "Reroute"])
def test_a_bypassed_node_passes_on_the_input_of_its_outputs_type(convert, between):
    nodes = (
        node(2, "Patch", mode=4),
        node(
            3,
            between,
            mode=0 if between == "Reroute" else 4,
            inputs=[("", "*", "")] if between == "Reroute" else (),
        ),
    )
    name = "" if between == "Reroute" else "model"
    assert with_sampler(convert, *nodes, links=[(1, 0, 2, "model"), (2, 0, 3, name), (3, 0, 9, "model")])[
        "model"
    ] == ["1", 0]


def test_a_bypassed_node_without_such_an_input_gives_nothing(convert):
    assert "positive" not in with_sampler(
        convert, node(2, "Text", mode=4), links=[(1, 1, 2, "clip"), (2, 0, 9, "positive")]
    )


def foreign(mode=0):
    return node(2, "Foreign", inputs=[("model", "MODEL", "")], outputs=["MODEL"], mode=mode)


def test_a_class_that_is_not_there_is_named(ours):
    with pytest.raises(GraphError, match=r"Node 2 is a Foreign, which this ComfyUI does not have: install"):
        with_sampler(ours, foreign(), links=[(1, 0, 2, "model"), (2, 0, 9, "model")])


def test_a_class_that_is_not_there_may_be_bypassed(convert):
    assert with_sampler(convert, foreign(mode=4), links=[(1, 0, 2, "model"), (2, 0, 9, "model")])[
        "model"
    ] == ["1", 0]


def test_what_cannot_become_a_prompt_is_said(ours):
    with pytest.raises(GraphError, match="no list of nodes"):
        ours({"1": {"class_type": "Loader"}})
    broken = workflow(node(1, *LOADER), node(9, "Sampler"), links=[(1, 0, 9, "model")])
    with pytest.raises(GraphError, match="An input of node 9 has link 1, which"):
        ours({**broken, "links": []})
    with pytest.raises(GraphError, match="A link leads from node 1, which"):
        ours({**broken, "nodes": broken["nodes"][1:]})
    circle = [node(id, "Reroute", inputs=[("", "*", "")]) for id in (1, 2)]
    with pytest.raises(GraphError, match="go in a circle"):
        ours(workflow(*circle, node(9, "Sampler"), links=[(1, 0, 2, ""), (2, 0, 1, ""), (2, 0, 9, "model")]))
    with pytest.raises(GraphError, match="is filled in by the browser"):
        inputs_of(ours, node(1, "Save", ["png", 8, "%date:yyyy%/x"]))


# -- subgraphs


def sampling(*, host_ids=(7,), promoted=("steps",), mode=0, **host):
    """A loader, and nodes of a subgraph that samples with it."""
    inner = subgraph(
        "sub",
        node(
            20,
            "Sampler",
            [5, "fixed", 4, "heun"],
            inputs=["model", *((name, "INT", name) for name in promoted)],
        ),
        links=[
            (-10, 0, 20, "model"),
            *((-10, index, 20, name) for index, name in enumerate(promoted, 1)),
            (20, 0, -20, 0),
        ],
        inputs=[("model", "MODEL"), *((name, "INT") for name in promoted)],
        outputs=[("LATENT", "LATENT")],
    )
    hosts = [
        node(
            id,
            "sub",
            host.get("values", ()),
            mode=mode,
            inputs=["model"],
            outputs=["LATENT"],
            **host.get("properties", {}),
        )
        for id in host_ids
    ]
    return workflow(
        node(1, *LOADER),
        *hosts,
        *host.get("more", ()),
        links=[*((1, 0, id, "model") for id in host_ids), *host.get("links", ())],
        subgraphs=[inner],
    )


def test_a_subgraph_is_laid_out_flat_and_its_promoted_value_holds(convert):
    prompt = convert(sampling(values=[11], more=[node(8, "Decode")], links=[(7, 0, 8, "samples")]))
    assert prompt["7:20"] == {
        "class_type": "Sampler",
        "inputs": {"model": ["1", 0], "seed": 5, "steps": 11, "name": "heun"},
    }
    assert prompt["8"]["inputs"] == {"samples": ["7:20", 0]}
    assert prompt.keys() == {"1", "7:20", "8"}


def test_two_nodes_of_a_subgraph_have_their_own_values(convert):
    workflow = sampling(host_ids=(7, 8), values=[11])
    workflow["nodes"][2]["widgets_values"] = []
    prompt = convert(workflow)
    assert (prompt["7:20"]["inputs"]["steps"], prompt["8:20"]["inputs"]["steps"]) == (11, 4)


def test_a_link_to_a_subgraph_wins_over_its_promoted_value(convert):
    prompt = convert(sampling(values=[11], more=[node(3, "Number")], links=[(3, 0, 7, "steps")]))
    assert prompt["7:20"]["inputs"]["steps"] == ["3", 0]


@pytest.mark.parametrize("mode", [2, 4])
def test_a_subgraph_that_is_off_is_left_out(convert, mode):
    assert convert(sampling(mode=mode)).keys() == {"1"}


def test_a_nested_subgraph_has_both_ids_and_passes_values_on(convert):
    inner = sampling()["definitions"]["subgraphs"][0]
    outer = subgraph(
        "outer",
        node(30, "sub", [11], inputs=["model", ("steps", "INT", "steps")], outputs=["LATENT"]),
        links=[(-10, 0, 30, "model"), (-10, 1, 30, "steps"), (30, 0, -20, 0)],
        inputs=[("model", "MODEL"), ("count", "INT")],
        outputs=[("LATENT", "LATENT")],
    )
    nodes = (node(1, *LOADER), node(7, "outer", [12], outputs=["LATENT"]), node(8, "Decode"))
    prompt = convert(
        workflow(*nodes, links=[(1, 0, 7, "model"), (7, 0, 8, "samples")], subgraphs=[outer, inner])
    )
    assert prompt["7:30:20"]["inputs"] == {"model": ["1", 0], "seed": 5, "steps": 12, "name": "heun"}
    assert prompt["8"]["inputs"] == {"samples": ["7:30:20", 0]}


def test_an_id_that_two_nodes_have_is_counted_on(convert):
    made = sampling()
    made["definitions"]["subgraphs"][0]["nodes"][0]["id"] = 1
    for link in made["definitions"]["subgraphs"][0]["links"]:
        link.update({key: 1 for key in ("origin_id", "target_id") if link[key] == 20})
    assert convert({**made, "last_node_id": 40}).keys() == {"1", "7:41"}


def test_a_subgraph_in_itself_is_refused(ours):
    own = subgraph("sub", node(20, "sub"))
    with pytest.raises(GraphError, match="stands in"):
        ours(workflow(node(1, "sub"), subgraphs=[own]))


# -- old files: proxyWidgets


def test_old_promoted_values_become_inputs(convert):
    properties = {
        "proxyWidgets": [["20", "seed"], ["20", "name"], ["20", "control_after_generate"], ["99", "gone"]]
    }
    prompt = convert(sampling(values=[77, "euler", "fixed"], properties=properties, promoted=()))
    assert prompt["7:20"]["inputs"] == {"model": ["1", 0], "seed": 77, "steps": 4, "name": "euler"}


def test_an_old_value_without_a_place_is_that_of_the_node_inside(convert):
    prompt = convert(sampling(properties={"proxyWidgets": [["20", "seed"]]}, promoted=()))
    assert prompt["7:20"]["inputs"]["seed"] == 5


def test_an_old_value_of_an_input_or_of_the_border_goes_there(convert):
    for entry in (["20", "steps"], ["-1", "steps"], ["20", "20: steps"]):
        prompt = convert(sampling(values=["x", 31], properties={"proxyWidgets": [["20", "name"], entry]}))
        assert (prompt["7:20"]["inputs"]["steps"], prompt["7:20"]["inputs"]["name"]) == (31, "x")


def test_a_value_that_an_earlier_loading_could_not_place_holds(convert):
    entry = {
        "originalEntry": ["-1", "steps"],
        "reason": "missingSourceNode",
        "hostValue": 31,
        "attemptedAtVersion": 1,
    }
    prompt = convert(sampling(values=[11], properties={"proxyWidgetErrorQuarantine": [entry]}))
    assert prompt["7:20"]["inputs"]["steps"] == 31


def test_an_old_promoted_widget_cuts_the_link_that_its_input_had_inside(convert):
    made = sampling(properties={"proxyWidgets": [["20", "seed"]]}, promoted=())
    inner = made["definitions"]["subgraphs"][0]
    inner["nodes"].append(node(21, "Number", [9]))
    inner["nodes"][0]["inputs"].append({**slot(("seed", "INT", "seed")), "link": 50})
    inner["links"].append(
        {"id": 50, "origin_id": 21, "origin_slot": 0, "target_id": 20, "target_slot": 1, "type": "INT"}
    )
    assert convert(made)["7:20"]["inputs"]["seed"] == 5


@pytest.mark.parametrize(
    ("index", "seed"), [(2, 88), (1, 9)], ids=["as now", "as before the class had more inputs"]
)
def test_an_old_primitive_hands_its_links_to_an_input_if_they_lead_where_the_file_says(convert, index, seed):
    made = sampling(values=[88], properties={"proxyWidgets": [["21", "value"]]}, promoted=())
    inner = made["definitions"]["subgraphs"][0]
    primitive = node(21, "PrimitiveNode", [9])
    primitive["outputs"][0].update(type="INT", links=[50])
    inner["nodes"].append(primitive)
    inner["nodes"][0]["inputs"].append({**slot(("seed", "INT", "seed")), "link": 50})
    inner["links"].append(
        {"id": 50, "origin_id": 21, "origin_slot": 0, "target_id": 20, "target_slot": index, "type": "INT"}
    )
    assert convert(made)["7:20"]["inputs"]["seed"] == seed


# -- which templates are meant


def chain(*, file="dit.safetensors", decode="Decode", mode=0):
    nodes = (
        node(1, "Loader", [file]),
        node(2, "Sampler", mode=mode, inputs=[("model", "MODEL", "")]),
        node(3, decode, inputs=[("samples", "LATENT", "")]),
    )
    return workflow(*nodes, links=[(1, 0, 2, "model"), (2, 0, 3, "samples")])


def test_a_template_samples_a_transformer_unless_it_is_off_a_unet_or_no_image():
    assert samples_transformer(chain())
    assert not samples_transformer(chain(mode=4))
    assert not samples_transformer(chain(file="folder/sd_xl_base.safetensors"))
    assert not samples_transformer(chain(decode="Decode3D"))
    assert not samples_transformer(workflow(node(1, *LOADER)))
