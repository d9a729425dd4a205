"""Stand in for a CUDA device: operations return tensors without content, and their FLOPs, memory
and moved bytes are counted. ``lab/dry_run/device.py`` also counts sent bytes and waits.

FakeTensorMode knows only shapes, dtypes and devices, and raises if two devices meet in one
operation. Nothing of the driver is called. A value that is read from the device is made up.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar
from unittest.mock import patch

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

DEVICE = torch.device("cuda", 0)
CAPABILITY = (9, 0)  # of an H100; kernels are chosen by it
aten = torch.ops.aten
QUESTIONS = {torch.ops.prim.device.default, aten.is_pinned.default}  # they compute nothing
READS = {aten._local_scalar_dense.default, aten.equal.default}
BY_INDEX = {aten.index.Tensor, aten.index_put.default, aten.index_put_.default}
MASKS = (torch.bool, torch.uint8)
OWN = "pipemesh"
FUSED = {aten.rms_norm.default}  # operations of torch's that are one kernel there, whatever they are made of
UNREAD = {aten.copy_.default, aten.fill_.Scalar, aten.zero_.default}  # they write their first argument alone


class CountedMemory:
    """The memory of tensors that were made on the device: ``live`` bytes now, ``peak`` at most."""

    def __init__(self) -> None:
        self.live = self.peak = 0
        self._storages: dict[int, weakref.ref] = {}
        self._known: set[int] = set()

    def leave_out(self, tensors: Iterable[torch.Tensor]) -> None:
        """Do not count these, which were there before."""
        for tensor in tensors:
            self._known.add(tensor.untyped_storage()._cdata)

    def hold(self, tensor: torch.Tensor) -> None:
        """Count a tensor until its last view has gone."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if not is_on_device(tensor) or key in self._storages or key in self._known:
            return
        nbytes = storage.nbytes()

        def free(_: Any) -> None:
            del self._storages[key]
            self.live -= nbytes

        self._storages[key] = weakref.ref(storage, free)
        self.live += nbytes
        self.peak = max(self.peak, self.live)


