"""What a sampler's node shows goes to the page that has queued the prompt, and to nobody else."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from comfy_execution.progress import get_progress_state, reset_progress_state
from pipemesh.nodes import extension, screen
from pipemesh.nodes.notices import Notice
from pipemesh.nodes.progress_event import Waited
from pipemesh.nodes.screen import NodeScreen
from pipemesh.nodes.waiting import Waiting

WAITED = Waited(node="3", prompt="a prompt", text="loading", done=1, total=2, seconds=1.0)
NOTICE = Notice(at=0.0, text="On one GPU", node="3", prompt="a prompt")


@pytest.fixture
def server(monkeypatch):
    """(client, flags) -> ComfyUI's server in a prompt of this client, with what it sent to whom."""

    def made(client, **flags):
        sent = []
        known = {client: {"feature_flags": flags or {screen.SHOWS_TEXT: True}}} if client else {}
        found = SimpleNamespace(
            client_id=client,
            sent=sent,
            sockets_metadata=known,
            send_progress_text=lambda text, node, sid=None: sent.append((text, sid)),
            send_sync=lambda event, data, sid=None: sent.append((event, sid)),
        )
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


def test_the_page_that_has_queued_a_prompt_is_shown_it_alone(server):
    sent_by = server("a browser")
    show_all()
    texts = ["loading", "pipemesh.progress", "loaded", "PipeMesh: On one GPU", "pipemesh.notice"]
    assert sent_by.sent == [(text, "a browser") for text in texts]
    assert Waiting(NodeScreen()).is_seen()


@pytest.fixture
def bar():
    prompt = SimpleNamespace(get_node=lambda node: None)
    reset_progress_state("a prompt", prompt)
    yield lambda done, total: get_progress_state().update_progress("3", done, total)
    reset_progress_state("another", prompt)


def test_steps_are_the_samplers_own_also_where_as_many_ranks_were_waited_for(server, bar):
    server("a browser")
    shown = NodeScreen()
    shown.note_bar("3")
    for ready in range(1, 5):
        shown.show(replace(WAITED, done=ready, total=4))
        assert not shown.is_sampling("3")
    for step in range(1, 4):
        bar(step, 4)
        assert shown.is_sampling("3"), f"step {step} of 4"


@pytest.mark.parametrize(
    ("client", "flags"),
    [(None, {}), ("a script", {"said": "nothing"}), ("of pictures", {"supports_preview_metadata": True})],
)
def test_a_prompt_of_a_script_is_shown_on_nobodys_node_nor_on_its_bar(server, bar, client, flags):
    sent_by = server(client, **flags)
    show_all()
    assert sent_by.sent == [] and screen.bar_of("3") == (0.0, 1.0)
    assert not Waiting(NodeScreen()).is_seen()


@pytest.mark.host
def test_comfyuis_page_says_of_itself_that_it_shows_text():
    package = pytest.importorskip("comfyui_frontend_package")
    scripts = (Path(package.__file__).parent / "static" / "assets").glob("*.js")
    assert any(f"{screen.SHOWS_TEXT}:!0".encode() in script.read_bytes() for script in scripts)
