"""The switch of auto mode: a setting in a file that ComfyUI writes, or a variable. While it is off
nothing of the pool is asked for.
"""

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from types import SimpleNamespace

import pytest
from pipemesh.nodes.auto.mode import Auto
from pipemesh.nodes.auto.switch import FILE, Switch
from pipemesh.nodes.first_use import Once
from pipemesh.nodes.notices import Notices

from ..kit.shared_runtime import settings

__all__ = ["settings"]  # a fixture


@pytest.mark.parametrize(
    ("variable", "text", "on"),
    [
        ("", None, False),
        *(("", text, text == '{"PipeMesh.Auto": true}') for text in ('{"PipeMesh.Auto": true}', "{}", "[]")),
        ("", '{"PipeMesh.Auto": false}', False),
        ("1", '{"PipeMesh.Auto": false}', True),
        ("0", '{"PipeMesh.Auto": true}', False),
        ("yes", '{"PipeMesh.Auto": true}', True),
    ],
)
def test_the_switch_is_the_setting_unless_the_variable_says_1_or_0(tmp_path, caplog, variable, text, on):
    file = tmp_path / FILE
    switch = Switch({"PIPEMESH_AUTO": variable} if variable else {}, lambda: file)
    if text is not None:
        switch.is_on()  # the file comes later
        file.write_text(text)
    assert switch.is_on() is on
    named = ["[PipeMesh] PIPEMESH_AUTO is yes: set it to 1 or 0."]
    assert caplog.messages == (named if variable == "yes" else [])


def test_while_comfyui_writes_its_settings_the_switch_is_as_it_was(settings):
    switch = Switch({}, lambda: settings.file)
    for on in (True, False):
        settings(on)
        assert switch.is_on() is on
        settings.file.write_text('{"Comfy.Ot')
        assert switch.is_on() is on


def test_a_setting_without_effect_is_said_to_be(settings):
    """With several users there is no file, and that for queues has none whatever the variable."""
    fixed, several = Switch({"PIPEMESH_AUTO": "0"}, lambda: None), Switch({}, lambda: None)
    assert fixed.overruled.english.endswith("PIPEMESH_AUTO=0 is set where ComfyUI was started.")
    assert "--multi-user" in several.overruled.english and several.is_on() is False
    assert Switch({}, lambda: settings.file).overruled is None
    several = Switch({"PIPEMESH_AUTO": "1"}, lambda: None)
    assert several.looks_ahead() and "PipeMesh Pool" in several.queue_overruled.english
    assert Switch({"PIPEMESH_AUTO": "1"}, lambda: settings.file).queue_overruled is None


@pytest.mark.parametrize("on", [False, True])
def test_what_cannot_be_made_in_this_comfyui_is_missed_only_where_auto_mode_is_on_and_stock_samples(on):
    asked, notices = [], Notices()

    def runtime():
        asked.append(True)
        raise ImportError("comfy has no samplers")

    auto = Auto(runtime, Switch({"PIPEMESH_AUTO": str(int(on))}, lambda: None), notices)
    assert auto.sample(SimpleNamespace(model_patcher=None), lambda: "stock") == "stock"
    assert bool(asked) == on
    told = ["On one GPU: ImportError: comfy has no samplers"] if on else []
    assert [notice.text for notice in notices.latest()] == told


def test_threads_that_ask_at_once_get_the_same_made_once():
    both, made = threading.Barrier(2), []

    def make():
        made.append(object())
        with suppress(threading.BrokenBarrierError):
            both.wait(0.2)  # for another thread, if one comes here
        return made[-1]

    once = Once(make)
    with ThreadPoolExecutor(2) as threads:
        got = set(threads.map(lambda _: once(), range(2)))
    assert got == {*made} and len(made) == 1
