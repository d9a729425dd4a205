"""What is changed for the whole process while a thread needs it: no other thread puts it back too
early, or leaves it changed for good.
"""

import threading
from types import SimpleNamespace

import comfy.cli_args
import comfy.ops
import comfy.utils
import pytest
from pipemesh.parallel_runtime.client.remote_forward import NO_COMPILER, uncompiled
from pipemesh.parallel_runtime.client.tiles import no_progress_shown
from pipemesh.parallel_runtime.weights.casts import casts_in_turn


def seen_inside(manager, look):
    """What one thread sees inside, when another that came before it has left."""
    first_in, second_in, seen = threading.Event(), threading.Event(), []

    def first():
        with manager():
            first_in.set()
            second_in.wait()

    def second():
        first_in.wait()
        with manager():
            second_in.set()
            threads[0].join()
            seen.append(look())

    threads = [threading.Thread(target=one) for one in (first, second)]
    for thread in threads:
        thread.start()
    threads[1].join()
    return seen[0]


@pytest.fixture
def compiler(monkeypatch):
    monkeypatch.setattr(comfy.cli_args.args, NO_COMPILER, False, raising=False)


def test_no_thread_puts_back_what_another_needs_or_has_changed(compiler, monkeypatch):
    shown = []
    monkeypatch.setattr(comfy.utils, "PROGRESS_BAR_HOOK", lambda *args, **kwargs: shown.append(args[0]))
    own = comfy.utils.PROGRESS_BAR_HOOK, comfy.ops.cast_bias_weight

    def show():
        comfy.utils.ProgressBar(2).update_absolute(1)
        other = threading.Thread(target=lambda: comfy.utils.ProgressBar(2).update_absolute(2))
        other.start()
        other.join()

    seen_inside(no_progress_shown, show)
    assert shown == [2], "a bar of another thread goes on"
    assert seen_inside(uncompiled, lambda: bool(getattr(comfy.cli_args.args, NO_COMPILER)))
    layer = SimpleNamespace(pipemesh_turn=lambda cast: "in turn")
    assert seen_inside(casts_in_turn, lambda: comfy.ops.cast_bias_weight(layer)) == "in turn"
    assert (comfy.utils.PROGRESS_BAR_HOOK, comfy.ops.cast_bias_weight) == own
    assert getattr(comfy.cli_args.args, NO_COMPILER) is False
