"""Prints one page about this machine: what works, what does not, and the remedy. Only `gather` asks
the machine; the judgement is pure. If there is no ComfyUI yet, it says so before any is installed,
in whatever Python runs it. Imports the standard library alone; only the questions about torch
import torch.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import importlib.util
import json
import mmap
import os
import platform
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from ...parallel_runtime.comm.cores import bus_of
from ...pool.gpu_modes import SHARED, ask_driver, is_mig, modes_in
from ..cache import cache_folder
from ..comfyui.host_record import ComfyInstall

if TYPE_CHECKING:
    from ...pool.trial.host_trials import HostCode

GIB = 2**30
ROOMY_SHM_BYTES = GIB
ROOMY_MEMORY_BYTES = 4 * GIB
NEEDED_PACKAGES = ("greenlet", "msgspec", "safetensors")
GPU_NODES = {"/dev/nvidiactl": "NVIDIA", "/dev/dxg": "WSL", "/dev/kfd": "AMD"}
HANGS = "2.7.0"  # the torch whose NCCL hangs at random where a process group has its device

Severity = Literal["works", "limited", "blocked"]
# GPUs that were in one pool, and by sizes of groups the GB/s that each sends
Measured = tuple[tuple[int, ...], tuple[tuple[int, float], ...]]
MARKS: dict[Severity, str] = {"works": "ok  ", "limited": "note", "blocked": "STOP"}


@dataclass(frozen=True)
class Gpu:
    name: str
    memory_bytes: int
    mode: str = SHARED  # who may use it at once, as the driver says


@dataclass(frozen=True)
class Package:
    name: str
    version: str  # empty where it is not installed


@dataclass(frozen=True, kw_only=True)
class Machine:
    platform: str
    cores: int
    memory_available_bytes: int | None
    shm_free_bytes: int | None
    memfd: bool
    gpu_driver: str = ""  # its maker's name; empty where there is none


@dataclass(frozen=True, kw_only=True)
class Torch:
    version: str  # empty where torch does not import; then `error` says why
    error: str = ""
    build: str = "CPU"
    backends: tuple[str, ...] = ()
    gpus: tuple[Gpu, ...] = ()
    pairs_without_peer_access: tuple[tuple[int, int], ...] = ()
    exchanges: tuple[Measured, ...] = ()


@dataclass(frozen=True)
class RingKernel:
    """The kernel that a ring's attention runs on, on this device; ``refused``: a sentence for each
    that was found wrong.
    """

    device: str
    name: str
    refused: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Environment:
    """The facts about this machine that the page judges. ``python`` is the version of the Python
    that runs, ``executable``.
    """

    python: str
    executable: str
    machine: Machine
    torch: Torch
    comfyui: ComfyInstall | None  # none is installed yet
    packages: tuple[Package, ...] = ()
    kernels: tuple[RingKernel, ...] = ()
    host: HostCode | None = None  # there is no ComfyUI


@dataclass(frozen=True)
class Finding:
    level: Severity
    text: str
    remedy: str = ""


NO_COMFYUI = Finding(
    "blocked",
    "The commands have no ComfyUI yet, so torch was not examined.",
    "put PipeMesh's folder into ComfyUI's custom_nodes, or point PIPEMESH_COMFYUI to yours; in a clone of"
    " PipeMesh's repository `python3 -m launcher host` installs one (6 GB, 3 minutes)",
)


def findings(facts: Environment) -> tuple[Finding, ...]:
    """Every check's findings: works, limited and blocked, as they stand on the page."""
    if facts.comfyui is None:
        return (NO_COMFYUI, *about_memory(facts))
    return tuple(finding for check in CHECKS for finding in check(facts))


def about_torch(facts: Environment) -> Iterator[Finding]:
    torch = facts.torch
    if not torch.version:
        remedy = f"reinstall it for {facts.executable}"
        yield Finding("blocked", f"torch does not import: {torch.error}.", remedy)
    elif "gloo" not in torch.backends:
        text = f"torch {torch.version} was built without torch.distributed's gloo, which every rank needs."
        remedy = "install the torch wheel of the Python package registry or of pytorch.org"
        yield Finding("blocked", text, remedy)


def about_packages(facts: Environment) -> Iterator[Finding]:
    pip = f"{facts.executable} -m pip install"
    there = {package.name for package in facts.packages if package.version}
    for name in NEEDED_PACKAGES:
        if name not in there:
            yield Finding("blocked", f"{name} is not installed.", f"{pip} {name}")


