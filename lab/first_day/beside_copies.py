"""Attention in chunks of heads, alone and beside the copies of an exchange; and what it costs a CPU
to start work on a GPU.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.nn.functional import scaled_dot_product_attention

from .driver import checked, driver
from .link import MIB
from .place import Line, Place, milliseconds, wait

TOKENS, HEAD, HEADS = 4608, 128, 24  # of the documents' first model, at 1024 x 1024
CHUNKS = (1, 2, 4)
PART = 8 * MIB  # bytes of a copy
GATE = 40_000_000  # cycles, some 20 ms, in which a CPU asks for all that is to run together
OPERATIONS = 2000
KERNELS = (1, 10, 40)
REPLAYS = 200


class Bench:
    """Attention of one rank of ``ranks``, and the copies of what it sends and receives before."""

    def __init__(self, place: Place, ranks: int):
        self.device, self.on_cpu, self.heads = place.own(), place.on_cpu, HEADS // ranks
        tokens, dtype = (64, torch.float32) if place.is_tiny else (TOKENS, torch.bfloat16)
        like = torch.empty(3, 1, self.heads, tokens, HEAD, device=self.device, dtype=dtype)
        self.qkv = like.normal_()
        self.nbytes = like.nbytes * (ranks - 1) // ranks
        pinned = not self.on_cpu
        self._here = torch.empty(2, max(PART, self.nbytes), dtype=torch.uint8, device=self.device)
        self._there = torch.empty(2, max(PART, self.nbytes), dtype=torch.uint8, pin_memory=pinned)
        self.out, self.into = (None, None) if self.on_cpu else (torch.cuda.Stream(), torch.cuda.Stream())

    def chunks(self, number: int) -> Sequence[torch.Tensor]:
        return self.qkv.tensor_split(number, dim=2)

    def attend(self, number: int) -> None:
        for query, key, value in self.chunks(number):
            scaled_dot_product_attention(query, key, value)

    def copy(self, start: int, nbytes: int) -> None:
        """Copy to main memory on one stream, and as much from there on another."""
        for stream, into, source in (
            (self.out, self._there[0], self._here[0]),
            (self.into, self._here[1], self._there[1]),
        ):
            with on(stream):
                into[start : start + nbytes].copy_(source[start : start + nbytes], non_blocking=True)

    def exchange_and_attend(self, number: int) -> None:
        """Each chunk of heads is attended to when it has come, while the next one is copied."""
        behind(self.out, self.into)
        each = self.nbytes // number
        for at, (query, key, value) in enumerate(self.chunks(number)):
            self.copy(at * each, each)
            after(self.out, self.into)
            scaled_dot_product_attention(query, key, value)


def on(stream: Any) -> AbstractContextManager[Any]:
    return nullcontext() if stream is None else torch.cuda.stream(stream)


def behind(*streams: Any) -> None:
    """Have the streams wait for the current one."""
    for stream in streams:
        if stream is not None:
            stream.wait_stream(torch.cuda.current_stream())


def after(*streams: Any) -> None:
    """Have the current stream wait for the others."""
    for stream in streams:
        if stream is not None:
            torch.cuda.current_stream().wait_stream(stream)


def attention_beside_copies(place: Place) -> Iterator[Line]:
    for ranks in (2,) if place.is_tiny else (2, 4):
        bench = Bench(place, ranks)
        yield from chunked(bench, place.rounds(8))
        yield from beside(bench) if not place.on_cpu else ()


def chunked(bench: Bench, rounds: int) -> Iterator[Line]:
    copied = lasting(bench, partial(moved, bench), rounds)
    attended, together = (
        {number: lasting(bench, partial(act, number), rounds) for number in CHUNKS}
        for act in (bench.attend, bench.exchange_and_attend)
    )
    for number in CHUNKS:
        hidden = 100 * (attended[1] + copied - together[number]) / min(attended[1], copied)
        yield Line(
            f"{bench.heads} heads in {len(bench.chunks(number))}: attention {attended[number]:.3f} ms,"
            f" {bench.nbytes / 1e6:.1f} MB copied each way {copied:.3f} ms, one behind the other"
            f" {together[number]:.3f} ms",
            f"{hidden:.0f} % of the shorter one is hidden",
        )


def lasting(bench: Bench, act: Callable[[], None], rounds: int) -> float:
    """Return the milliseconds of one, on a GPU among others that were asked for before it began."""
    if bench.on_cpu:
        return milliseconds(act, bench.device, rounds)
    act()
    return timed([(None, act, rounds)])[0] / rounds


def moved(bench: Bench) -> None:
    behind(bench.out, bench.into)
    bench.copy(0, bench.nbytes)
    after(bench.out, bench.into)


class Span(NamedTuple):
    """Events that enclose what a stream does."""

    began: torch.cuda.Event
    ended: torch.cuda.Event

    @property
    def ms(self) -> float:
        return self.began.elapsed_time(self.ended)


def beside(bench: Bench) -> Iterator[Line]:
    """Attention and copies of 8 MB that take about as long, each alone and both at once."""
    attention_ms = timed([(None, partial(bench.attend, 1), 8)])[0] / 8
    pair_ms = max(timed(copies(bench, 8))) / 8
    number = max(8, round(40 * attention_ms / pair_ms))
    alone = timed([(None, partial(bench.attend, 1), 40)])[0]
    copied = max(timed(copies(bench, number)))
    attended, *both = timed([(None, partial(bench.attend, 1), 40), *copies(bench, number)])
    hidden = (alone + copied - max(attended, *both)) / min(alone, copied)
    rate = number * PART / 1e6
    yield Line(
        f"{bench.heads} heads, 40 times, beside copies of 8 MiB each way: attention {alone:.1f} ms alone,"
        f" {attended:.1f} beside ({attended / alone:.2f} times as long); copies {rate / copied:.1f} GB/s each"
        f" way alone, {rate / max(both):.1f} beside",
        f"{100 * hidden:.0f} % of the shorter one is hidden",
    )


def copies(bench: Bench, number: int) -> list[tuple[Any, Callable[[], Any], int]]:
    ways = (
        (bench.out, bench._there[0], bench._here[0]),
        (bench.into, bench._here[1], bench._there[1]),
    )
    return [
        (stream, partial(into[:PART].copy_, source[:PART], non_blocking=True), number)
        for stream, into, source in ways
    ]


def timed(asked: Sequence[tuple[Any, Callable[[], Any], int]]) -> list[float]:
    """Return the milliseconds that each stream takes for its act, so many times, where all begin
    together; the CPU asks for them while the GPU sleeps.
    """
    torch.cuda.synchronize()
    torch.cuda._sleep(GATE)
    spans = []
    for stream, _, _ in asked:
        behind(stream)
    for stream, act, times in asked:
        with on(stream):
            span = Span(*(torch.cuda.Event(enable_timing=True) for _ in range(2)))
            span.began.record()
            for _ in range(times):
                act()
            span.ended.record()
            spans.append(span)
    torch.cuda.synchronize()
    return [span.ms for span in spans]


def launch_costs(place: Place) -> Iterator[Line]:
    """What the CPU takes to start work, and a GPU for each."""
    torch.set_num_threads(1)
    device, number = place.own(), OPERATIONS // (100 if place.is_tiny else 1)
    one = torch.ones(64, device=device)
    yield costing("an addition", one.add_, (1,), number, device)
    yield costing("a copy within the device", torch.ones_like(one).copy_, (one,), number, device)
    if place.on_cpu:
        yield Line("graphs and the driver's calls: not tried", "a CPU has none")
        return
    for kernels in KERNELS:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(kernels):
                one.add_(1)
        yield costing(f"a graph of {kernels} kernels", graph.replay, (), REPLAYS, device, kernels)
    yield from calls_of_driver(device)


def calls_of_driver(device: torch.device) -> Iterator[Line]:
    found, there = driver(), torch.zeros(1024, dtype=torch.int32, pin_memory=True)
    here, stream = torch.zeros_like(there, device=device), torch.cuda.current_stream().cuda_stream
    raw, event, own = found.CUstream(stream), torch.cuda.Event(), there.data_ptr()

    def act(call: Callable[..., Any], *args: Any) -> None:
        checked(call(*args))

    number = REPLAYS
    yield costing("a number written", act, (found.cuStreamWriteValue32, raw, own, 7, 0), number, device)
    yield costing("a number waited for", act, (found.cuStreamWaitValue32, raw, own, 7, 0), number, device)
    copied = (found.cuMemcpyAsync, here.data_ptr(), own, 4096, raw)
    yield costing("4 KiB copied in by the driver", act, copied, number, device)
    yield costing(
        "4 KiB copied in by torch", partial(here.copy_, non_blocking=True), (there,), number, device
    )
    yield costing("an event recorded", event.record, (), number, device)
    plain = ctypes.CDLL("libcuda.so.1").cuStreamWriteValue32_v2
    plain.argtypes = [ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint]
    written = partial(lambda *args: checked((plain(*args),)), stream, own, 8, 0)
    yield costing("a number written, by ctypes", written, (), number, device)


def costing(
    name: str,
    act: Callable[..., Any],
    args: tuple[Any, ...],
    times: int,
    device: torch.device,
    parts: int = 1,
) -> Line:
    """``parts``: of each act, by which its time on the device is shared."""
    for _ in range(10):
        act(*args)
    wait(device)
    began = time.perf_counter()
    for _ in range(times):
        act(*args)
    asked = time.perf_counter() - began
    wait(device)
    taken = time.perf_counter() - began
    each, all_of = (1e6 * one / times for one in (asked, taken))
    share = f", {all_of / parts:.2f} for each of its kernels" if parts > 1 else ""
    return Line(
        f"{name}: {each:.2f} us of the CPU, {all_of:.2f} us with the device{share}",
        "the CPU is what it waits for" if asked > 0.8 * taken else "the device is what it waits for",
    )
