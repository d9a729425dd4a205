"""Stand in for a CUDA device: operations return tensors without content, and count what they would
compute, hold, send and wait for.

FakeTensorMode knows shapes, dtypes and devices alone, and raises where two devices meet in one
operation. Nothing of the driver is called. A value that is read of the device is made up.
"""

from __future__ import annotations

import sys
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from .figures import Wait

DEVICE = torch.device("cuda", 0)
CAPABILITY = (9, 0)  # of an H100; kernels are chosen by it
aten = torch.ops.aten
QUESTIONS = {torch.ops.prim.device.default, aten.is_pinned.default}  # they compute nothing
READS = {aten._local_scalar_dense.default, aten.equal.default}
# Of a copy to the device that the driver takes at once (CUDA's API synchronization behavior)
SMALL_BYTES = 1 << 16
COPIES = {aten._to_copy.default, aten.copy_.default}
BY_INDEX = {aten.index.Tensor, aten.index_put.default, aten.index_put_.default}
LEFT_SECOND = {aten.addmm, aten.baddbmm}  # products whose left factor is the second argument
UNREAD = {aten.copy_.default, aten.fill_.Scalar, aten.zero_.default}  # they write their first argument alone
BY_PIXELS = {aten.convolution, aten._convolution, aten.convolution_overrideable}  # they have no rows


