"""What becomes of queues that wait for numbers of another process: registered in which way, never
written, of a process that is killed, and recorded as a CUDA graph.
"""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from ...parallel_runtime.wire.segment import Segment, mapped
from .driver import MAPPED, PORTABLE, USED, Refused
from .link import KIB, engine_of, meeting, over, pattern, streaming
from .place import FORK, Broken, Child, Line, Place, in_process, side_by_side
from .staged import IN, OUT, Engine, Room, Staged, number_at, release

ROOM = Room(2, 64 * KIB)
PART = 64 * KIB  # numbers of each part: four slots of bytes
WAITS_S = 0.1  # of silence, by which a queue is known to wait
LIMIT_S = 10.0
NUMBER = 5
SUM = 1000
FLAGS = {
    "Portable and Mapped": USED,
    "Portable": PORTABLE,
    "Mapped": MAPPED,
    "neither": 0,
}


def lost_peer(place: Place) -> Iterator[Line]:
    for act in (registered, released, killed, *(() if place.on_cpu else (captured,))):
        try:
            yield from act(place)
        except Broken as error:
            yield Line(f"{act.__name__}: {error}", "not as it must be", fails=True)


@contextmanager
def shared() -> Iterator[tuple[int, int]]:
    """Yield the descriptor of a segment, and its address in this process, which has no GPU."""
    segment = Segment.create("first-day", ROOM.nbytes)
    mapping = mapped(segment.fd, ROOM.nbytes)
    try:
        yield segment.fd, ctypes.addressof(mapping)
    finally:
        segment.close()
        del mapping


def registered(place: Place) -> Iterator[Line]:
    """Of two processes each registers its own mapping, in each way."""
    barrier = FORK.Barrier(2)
    with shared() as (fd, _):
        made = [partial(passing, place, fd, rank, meeting(barrier)) for rank in range(2)]
        ranks = side_by_side(made, LIMIT_S)
    for name in ranks[0]:
        refusals = sorted({found[name] for found in ranks} - {""})
        yield Line(
            f"registered as {name}: {', '.join(refusals) or 'a number passes'}",
            "refused" if refusals else "between mappings of two processes",
            fails=bool(refusals) and FLAGS[name] == USED,
        )


def passing(place: Place, fd: int, rank: int, meet: Callable[[], object]) -> Iterator[dict[str, str]]:
    found = {}
    with streaming(place):
        for number, (name, flags) in enumerate(FLAGS.items(), 1):
            meet()
            try:
                with engine_of(place, fd, ROOM.nbytes, flags) as engine:
                    act = engine.wait if rank else engine.write
                    act(OUT, ROOM.sent(0, 1), number)
                    engine.end()
                    over(place.own())
                found[name] = ""
            except Refused as error:
                found[name] = str(error)
    yield found


def released(place: Place) -> Iterator[Line]:
    """Nobody writes what a queue waits for: the CPU of another process does."""
    with shared() as (fd, address), child(partial(waiting, place, fd)) as waiter:
        waiter.next()
        waited, came_s = let_go(waiter, address)
        if waiter.next() != SUM:
            raise Broken("what the device computes afterwards is wrong")
    yield went_on("a queue whose number nobody writes", waited, came_s)


def waiting(place: Place, fd: int) -> Iterator[Any]:
    with streaming(place), engine_of(place, fd, ROOM.nbytes) as engine:
        yield "asks"
        engine.begin()
        engine.wait(IN, ROOM.sent(1, 0), NUMBER)
        engine.end()
        over(place.own())
        yield time.monotonic()
        yield sums(place)


def sums(place: Place) -> float:
    """Return what new work of the device comes to, which is to be SUM."""
    return float(torch.ones(SUM, device=place.own()).sum())


def let_go(waiter: Child, address: int) -> tuple[bool, float]:
    """Return whether it waited, and how soon it went on when the numbers were written."""
    waited, wrote = not waiter.told.poll(WAITS_S), time.monotonic()
    release(address, ROOM)
    if not waiter.told.poll(LIMIT_S):
        raise Broken(f"its queue does not go on within {LIMIT_S:.0f} s of the CPU's writing")
    return waited, waiter.next() - wrote


def went_on(what: str, waited: bool, came_s: float, more: str = "") -> Line:
    figure = (
        f"{what} {'waits' if waited else 'DOES NOT WAIT'}, and goes on {1e6 * came_s:.0f} us after the CPU"
    )
    return Line(
        f"{figure} of a process without a GPU has written the numbers{more}", "new work is right", not waited
    )


