"""The doctor's judgement, on made-up machines, and one look at this one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from pipemesh.launcher.comfyui.host_record import ComfyInstall
from pipemesh.launcher.commands import doctor
from pipemesh.launcher.commands.doctor import (
    Environment,
    Finding,
    Gpu,
    Machine,
    Package,
    RingKernel,
    Torch,
    can_run,
    findings,
    report,
)
from pipemesh.pool import gpu_modes
from pipemesh.pool.trial.host_trials import HostCode

ROOT = Path(__file__).resolve().parents[2]
NEEDED = (Package("greenlet", "3.2"), Package("msgspec", "0.20"), Package("safetensors", "0.6"))
CPU = Environment(
    python="3.11.7",
    executable="/usr/bin/python3",
    machine=Machine(
        platform="Linux 6.1 x86_64", cores=4, memory_available_bytes=2**34, shm_free_bytes=2**33, memfd=True
    ),
    torch=Torch(version="2.11.0", backends=("gloo", "nccl")),
    comfyui=ComfyInstall("/opt/python", "/opt/ComfyUI", "0.30.0", base=""),
    packages=NEEDED,
)
GPU = Gpu("H100", 80 * doctor.GIB)
INSTANCE = Gpu("NVIDIA H100 80GB HBM3 MIG 1g.10gb", 10 * doctor.GIB)
EXCLUSIVE = replace(GPU, mode="exclusive_process")
TWO_GPUS = replace(
    CPU,
    torch=replace(CPU.torch, gpus=(GPU, GPU), build="CUDA 13.0"),
    host=HostCode(tested=("0.29.0",), classes=3),
)
DIFFERENT = replace(TWO_GPUS.host, unknown=("Flux", "Wan"), verified=("Flux",), refused=("Wan",))
DIFFER = (
    "ComfyUI 0.30.0: 2 of 3 models differ from every tested version (0.29.0); each is compared with stock on the"
    " CPU, once, before a pool computes it. Verified here: Flux. Not computed by a pool: Wan."
)

REFUSED = replace(
    TWO_GPUS,
    kernels=(
        RingKernel("cuda:0", "cuDNN's attention"),
        RingKernel("cuda:1", "torch's flash attention", ("cuDNN's attention is not used: wrong.",)),
    ),
)


def machine(facts: Environment, **changed) -> Environment:
    return replace(facts, machine=replace(facts.machine, **changed))


def torch(facts: Environment, **changed) -> Environment:
    return replace(facts, torch=replace(facts.torch, **changed))


def at(level: str, facts: Environment) -> list[Finding]:
    return [finding for finding in findings(facts) if finding.level == level]


def test_two_gpus_with_everything_need_no_remedy() -> None:
    assert [finding.remedy for finding in findings(TWO_GPUS)] == [""] * 3
    assert can_run(findings(TWO_GPUS))


def test_a_cpu_machine_can_run_ranks_and_is_told_what_they_are_good_for() -> None:
    (limit,) = at("limited", CPU)
    assert "for trials and tests" in limit.text and can_run(findings(CPU))
    assert any("Up to 4 ranks on the CPU" in finding.text for finding in at("works", CPU))
    assert any("no speed-up" in finding.text for finding in at("limited", machine(CPU, cores=1)))


@pytest.mark.parametrize(
    "level, facts, names, remedy",
    [
        ("blocked", torch(CPU, version="", error="libfoo.so: no"), "libfoo.so: no", "reinstall it"),
        ("blocked", torch(CPU, backends=()), "gloo", "install the torch wheel"),
        ("blocked", replace(CPU, packages=NEEDED[1:]), "greenlet is not", "python3 -m pip install greenlet"),
        ("blocked", machine(CPU, memfd=False, shm_free_bytes=None), "No memfd here", "run on Linux"),
        ("blocked", torch(TWO_GPUS, gpus=(GPU, EXCLUSIVE)), "GPU 1 is in", "nvidia-smi -i 1 -c DEFAULT"),
        ("blocked", torch(TWO_GPUS, version="2.7.0+cu128"), "2.7.0+cu128 over NCCL", "torch 2.7.1 or newer"),
        ("limited", machine(CPU, gpu_driver="NVIDIA"), "a GPU driver (NVIDIA)", "CUDA_VISIBLE_DEVICES"),
        ("limited", machine(TWO_GPUS, gpu_driver="WSL"), "This is WSL", "run on Linux itself"),
        ("limited", torch(TWO_GPUS, gpus=(GPU, INSTANCE)), "GPU 1 is an instance", "nvidia-smi -mig 0"),
        ("limited", torch(TWO_GPUS, gpus=(GPU,)), "One GPU", "add a GPU"),
        ("limited", torch(TWO_GPUS, backends=("gloo",)), "without NCCL", "NCCL (RCCL on AMD)"),
        ("limited", torch(TWO_GPUS, pairs_without_peer_access=((0, 1),)), "to each other: 0-1", "NVLink"),
        ("limited", machine(TWO_GPUS, shm_free_bytes=64 * 2**20), "has 0.1 GiB free", "--shm-size=1g"),
        ("limited", machine(TWO_GPUS, memory_available_bytes=doctor.GIB), "1.0 GiB of memory", "close other"),
        (
            "limited",
            REFUSED,
            "cuda:1: cuDNN's attention is not used: wrong.",
            "until then torch's flash attention",
        ),
        ("limited", replace(TWO_GPUS, host=DIFFERENT), DIFFER, ""),
    ],
)
def test_what_stops_or_limits_is_named_with_its_remedy(
    level: str, facts: Environment, names: str, remedy: str
) -> None:
    (finding,) = at(level, facts)
    assert names in finding.text and remedy in finding.remedy
    assert can_run(findings(facts)) == (level == "limited")


def test_the_driver_says_who_may_use_a_gpu_and_torch_which_it_is() -> None:
    answer = "GPU-1b2c, Exclusive_Process\nGPU-3d4e, Default\nUnable to determine the device handle\n"
    assert gpu_modes.modes_in(answer) == {"1b2c": "exclusive_process", "3d4e": gpu_modes.SHARED}
    assert gpu_modes.modes_in("") == {}


def test_in_a_fresh_clone_nothing_is_installed_before_the_page_says_that_there_is_no_comfyui(
    tmp_path: Path,
) -> None:
    unset = ("PIPEMESH_HOST", "PIPEMESH_COMFYUI")
    env = {name: value for name, value in os.environ.items() if name not in unset}
    env["PIPEMESH_CACHE"] = str(tmp_path)
    command = [sys.executable, "-m", "launcher", "doctor"]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 1 and not list(tmp_path.iterdir())
    assert "ComfyUI   none yet" in done.stdout and "STOP  The commands have no ComfyUI yet" in done.stdout
    assert "`python3 -m launcher host` installs one (6 GB, 3 minutes)" in done.stdout
    assert "torch does not import" not in done.stdout


def test_the_page_holds_every_finding_and_fits_one_screen() -> None:
    bare = machine(replace(TWO_GPUS, packages=()), memfd=False, shm_free_bytes=None)
    facts = torch(bare, pairs_without_peer_access=((0, 1),))
    page = report(facts, findings(facts))
    assert all(finding.text in page and finding.remedy in page for finding in findings(facts))
    assert page.endswith("PipeMesh cannot run here: repair every line marked STOP first.")
    assert len(page.splitlines()) <= 40


def test_this_machine_can_be_looked_at_in_words_and_in_json(capsys: pytest.CaptureFixture[str]) -> None:
    host = ComfyInstall("/opt/python", "/opt/ComfyUI", "0.30.0", base="")
    status = doctor.main([], host)
    assert "/opt/ComfyUI (your own)" in capsys.readouterr().out
    assert doctor.main(["--json"], host) == status
    said = json.loads(capsys.readouterr().out)
    assert said["works"] == (status == 0)
    assert said["facts"]["torch"]["version"]
    assert said["facts"]["kernels"]
    assert {"level", "text", "remedy"} == set(said["findings"][0])