class Memory:
    """The memory of tensors. ``live`` and ``peak``: bytes of those on the device that were made
    meanwhile.
    """

    def __init__(self) -> None:
        self.live = self.peak = 0
        self._storages: dict[int, weakref.ref] = {}
        self._pinned: dict[int, weakref.ref] = {}
        self._known: set[int] = set()

    def leave_out(self, tensors: Iterable[torch.Tensor]) -> None:
        """Do not count these, which were there before."""
        for tensor in tensors:
            self._known.add(tensor.untyped_storage()._cdata)

    def hold(self, tensor: FakeTensor, is_pinned: bool) -> None:
        """Count a tensor until its last view has gone."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if is_pinned:
            self._pinned[key] = weakref.ref(storage, lambda _: self._pinned.pop(key))
        if not is_on_device(tensor) or key in self._storages or key in self._known:
            return
        nbytes = storage.nbytes()

        def free(_: Any) -> None:
            del self._storages[key]
            self.live -= nbytes

        self._storages[key] = weakref.ref(storage, free)
        self.live += nbytes
        self.peak = max(self.peak, self.live)

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage()._cdata in self._pinned


class Counts(TorchDispatchMode):
    """Counts while it is entered. ``messages``: bytes sent, by operation of torch.distributed.
    ``value``: all that code reads of the device; ``chosen``: the share of its elements that a mask
    chooses. ``by_rows``: FLOPs by the rows that a product or an attention has. ``moved``: kernels
    beside products, attentions and messages, by the bytes that they read and write.
    """

    def __init__(self) -> None:
        super().__init__()
        self.value = 0.0
        self.chosen = 1.0
        self.by_rows: Counter[int] = Counter()
        self.moved: Counter[int] = Counter()
        self.memory = Memory()
        self.messages: Counter[str] = Counter()
        self.waits: Counter[Wait] = Counter()

    @property
    def flops(self) -> int:
        return sum(self.by_rows.values())

    @classmethod
    # Nothing is compiled here, and asking takes longer than most operations
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        options = dict(kwargs or {})
        if func is torch.ops.prim.device.default and isinstance(args[0], FakeTensor):
            return args[0].device
        if func in QUESTIONS:
            return func(*args, **options)
        if func in READS:
            return self._read(func, args)
        if func is aten.scaled_dot_product_attention.default:
            with self:
                return fused_attention(*args, **options)
        if func._overloadpacket not in flop_registry and func._can_decompose():
            with self:
                made = func.decompose(*args, **options)
            if made is not NotImplemented:
                return made
        return self._compute(func, args, options)

    def _compute(self, func: Any, args: tuple, options: dict[str, Any]) -> Any:
        if func in COPIES:
            self._note_copy(func, args, options)
        if func in BY_INDEX:
            args = (args[0], self._without_masks(args[1]), *args[2:])
        # Torch would make the real thing of a tensor whose value it knows
        if options.get("device") is not None:
            for leaf in args:
                if isinstance(leaf, FakeTensor):
                    leaf.constant = None
        is_pinned = options.pop("pin_memory", False)
        made = func(*args, **options)
        if func._overloadpacket in flop_registry:
            self.by_rows[rows_of(func._overloadpacket, args)] += flop_registry[func._overloadpacket](
                *args, **options, out_val=made
            )
        elif func.namespace == "c10d":
            self._note_message(func, args)
        else:
            self.moved[moved_bytes(func, args, made)] += 1
        for leaf in (made,) if isinstance(made, torch.Tensor) else tree_leaves(made):
            if isinstance(leaf, FakeTensor):
                self.memory.hold(leaf, is_pinned)
        return made

    def _read(self, func: Any, args: tuple) -> Any:
        """Read a value. A tensor that was made of a number on the CPU has it still."""
        if is_on_device(args[0]):
            self.wait("read")
        elif not isinstance(args[0], FakeTensor) or args[0].constant is not None:
            try:
                return func(*args)
            except DataDependentOutputException:
                pass
        if func is aten.equal.default:
            return True
        return self.value if args[0].dtype.is_floating_point else int(self.value)

    def _without_masks(self, indices: Iterable[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """Return numbers of rows in place of masks, which choose rows that nobody knows here."""
        found: list[torch.Tensor | None] = []
        for index in indices:
            if index is None or index.dtype not in (torch.bool, torch.uint8):
                found.append(index)
                continue
            self.wait("read")
            count = int(self.chosen * index.numel())
            found += [torch.empty(count, dtype=torch.long, device=index.device) for _ in range(index.dim())]
        return found

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
        if target != source and not (returns_early and (is_small or self.memory.is_pinned(on_cpu))):
            self.wait("copy to the device" if target else "copy from the device")

    def wait(self, call: str) -> None:
        frame = sys._getframe(1)
        while frame is not None and (
            is_within_torch(frame.f_code.co_filename) or frame.f_code.co_filename == __file__
        ):
            frame = frame.f_back
        if frame is not None:
            self.waits[Wait(call, frame.f_code.co_filename, frame.f_code.co_name)] += 1

    def _note_message(self, func: Any, args: tuple) -> None:
        sent = {
            "alltoall_base_": args[1:2],
            "_allgather_base_": args[1:2],
            "send": args[0] if args else (),
        }.get(func._opname, ())
        receivers = args[0].numel() // args[1].numel() - 1 if func._opname == "_allgather_base_" else 1
        self.messages[func._opname] += receivers * sum(
            tensor.numel() * tensor.element_size() for tensor in sent
        )


def rows_of(packet: Any, args: tuple) -> int:
    """Return the rows of what a product multiplies, or of an attention's queries; 0 where there are
    none.
    """
    left = args[1] if packet in LEFT_SECOND else args[0]
    return left.shape[-2] if packet not in BY_PIXELS and left.dim() > 1 else 0


def moved_bytes(func: Any, args: tuple, made: Any) -> int:
    """Return the bytes that a kernel reads and writes; 0 where there is none, as for a view."""
    given = [leaf for leaf in tree_leaves(args) if is_on_device(leaf)]
    found = [leaf for leaf in tree_leaves(made) if is_on_device(leaf)]
    known = {leaf.untyped_storage()._cdata for leaf in given}
    is_view = not func._schema.is_mutable and all(leaf.untyped_storage()._cdata in known for leaf in found)
    if is_view or "empty" in func._opname:
        return 0
    return sum(map(own_bytes, (given[1:] if func in UNREAD else given) + found))


def own_bytes(tensor: torch.Tensor) -> int:
    """Return the bytes of memory that a tensor shows: an expanded one has fewer than elements."""
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())


def is_on_device(tensor: Any) -> bool:
    return isinstance(tensor, FakeTensor) and tensor.fake_device.type == DEVICE.type


def is_within_torch(file: str) -> bool:
    return file.startswith((str(Path(torch.__file__).parent), "<"))


def fused_attention(
    q, k, v, attn_mask=None, dropout_p=0.0, is_causal=False, *, scale=None, enable_gqa=False
) -> torch.Tensor:
    """Attend by the kernel that torch has for it on such a device, which holds no scores."""
    if enable_gqa:
        k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    if attn_mask is None and q.dtype in (torch.float16, torch.bfloat16):
        return aten._scaled_dot_product_flash_attention(q, k, v, dropout_p, is_causal, scale=scale)[0]
    bias = None if attn_mask is None else attn_mask.expand(*q.shape[:3], k.shape[2])
    return aten._scaled_dot_product_efficient_attention(
        q, k, v, bias, False, dropout_p, is_causal, scale=scale
    )[0]


class Driver:
    """The parts of torch.cuda that ranks call, without a driver."""

    def __init__(self, counts: Counts):
        self._counts = counts

    def get_device_capability(self, device: Any = None) -> tuple[int, int]:
        return CAPABILITY

    def current_stream(self, device: Any = None) -> Driver:
        return self

    def synchronize(self, device: Any = None) -> None:
        self._counts.wait("synchronize")

    def Event(self, *_: Any, **__: Any) -> DryEvent:
        return DryEvent(self._counts)


class DryEvent:
    """A place in the device's queue. To wait for it is counted where no product and no attention
    was enqueued behind it: then the device has nothing left to do meanwhile.
    """

    def __init__(self, counts: Counts):
        self._counts = counts
        self._flops = -1  # before it: none

    def record(self, *_: Any) -> None:
        self._flops = self._counts.flops

    def synchronize(self) -> None:
        if self._flops == self._counts.flops:
            self._counts.wait("event")

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: Any) -> float:
        return 0.0


@contextmanager
def dry_device(mode: FakeTensorMode) -> Iterator[Counts]:
    """Compute on the device that is not there. ``mode`` has the tensors of before."""
    counts = Counts()
    driver = Driver(counts)
    with ExitStack() as stack:
        for name in ("get_device_capability", "current_stream", "synchronize", "Event"):
            stack.enter_context(patch.object(torch.cuda, name, getattr(driver, name)))
        for entered in (mode, torch.inference_mode(), counts):
            stack.enter_context(entered)
        yield counts
