"""Gives every rank a device, before any process starts."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ..parallel_runtime.comm.cores import share_of_cores
from ..parallel_runtime.comm.shares import relative
from ..parallel_runtime.errors import LayoutError
from ..parallel_runtime.layout import OF_A_GROUP, Layout
from ..parallel_runtime.wire.arena import MAX_RANKS
from .gpu_modes import is_mig

Backend = Literal["gloo", "nccl"]
# HIP reads the first too, where the second is not set
CUDA_VARIABLE, HIP_VARIABLE = "CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"
KINDS = ("cpu", "cuda")  # of devices that ranks compute on; AMD's GPUs are ``cuda`` too
ELSEWHERE = re.compile(r"[\w.-]+/(cpu|cuda:\d+)")


@dataclass(frozen=True)
class Device:
    """Names a device as the UI knows it: ``cuda:1``, ``cpu``, on another machine ``node1/cuda:1``.
    ``visible``, for a GPU of this machine, is the value of ``variable`` with which another process
    sees the same GPUs as this one, in the same order. ``title`` is the driver's name for it; empty
    if the name tells nothing. ``flops_per_s`` was measured here; 0 if it was not.
    """

    name: str
    visible: str = ""
    variable: str = CUDA_VARIABLE
    title: str = ""
    flops_per_s: float = 0.0

    @property
    def machine(self) -> str:
        """The name of its machine; empty for ComfyUI's own."""
        return self.name.rpartition("/")[0]

    @property
    def local_name(self) -> str:
        return self.name.rpartition("/")[2]

    @property
    def is_gpu(self) -> bool:
        return self.local_name != "cpu"


@dataclass(frozen=True, kw_only=True)
class Placement:
    """A layout on devices, one per rank. ``speeds`` has the devices' speeds in percent of the
    fastest, such as (100, 50): faster devices take more work. Empty if all are alike, or if a speed
    is not known.
    """

    layout: Layout
    devices: tuple[Device, ...]
    backend: Backend
    speeds: tuple[int, ...] = ()

    def sharers(self, rank: int) -> int:
        """Returns how many ranks of this one's stage are on its device: they ask for room at the
        same time, and stages one after the other.
        """
        own = self.layout.stage(rank), self.devices[rank]
        return sum((self.layout.stage(other), device) == own for other, device in enumerate(self.devices))

    @property
    def times_devices(self) -> bool:
        """Returns whether ranks report how fast their devices are: they do if the devices differ
        and each rank has a device to itself.
        """
        titles = {device.title for device in self.devices}
        return len(titles) > 1 and all(titles) and len({*self.devices}) == len(self.devices)

    @property
    def other_machines(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(device.machine for device in self.devices if device.machine))

    @property
    def machines(self) -> tuple[int, ...]:
        """A number for each rank's machine, 0 for ComfyUI's own: (0, 0, 1, 1) for two ranks on each
        of two machines. Empty if all ranks are on ComfyUI's machine.
        """
        names = ("", *self.other_machines)
        return tuple(names.index(device.machine) for device in self.devices) if len(names) > 1 else ()

    @property
    def is_one_gpu(self) -> bool:
        return len(self.devices) == 1 and self.devices[0].is_gpu and not self.devices[0].machine

    def ranks_on(self, machine: str) -> tuple[int, ...]:
        return tuple(rank for rank, device in enumerate(self.devices) if device.machine == machine)

    def ranks_named(self, device: str) -> tuple[int, ...]:
        return tuple(rank for rank, one in enumerate(self.devices) if one.name == device)

    def cores(self, rank: int) -> tuple[int, ...]:
        """The rank's share of the cores of this process, which is on the rank's machine; empty if
        it computes on a GPU.
        """
        here = self.ranks_on(self.devices[rank].machine)
        return () if self.devices[rank].is_gpu else share_of_cores(own_cores(), here.index(rank), len(here))

    @property
    def exceeds_cores(self) -> int:
        """Returns how many cores this process has if its machine has more CPU ranks than cores;
        else 0.
        """
        ranks = [rank for rank in self.ranks_on("") if not self.devices[rank].is_gpu]
        return len(own_cores()) if len(ranks) > len(own_cores()) else 0

    def threads(self, rank: int) -> int:
        """Returns the number of CPU threads of the rank: its share of the cores of this process,
        and no more than OMP_NUM_THREADS.
        """
        share = len(share_of_cores(own_cores(), 0, len(self.ranks_on(self.devices[rank].machine))))
        # OpenMP takes one number per level of nesting
        limit = os.environ.get("OMP_NUM_THREADS", "").split(",")[0]
        return min(share, int(limit)) if limit.isdigit() and int(limit) else share