def about_kernels(facts: Environment) -> Iterator[Finding]:
    """Kernels that compute something else than attention, or another log-sum-exp."""
    for one in facts.kernels:
        for sentence in one.refused:
            remedy = f"update torch; until then {one.name} is used"
            yield Finding("limited", f"{one.device}: {sentence}", remedy)


def about_devices(facts: Environment) -> Iterator[Finding]:
    torch, driver = facts.torch, facts.machine.gpu_driver
    count = len(torch.gpus)
    if count == 0 and driver:
        text = f"There is a GPU driver ({driver}), but this torch ({torch.build}) sees no GPU."
        remedy = (
            "install the torch build for this GPU, and check that CUDA_VISIBLE_DEVICES does not hide the GPU"
        )
        yield Finding("limited", text, remedy)
    elif count == 0:
        text = "No GPU: the ranks run on the CPU over gloo, which is for trials and tests."
        yield Finding("limited", text, "use a machine with GPUs for speed")
    elif count == 1:
        shares = "for tests, several ranks can share it over gloo (through CPU memory)"
        yield Finding("limited", f"One GPU: {shares}; nothing gets faster.", "add a GPU for speed")
    elif "nccl" not in torch.backends:
        text = f"{count} GPUs, one rank each, over gloo: without NCCL every exchange goes through CPU memory."
        yield Finding("limited", text, "use Linux and a torch with NCCL (RCCL on AMD) for speed")
    elif torch.version.partition("+")[0] == HANGS:
        text = f"torch {torch.version} over NCCL hangs at random (pytorch issue 153960)."
        yield Finding("blocked", text, "install torch 2.7.1 or newer")
    else:
        yield Finding("works", f"{count} GPUs, one rank each, over NCCL.")
        if torch.pairs_without_peer_access:
            pairs = ", ".join(f"{a}-{b}" for a, b in torch.pairs_without_peer_access)
            goes = "their messages go through CPU memory"
            remedy = "if you can choose, put GPUs of one switch or NVLink bridge into a pool"
            yield Finding("limited", f"GPUs without peer access to each other: {pairs}; {goes}.", remedy)
    for gpus, gb_per_s in torch.exchanges:
        together = ", ".join(map(str, gpus))
        speeds = ", ".join(f"{speed:.1f} in groups of {ranks}" for ranks, speed in gb_per_s)
        yield Finding("works", f"GPUs {together} exchange, as workers measured, GB/s each: {speeds}.")


def about_sharing(facts: Environment) -> Iterator[Finding]:
    """GPUs that a rank cannot have beside ComfyUI, or not as others do."""
    for index, gpu in enumerate(facts.torch.gpus):
        if gpu.mode != SHARED:
            text = f"GPU {index} is in the compute mode {gpu.mode}: while ComfyUI uses it, no rank can."
            yield Finding("blocked", text, f"nvidia-smi -i {index} -c DEFAULT, as root")
        if is_mig(gpu.name):
            alone = "a process sees only one instance, so all ranks would share it"
            remedy = "switch MIG off (nvidia-smi -mig 0), or use GPUs that are not divided"
            yield Finding("limited", f"GPU {index} is an instance of a divided GPU (MIG): {alone}.", remedy)
    if facts.torch.gpus and facts.machine.gpu_driver == "WSL":
        lacks = "GPUs have no peer access and little pinned memory there"
        text = f"This is WSL: {lacks}, so messages go through CPU memory."
        yield Finding("limited", text, "run on Linux itself for speed")


def about_cores(facts: Environment) -> Iterator[Finding]:
    cores = facts.machine.cores
    if not facts.torch.version or facts.torch.gpus:
        return
    if cores == 1:
        text = "One core: two ranks on the CPU take turns, so the demo shows no speed-up."
        yield Finding("limited", text, "use two cores or more")
    else:
        yield Finding("works", f"Up to {cores} ranks on the CPU over gloo, one core each.")


