"""A GPU that no machine has, as late as a GPU may be: its tensors say that they are on cuda:N, hold
real data, and are computed when somebody waits for them. A process that asks for another GPU, or
for one without a number, is told: on a real one that may make a context elsewhere.

Each operation goes into a stream's queue (late_queues.py). A process waits for an event, a value
that it reads, and a copy from or to memory that is not pinned; a stream that waits for another does
so in its queue. Until memory is written, and where it is free again, it has what shows: NaN, or all
bits set. A seeded scheduler moves on any queue that may move, so what holds at every seed holds by
the order of events. late_ranks.py has many processes, each with such a GPU.
"""

import weakref
from collections import Counter
from contextlib import ExitStack, contextmanager
from functools import cache
from types import SimpleNamespace
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_unflatten

from .late_queues import Box

CAPABILITY = (9, 0)  # of an H100
PLENTY = 1 << 40  # bytes
aten = torch.ops.aten
# Torch takes these apart by rules of each device; here each is computed as on the CPU
WHOLE = {
    aten.linear.default,
    aten.matmul.default,
    aten.rms_norm.default,
    aten.layer_norm.default,
    aten.scaled_dot_product_attention.default,
}
BY_INDEX = {aten.index.Tensor, aten.index_put.default, aten.index_put_.default}
UNWRITTEN = {
    f"aten::{name}" for name in ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")
}
BY_DATA = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


class Memory:
    """A block of a GPU's memory. Where no tensor has it any more, it is again the stream's that it
    was taken in: what this one is asked for from then on may write there.
    """

    def __init__(self, gpu, content):
        gpu.take(content.untyped_storage().nbytes())
        self.box, self._content, self.gpu = gpu.box, content, gpu
        self._queue = gpu.current if gpu.current.recording is None else None
        gpu.graph_bytes += 0 if self._queue else content.untyped_storage().nbytes()

    def __del__(self):
        if not hasattr(self, "_queue"):
            return  # there was none
        content = self._content
        self.gpu.held_bytes -= content.untyped_storage().nbytes()
        self.gpu.free(self._queue, lambda: poison(content))


def poison(content):
    if content.dtype.is_floating_point:
        content.fill_(float("nan"))
    else:
        content.fill_(1 if content.dtype == torch.bool else 255 if content.dtype == torch.uint8 else -1)


class LateTensor(torch.Tensor):
    """A tensor of a GPU. ``content``: what is there when its queue has come so far."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, content, memory):
        layout = {"strides": content.stride(), "storage_offset": content.storage_offset()}
        made = torch.Tensor._make_wrapper_subclass(
            cls, content.shape, **layout, dtype=content.dtype, device="meta", dispatch_device=True
        )
        made.content, made.memory = content, memory
        return made

    device = property(lambda self: self.memory.gpu.device)
    is_cuda = property(lambda self: True)
    is_meta = property(lambda self: False)

    def __repr__(self):
        return f"LateTensor{tuple(self.shape)}"

    def data_ptr(self):
        return self.content.data_ptr()

    def tolist(self):
        return self.to("cpu").tolist()

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        first = next(one for one in leaves_of(args, kwargs) if isinstance(one, LateTensor))
        return asked_for(first.memory.box, func, args, kwargs or {})


class Mode(TorchDispatchMode):
    def __init__(self, box):
        super().__init__()
        self.box = box

    @classmethod
    # Nothing is compiled here, and asking takes longer than an operation
    def _should_skip_dynamo(cls):
        return False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return asked_for(self.box, func, args, kwargs or {})


def leaves_of(*trees):
    """As pytree's, in a fraction of the time."""
    found = []
    for one in trees:
        if type(one) in (tuple, list):
            found += leaves_of(*one)
        elif type(one) is dict:
            found += leaves_of(*one.values())
        else:
            found.append(one)
    return found


@cache
def is_taken_apart(func):
    return func not in WHOLE and func._can_decompose()