def no_ranks_on(own: str) -> str:
    """Returns why a pool cannot compute on devices such as ``own``, ComfyUI's device; empty if it
    can.
    """
    if own.partition(":")[0] in KINDS:
        return ""
    return (
        f"ComfyUI computes on {own}, and PipeMesh on GPUs of NVIDIA and AMD, or on the CPU: "
        "sample without PipeMesh, or set devices of PipeMesh Pool to cpu."
    )


def place(layout: Layout, wanted: str, backend: str, gpus: tuple[Device, ...], own: str = "cpu") -> Placement:
    """Gives every rank a device. ``wanted`` is ``auto``, ``cpu`` or a list such as
    ``cuda:0,cuda:2`` or ``cuda:0,node1/cuda:0``; ``gpus`` are those of this machine, and ``own`` is
    the device that ComfyUI computes on: for ``auto``, CPU ranks stand for GPUs only if ``own`` is
    the CPU.

    The devices of another machine are found out when the pool starts. Raises LayoutError with the
    equation that fails.
    """
    names = names_of(layout, wanted, gpus, own)
    known = {device.name: device for device in (Device("cpu"), *gpus)}
    known |= {name: Device(name) for name in names if ELSEWHERE.fullmatch(name)}
    unknown = [name for name in names if name not in known]
    if unknown:
        raise LayoutError(
            f"Device {unknown[0]} is not here: choose from {', '.join(known)}, or node1/cuda:0 of machine"
            " node1."
        )
    devices = tuple(known[name] for name in names)
    if len({device.is_gpu for device in devices}) > 1:
        raise LayoutError(f"CPU and GPU ranks cannot be mixed ({', '.join(names)}): list one kind.")
    if layout.world_size > MAX_RANKS:
        raise LayoutError(f"{layout.equation()}, at most {MAX_RANKS} in one pool: lower the degrees.")
    return on_devices(layout, devices, backend)


def cost_of_order(placement: Placement) -> str:
    """Says which axis sends more over the network than it must, because of the order in which
    devices are listed; empty if no axis does. Ranks are numbered along inner axes first, so devices
    of one machine should stand together, and the machine with most devices first, so that groups
    divide evenly.
    """
    layout, several = placement.layout, Counter(device.machine for device in placement.devices)
    order = {machine: place for place, (machine, _) in enumerate(several.most_common())}
    better = sorted(placement.devices, key=lambda device: order[device.machine])
    for axis in OF_A_GROUP if len(several) > 1 else ():
        now, then = (
            sum(len({devices[rank].machine for rank in line}) > 1 for line in layout.lines(axis))
            for devices in (placement.devices, better)
        )
        if now != then:
            names = ",".join(device.name for device in better)
            return (
                f"As devices are listed, {now} groups of {axis} send over the network between machines, which"
                f" is slow: list {names}, and {then} do."
                if then < now
                else ""
            )
    return ""


def on_devices(layout: Layout, devices: tuple[Device, ...], backend: str = "auto") -> Placement:
    """Returns a layout on these devices, one per rank. Raises LayoutError if ``backend`` cannot
    be used there.
    """
    return Placement(
        layout=layout,
        devices=devices,
        backend=choose_backend(layout, backend, devices),
        speeds=speeds_of(devices),
    )


def speeds_of(devices: Sequence[Device]) -> tuple[int, ...]:
    """Returns the speeds of devices in percent of the fastest: the measured speeds if all were
    measured, else the published figures of their titles. Ranks on one device share its speed. Empty
    if all are alike.
    """
    if len({device.title for device in devices}) == 1:
        return ()
    speeds = [device.flops_per_s for device in devices]
    if not all(speeds):
        from ..parallel_runtime.planner.machine import speed_of

        speeds = [speed_of(device.title) for device in devices]
    return relative([speed / devices.count(device) for speed, device in zip(speeds, devices, strict=True)])


