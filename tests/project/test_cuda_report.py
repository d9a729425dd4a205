"""The report of the checks on a GPU, and the sentence where there is none. The checks themselves
run with ``--cuda``.
"""

import ast
import re
from importlib import import_module
from types import SimpleNamespace

import pytest

from .. import fixtures
from ..cuda import report


def test_without_a_gpu_one_sentence_says_so_and_nothing_runs(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    asked = {"--cuda": True, "--cuda-as": "cuda"}
    config = SimpleNamespace(addinivalue_line=lambda *_: None, getoption=asked.__getitem__)
    with pytest.raises(pytest.UsageError, match=re.escape(report.without_a_gpu())):
        fixtures.pytest_configure(config)


@pytest.mark.parametrize("name", [file.stem for file in sorted(fixtures.ON_A_GPU.glob("*.py"))])
def test_all_that_the_checks_import_is_there_without_a_gpu_too(name):
    """Also what a fixture imports when it is asked for."""
    package, file = import_module(f"tests.cuda.{name}").__package__, fixtures.ON_A_GPU / f"{name}.py"
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import | ast.ImportFrom):
            exec(compile(ast.Module([node], []), file, "exec"), {"__package__": package})
