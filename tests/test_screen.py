"""What a sampler's node shows goes to the browser that has queued the prompt, and to no other."""

import pytest
from pipemesh.nodes import extension, screen
from pipemesh.nodes.notices import Notice
from pipemesh.nodes.screen import NodeScreen
from pipemesh.nodes.waiting import Waited

WAITED = Waited(node="3", prompt="a prompt", text="loading", done=1, total=2, seconds=1.0)


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


def show_all():
    shown = NodeScreen()
    shown.show(WAITED)
    shown.end("3", "loaded")
    extension.show_notice(Notice(at=0.0, text="On one GPU", node="3", prompt="a prompt"))


def test_the_browser_that_has_queued_a_prompt_is_shown_it_alone(server):
    sent_by = server("a browser")
    show_all()
    texts = ["loading", "pipemesh.progress", "loaded", "PipeMesh: On one GPU", "pipemesh.notice"]
    assert sent_by.sent == [(text, "a browser") for text in texts]


def test_a_prompt_of_a_script_that_listens_nowhere_is_shown_on_nobodys_node(server):
    sent_by = server(None)
    show_all()
    assert sent_by.sent == []