def mapped(function, tree):
    if isinstance(tree, (tuple, list)):
        return type(tree)([mapped(function, one) for one in tree])
    return (
        {name: mapped(function, one) for name, one in tree.items()}
        if isinstance(tree, dict)
        else function(tree)
    )


# -- what becomes of an operation that is asked for


def asked_for(box, func, args, kwargs):
    if func is torch.ops.prim.device.default:
        return args[0].device
    if func is aten._has_compatible_shallow_copy_type.default:
        return type(args[0]) is type(args[1])  # else a module makes itself new parameters when it moves
    leaves = leaves_of(args, kwargs)
    asked = [one.type for one in leaves if isinstance(one, torch.device)]
    own = box.gpu.device
    if others := [
        one for one in leaves if isinstance(one, torch.device) and one.type == "cuda" and one != own
    ]:
        raise RuntimeError(f"{func}: {others[0]} in a process that computes on {own}")
    if "cuda" not in asked and not any(isinstance(one, LateTensor) for one in leaves):
        return on_cpu(box, func, args, dict(kwargs))
    if is_taken_apart(func):
        with Mode(box):
            made = func.decompose(*args, **kwargs)
        if made is not NotImplemented:
            return made
    if func is aten.is_pinned.default:
        return False
    if func is aten.detach_.default:
        return args[0]
    if func is aten._to_copy.default:
        return moved(box, args[0], dict(kwargs), "cpu" in asked)
    if func is aten.copy_.default:
        return copied(box, *args, **kwargs)
    return on_gpu(box.gpu, func, args, kwargs)


def on_cpu(box, func, args, kwargs):
    if func is aten.is_pinned.default:
        return is_pinned(box, args[0])
    pinned = kwargs.pop("pin_memory", False)
    made = func(*args, **kwargs)
    return pin_down(box, made) if pinned else made


def pin_down(box, tensor):
    """A copy that is in a queue holds pinned memory, as torch's allocator does until its event."""
    storage = tensor.untyped_storage()
    box.pinned.add(storage._cdata)
    weakref.finalize(storage, box.pinned.discard, storage._cdata)
    poison(tensor)
    return tensor


def is_pinned(box, tensor):
    """A copy may not go past the end of what was registered at once, as with a driver."""
    at = tensor.data_ptr()
    left = [start + nbytes - at for start, nbytes in box.registered.items() if 0 <= at - start < nbytes]
    assert not left or tensor.nbytes <= left[0], "a copy beyond what was registered"
    return tensor.untyped_storage()._cdata in box.pinned or bool(left)


def content_of(leaf):
    """What an operation reads. A number that is on the CPU goes along as it is now."""
    if isinstance(leaf, LateTensor):
        return leaf.content
    if isinstance(leaf, torch.device):
        return torch.device("cpu")
    return leaf.clone() if isinstance(leaf, torch.Tensor) else leaf


def on_gpu(gpu, func, args, kwargs):
    tensors = [leaf for leaf in leaves_of(args, kwargs) if isinstance(leaf, torch.Tensor)]
    given, options = mapped(content_of, args), mapped(content_of, kwargs)
    if func.is_view:
        memory = tensors[0].memory
        views = func(*given, **options)
        return mapped(lambda one: LateTensor(one, memory) if isinstance(one, torch.Tensor) else one, views)
    elsewhere = [tensor for tensor in tensors if tensor.ndim and not isinstance(tensor, LateTensor)]
    if func in BY_INDEX:
        by_data = bool(elsewhere) or any(one is not None and one.dtype == torch.bool for one in args[1])
    elif elsewhere and func._schema.name not in UNWRITTEN:
        raise RuntimeError(
            f"{func}: Expected all tensors to be on the same device, but found {gpu.device} and cpu"
        )
    else:
        by_data = bool(BY_DATA & set(func.tags))
    if not by_data:
        return later(gpu, func, args, kwargs, given, options)
    gpu.wait_for(gpu.current.last, func._schema.name)
    made = func(*given, **options)
    if func._schema.is_mutable:
        return args[0]
    return mapped(lambda one: fresh(gpu, one) if isinstance(one, torch.Tensor) else one, made)


