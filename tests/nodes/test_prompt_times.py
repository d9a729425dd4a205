"""What a prompt waits for, and how much of that no pool can take away."""

import threading
from types import SimpleNamespace

import pytest
from pipemesh.nodes import prompt_times
from pipemesh.nodes.prompt_times import PromptTimes, VAEWork
from pipemesh.nodes.report.text import prompt_text
from pipemesh.parallel_runtime.client.run import Evaluation, Run

from ..kit.at_once import at_once


@pytest.fixture
def now(monkeypatch):
    made = SimpleNamespace(prompt="p", at=1015.0, span=None)
    monkeypatch.setattr(prompt_times.time, "time", lambda: made.at)
    return made


@pytest.fixture
def prompt_waits(now):
    return PromptTimes(lambda: now.prompt, lambda prompt: now.span if prompt == "p" else None)


def run_of(*evaluations):
    return Run(evaluations=[Evaluation(seconds, 0.0, 0.0, 0, began) for began, seconds in evaluations])


def test_the_parts_of_a_prompt_add_up_and_what_ranks_do_not_compute_is_left(prompt_waits, now):
    prompt_waits.note_vae("encode", 0.5, False)
    ours, other = run_of((103.0, 2.0), (105.5, 1.0)), run_of((1.0, 1.0))
    assert prompt_waits.of(ours, 2.0) is None, "it goes on"
    prompt_waits.note_run(ours, 100.0, 110.0)
    prompt_waits.note_vae("decode", 1.0, True)
    found = prompt_waits.of(ours, 2.0)
    assert (found.loading_s, found.first_s, found.sampling_s) == (3.0, 2.0, 5.0)
    assert found.vae == (VAEWork("encode", 0.5, False), VAEWork("decode", 1.0, True))
    assert (found.before_s, found.total_s, found.left_s) == (None, None, 3.5)
    assert found.speedup == (3.5 + 2 * 8) / 11.5 and found.at_most == (3.5 + 2 * 8) / 3.5
    now.span = 1000.0, 1020.0  # ComfyUI has ended it
    found = prompt_waits.of(ours, None)
    assert (found.before_s, found.total_s, found.left_s) == (5.0, 20.0, 12.0)
    assert found.speedup is found.at_most is None
    prompt_waits.note_run(other, 0.0, 4.0)  # a second sampler of the prompt
    assert prompt_waits.of(ours, None).left_s == 12.0 - 3.0 == prompt_waits.of(other, None).left_s
    now.prompt = "another"
    prompt_waits.note_run(fresh := run_of((1.0, 1.0)), 0.0, 4.0)
    assert (prompt_waits.of(fresh, None).left_s, prompt_waits.of(fresh, None).vae) == (1.0, ())
    prompt_waits.note_run(empty := run_of(), 0.0, 1.0)
    assert prompt_waits.of(empty, None) is None


def test_figures_can_be_asked_for_while_runs_and_decodings_are_noted(prompt_waits):
    runs, noted = [run_of((103.0, 2.0)) for _ in range(1000)], threading.Event()
    prompt_waits.note_run(runs[0], 100.0, 110.0)
    prompt_waits.note_vae("decode", 1.0, True)

    def note():
        for run in runs:
            prompt_waits.note_run(run, 100.0, 110.0)
            prompt_waits.note_vae("encode", 1.0, True)
        noted.set()

    def ask():
        while not noted.is_set():
            assert prompt_waits.of(runs[0], None).vae

    at_once(note, ask)


def test_the_report_says_what_was_waited_for_and_the_bound_beside_the_speed(prompt_waits):
    prompt_waits.note_vae("decode", 1.0, True)
    prompt_waits.note_vae("encode", 0.25, False)
    prompt_waits.note_run(ours := run_of((103.0, 2.0)), 100.0, 110.0)
    text = [" ".join(line.split()) for line in prompt_text(prompt_waits.of(ours, 2.0)).splitlines()]
    assert text == [
        "What the prompt waited for, without other nodes",
        "loading, until it computes 3.00 s",
        "first evaluation 2.00 s",
        "sampling after it 5.00 s",
        "VAE, decode, by workers 1.00 s",
        "VAE, encode, by one device 0.25 s",
        "left if workers took no time 3.25 s",
        "in all 1.71 times as fast as one device, at most 5.92 times",
    ]
    assert "one device, at most" not in prompt_text(prompt_waits.of(ours, None))
