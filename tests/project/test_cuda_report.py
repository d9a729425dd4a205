"""The report of the checks on a GPU, and the sentence where there is none. The checks themselves
run with ``--cuda``.
"""

import ast
import os
import subprocess
import sys
from importlib import import_module

import pytest

from ..cuda import report
from ..fixtures import ON_A_GPU, ROOT


def test_without_a_gpu_one_sentence_says_so_and_nothing_runs(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    command = (sys.executable, "-m", "pytest", "--cuda", "-q")
    hidden = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, env=hidden)
    assert ran.returncode != 0 and ran.stdout == ""
    assert ran.stderr.strip() == f"ERROR: {report.without_a_gpu()}"


@pytest.mark.parametrize("name", [file.stem for file in sorted(ON_A_GPU.glob("*.py"))])
def test_all_that_the_checks_import_is_there_without_a_gpu_too(name):
    """Also what a fixture imports when it is asked for."""
    package, file = import_module(f"tests.cuda.{name}").__package__, ON_A_GPU / f"{name}.py"
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import | ast.ImportFrom):
            exec(compile(ast.Module([node], []), file, "exec"), {"__package__": package})
