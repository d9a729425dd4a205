"""What a sampler's node shows goes to the browser that has queued the prompt, and to no other."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
from comfy_execution.progress import get_progress_state, reset_progress_state
from pipemesh.nodes import extension, screen
from pipemesh.nodes.notices import Notice
from pipemesh.nodes.screen import NodeScreen
from pipemesh.nodes.waiting import Waited

WAITED = Waited(node="3", prompt="a prompt", text="loading", done=1, total=2, seconds=1.0)
NOTICE = Notice(at=0.0, text="On one GPU", node="3", prompt="a prompt")


class Server:
    def __init__(self, client):
        self.client_id, self.sent = client, []

    def send_progress_text(self, text, node, sid=None):
        self.sent.append((text, sid))

    def send_sync(self, event, data, sid=None):
        self.sent.append((event, sid))


@pytest.fixture
def server(monkeypatch):
    def made(client):
        found = Server(client)
        monkeypatch.setattr(screen.PromptServer, "instance", found, raising=False)
        return found

    return made


def test_a_notice_of_one_gpu_is_the_last_line_on_its_node_though_a_wait_was_shown_there(server):
    shown = server("a browser").sent
    waiting = SimpleNamespace(end=lambda: shown.append(("of the wait", "")))
    for one_gpu in (True, False):
        extension.show_notice(waiting, replace(NOTICE, one_gpu=one_gpu))
    told = ["PipeMesh: On one GPU", "pipemesh.notice"]
    assert [text for text, _ in shown] == ["of the wait", *told, *told], "others wait on"


def show_all():
    shown = NodeScreen()
    shown.show(WAITED)
    shown.end("3", "loaded")
    extension.show_notice(SimpleNamespace(end=lambda: None), NOTICE)


def test_the_browser_that_has_queued_a_prompt_is_shown_it_alone(server):
    sent_by = server("a browser")
    show_all()
    texts = ["loading", "pipemesh.progress", "loaded", "PipeMesh: On one GPU", "pipemesh.notice"]
    assert sent_by.sent == [(text, "a browser") for text in texts]


@pytest.fixture
def bar():
    class Prompt:
        def get_node(self, node):
            return None

    reset_progress_state("a prompt", Prompt())
    yield lambda done, total: get_progress_state().update_progress("3", done, total)
    reset_progress_state("another", Prompt())


def test_steps_are_the_samplers_own_also_where_as_many_ranks_were_waited_for(server, bar):
    server("a browser")
    shown = NodeScreen()
    shown.begin("3")
    for ready in range(1, 5):
        shown.show(replace(WAITED, done=ready, total=4))
        assert not shown.is_sampling("3")
    for step in range(1, 4):
        bar(step, 4)
        assert shown.is_sampling("3"), f"step {step} of 4"


def test_a_prompt_of_a_script_that_listens_nowhere_is_shown_on_nobodys_node(server):
    sent_by = server(None)
    show_all()
    assert sent_by.sent == []
