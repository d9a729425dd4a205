"""Which device each rank gets, decided before any process starts."""

from __future__ import annotations

import os
from dataclasses import dataclass

from ..parallel_runtime.comm.cores import share_of_cores
from ..parallel_runtime.errors import LayoutError
from ..parallel_runtime.layout import Layout
from ..parallel_runtime.wire.arena import MAX_RANKS


@dataclass(frozen=True)
class Device:
    """``name`` as the UI knows it (``cuda:1``, ``cpu``); ``uuid`` addresses a GPU whatever CUDA_VISIBLE_DEVICES says."""

    name: str
    uuid: str = ""

    @property
    def is_gpu(self) -> bool:
        return self.name != "cpu"


@dataclass(frozen=True, kw_only=True)
class Placement:
    """A layout on devices, one per rank."""

    layout: Layout
    devices: tuple[Device, ...]
    backend: str

    def cores(self, rank: int) -> tuple[int, ...]:
        """Of this process, those that a rank has to itself; empty where it computes on a GPU."""
        return () if self.devices[rank].is_gpu else share_of_cores(own_cores(), rank, len(self.devices))

    @property
    def threads(self) -> int:
        """CPU threads per rank: the cores of this process, or what OMP_NUM_THREADS leaves of them, shared out among the ranks."""
        share = len(share_of_cores(own_cores(), 0, len(self.devices)))
        limit = os.environ.get("OMP_NUM_THREADS", "").split(",")[0]  # OpenMP takes one number per level of nesting
        return min(share, int(limit)) if limit.isdigit() and int(limit) else share


def place(layout: Layout, wanted: str, backend: str, gpus: tuple[Device, ...]) -> Placement:
    """``wanted`` is ``auto``, ``cpu`` or a list such as ``cuda:0,cuda:2``. Raises LayoutError with the equation that fails."""
    names = [name.strip() for name in wanted.split(",") if name.strip()] or ["auto"]
    size = layout.world_size
    if names == ["auto"]:
        names = [gpu.name for gpu in gpus[:size]] if gpus else ["cpu"]
        if gpus and len(names) < size:
            raise LayoutError(f"{layout.equation()}, {count(len(gpus), 'GPU')}: lower the degree, or list devices to share (backend gloo).")
    if names == ["cpu"]:
        names = ["cpu"] * size
    if len(names) != size:
        raise LayoutError(f"{layout.equation()}, {count(len(names), 'device')} listed ({', '.join(names)}): list one device per rank.")
    known = {device.name: device for device in (Device("cpu"), *gpus)}
    unknown = [name for name in names if name not in known]
    if unknown:
        raise LayoutError(f"Device {unknown[0]} is not here: choose from {', '.join(known)}.")
    devices = tuple(known[name] for name in names)
    if len({device.is_gpu for device in devices}) > 1:
        raise LayoutError(f"CPU and GPU ranks cannot be mixed ({', '.join(names)}): list one kind.")
    if size > MAX_RANKS:
        raise LayoutError(f"{layout.equation()}, at most {MAX_RANKS} on one host: lower the degrees.")
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