def names_of(layout: Layout, wanted: str, gpus: tuple[Device, ...], own: str) -> list[str]:
    """The names of the devices, one per rank. Raises LayoutError."""
    names = [name.strip() for name in wanted.split(",") if name.strip()] or ["auto"]
    size = layout.world_size

    def nearest(ranks: int) -> str:
        return " or ".join(one.product() for one in layout.nearest(ranks))

    if names == ["auto"]:
        if not gpus and (sentence := no_ranks_on(own)):
            raise LayoutError(sentence)
        names = [gpu.name for gpu in gpus[:size]] if gpus else ["cpu"]
        if gpus and len(names) < size:
            here = count(len(gpus), "GPU")
            raise LayoutError(
                f"{layout.equation()}, {here}: choose {nearest(len(gpus))}, or list devices to share (backend"
                " gloo)."
            )
    if names == ["cpu"]:
        names = ["cpu"] * size
    if len(names) != size:
        listed = f"{count(len(names), 'device')} listed ({', '.join(names)})"
        raise LayoutError(
            f"{layout.equation()}, {listed}: list one device per rank, or choose {nearest(len(names))}."
        )
    return names


def choose_backend(layout: Layout, wanted: str, devices: tuple[Device, ...]) -> Backend:
    """Returns ``wanted``. For ``auto`` it is nccl if every rank has its own GPU, else gloo. Raises
    LayoutError.
    """
    on_gpus, size, distinct = devices[0].is_gpu, len(devices), len(set(devices))
    if wanted == "auto":
        return "nccl" if on_gpus and distinct == size else "gloo"
    if wanted == "gloo":
        return "gloo"
    if wanted != "nccl":
        raise LayoutError(f"Backend {wanted} is not known: choose auto, nccl or gloo.")
    if not on_gpus:
        raise LayoutError("Backend nccl needs GPUs and the ranks are on the CPU: choose auto or gloo.")
    if distinct < size:
        raise LayoutError(
            f"Backend nccl needs {count(size, 'GPU')} for {layout.equation()}, {distinct} listed: choose gloo"
            " to share one."
        )
    return "nccl"


def own_cores() -> list[int]:
    return (
        sorted(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else list(range(os.cpu_count() or 1))
    )


def count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def visible_gpus(cpu_only: bool) -> tuple[Device, ...]:
    """Returns the GPUs that this process sees. ``cpu_only``: ComfyUI runs with --cpu, so none.

    A rank sees all of them: RCCL's transports between two GPUs, and torch's symmetric memory, fail
    if each rank sees only its own GPU, as the first. A GPU of NVIDIA's is addressed by its UUID.
    HIP takes only the indices of all GPUs, of which a process may see some.
    """
    import torch

    if cpu_only or not torch.cuda.is_available():
        return ()
    indices = range(torch.cuda.device_count())
    properties = [torch.cuda.get_device_properties(index) for index in indices]
    if torch.version.hip is not None:
        seen = [
            one.strip()
            for one in (os.environ.get(HIP_VARIABLE) or os.environ.get(CUDA_VARIABLE) or "").split(",")
            if one.strip()
        ]
        variable, addresses = HIP_VARIABLE, (seen or [str(index) for index in indices])[: len(indices)]
    else:
        variable, addresses = CUDA_VARIABLE, [cuda_address(one.name, one.uuid) for one in properties]
    visible = ",".join(addresses)
    return tuple(Device(f"cuda:{index}", visible, variable, one.name) for index, one in enumerate(properties))


def hidden_gpus(environ: Mapping[str, str], driver: Path = Path("/proc/driver/nvidia/gpus")) -> int:
    """Returns how many GPUs NVIDIA's driver has if there are several and a variable hides some from
    this process; else 0.
    """
    there = len(list(driver.iterdir())) if driver.is_dir() else 0
    return there if there > 1 and environ.get(CUDA_VARIABLE) else 0


def cuda_address(title: str, uuid: object) -> str:
    """Returns the name of a GPU, or of an instance of a divided GPU (MIG), in
    CUDA_VISIBLE_DEVICES.
    """
    return f"{'MIG' if is_mig(title) else 'GPU'}-{uuid}"