def later(gpu, func, args, kwargs, given, options):
    name = func._schema.name
    if func._schema.is_mutable:
        gpu.push(name, lambda: func(*given, **options))
        return kwargs.get("out", args[0]) if func._schema.returns else None
    layouts, spec = layouts_of(func, given, options)
    places = [unwritten(layout) for layout in layouts]

    def run():
        for place, content in zip(places, leaves_of(func(*given, **options)), strict=True):
            place.copy_(content)

    made = [fresh(gpu, place) for place in places]
    if name not in UNWRITTEN:
        gpu.push(name, run)
    return tree_unflatten(made, spec)


def fresh(gpu, content):
    return LateTensor(content, Memory(gpu, content))


def unwritten(layout):
    shape, strides, dtype = layout
    place = torch.empty_strided(shape, strides, dtype=dtype)
    poison(place)
    return place


KNOWN = {}


def layouts_of(func, args, kwargs):
    """Returns shape, strides and dtype of each tensor that an operation returns: it is done once,
    with zeros.
    """
    leaves, spec = tree_flatten((args, kwargs))
    key = (
        func,
        spec,
        *(layout_of(one) if isinstance(one, torch.Tensor) else (type(one), one) for one in leaves),
    )
    if key not in KNOWN:
        zeros = [zeros_like(one) if isinstance(one, torch.Tensor) else one for one in leaves]
        args, kwargs = tree_unflatten(zeros, spec)
        made, made_spec = tree_flatten(func(*args, **kwargs))
        KNOWN[key] = [layout_of(one) for one in made], made_spec
    return KNOWN[key]


def layout_of(tensor):
    return tensor.shape, tensor.stride(), tensor.dtype


def zeros_like(tensor):
    span = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return torch.zeros(max(0, span) + 1, dtype=tensor.dtype).as_strided(tensor.shape, tensor.stride())


def moved(box, source, kwargs, to_cpu):
    """Copies as ``to`` does. A place on the CPU that is not waited for is pinned: torch's is."""
    non_blocking = kwargs.pop("non_blocking", False)
    kwargs.pop("device", None), kwargs.pop("pin_memory", None)
    content = source.content if isinstance(source, LateTensor) else source
    (layout,), _ = layouts_of(aten._to_copy.default, (content,), kwargs)
    place = unwritten(layout)
    if not to_cpu:
        place = fresh(box.gpu, place)
    elif non_blocking:
        pin_down(box, place)
    return copied(box, place, source, non_blocking)


def copied(box, target, source, non_blocking=False):
    """Copies later; waits for that, unless memory is pinned and it need not be waited for."""
    here = [one for one in (target, source) if not isinstance(one, LateTensor)]
    to, of = (getattr(one, "content", one) for one in (target, source))
    op = box.gpu.push("copy", lambda: to.copy_(of))
    if here and not (non_blocking and is_pinned(box, here[0])):
        box.gpu.wait_for(op, "copy")
    return target


# -- torch.cuda


class Driver:
    """What is asked of torch.cuda, of the GPU of the process at hand."""

    def __init__(self, box):
        self._box = box

    def Event(self, *_, **__):
        return Event(self._box)

    def cudart(self):
        return Cudart(self._box)

    def CUDAGraph(self):
        return Graph(self._box.gpu)

    def graph_pool_handle(self):
        return 0, 0

    def Stream(self):
        return Stream(self._box)

    @contextmanager
    def stream(self, stream):
        gpu = self._box.gpu
        gpu.current, before = stream.queue, gpu.current
        try:
            yield
        finally:
            gpu.current = before

    def current_stream(self, device=None):
        return self

    def synchronize(self, device=None):
        gpu = self._box.gpu
        gpu.wait_for(gpu.current.last, "synchronize")

    def get_device_capability(self, device=None):
        return CAPABILITY

    def get_device_properties(self, device=None):
        return SimpleNamespace(name="NVIDIA H100 80GB HBM3", total_memory=80 << 30)

    def current_device(self):
        return self._box.gpu.device.index

    def is_available(self):
        return True

    def mem_get_info(self, device=None):
        return PLENTY, PLENTY

    def memory_stats(self, device=None):
        return Counter()

    def memory_reserved(self, device=None):
        return self._box.gpu.graph_bytes

    def memory_allocated(self, device=None):
        return 0

    def get_rng_state(self, device=None):
        return torch.zeros(16, dtype=torch.uint8)

    def set_rng_state(self, state, device=None): ...
    def empty_cache(self): ...
    def _lazy_init(self): ...