def about_memory(facts: Environment) -> Iterator[Finding]:
    shm, memory = facts.machine.shm_free_bytes, facts.machine.memory_available_bytes
    if facts.machine.memfd:
        yield Finding("works", "Shared memory between the UI and the ranks: memfd.")
    else:
        text = "No memfd here: the UI and the ranks cannot share memory."
        yield Finding("blocked", text, "run on Linux, and allow memfd_create")
    if len(facts.torch.gpus) > 1 and shm is not None and shm < ROOMY_SHM_BYTES:
        text = f"/dev/shm has {gib(shm)} free, and NCCL needs it for messages within a machine."
        yield Finding("limited", text, "make it 1 GiB or more (Docker: --shm-size=1g, or --ipc=host)")
    if memory is not None and memory < ROOMY_MEMORY_BYTES:
        text = f"{gib(memory)} of memory are available: a model may not fit beside ComfyUI."
        yield Finding("limited", text, "close other programs, or add memory")


def about_host(facts: Environment) -> Iterator[Finding]:
    if facts.host is None or facts.comfyui is None or not facts.host.classes:
        return
    host, version, tested = facts.host, facts.comfyui.version, ", ".join(facts.host.tested)
    if not host.unknown:
        yield Finding(
            "works", f"The models of ComfyUI {version} are the same as those of a tested version ({tested})."
        )
        return
    text = (
        f"ComfyUI {version}: {len(host.unknown)} of {host.classes} models differ from every tested version"
        f" ({tested}); each is compared with stock on the CPU, once, before a pool computes it."
    )
    for says, names in (("Verified here", host.verified), ("Not computed by a pool", host.refused)):
        text += f" {says}: {', '.join(names)}." if names else ""
    yield Finding("limited", text)


CHECKS = (
    *(about_torch, about_packages, about_host, about_kernels, about_devices),
    *(about_sharing, about_cores, about_memory),
)


def gib(size_bytes: int) -> str:
    return f"{size_bytes / GIB:.1f} GiB"


def report(facts: Environment, found: Sequence[Finding]) -> str:
    """The page."""
    machine = facts.machine
    memory, shm = machine.memory_available_bytes, machine.shm_free_bytes
    packages = ", ".join(f"{package.name} {package.version or 'not found'}" for package in facts.packages)
    stops = "PipeMesh cannot run here: repair every line marked STOP first."
    lines = [
        f"Python    {facts.python}  {facts.executable}",
        f"Platform  {machine.platform}, {machine.cores} core{'s' * (machine.cores > 1)}",
        *lines_about(facts.comfyui, facts.torch),
        *([f"Packages  {packages}"] if packages else []),
        *(f"Ring      on {one.device}: {one.name}" for one in facts.kernels),
        f"Memory    {'unknown' if memory is None else f'{gib(memory)} available'}; "
        f"/dev/shm {'none' if shm is None else f'{gib(shm)} free'}; "
        f"memfd {'works' if machine.memfd else 'does not work'}",
        "",
    ]
    for finding in found:
        lines += [f"{MARKS[finding.level]}  {finding.text}"]
        lines += [f"      -> {finding.remedy}"] if finding.remedy else []
    return "\n".join((*lines, "", "PipeMesh can run here." if can_run(found) else stops))


def lines_about(comfyui: ComfyInstall | None, torch: Torch) -> list[str]:
    if comfyui is None:
        return ["ComfyUI   none yet"]
    whose = "installed by PipeMesh" if comfyui.base else "your own"
    version, backends = torch.version or "does not import", ", ".join(torch.backends) or "none"
    return [
        f"ComfyUI   {comfyui.version}  {comfyui.comfyui} ({whose})",
        f"torch     {version} ({torch.build}), backends: {backends}",
        *(f"GPU {index}     {gpu.name}, {gib(gpu.memory_bytes)}" for index, gpu in enumerate(torch.gpus)),
        *([] if torch.gpus else ["GPU       none"]),
    ]


def can_run(found: Sequence[Finding]) -> bool:
    return all(finding.level != "blocked" for finding in found)


def gather(host: ComfyInstall | None) -> Environment:
    torch, packages, code = Torch(version=""), (), None
    if host is not None:
        torch, packages = ask_torch(), NEEDED_PACKAGES
    if host is not None and torch.version:
        from ...pool.trial.host_trials import FOLDER, Verdicts, host_code

        code = host_code(Path(host.comfyui), Verdicts(cache_folder(os.environ) / FOLDER))
    return Environment(
        python=platform.python_version(),
        executable=sys.executable,
        machine=Machine(
            platform=f"{platform.system()} {platform.release()} {platform.machine()}",
            cores=len(os.sched_getaffinity(0)),
            memory_available_bytes=memory_available_bytes(),
            shm_free_bytes=shm_free_bytes(),
            memfd=memfd_works(),
            gpu_driver=next((maker for node, maker in GPU_NODES.items() if Path(node).exists()), ""),
        ),
        torch=torch,
        comfyui=host,
        packages=tuple(Package(name, package_version(name)) for name in packages),
        kernels=try_kernels(torch),
        host=code,
    )


