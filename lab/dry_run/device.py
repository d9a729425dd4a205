"""The device that is not there, which also counts what it is sent and waited for: where messages
go, and which calls of the pack's code make the CPU wait.
"""

from __future__ import annotations

import sys
import weakref
from collections import Counter
from collections.abc import Iterable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from ...parallel_runtime.planner import dry_device as product
from ...parallel_runtime.planner.dry_device import (
    DEVICE,
    MASKS,
    DeviceCounts,
    Driver,
    aten,
    computing_dry,
    fake_tensors_of,
    is_on_device,
)

PACK = Path(__file__).resolve().parent.parent.parent
# Of a copy to the device that the driver takes at once (CUDA's API synchronization behavior)
SMALL_BYTES = 1 << 16
PACK_BYTES = 16  # NCCL's copies are of so many bytes, to and from multiples of it; else of one
COPIES = {aten._to_copy.default, aten.copy_.default}
LEFT_SECOND = {aten.addmm, aten.baddbmm}  # products whose left factor is the second argument
BY_PIXELS = {aten.convolution, aten._convolution, aten.convolution_overrideable}  # they have no rows
TO_CPU = "copy to the CPU"
NOT_THE_CALLER = (__file__, product.__file__)


class Wait(NamedTuple):
    """A call that makes the CPU wait for the device, and where the code has it."""

    call: str
    file: str
    function: str

    @property
    def is_ours(self) -> bool:
        """Whether the call is the pack's own; ComfyUI and its models have others."""
        return Path(self.file).is_relative_to(PACK)

    def __str__(self) -> str:
        return f"{self.call} in {'/'.join(Path(self.file).parts[-2:])}, {self.function}"


class WatchedDevice(DeviceCounts):
    """``messages``: bytes sent to others, by operation of torch.distributed; ``unaligned``: places
    of messages that begin where NCCL copies byte by byte. ``by_rows``: FLOPs by the rows that a
    product or an attention has. ``waits``: how often each call made the CPU wait.
    """

    def __init__(self) -> None:
        super().__init__()
        self.by_rows: Counter[int] = Counter()
        self.messages: Counter[str] = Counter()
        self.unaligned = 0
        self.waits: Counter[Wait] = Counter()
        self._pinned: dict[int, weakref.ref] = {}

    def driver(self) -> WatchedDriver:
        return WatchedDriver(self)

    def compute(self, func: Any, args: tuple, options: dict[str, Any]) -> Any:
        if func in COPIES:
            self._note_copy(func, args, options)
        is_pinned, before = options.get("pin_memory", False), self.flops
        made = super().compute(func, args, options)
        if func._overloadpacket in flop_registry:
            self.by_rows[rows_of(func._overloadpacket, args)] += self.flops - before
        elif func.namespace == "c10d":
            self.note_message(func, args)
        for tensor in fake_tensors_of(made) if is_pinned else ():
            storage = tensor.untyped_storage()
            key = storage._cdata
            self._pinned[key] = weakref.ref(storage, lambda _, key=key: self._pinned.pop(key))
        return made

    def read(self, func: Any, args: tuple) -> Any:
        if is_on_device(args[0]):
            self.wait("read")
        return super().read(func, args)

    def without_masks(self, indices: Iterable[torch.Tensor | None]) -> list[torch.Tensor | None]:
        indices = list(indices)
        for index in indices:
            if index is not None and index.dtype in MASKS:
                self.wait("read")
        return super().without_masks(indices)

    def wait(self, call: str) -> None:
        frame = sys._getframe(1)
        while frame is not None and (
            is_within_torch(frame.f_code.co_filename) or frame.f_code.co_filename in NOT_THE_CALLER
        ):
            frame = frame.f_back
        if frame is not None:
            self.waits[Wait(call, frame.f_code.co_filename, frame.f_code.co_name)] += 1

    def _note_copy(self, func: Any, args: tuple, options: dict[str, Any]) -> None:
        """A copy from or into the CPU's ordinary memory may wait until the device has come so far,
        but for a small one to the device, which travels with the command; and so does any that is
        not asked to return early.
        """
        if func is aten.copy_.default:
            target, source, returns_early = (
                is_on_device(args[0]),
                is_on_device(args[1]),
                (args[2:] or (options.get("non_blocking"),))[0],
            )
        else:
            source, returns_early = is_on_device(args[0]), options.get("non_blocking")
            target = (
                source
                if options.get("device") is None
                else torch.device(options["device"]).type == DEVICE.type
            )
        on_cpu = args[1] if target and func is aten.copy_.default else args[0]
        is_small = target and on_cpu.numel() * on_cpu.element_size() <= SMALL_BYTES
        is_pinned = on_cpu.untyped_storage()._cdata in self._pinned
        if target != source and not (returns_early and (is_small or is_pinned)):
            self.wait("copy to the device" if target else "copy from the device")

    def note_message(self, func: Any, args: tuple) -> None:
        name, places = func._opname, [one for one in tree_leaves(args) if isinstance(one, torch.Tensor)]
        sent = 0
        if name == "alltoall_base_":
            received, sending, group, *splits = args[:5]
            places = [
                part
                for whole, sizes in zip((received, sending), splits, strict=True)
                for part in whole.split(sizes)
            ]
            own = dist.ProcessGroup.unbox(group).rank()
            sent = sending.nbytes - splits[1][own] * sending.element_size()
        elif name == "_allgather_base_":
            sent = args[0].nbytes - args[1].nbytes
            places = [args[1], *args[0].split(args[1].numel())]
        elif name == "send":
            sent = sum(tensor.nbytes for tensor in args[0])
        self.messages[name] += sent
        self.unaligned += sum(
            one.numel() > 0 and one.storage_offset() * one.element_size() % PACK_BYTES > 0 for one in places
        )


