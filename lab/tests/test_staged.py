"""An exchange by copies: exact among any number of ranks, a slot is not filled before it is taken,
and whoever waits for a lost rank goes on when the numbers are written for it.
"""

import ctypes
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pipemesh.lab.first_day.staged import (
    AHEAD,
    IN,
    OUT,
    SLOTS,
    WRAP,
    PlainEngine,
    Room,
    Staged,
    has_passed,
    number_at,
    release,
)

SIZES = [[3, 700, 0, 64], [129, 5, 1000, 1], [0, 64, 300, 2], [7, 0, 513, 40]]  # to each, of each
TURNS = 6


@pytest.fixture
def room_of():
    """Ranks -> a room of slots of 64 numbers, and the address of its memory."""
    kept = []

    def made(ranks):
        room = Room(ranks, 256)
        kept.append((ctypes.c_ubyte * room.nbytes)())
        return room, ctypes.addressof(kept[-1])

    return made


def part(source, target, turn, count):
    return torch.arange(count, dtype=torch.int32) + 10_000 * (source + 10 * target + 100 * turn)


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_every_rank_gets_what_was_sent_whatever_the_sizes(room_of, ranks):
    """A part of 700 numbers takes eleven slots."""
    room, address = room_of(ranks)

    def of_rank(rank):
        exchange, came = Staged(PlainEngine(address), room, rank), []
        for turn in range(TURNS):
            sizes = [[SIZES[(a + turn) % 4][b] for b in range(ranks)] for a in range(ranks)]
            to, come = sizes[rank], [sizes[other][rank] for other in range(ranks)]
            out = torch.cat([part(rank, other, turn, count) for other, count in enumerate(to)])
            into = torch.full((sum(come),), -1, dtype=torch.int32)
            exchange.all_to_all(into, out, come, to)
            due = torch.cat([part(other, rank, turn, count) for other, count in enumerate(come)])
            came.append(torch.equal(into, due))
        return came

    with ThreadPoolExecutor(ranks) as threads:
        assert [*threads.map(of_rank, range(ranks))] == [[True] * TURNS] * ranks


class Written(PlainEngine):
    """Keeps what was asked for, and waits for nothing."""

    def __init__(self, address):
        super().__init__(address)
        self.asked = []

    def copy(self, queue, to, source, nbytes):
        self.asked.append((queue, "copy"))

    def write(self, queue, offset, number):
        self.asked.append((queue, "write", offset, number))

    def wait(self, queue, offset, number):
        self.asked.append((queue, "wait", offset, number))


def test_a_slot_is_filled_again_once_it_is_taken_and_read_once_it_is_filled(room_of):
    room, address = room_of(2)
    engine, pieces = Written(address), SLOTS + 1
    into, out = torch.zeros(2, 64 * pieces, dtype=torch.int32)
    Staged(engine, room, 0).all_to_all(into, out, [0, 64 * pieces], [0, 64 * pieces])
    sent, came = ([ask[1:] for ask in engine.asked if ask[0] == queue] for queue in (OUT, IN))
    filled = [[("copy",), ("write", room.sent(0, 1), number)] for number in range(1, pieces + 1)]
    filled[SLOTS].insert(0, ("wait", room.taken(0, 1), 1))
    assert sent == [ask for piece in filled for ask in piece]
    acts = (("wait", room.sent(1, 0)), ("write", room.taken(1, 0)))
    due = [(*act, number) for number in range(1, pieces + 1) for act in acts]
    assert [ask for ask in came if ask != ("copy",)] == due


@given(st.integers(2, 6), st.integers(1, 3))
def test_no_two_parts_or_numbers_of_a_room_share_a_byte(ranks, pages):
    room = Room(ranks, 4096 * pages)
    pairs = [(a, b) for a in range(ranks) for b in range(ranks) if a != b]
    numbers = [place(*pair) for pair in pairs for place in (room.sent, room.taken)]
    slots = [room.slot(*pair, number) for pair in pairs for number in range(SLOTS)]
    assert len({*numbers}) == len(numbers) and {*numbers} <= {*room.numbers}
    assert min(slots) >= room.numbers.stop
    gaps = [b - a for a, b in zip(sorted(slots), [*sorted(slots)[1:], room.nbytes], strict=True)]
    assert {*gaps} == {room.slot_bytes}


@given(st.integers(0, 2 * WRAP), st.integers(1, AHEAD - 1))
def test_a_number_counts_as_passed_at_it_and_behind_it_also_where_numbers_wrap(number, more):
    assert has_passed(number % WRAP, number) and has_passed((number + more) % WRAP, number)
    assert not has_passed((number - more) % WRAP, number)


@pytest.mark.parametrize("before", [0, WRAP - 3], ids=["new", "old"])
def test_whoever_waits_for_a_lost_rank_goes_on_when_its_room_is_released(room_of, before):
    room, address = room_of(3)
    for offset in room.numbers:
        number_at(address + offset).value = before
    engine, asks = PlainEngine(address), threading.Barrier(3)

    def waits(offset):
        asks.wait()
        engine.wait(IN, offset, before + 5)
        return True

    with ThreadPoolExecutor(2) as threads:
        waiters = [threads.submit(waits, offset) for offset in (room.sent(1, 0), room.taken(0, 2))]
        asks.wait()
        assert not any(one.done() for one in waiters)
        release(address, room)
        assert all(one.result(60) for one in waiters)
