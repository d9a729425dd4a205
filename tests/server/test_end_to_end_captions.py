"""Captions drawn by the trained model on a running server, by ComfyUI's own loaders."""

import numpy
import pytest
from pipemesh.lab.comfyui.api import node
from pipemesh.lab.demo_nodes.captions import COLOURS, PLACES, parse_caption
from pipemesh.lab.pictures import showcase
from pipemesh.lab.pictures.scenes import CENTRES, RGB, SIDE

CAPTION, STEPS = showcase.CAPTIONS[0], 8


@pytest.fixture(scope="module", autouse=True)
def trained(server):
    showcase.copy_files(server.models, SIDE)


def test_a_caption_is_drawn_as_it_says_and_one_of_a_linked_node_too(server):
    stock = showcase.draw(server, CAPTION, None, SIDE, STEPS)
    assert stock.picture.size == (SIDE, SIDE) and len(stock.steps_s) == STEPS - 1
    shown = numpy.asarray(stock.picture, dtype=float)
    for thing in parse_caption(CAPTION).things:
        x, y = CENTRES[PLACES[thing.place]]
        seen = shown[y - 4 : y + 4, x - 4 : x + 4].mean((0, 1))
        assert min(RGB, key=lambda name: numpy.linalg.norm(seen - RGB[name])) == COLOURS[thing.colour]
    assert server.run(with_caption(CAPTION, is_linked=True)).error is None


def with_caption(caption, is_linked):
    nodes = showcase.graph(caption, None, SIDE, STEPS)
    if is_linked:
        nodes["text"] = node("PrimitiveString", value=caption)
        nodes["positive"]["inputs"]["caption"] = ["text", 0]
    return nodes


@pytest.mark.parametrize("is_linked", [False, True], ids=["typed", "linked"])
def test_a_caption_with_an_unknown_word_is_refused_by_it(server, is_linked):
    error = server.run(with_caption("a pink ring at the centre on a dark ground", is_linked)).error
    assert error is not None and '"pink" is no colour of the picture set: choose red, green' in str(error)