@contextmanager
def child(made: Callable[[], Iterator[Any]]) -> Iterator[Child]:
    one = Child(made)
    try:
        yield one
    finally:
        one.end()


def killed(place: Place) -> Iterator[Line]:
    """One of two ranks is killed in an exchange; the other goes on, with a new peer."""
    with (
        shared() as (fd, address),
        shared() as (later, _),
        child(partial(surviving, place, fd, later)) as survivor,
        child(partial(dying, place, fd)) as lost,
    ):
        survivor.next()
        try:
            while lost.next() is not None:
                pass
        except Broken as error:
            ended = str(error)
        else:
            raise Broken("the rank that was to be killed lives")
        waited, came_s = let_go(survivor, address)
        with child(partial(exchanging, place, later, 1)) as peer:
            if (peer.next(), survivor.next()) != (0, 0):
                raise Broken("numbers of a later exchange are others than were sent")
        if survivor.next() is not None:
            raise Broken("the rank that was left said too much")
    more = f"; {ended}, and an exchange with a new peer came right"
    yield went_on("the rank that is left", waited, came_s, more)


class Mortal:
    """An engine whose process is killed as it asks for a number to be written: the ``last``."""

    def __init__(self, engine: Engine, last: int):
        self._engine, self._left = engine, last
        self.base = engine.base
        self.begin, self.copy, self.wait = engine.begin, engine.copy, engine.wait
        self.end, self.close = engine.end, engine.close

    def write(self, queue: int, offset: int, number: int) -> None:
        self._left -= 1
        if not self._left:
            os.kill(os.getpid(), signal.SIGKILL)
        self._engine.write(queue, offset, number)


def dying(place: Place, fd: int) -> Iterator[Any]:
    with streaming(place), engine_of(place, fd, ROOM.nbytes) as engine:
        yield "asks"
        exchange = Staged(Mortal(engine, 19), ROOM, 1)  # in the third of six, which take eight each
        for turn in range(6):
            wrong_of(place, exchange, turn)


def surviving(place: Place, fd: int, later: int) -> Iterator[Any]:
    with streaming(place):
        with engine_of(place, fd, ROOM.nbytes) as engine:
            yield "asks"
            exchange = Staged(engine, ROOM, 0)
            for turn in range(6):
                wrong_of(place, exchange, turn)
            over(place.own())
            yield time.monotonic()
        yield from exchanged_with(place, later, 0)


def exchanging(place: Place, fd: int, rank: int) -> Iterator[int]:
    with streaming(place):
        yield from exchanged_with(place, fd, rank)


def exchanged_with(place: Place, fd: int, rank: int) -> Iterator[int]:
    with engine_of(place, fd, ROOM.nbytes) as engine:
        exchange = Staged(engine, ROOM, rank)
        yield int(sum(wrong_of(place, exchange, turn) for turn in range(6)))


def wrong_of(place: Place, exchange: Staged, turn: int) -> torch.Tensor:
    """Exchange once; return how many numbers are not what the other rank sent."""
    rank, device = exchange.rank, place.own()
    out = torch.cat([pattern(rank, other, turn, PART, device) for other in range(2)])
    into = torch.empty_like(out)
    exchange.all_to_all(into, out, [PART] * 2, [PART] * 2)
    return (into != torch.cat([pattern(other, rank, turn, PART, device) for other in range(2)])).sum()


def captured(place: Place) -> Iterator[Line]:
    """Whether a CUDA graph takes a number to be written, or to be waited for."""
    for what in ("write", "wait"):
        with shared() as (fd, address):
            try:
                (said,) = in_process(partial(recording, place, fd, address, what), LIMIT_S)
            except Broken as error:
                said = f"no ({error})"
        yield Line(
            f"a graph takes a {what} of a number: {said}",
            "that a recording may hold" if said == "yes" else "eager",
        )


def recording(place: Place, fd: int, address: int, what: str) -> Iterator[str]:
    with streaming(place), engine_of(place, fd, ROOM.nbytes) as engine:
        at, graph = ROOM.sent(0, 1), torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            engine.begin()
            getattr(engine, what)(OUT, at, NUMBER)
            engine.end()
        there = number_at(address + at)  # mapped before this process began
        graph.replay()
        if what == "wait":
            time.sleep(WAITS_S)
            is_over, there.value = torch.cuda.current_stream().query(), NUMBER
        else:
            is_over = False
        over(place.own())
        yield "no, it has no effect" if is_over or there.value != NUMBER else "yes"