class Stream:
    def __init__(self, box):
        self._box, self.queue = box, box.queue()

    def wait_stream(self, _current):
        self.queue.push(needs=(self._box.gpu.current.last,))

    def synchronize(self):
        self._box.gpu.wait_for(self.queue.last, "Stream.synchronize")


class Graph:
    """What a GPU was asked for in one stream, to be asked for again."""

    def __init__(self, gpu):
        self._gpu, self.asked = gpu, []

    def capture_begin(self, pool=None, capture_error_mode="global"):
        assert self._gpu.current.recording is None and capture_error_mode == "relaxed"
        if self._gpu.generator is None:
            self._gpu.generator = torch.empty(1, device=self._gpu.device)
        self._gpu.generator.fill_(0)  # torch does so, by operations like any other
        self._gpu.current.recording = self.asked
        self._gpu.recordings += 1

    def capture_end(self):
        queue = self._gpu.current
        assert queue.recording is self.asked
        queue.recording, failed, queue.has_failed = None, queue.has_failed, False
        if failed:
            raise RuntimeError("operation failed due to a previous error during capture")

    def pool(self):
        return 0, 0

    def replay(self):
        self._gpu.require_no_recording("a replay")
        self._gpu.replays += 1
        for ask in self.asked:
            ask()


class Cudart:
    """Registers memory as pinned, where the box has a GPU that can."""

    def __init__(self, box):
        self._box = box

    def cudaHostRegister(self, address, nbytes, flags):
        if not self._box.registers:
            return 1
        others = self._box.registered.items()
        assert not any(start < address + nbytes and address < start + size for start, size in others)
        self._box.registered[address] = nbytes
        return 0

    def cudaHostUnregister(self, address):
        del self._box.registered[address]


class Event:
    """The place that the current stream has come to where it is recorded."""

    def __init__(self, box):
        self._box, self.op = box, None

    def record(self):
        self._box.gpu.require_no_recording("Event.record")
        self.op = self._box.gpu.current.last

    def query(self):
        """Who asks again and again sees time pass."""
        if self.op is not None and not self.op.is_over:
            self._box.look()
        return self.op is None or self.op.is_over

    def synchronize(self):
        if self.op is not None and not self.op.is_over:
            self._box.gpu.wait_for(self.op, "Event.synchronize")

    def elapsed_time(self, other):
        assert self.op.is_over and other.op.is_over, "asked before the GPU had come so far"
        return float(max(1, other.op.ended_at - self.op.ended_at))


PATCHED = [name for name in vars(Driver) if not name.startswith("__")]


@contextmanager
def on_this_thread(box):
    lifts = torch._C._only_lift_cpu_tensors()
    with torch.inference_mode(), Mode(box):
        # As with fake tensors: else torch.tensor and t[1:2] call the driver
        torch._C._set_only_lift_cpu_tensors(True)
        torch._C._ensureCUDADeviceGuardSet()
        try:
            yield
        finally:
            torch._C._set_only_lift_cpu_tensors(lifts)


@contextmanager
def late_device(seed=0, at_once=False):
    """Yields a box, whose GPU torch has inside."""
    box = Box(seed, at_once)
    driver = Driver(box)
    with ExitStack() as stack:
        for name in PATCHED:
            stack.enter_context(patch.object(torch.cuda, name, getattr(driver, name)))
        stack.enter_context(on_this_thread(box))
        yield box
