"""How tests wait for a page: whatever the order in which Chromium tells of it and answers."""

import asyncio
import json
from itertools import permutations

import pytest
from pipemesh.tests.chromium import Page

NAVIGATED = {"method": "Page.frameNavigated", "params": {"frame": {"url": "http://127.0.0.1:8188/"}}}
WITHIN = {"method": "Page.frameNavigated", "params": {"frame": {"url": "about:srcdoc", "parentId": "1"}}}
LOADED = {"method": "Page.loadEventFired", "params": {"timestamp": 1}}
ANSWER = {"id": 1, "result": {"frameId": "1"}}


class Socket:
    """Chromium's side: what it says, in this order, and then nothing more."""

    def __init__(self, *messages):
        self.said = list(messages)

    async def send_json(self, asked):
        assert asked["id"] == 1

    async def receive_str(self):
        return json.dumps(self.said.pop(0))


@pytest.fixture
def page():
    made = Page("http://127.0.0.1:8188")
    yield made
    made.forget()


@pytest.fixture
def load(page):
    """Loads a page; returns what Chromium has said that was not looked at."""

    def loaded(*messages):
        page._socket = Socket(*messages)
        page._within(10, page._load("Page.navigate"), "loaded")
        return page._socket.said

    return loaded


@pytest.mark.parametrize(
    "order",
    [one for one in permutations([NAVIGATED, LOADED, ANSWER]) if one.index(NAVIGATED) < one.index(LOADED)],
)
def test_a_page_has_loaded_once_it_has_come_and_loaded_and_the_answer_is_there(load, order):
    assert load(LOADED, *order, "what comes next") == ["what comes next"], "the first is of the page before"


@pytest.mark.parametrize(
    "said", [[ANSWER, LOADED], [ANSWER, WITHIN, LOADED], [NAVIGATED, LOADED], [LOADED, ANSWER, NAVIGATED]]
)
def test_it_has_not_as_long_as_one_of_them_is_missing(load, said):
    with pytest.raises(IndexError):
        load(*said)


def test_a_page_that_cannot_be_reached_is_an_error(load):
    with pytest.raises(AssertionError, match=r"Page\.navigate: net::ERR_CONNECTION_REFUSED"):
        load(NAVIGATED, LOADED, {"id": 1, "result": {"errorText": "net::ERR_CONNECTION_REFUSED"}})


def test_an_answer_that_does_not_come_is_named(page):
    with pytest.raises(TimeoutError, match="not within 0 s: a picture"):
        page._within(0, asyncio.sleep(60), "a picture")


def test_a_page_that_has_crashed_is_an_error_at_once(load):
    with pytest.raises(RuntimeError, match="the page has crashed"):
        load({"method": "Inspector.targetCrashed", "params": {}})
