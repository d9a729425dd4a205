"""The report of the checks on a GPU: text that can be pasted into an issue."""

from __future__ import annotations

import importlib.metadata
import platform
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

ROOT = Path(__file__).resolve().parent.parent.parent
PACKAGES = ("sageattention", "triton")
GIB = 1 << 30
MARKS = {"passed": "ok    ", "failed": "FAILED", "skipped": "left  "}


@dataclass(frozen=True)
class Check:
    """One check, its figures, and why it failed or was left out."""

    name: str
    outcome: Literal["passed", "failed", "skipped"]
    figures: tuple[str, ...] = ()
    why: str = ""


@dataclass(frozen=True)
class Facts:
    """The machine and what runs on it: (name, value) in the order of the report."""

    rows: tuple[tuple[str, str], ...]


def text(facts: Facts, checks: Sequence[Check]) -> str:
    """Write the report, fenced as code."""
    width = max(len(name) for name, _ in facts.rows)
    lines = ["```", *(f"{name:{width}}  {value}" for name, value in facts.rows), ""]
    for check in checks:
        lines.append(f"{MARKS[check.outcome]}  {check.name}")
        lines += [f"        {line}" for line in (*check.figures, *([check.why] if check.why else []))]
    counts = [f"{sum(check.outcome == outcome for check in checks)} {word}" for outcome, word in COUNTED]
    return "\n".join([*lines, "", ", ".join(counts), "```"])


COUNTED = (("passed", "passed"), ("failed", "failed"), ("skipped", "left out"))


def facts_of(device: str, comfyui: str, today: str) -> Facts:
    rows = [
        ("Device", name_of(device)),
        ("Driver", driver() if device != "cpu" else "none: the CPU stands for a GPU"),
        ("torch", f"{torch.__version__}, NCCL {nccl()}"),
        (
            "Packages",
            ", ".join(f"{name} {version}" for name in PACKAGES if (version := version_of(name))) or "none",
        ),
        ("ComfyUI", comfyui),
        ("Python", f"{platform.python_version()}, {platform.system()} {platform.release()}"),
        ("Commit", commit()),
        ("Date", today),
    ]
    return Facts(tuple(rows))


def name_of(device: str) -> str:
    if device == "cpu":
        return platform.processor() or platform.machine()
    found = torch.cuda.get_device_properties(0)
    version = (
        f"ROCm {torch.version.hip}"
        if torch.version.hip
        else f"compute capability {found.major}.{found.minor}"
    )
    return f"{found.name}, {found.total_memory / GIB:.1f} GiB, {version}; {torch.cuda.device_count()} visible"


def driver() -> str:
    return said(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]) or "not told"


def nccl() -> str:
    if not torch.cuda.is_available() or not torch.distributed.is_nccl_available():
        return "none"
    return ".".join(map(str, torch.cuda.nccl.version()))


def version_of(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def commit() -> str:
    changed = said(["git", "-C", str(ROOT), "status", "--porcelain"])
    return f"{said(['git', '-C', str(ROOT), 'rev-parse', '--short=12', 'HEAD']) or 'not told'}{' with changes' if changed else ''}"


def said(command: list[str]) -> str:
    """The first line that a program prints; empty where there is no such program, or it fails."""
    try:
        ran = subprocess.run(command, capture_output=True, text=True, check=False, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return next(iter(ran.stdout.splitlines()), "") if ran.returncode == 0 else ""


def without_a_gpu() -> str:
    """The sentence for a machine without one; empty where there is one."""
    if torch.cuda.is_available():
        return ""
    return (
        f"No GPU: torch {torch.__version__} sees none here, and these checks are of one; python3 -m launcher"
        " doctor says why."
    )


def check_of(report: object, outcome: Literal["passed", "failed", "skipped"]) -> Check:
    """Make a check of pytest's report of a test."""
    name = getattr(report, "nodeid", "").rpartition("::")[2].removeprefix("test_").replace("_", " ")
    figures = tuple(value for key, value in getattr(report, "user_properties", ()) if key == "figure")
    return Check(
        name, outcome, figures, "" if outcome == "passed" else why(getattr(report, "longrepr", None))
    )


def why(longrepr: object) -> str:
    """The first line of an error, or the reason of a skip."""
    if isinstance(longrepr, tuple):
        return str(longrepr[2]).removeprefix("Skipped: ")
    crash = getattr(longrepr, "reprcrash", None)
    return (str(getattr(crash, "message", "")) or str(longrepr)).splitlines()[0]
