"""The report of the checks on a GPU, and the sentence where there is none. The checks themselves
run with ``--cuda``.
"""

import os
import subprocess
import sys

from .conftest import ROOT
from .cuda import report


def test_without_a_gpu_one_sentence_says_so_and_nothing_runs(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    command = (sys.executable, "-m", "pytest", "--cuda", "-q")
    hidden = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, env=hidden)
    assert ran.returncode != 0 and ran.stdout == ""
    assert ran.stderr.strip() == f"ERROR: {report.without_a_gpu()}"
