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
    ("text", "on"),
    [('{"PipeMesh.Auto": true}', True), ('{"PipeMesh.Auto": false}', False), ("{}", False), ("[]", False)],
)
def test_the_switch_is_the_setting(tmp_path, text, on):
    file = tmp_path / FILE
    switch = Switch({}, lambda: file)
    assert switch.is_on() is False
    file.write_text(text)
    assert switch.is_on() is on


def test_while_comfyui_writes_its_settings_the_switch_is_as_it_was(settings):
    switch = Switch({}, lambda: settings.file)
    for on in (True, False):
        settings(on)
        assert switch.is_on() is on
        settings.file.write_text('{"Comfy.Ot')
        assert switch.is_on() is on


@pytest.mark.parametrize(("value", "on"), [("1", True), ("0", False)])
def test_the_variable_counts_more_than_the_setting(settings, value, on):
    settings(not on)
    assert Switch({"PIPEMESH_AUTO": value}, lambda: settings.file).is_on() is on


def test_a_variable_that_is_neither_is_named_and_the_setting_counts(settings, caplog):
    settings(True)
    assert Switch({"PIPEMESH_AUTO": "yes"}, lambda: settings.file).is_on() is True
    assert caplog.messages == ["[PipeMesh] PIPEMESH_AUTO is yes: set it to 1 or 0."]
    assert Switch({}, lambda: None).is_on() is False


def test_a_setting_without_effect_is_said_to_be(settings):
    fixed = Switch({"PIPEMESH_AUTO": "0"}, lambda: None).overruled
    assert fixed.english.endswith("PIPEMESH_AUTO=0 is set where ComfyUI was started.")
    assert "--multi-user" in Switch({}, lambda: None).overruled.english
    assert Switch({}, lambda: settings.file).overruled is None


def test_with_several_users_the_setting_for_queues_is_said_to_have_no_effect_whatever_the_variable(settings):
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