def try_kernels(torch: Torch) -> tuple[RingKernel, ...]:
    """Try the attention kernels on every GPU, or on the CPU, as ranks do when they start."""
    if not torch.version:
        return ()
    from torch import device

    from ...parallel_runtime.attention.trial import tried_kernels, usual

    names = [f"cuda:{index}" for index in range(len(torch.gpus))] or ["cpu"]
    found = [(name, tried_kernels(device(name))) for name in names]
    return tuple(RingKernel(name, usual(kernels, device(name)), kernels.refused) for name, kernels in found)


def ask_torch() -> Torch:
    try:
        import torch
        import torch.distributed as dist
    except (ImportError, OSError) as error:  # OSError: a library that torch loads is missing or broken
        return Torch(version="", error=str(error).splitlines()[0] if str(error) else type(error).__name__)
    cuda = torch.cuda
    count = cuda.device_count() if cuda.is_available() else 0
    properties = [cuda.get_device_properties(index) for index in range(count)]
    modes = modes_in(ask_driver()) if count and not torch.version.hip else {}
    builds = {"ROCm": torch.version.hip, "CUDA": torch.version.cuda}
    build = next((f"{name} {version}" for name, version in builds.items() if version), "CPU")
    return Torch(
        version=torch.__version__,
        build=build,
        backends=tuple(
            name for name in ("gloo", "nccl") if dist.is_available() and dist.is_backend_available(name)
        ),
        gpus=tuple(
            Gpu(device.name, device.total_memory, modes.get(str(getattr(device, "uuid", "")), SHARED))
            for device in properties
        ),
        pairs_without_peer_access=tuple(
            (a, b) for a, b in combinations(range(count), 2) if not cuda.can_device_access_peer(a, b)
        ),
        exchanges=tuple(measured_exchanges([bus_of(one) for one in properties])),
    )


def measured_exchanges(addresses: Sequence[str]) -> Iterator[Measured]:
    """Yield the GPUs that have been in one pool, and the GB/s that each sends in groups of so many.
    ``addresses`` of all GPUs here.
    """
    from ...parallel_runtime.planner.measurements import DEVICES, link_versions, read_links

    for joined, links in read_links(cache_folder(os.environ) / DEVICES, link_versions()).items():
        if links and {*joined.split(",")} <= {*addresses}:
            gpus = tuple(addresses.index(one) for one in joined.split(","))
            yield gpus, tuple((ranks, speed.bytes_per_s / 1e9) for ranks, speed in links.items())


def package_version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "unknown" if importlib.util.find_spec(name.replace("-", "_")) else ""


def memfd_works() -> bool:
    try:
        with open(os.memfd_create("pipemesh-doctor"), "r+b") as file:
            file.truncate(mmap.PAGESIZE)
            with mmap.mmap(file.fileno(), mmap.PAGESIZE) as mapped:
                mapped[0] = 1
    except (AttributeError, OSError):
        return False
    return True


def shm_free_bytes() -> int | None:
    try:
        shm = os.statvfs("/dev/shm")
    except OSError:
        return None
    return shm.f_bavail * shm.f_frsize


def memory_available_bytes() -> int | None:
    # Before a ComfyUI is installed, `launcher` and its neighbours are packages of no other
    above = (__package__ or "").removesuffix("launcher.commands")
    try:
        return importlib.import_module(f"{above}parallel_runtime.memory").system_memory()[0]
    except OSError:
        return None


def main(argv: Sequence[str], host: ComfyInstall | None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m launcher doctor", description="What works here, what does not, and the remedy."
    )
    parser.add_argument("--json", action="store_true", help="the same as one JSON object")
    options = parser.parse_args(argv)
    facts = gather(host)
    found = findings(facts)
    if options.json:
        said = {"facts": asdict(facts), "findings": [*map(asdict, found)], "works": can_run(found)}
        print(json.dumps(said))
    else:
        print(report(facts, found))
    return 0 if can_run(found) else 1
