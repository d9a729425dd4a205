"""The report of the checks on a GPU, and the sentence where there is none. The checks themselves
run with ``--cuda``.
"""

import os
import subprocess
import sys
from types import SimpleNamespace

from .conftest import ROOT
from .cuda import report
from .cuda.report import Check, Facts


def test_the_report_has_each_check_with_its_figures_and_what_came_of_it():
    facts = Facts((("Device", "H100"), ("torch", "2.11")))
    checks = [
        Check("fp32 is stocks", "passed", ("off by 1e-7", "at most 2e-5")),
        Check("nccl connects", "failed", (), "RuntimeError: no route"),
        Check("fp8", "skipped", (), "needs Ada"),
    ]
    assert report.text(facts, checks).splitlines() == [
        "```",
        "Device  H100",
        "torch   2.11",
        "",
        "ok      fp32 is stocks",
        "        off by 1e-7",
        "        at most 2e-5",
        "FAILED  nccl connects",
        "        RuntimeError: no route",
        "left    fp8",
        "        needs Ada",
        "",
        "1 passed, 1 failed, 1 left out",
        "```",
    ]


def test_a_check_is_made_of_what_pytest_says_of_a_test():
    passed = SimpleNamespace(
        nodeid="tests/cuda/test_x.py::test_stop_leaves_it[ring 2]",
        user_properties=[("figure", "3 ms"), ("other", 1)],
    )
    assert report.check_of(passed, "passed") == Check("stop leaves it[ring 2]", "passed", ("3 ms",))
    crash = SimpleNamespace(message="AssertionError: off\nassert 1 == 2")
    failed = SimpleNamespace(
        nodeid="t::test_a", user_properties=[], longrepr=SimpleNamespace(reprcrash=crash)
    )
    assert report.check_of(failed, "failed").why == "AssertionError: off"
    skipped = SimpleNamespace(
        nodeid="t::test_a", user_properties=[], longrepr=("file", 3, "Skipped: no fp8 here")
    )
    assert report.check_of(skipped, "skipped").why == "no fp8 here"


def test_the_facts_name_device_driver_torch_and_commit(monkeypatch):
    monkeypatch.setattr(report, "said", lambda command: "")
    rows = dict(report.facts_of("cpu", "0.30.0", "2026-11-22").rows)
    assert (
        rows.keys() >= {"Device", "Driver", "torch", "ComfyUI", "Commit", "Date"}
        and rows["Commit"] == "not told"
    )
    assert report.said(["no-such-program"]) == ""


def test_without_a_gpu_one_sentence_says_so_and_nothing_runs(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    command = (sys.executable, "-m", "pytest", "--cuda", "-q")
    hidden = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, env=hidden)
    assert ran.returncode != 0 and ran.stdout == ""
    assert ran.stderr.strip() == f"ERROR: {report.without_a_gpu()}"