class AskedOfTorch(TorchDispatchMode):
    """Counts what the CPU asks the device for, by name, messages as ``sent``. It answers where a
    tensor is, which is no operation on a GPU.
    """

    def __init__(self, counts: DeviceCounts):
        super().__init__()
        self.started: Counter[str] = Counter()
        self.sent = 0
        self._counts = counts

    @classmethod
    # Nothing is compiled here, and asking takes longer than most operations
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func is torch.ops.prim.device.default:
            return args[0].fake_device
        before = self._counts.launches
        made = func(*args, **(kwargs or {}))
        if func.namespace == "c10d":
            self.sent += 1
        elif func is aten.copy_.default and not is_on_device(args[0]) and is_on_device(args[1]):
            self.started[TO_CPU] += 1
        else:
            self.started[func._opname] += self._counts.launches - before
        return made


class WatchedDriver(Driver):
    def __init__(self, counts: WatchedDevice):
        self._counts = counts

    def synchronize(self, device: Any = None) -> None:
        self._counts.wait("synchronize")

    def Event(self, *_: Any, **__: Any) -> WatchedEvent:
        return WatchedEvent(self._counts)


class WatchedEvent(Driver):
    """A place in the device's queue. To wait for it is counted where no product and no attention
    was enqueued behind it: then the device has nothing left to do meanwhile.
    """

    def __init__(self, counts: WatchedDevice):
        self._counts = counts
        self._flops = -1  # before it: none

    def record(self, *_: Any) -> None:
        self._flops = self._counts.flops

    def synchronize(self, device: Any = None) -> None:
        if self._flops == self._counts.flops:
            self._counts.wait("event")


def dry_device(mode: FakeTensorMode) -> AbstractContextManager[WatchedDevice]:
    """Compute on the device that is not there, watched. ``mode`` has the tensors of before."""
    return computing_dry(mode, WatchedDevice())


def rows_of(packet: Any, args: tuple) -> int:
    """Return the rows of what a product multiplies, or of an attention's queries; 0 where there are
    none.
    """
    left = args[1] if packet in LEFT_SECOND else args[0]
    return left.shape[-2] if packet not in BY_PIXELS and left.dim() > 1 else 0


def is_within_torch(file: str) -> bool:
    return file.startswith((str(Path(torch.__file__).parent), "<"))
