"""Measured speeds: the box that is made of them, and the file that keeps them."""

import pytest
from pipemesh.lab.bench.plan import Timed
from pipemesh.parallel_runtime.layout import Layout
from pipemesh.parallel_runtime.planner.job import Job
from pipemesh.parallel_runtime.planner.measured import VERSION, Speeds, read_speeds, this_machine, write
from pipemesh.parallel_runtime.planner.prediction import predict

from .planned import attention_alone, counts

SPEEDS = Speeds(matmul=2e12, attention=5e11, beside_s=1e-3, memory=1e11, merge=1e10, latency_s=1e-4, link=1e9)


def test_a_box_of_measured_speeds_takes_the_measured_times():
    whole = counts("flux 1024")
    timed = Timed.of(whole, 1.0)
    alone = predict(Job(whole=whole), Layout(), SPEEDS.box(1, 2))[0]
    assert alone.seconds == pytest.approx(
        timed.matmul_flops / 2e12 + timed.attention_flops / 5e11 + timed.blocks * 1e-3
    )
    one = Job(whole=attention_alone(1024))
    sent = [predict(one, Layout(ulysses=2), SPEEDS.box(2, size))[0].parts["ulysses"] for size in (2, 4)]
    assert sent[1] - 2e-4 == pytest.approx(2 * (sent[0] - 2e-4))  # two exchanges, whose latency stays


def test_the_file_is_for_one_machine_and_one_version(tmp_path):
    file = tmp_path / "cache" / "speeds.json"
    assert read_speeds(file, "a") == {}
    write(file, "a", {"model": SPEEDS})
    assert read_speeds(file, "a") == {"model": SPEEDS}
    assert read_speeds(file, "b") == {}
    file.write_text(file.read_text().replace(f'"version": {VERSION}', f'"version": {VERSION - 1}'))
    assert read_speeds(file, "a") == {}
    for broken in ("", "[]", f'{{"version": {VERSION}, "machine": "a", "speeds": {{"model": {{}}}}}}'):
        file.write_text(broken)
        assert read_speeds(file, "a") == {}


def test_speeds_of_another_torch_or_of_other_cores_are_not_this_machines(monkeypatch):
    here = this_machine()
    monkeypatch.setattr("torch.__version__", "0.1")
    other = this_machine()
    monkeypatch.setattr("os.sched_getaffinity", lambda _pid: {0})
    assert here != other != this_machine() and other.endswith("torch 0.1")
    monkeypatch.setattr(
        "pathlib.Path.read_text", lambda *_, **__: "processor\t: 0\nmodel name\t: A Processor 9000\n"
    )
    assert this_machine().startswith("A Processor 9000, 1 cores")
