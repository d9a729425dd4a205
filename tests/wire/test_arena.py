"""Shared memory: segments, the arena, its allocator and its board. No process is started here."""

import os
import resource
from contextlib import contextmanager
from itertools import pairwise
from mmap import PAGESIZE
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pipemesh.parallel_runtime.errors import SharedMemoryFull
from pipemesh.parallel_runtime.wire import arena as arenas
from pipemesh.parallel_runtime.wire.arena import BOARD_BYTES, MAX_RANKS, PHASES, ROOM, Allocator, Arena, Board
from pipemesh.parallel_runtime.wire.parcel import Parcel
from pipemesh.parallel_runtime.wire.segment import ALIGN, Segment, TensorRef, aligned
from pipemesh.parallel_runtime.wire.tree import decode_tree

from .test_wire import DTYPES, arena, bits, descriptors, mappings

__all__ = ["arena"]  # a fixture


@contextmanager
def largest_file(nbytes: int):
    """The kernel refuses this process any file, and so any segment, beyond ``nbytes``."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


# -- segments


@pytest.fixture
def segment():
    segment = Segment.create("test", 4096, ROOM)
    yield segment
    segment.close()


def test_a_segment_that_grows_keeps_its_refs_and_its_old_views(segment):
    ref = segment.put(128, torch.arange(8.0))
    view = segment.tensor(ref)
    segment.grow(1 << 20)
    far = segment.put(512 << 10, torch.ones(16, dtype=torch.bfloat16))
    assert segment.nbytes == 1 << 20
    assert torch.equal(segment.tensor(ref), torch.arange(8.0))
    assert view.data_ptr() == segment.tensor(ref).data_ptr()
    assert torch.equal(segment.tensor(far), torch.ones(16, dtype=torch.bfloat16))


def test_another_mapping_follows_what_was_grown(segment):
    theirs = Segment(os.dup(segment.fd), 4096, ROOM)
    segment.grow(64 << 10)
    ref = segment.put(32 << 10, torch.arange(5))
    theirs.follow()
    assert torch.equal(theirs.tensor(ref), torch.arange(5))
    theirs.tensor(ref)[0] = 9
    assert segment.tensor(ref)[0] == 9
    theirs.close()


def test_a_mapping_that_cannot_grow_says_so_again_when_asked_again():
    mine = Segment.create("test", 4096, 1 << 21)
    for _ in range(2):
        with pytest.raises(SharedMemoryFull, match=r"takes 4.0 MiB .* has addresses for 2.0 MiB"):
            mine.grow(1 << 22)
        with pytest.raises(ValueError, match=r"^A tensor ends at byte 4104 of 4096"):
            mine.tensor(TensorRef(4096, (2,), "float32"))  # it would end this process
    assert mine.nbytes == 4096
    mine.close()


def test_a_piece_that_ends_behind_the_segment_is_refused_and_none_is_cut_short(segment):
    says = pytest.raises(ValueError, match=r"piece ends at byte 4104 of")
    with open(segment.fd, "rb", closefd=False) as file, says:
        segment.fill([(4000, 104), (0, 8)], file.fileno())


@pytest.mark.parametrize("left", [1 << 30, None], ids=["a limit", "no limit"])
def test_memory_that_grows_takes_a_quarter_of_the_addresses_that_a_limit_leaves(left):
    """In a process of its own: a limit cannot be taken back there."""
    if not (child := os.fork()):
        status = 1
        try:
            taken = int(Path("/proc/self/statm").read_text().split()[0]) * PAGESIZE
            if left is not None:
                resource.setrlimit(resource.RLIMIT_AS, (taken + left, resource.RLIM_INFINITY))
            room = len(Segment.create("test", 4096, ROOM)._mapping)
            status = 0 if (room == ROOM if left is None else left // 8 < room <= left // 4) else 2
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_segment_gives_its_descriptor_back_once():
    segment = Segment.create("test", 4096)
    fd = segment.fd
    segment.close()
    other = os.memfd_create("test")
    assert other == fd  # the number is free again
    segment.close()
    os.fstat(other)
    os.close(other)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_parcel_holds_every_dtype_and_shape_in_its_own_place(dtype):
    made = [torch.randn(shape).mul(5).to(dtype) for shape in ((), (0,), (3,), (2, 0, 3), (5, 7))]
    parcel = Parcel(made)
    segment, refs = parcel.segment, decode_tree(parcel.tree, lambda ref: ref)
    assert all(ref.offset % ALIGN == 0 for ref in refs)
    assert [bits(segment.tensor(ref)) for ref in refs] == [bits(tensor) for tensor in made]
    assert [segment.tensor(ref).shape for ref in refs] == [tensor.shape for tensor in made]
    segment.close()


def test_shared_memory_that_the_system_refuses_is_one_sentence_and_no_descriptor():
    with largest_file(1 << 20), pytest.raises(SharedMemoryFull) as caught:
        Segment.create("refused", 3 << 20)
    assert str(caught.value) == (
        "Shared memory is full: 3.0 MiB more could not be reserved (File too large); "
        "close other programs, choose a smaller image or batch, or raise the memory limit of this container."
    )
    assert descriptors("pipemesh-refused") == []


def test_a_closed_arena_gives_its_memory_back_with_the_last_view():
    arena = Arena(nbytes=64 << 10)
    arena.segment = Segment.create("closing", 64 << 10)
    arena.board = Board(arena.segment)
    arena.board.enter(3, "computing", 7)
    view = arena.segment.tensor(arena.put(torch.arange(4)))
    arena.close()
    assert descriptors("pipemesh-closing") == [] and mappings("pipemesh-closing") == 1
    assert view.tolist() == [0, 1, 2, 3]
    del view
    assert mappings("pipemesh-closing") == 0
    assert (arena.board.phase(3), arena.board.progress(3)) == ("computing", 7 << 32)


# -- arena


def test_an_arena_that_cannot_grow_says_so_and_stays_usable():
    arena = Arena(nbytes=64 << 10)
    values = torch.arange(100.0), torch.arange(50.0), torch.ones(30 << 10), torch.full((1 << 20,), 3.0)
    refs = [arena.put(values[0])]
    with largest_file(256 << 10):
        for _ in range(2):
            with pytest.raises(SharedMemoryFull):
                arena.put(torch.zeros(1 << 20))
        refs.append(arena.put(values[1]))  # there is still room for this without growing
        assert arena.nbytes == 64 << 10
        refs.append(arena.put(values[2]))  # 120 KiB: fits below the limit
    refs.append(arena.put(values[3]))
    assert all(map(torch.equal, map(arena.segment.tensor, refs), values))
    arena.close()


def test_sizes_that_rise_within_a_run_add_up_as_the_page_says_until_the_arena_is_cut(monkeypatch):
    monkeypatch.setattr(arenas, "STEP", 256 << 10)  # all in KiB, in the place of MiB
    arena = Arena(8 << 10, 512 << 10)
    for size in (300, 600, 900, 600, 900):
        with arena.frame() as frame:
            frame.blank(size << 10)
    assert arena.nbytes == 2012 << 10
    arena.shrink()
    assert arena.nbytes == 512 << 10
    arena.close()


def test_an_arena_grows_by_what_is_needed_where_doubling_is_refused():
    arena = Arena(nbytes=64 << 10)
    sizes = 16 << 10, 60 << 10
    with largest_file(125 << 10):
        refs = [arena.put(torch.ones(size, dtype=torch.uint8)) for size in sizes]
    assert [arena.segment.tensor(ref).sum() for ref in refs] == [*sizes]
    arena.close()


def test_a_frame_writes_storage_that_appears_twice_once(arena):
    base = torch.randn(5, 5)
    with arena.frame() as frame:
        first = frame.put(base)
        assert frame.put(base[:]) == first
        others = base.t(), base[1:], base.clone(), base.view(torch.int32)
        refs = [frame.put(other) for other in others]
        assert len({first.offset, *(ref.offset for ref in refs)}) == 5
        assert all(map(torch.equal, map(arena.segment.tensor, refs), others))


def test_a_frame_never_takes_a_new_tensor_for_one_that_is_gone(arena):
    with arena.frame() as frame:
        # Each may get the address of the one before
        refs = [frame.put(torch.full((300,), float(n))) for n in range(20)]
        assert [arena.segment.tensor(ref)[0].item() for ref in refs] == list(range(20))


def test_a_frame_gives_everything_back_even_after_an_error(arena):
    def evaluation(fail: bool) -> int:
        with arena.frame() as frame:
            refs = [frame.put(torch.randn(n)) for n in (10, 1000, 1)] + [frame.blank(5000)]
            if fail:
                raise KeyError
        return refs[-1].offset

    first = evaluation(False)
    with pytest.raises(KeyError):
        evaluation(True)
    assert evaluation(False) == first


def test_a_tensor_that_cannot_be_written_takes_no_room(arena):
    before = arena.take(64)
    arena.give(before, 64)
    with pytest.raises((RuntimeError, NotImplementedError)):
        arena.put(torch.zeros(100, device="meta"))
    assert arena.take(64) == before


OPERATIONS = st.lists(st.tuples(st.booleans(), st.integers(0, 5000)), min_size=1, max_size=60)


@settings(deadline=None)
@given(OPERATIONS)
def test_live_blocks_never_overlap_and_everything_given_back_merges(operations):
    allocator = Allocator(BOARD_BYTES, 2 * BOARD_BYTES, 3 * BOARD_BYTES)
    live: dict[int, int] = {}  # offset -> bytes
    seams = {allocator.end, allocator.bound}
    for gives, number in operations:
        if gives and live:
            offset = sorted(live)[number % len(live)]
            allocator.give(offset, live.pop(offset))
        else:
            offset = allocator.take(number)
            assert BOARD_BYTES <= offset <= allocator.end - number
            assert offset % ALIGN == 0 and offset not in live
            live[offset] = number
            seams.add(allocator.end)
        places = sorted((offset, offset + max(1, number)) for offset, number in live.items())
        assert all(end <= begin for (_, end), (begin, _) in pairwise(places))
        assert not any(begin < seam < end for begin, end in places for seam in seams)
    end, is_behind = allocator.end, any(sum(place) > allocator.bound for place in live.items())
    assert allocator.cut() == (end > allocator.bound and not is_behind)
    for offset, number in live.items():
        allocator.give(offset, number)
    allocator.cut()
    assert allocator.end == min(end, allocator.bound)
    assert allocator.take(BOARD_BYTES) == BOARD_BYTES  # all before the first seam is one range again


@settings(deadline=None)
@given(
    st.lists(st.integers(0, 5000), min_size=1, max_size=12),
    st.lists(st.integers(0, 5000), max_size=6),
    st.randoms(),
)
def test_a_pattern_that_repeats_does_not_grow(pattern, kept, random):
    allocator = Allocator(BOARD_BYTES, 2 * BOARD_BYTES, 1 << 20)
    for number in kept:
        allocator.take(number)
    ends = []
    for _ in range(5):
        taken = [(allocator.take(number), number) for number in pattern]
        random.shuffle(taken)
        for offset, number in taken:
            allocator.give(offset, number)
        ends.append(allocator.end)
    assert len(set(ends)) == 1
    assert ends[0] <= 2 * BOARD_BYTES + sum(max(ALIGN, aligned(number)) for number in [*kept, *pattern])


def test_the_board_shows_each_ranks_line_to_every_process(arena):
    theirs = Board(Segment(os.dup(arena.segment.fd), arena.nbytes))
    phases = [PHASES[rank % len(PHASES)] for rank in range(MAX_RANKS)]
    for rank, phase in enumerate(phases):
        theirs.enter(rank, phase)
        for _ in range(rank):
            theirs.tick(rank)
    arena.board.cancel(2**40)
    assert theirs.cancelled_request == arena.board.cancelled_request == 2**40
    assert [arena.board.progress(rank) for rank in range(MAX_RANKS)] == [*range(1, MAX_RANKS + 1)]
    assert [arena.board.phase(rank) for rank in range(MAX_RANKS)] == phases


def test_ranks_at_work_on_the_same_request_can_be_compared(arena):
    board = arena.board
    seen = []
    for request in (1, 2):
        for rank in (0, 1):
            board.enter(rank, "computing", request)
        seen.append(board.progress(0))
        assert board.progress(0) == board.progress(1)
        # Whatever rank 1 did more of in the first request counts no more in the second
        for _ in range(5 * request):
            board.tick(1)
            seen.append(board.progress(1))
        for rank in (0, 1):
            board.enter(rank, "waiting")
    assert seen == sorted(set(seen))  # and the counter never goes back