class DeviceCounts(TorchDispatchMode):
    """Counts while it is entered. ``value``: all that code reads of the device; ``chosen``: the
    share of its elements that a mask chooses. ``moved``: kernels beside products, attentions and
    messages, by the bytes that they read and write. ``launches``: all kernels, a message as one;
    ``spared``: of those, the ones that are not where an operation of the pack's own is one.
    """

    def __init__(self) -> None:
        super().__init__()
        self.value = 0.0
        self.chosen = 1.0
        self.flops = self.launches = self.spared = 0
        self.moved: Counter[int] = Counter()
        self.memory = CountedMemory()

    @classmethod
    # Nothing is compiled here, and asking takes longer than most operations
    def _should_skip_dynamo(cls) -> bool:
        return False

    @property
    def so_far(self) -> tuple[int, int]:
        """The FLOPs and the launches."""
        return self.flops, self.launches

    def driver(self) -> Driver:
        return Driver()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        options = dict(kwargs or {})
        if func is torch.ops.prim.device.default and isinstance(args[0], FakeTensor):
            return args[0].device
        if func in QUESTIONS:
            return func(*args, **options)
        if func in READS:
            return self.read(func, args)
        if func is aten.scaled_dot_product_attention.default:
            with self:
                return fused_attention(*args, **options)
        if func._overloadpacket not in flop_registry and func._can_decompose():
            before = self.launches
            with self:
                made = func.decompose(*args, **options)
            if made is not NotImplemented:
                self.spared += (self.launches - before - 1) * (func.namespace == OWN)
                if func in FUSED:
                    self.launches = before + 1
                return made
        return self.compute(func, args, options)

    def compute(self, func: Any, args: tuple, options: dict[str, Any]) -> Any:
        if func in BY_INDEX:
            args = (args[0], self.without_masks(args[1]), *args[2:])
        # Torch would make the real thing of a tensor whose value it knows
        if options.get("device") is not None:
            for leaf in args:
                if isinstance(leaf, FakeTensor):
                    leaf.constant = None
        options.pop("pin_memory", None)
        made = func(*args, **options)
        packet = func._overloadpacket
        nbytes = 1
        if packet in flop_registry:
            self.flops += flop_registry[packet](*args, **options, out_val=made)
        elif func.namespace != "c10d":
            nbytes = moved_bytes(func, args, made)
            self.moved[nbytes] += 1
        self.launches += nbytes > 0
        for leaf in fake_tensors_of(made):
            self.memory.hold(leaf)
        return made

    def read(self, func: Any, args: tuple) -> Any:
        """Read a value. A tensor that was made of a number on the CPU has it still."""
        is_known = not isinstance(args[0], FakeTensor) or args[0].constant is not None
        if is_known and not is_on_device(args[0]):
            try:
                return func(*args)
            except DataDependentOutputException:
                pass
        if func is aten.equal.default:
            return True
        return self.value if args[0].dtype.is_floating_point else int(self.value)

    def without_masks(self, indices: Iterable[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """Return numbers of rows in place of masks, which choose rows that nobody knows here."""
        found: list[torch.Tensor | None] = []
        for index in indices:
            if index is None or index.dtype not in MASKS:
                found.append(index)
                continue
            count = int(self.chosen * index.numel())
            found += [torch.empty(count, dtype=torch.long, device=index.device) for _ in range(index.dim())]
        return found


def fake_tensors_of(made: Any) -> list[FakeTensor]:
    """Return the tensors without content among the results of an operation."""
    leaves = (made,) if isinstance(made, torch.Tensor) else tree_leaves(made)
    return [leaf for leaf in leaves if isinstance(leaf, FakeTensor)]


def moved_bytes(func: Any, args: tuple, made: Any) -> int:
    """Return the bytes that a kernel reads and writes; 0 without a kernel, as for a view."""
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


def fused_attention(
    q, k, v, attn_mask=None, dropout_p=0.0, is_causal=False, *, scale=None, enable_gqa=False
) -> torch.Tensor:
    """Attend by the kernel that torch has for it on such a device, which holds no scores; it takes
    channels that lie one behind the other.
    """
    if any(one.stride(-1) != 1 for one in (q, k, v)):
        return aten._scaled_dot_product_attention_math(
            q, k, v, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )[0]
    if enable_gqa:
        k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    if attn_mask is None and q.dtype in (torch.float16, torch.bfloat16):
        return aten._scaled_dot_product_flash_attention(q, k, v, dropout_p, is_causal, scale=scale)[0]
    bias = None if attn_mask is None else attn_mask.expand(*q.shape[:3], k.shape[2])
    return aten._scaled_dot_product_efficient_attention(
        q, k, v, bias, False, dropout_p, is_causal, scale=scale
    )[0]


class Driver:
    """The parts of torch.cuda that models and ranks call, without a driver. A stream, and a place
    in one, are a Driver as well.
    """

    def get_device_capability(self, device: Any = None) -> tuple[int, int]:
        return CAPABILITY

    def current_stream(self, device: Any = None) -> Driver:
        return self

    def synchronize(self, device: Any = None) -> None: ...

    def Event(self, *_: Any, **__: Any) -> Any:
        return self

    def record(self, *_: Any) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: Any) -> float:
        return 0.0


C = TypeVar("C", bound=DeviceCounts)


@contextmanager
def computing_dry(mode: FakeTensorMode, counts: C) -> Iterator[C]:
    """Compute on the device that is not there, and count. ``mode`` has the tensors of before."""
    driver = counts.driver()
    with ExitStack() as stack:
        for name in ("get_device_capability", "current_stream", "synchronize", "Event"):
            stack.enter_context(patch.object(torch.cuda, name, getattr(driver, name)))
        for entered in (mode, torch.inference_mode(), counts):
            stack.enter_context(entered)
        yield counts
