"""Which device each rank gets, decided before any process starts."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

from ...parallel_runtime.comm.cores import share_of_cores
from ...parallel_runtime.errors import LayoutError
from ...parallel_runtime.layout import Layout
from ...parallel_runtime.wire.arena import MAX_RANKS

ELSEWHERE = re.compile(r"[\w.-]+/(cpu|cuda:\d+)")


@dataclass(frozen=True)
class Device:
    """``name`` as the UI knows it (``cuda:1``, ``cpu``, on another machine ``node1/cuda:1``).

    ``uuid`` addresses a GPU of this machine whatever CUDA_VISIBLE_DEVICES says.
    """

    name: str
    uuid: str = ""

    @property
    def machine(self) -> str:
        """Its name; empty for ComfyUI's own."""
        return self.name.rpartition("/")[0]

    @property
    def local_name(self) -> str:
        return self.name.rpartition("/")[2]

    @property
    def is_gpu(self) -> bool:
        return self.local_name != "cpu"


@dataclass(frozen=True, kw_only=True)
class Placement:
    """A layout on devices, one per rank."""

    layout: Layout
    devices: tuple[Device, ...]
    backend: str

    @property
    def other_machines(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(device.machine for device in self.devices if device.machine))

    @property
    def machines(self) -> tuple[int, ...]:
        """A number for each rank's machine, 0 for ComfyUI's own; empty where that is the only
        one.
        """
        names = ("", *self.other_machines)
        return tuple(names.index(device.machine) for device in self.devices) if len(names) > 1 else ()

    def ranks_on(self, machine: str) -> tuple[int, ...]:
        return tuple(rank for rank, device in enumerate(self.devices) if device.machine == machine)

    def cores(self, rank: int) -> tuple[int, ...]:
        """Of this process, which is on the rank's machine, those that it has to itself; empty
        where it computes on a GPU.
        """
        here = self.ranks_on(self.devices[rank].machine)
        return () if self.devices[rank].is_gpu else share_of_cores(own_cores(), here.index(rank), len(here))

    def threads(self, rank: int) -> int:
        """CPU threads of a rank: the cores of this process, or what OMP_NUM_THREADS leaves of them,
        shared out among its machine's ranks.
        """
        share = len(share_of_cores(own_cores(), 0, len(self.ranks_on(self.devices[rank].machine))))
        limit = os.environ.get("OMP_NUM_THREADS", "").split(",")[0]  # OpenMP takes one number per level of nesting
        return min(share, int(limit)) if limit.isdigit() and int(limit) else share


def fewer(layout: Layout, devices: int) -> str:
    """What to set so that a layout needs no more than so many devices."""
    stages = layout.pipefusion
    return f"set ulysses to {devices // stages}" if 1 < stages <= devices else "lower the degree"


def place(layout: Layout, wanted: str, backend: str, gpus: tuple[Device, ...]) -> Placement:
    """``wanted`` is ``auto``, ``cpu`` or a list such as ``cuda:0,cuda:2`` or
    ``cuda:0,node1/cuda:0``.

    What another machine has is found out when the pool starts. Raises LayoutError with the equation
    that fails.
    """
    names = [name.strip() for name in wanted.split(",") if name.strip()] or ["auto"]
    size = layout.world_size
    if names == ["auto"]:
        names = [gpu.name for gpu in gpus[:size]] if gpus else ["cpu"]
        if gpus and len(names) < size:
            here, remedy = count(len(gpus), "GPU"), fewer(layout, len(gpus))
            raise LayoutError(f"{layout.equation()}, {here}: {remedy}, or list devices to share (backend gloo).")
    if names == ["cpu"]:
        names = ["cpu"] * size
    if len(names) != size:
        raise LayoutError(f"{layout.equation()}, {count(len(names), 'device')} listed ({', '.join(names)}): list one device per rank.")
    known = {device.name: device for device in (Device("cpu"), *gpus)}
    known |= {name: Device(name) for name in names if ELSEWHERE.fullmatch(name)}
    unknown = [name for name in names if name not in known]
    if unknown:
        raise LayoutError(f"Device {unknown[0]} is not here: choose from {', '.join(known)}, or node1/cuda:0 of machine node1.")
    devices = tuple(known[name] for name in names)
    if devices[0].machine:
        raise LayoutError(f"Rank 0 hands the result to ComfyUI and {names[0]} is on another machine: list a device of this one first.")
    if layout.pipefusion > 1 and any(device.machine for device in devices):
        raise LayoutError(f"{layout.equation()} over several machines: stages share one machine, list devices of this one only.")
    if len({device.is_gpu for device in devices}) > 1:
        raise LayoutError(f"CPU and GPU ranks cannot be mixed ({', '.join(names)}): list one kind.")
    if size > MAX_RANKS:
        raise LayoutError(f"{layout.equation()}, at most {MAX_RANKS} in one pool: lower the degrees.")
    if backend == "auto":
        backend = "nccl" if devices[0].is_gpu and len(set(names)) == size else "gloo"
    if backend == "nccl" and not devices[0].is_gpu:
        raise LayoutError("Backend nccl needs GPUs and the ranks are on the CPU: choose auto or gloo.")
    if backend == "nccl" and len(set(names)) < size:
        needed, listed = count(size, "GPU"), len(set(names))
        raise LayoutError(f"Backend nccl needs {needed} for {layout.equation()}, {listed} listed: choose gloo to share one.")
    return Placement(layout=layout, devices=devices, backend=backend)


def own_cores() -> list[int]:
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))


def count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def visible_gpus(cpu_only: bool) -> tuple[Device, ...]:
    """The GPUs this process sees; none where ComfyUI runs with --cpu."""
    import torch

    if cpu_only or not torch.cuda.is_available():
        return ()
    uuids = [torch.cuda.get_device_properties(index).uuid for index in range(torch.cuda.device_count())]
    return tuple(Device(f"cuda:{index}", f"GPU-{uuid}") for index, uuid in enumerate(uuids))
