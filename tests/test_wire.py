"""The border: trees, the channel, segments, the arena. No process is started here."""

import os
import resource
import socket
import threading
from contextlib import contextmanager
from itertools import pairwise
from math import inf

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pipemesh.parallel_runtime.errors import SharedMemoryFull
from pipemesh.parallel_runtime.wire.arena import BOARD_BYTES, MAX_RANKS, PHASES, Allocator, Arena
from pipemesh.parallel_runtime.wire.channel import HEADER, Channel, ChannelClosed
from pipemesh.parallel_runtime.wire.messages import Close, Done, Failed, FromRank, Memory, Release, ToRank
from pipemesh.parallel_runtime.wire.segment import ALIGN, Segment, TensorRef, aligned, pack
from pipemesh.parallel_runtime.wire.tree import NotPlain, decode_tree, encode_tree, is_plain

DTYPES = (
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool, torch.complex64),
)
SHAPES = st.lists(st.integers(0, 4), max_size=4).map(tuple)


@pytest.fixture
def arena():
    arena = Arena(nbytes=BOARD_BYTES + (64 << 10))
    yield arena
    arena.close()


@contextmanager
def largest_file(nbytes: int):
    """The kernel refuses this process any file, and so any segment, beyond ``nbytes``."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()


# -- trees ---------------------------------------------------------------------------------------------------------------


@st.composite
def tensors(draw) -> torch.Tensor:
    shape, dtype = draw(SHAPES), draw(st.sampled_from(DTYPES))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32 - 1)))
    tensor = (torch.randn(shape, generator=generator) * 8).to(dtype)
    return tensor.transpose(0, -1) if tensor.ndim > 1 and draw(st.booleans()) else tensor


SCALARS = st.one_of(
    *(st.none(), st.booleans(), st.integers(-(2**63), 2**64 - 1), st.floats(allow_nan=False), st.text(max_size=8), st.binary(max_size=8)),
)
LEAVES = st.one_of(SCALARS, st.sampled_from(DTYPES), tensors())
KEYS = st.one_of(st.text(max_size=6), st.integers(-(2**63), 2**63 - 1))
TREES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        *(st.lists(inner, max_size=4), st.lists(inner, max_size=4).map(tuple), st.dictionaries(KEYS, inner, max_size=4)),
    ),
    max_leaves=12,
)


def same(one, other) -> bool:
    """Equal in content, in every type and to the bit."""
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and (one.shape, one.dtype, bits(one)) == (other.shape, other.dtype, bits(other))
    if type(one) is not type(other):
        return False
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    return one == other


@settings(deadline=None, max_examples=150)
@given(TREES)
def test_a_tree_of_tensors_and_plain_data_crosses_unchanged(tree):
    arena = Arena(nbytes=BOARD_BYTES + (64 << 10))
    try:
        with arena.frame() as frame:
            assert same(tree, decode_tree(encode_tree(tree, lambda _path, tensor: frame.put(tensor)), arena.segment.tensor))
        assert is_plain(tree)
    finally:
        arena.close()


class Foreign:
    pass


@pytest.mark.parametrize(
    ("tree", "path"),
    [
        ({"a": [1, {"b": (2, Foreign())}]}, "a/1/b/1"),
        ({"transformer_options": {"patches": {"attn": [print]}}}, "transformer_options/patches/attn/0"),
        ({"a": {1, 2}}, "a"),
        ({"seed": 2**64}, "seed"),
        ({"seed": -(2**63) - 1}, "seed"),
        ({"file": "name-\udc80"}, "file"),
        ({"n": [torch.device("cpu")]}, "n/0"),
    ],
)
def test_what_cannot_cross_is_named_by_its_path(tree, path):
    with pytest.raises(NotPlain) as caught:
        encode_tree(tree, lambda _path, _tensor: TensorRef(0, (), "uint8"))
    assert caught.value.path == path
    assert str(caught.value).startswith(f"{path} is a ")
    assert not is_plain(tree)


@pytest.mark.parametrize("key", [None, 1.5, (1, 2), True, 2**64, "\udc80"])
def test_a_key_that_cannot_cross_is_named_by_its_dict(key):
    with pytest.raises(NotPlain, match=r"^a key of options/deep is a "):
        encode_tree({"options": {"deep": {key: 1}}}, lambda _path, _tensor: TensorRef(0, (), "uint8"))


def test_tensors_are_offered_under_their_path():
    paths = []
    tree = {"control": {"input": [torch.zeros(1), None, torch.zeros(1)]}, "x": torch.zeros(1), 7: (torch.zeros(1),)}
    encode_tree(tree, lambda path, _tensor: paths.append(path) or TensorRef(0, (1,), "float32"))
    assert paths == ["control/input/0", "control/input/2", "x", "7/0"]


@pytest.mark.parametrize(
    "body",
    [
        msgspec.msgpack.encode([msgspec.msgpack.Ext(9, b"")]),
        msgspec.msgpack.encode(msgspec.msgpack.Ext(3, b"nn")),
        msgspec.msgpack.encode(msgspec.msgpack.Ext(3, b"no_such_dtype")),
        msgspec.msgpack.encode(msgspec.msgpack.Ext(1, msgspec.msgpack.encode("not a reference"))),
        msgspec.msgpack.encode(msgspec.msgpack.Ext(1, msgspec.msgpack.encode([0, [1], "nn", 0]))),
        msgspec.msgpack.encode(msgspec.msgpack.Ext(2, msgspec.msgpack.encode([msgspec.msgpack.Ext(8, b"")]))),
        b"\xc1",
        b"",
    ],
)
def test_a_foreign_extension_is_rejected(body, arena):
    with pytest.raises(msgspec.DecodeError):
        decode_tree(body, arena.segment.tensor)


# -- channel -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def ends():
    """The UI's and a rank's end, and the rank's raw socket."""
    ours, theirs = socket.socketpair()
    pair = Channel(ours, FromRank), Channel(theirs, ToRank), theirs
    yield pair
    pair[0].close()
    pair[1].close()


def framed(message: msgspec.Struct) -> bytes:
    body = msgspec.msgpack.encode(message)
    return HEADER.pack(len(body), 0) + body


@settings(deadline=None, max_examples=40)
@given(st.lists(st.integers(0, 300), min_size=1, max_size=4), st.data())
def test_messages_arrive_whole_however_the_bytes_are_cut(sizes, data):
    messages = [Done(request=index + 1, memory=Memory(1, 2, 3), output=bytes(size)) for index, size in enumerate(sizes)]
    stream = b"".join(map(framed, messages))
    cuts = sorted(data.draw(st.sets(st.integers(1, len(stream) - 1), max_size=6)))
    ours, theirs = socket.socketpair()
    channel = Channel(ours, FromRank)
    try:
        received = []
        for begin, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
            theirs.sendall(stream[begin:end])
            received += channel.pump()
        assert received == [(message, []) for message in messages]
    finally:
        channel.close()
        theirs.close()


def test_a_message_larger_than_the_sockets_buffer_arrives_whole(ends):
    ui, rank, _ = ends
    big = Done(request=1, memory=Memory(1, 2, 3), output=os.urandom(3 << 20))
    sender = threading.Thread(target=rank.send, args=(big,))
    sender.start()
    message, fds = ui.receive()
    sender.join()
    assert message == big
    assert fds == []


def inode(fd: int) -> int:
    return os.fstat(fd).st_ino


def test_descriptors_arrive_with_the_message_they_were_sent_with(ends):
    ui, rank, _ = ends
    sent = [os.memfd_create(f"test-{n}") for n in range(3)]
    ui.send(Release(request=1, model="none"))
    ui.send(Release(request=2, model="two" * 50_000), sent[:2])
    ui.send(Release(request=3, model="none"))
    ui.send(Release(request=4, model="one"), sent[2:])
    try:
        received = {}
        for _ in range(4):
            message, fds = rank.receive()
            received[message.request] = fds
        assert {request: list(map(inode, fds)) for request, fds in received.items()} == {
            1: [],
            2: [inode(sent[0]), inode(sent[1])],
            3: [],
            4: [inode(sent[2])],
        }
        assert not any(os.get_inheritable(fd) for fds in received.values() for fd in fds)
    finally:
        for fd in [*sent, *(fd for fds in received.values() for fd in fds)]:
            os.close(fd)


@pytest.mark.parametrize(
    "message",
    [
        {"type": "Nonsense"},
        {"type": "Release", "request": 1, "model": "a message for ranks"},
        {"type": "Done", "request": "one", "memory": [1, 2, 3]},
        {"type": "Done", "request": 1, "memory": [1, 2]},
        {"type": "Failed", "request": 1, "kind": "unheard of", "phase": "", "text": "", "trace": "", "memory": [1, 2, 3]},
        [1, 2, 3],
    ],
)
def test_a_message_of_the_wrong_schema_is_rejected(ends, message):
    ui, _, raw = ends
    body = msgspec.msgpack.encode(message)
    raw.sendall(HEADER.pack(len(body), 0) + body)
    with pytest.raises(msgspec.ValidationError):
        ui.receive()


def test_a_rejected_message_leaves_no_descriptor_open(ends):
    ui, rank, _ = ends
    held = os.memfd_create("test")
    mine = inode(held)
    ui.send(Done(request=1, memory=Memory(1, 2, 3)), [held])  # the rank accepts no such message
    with pytest.raises(msgspec.ValidationError):
        rank.receive()
    os.close(held)
    assert not [fd for fd in os.listdir("/proc/self/fd") if is_inode(fd, mine)]


def is_inode(fd: str, wanted: int) -> bool:
    try:
        return os.stat(f"/proc/self/fd/{fd}").st_ino == wanted
    except FileNotFoundError:  # the descriptor that listed the folder
        return False


def test_descriptors_of_a_message_nobody_took_are_closed_with_the_channel(ends):
    ui, rank, _ = ends
    held = os.memfd_create("test")
    mine = inode(held)
    body = msgspec.msgpack.encode(Close())
    socket.send_fds(ui._sock, [HEADER.pack(len(body), 1) + body[:1]], [held])  # the rest never comes
    assert rank.pump() == []
    os.close(held)
    assert [fd for fd in os.listdir("/proc/self/fd") if is_inode(fd, mine)]
    rank.close()
    assert not [fd for fd in os.listdir("/proc/self/fd") if is_inode(fd, mine)]


def test_a_closed_peer_is_told_to_the_reader_after_what_it_said(ends):
    ui, rank, _ = ends
    rank.send(Done(request=1, memory=Memory(1, 2, 3)))
    rank.close()
    assert ui.receive()[0].request == 1
    with pytest.raises(ChannelClosed):
        ui.receive()


def test_a_closed_peer_is_told_to_the_writer(ends):
    ui, rank, _ = ends
    rank.close()
    with pytest.raises(ChannelClosed):
        ui.send(Close())
    held = os.memfd_create("test")
    with pytest.raises(ChannelClosed):
        ui.send(Close(), [held])
    os.close(held)


def test_a_peer_that_dies_in_the_middle_of_a_message_closes_the_channel(ends):
    ui, _, raw = ends
    raw.sendall(framed(Failed(request=1, kind="error", phase="", text="", trace="", memory=Memory(1, 2, 3)))[:-3])
    raw.close()
    with pytest.raises(ChannelClosed):
        ui.receive()


# -- segments ------------------------------------------------------------------------------------------------------------


def test_a_segment_that_grows_keeps_its_refs_and_its_old_views():
    segment = Segment.create("test", 4096)
    ref = segment.put(128, torch.arange(8.0))
    view = segment.tensor(ref)
    segment.grow(1 << 20)
    far = segment.put(512 << 10, torch.ones(16, dtype=torch.bfloat16))
    assert segment.nbytes == 1 << 20
    assert torch.equal(segment.tensor(ref), torch.arange(8.0))
    view[3] = 42.0  # the old mapping shows the same pages
    assert segment.tensor(ref)[3] == 42.0
    segment.tensor(ref)[4] = 43.0
    assert view[4] == 43.0
    assert torch.equal(segment.tensor(far), torch.ones(16, dtype=torch.bfloat16))
    segment.close()


def test_another_mapping_follows_what_was_grown():
    mine = Segment.create("test", 4096)
    theirs = Segment(os.dup(mine.fd), 4096)
    mine.grow(64 << 10)
    ref = mine.put(32 << 10, torch.arange(5))
    theirs.follow(mine.nbytes)
    assert torch.equal(theirs.tensor(ref), torch.arange(5))
    theirs.tensor(ref)[0] = 9
    assert mine.tensor(ref)[0] == 9
    mine.close()
    theirs.close()


def test_a_mapping_that_cannot_follow_says_so_again_when_asked_again():
    mine = Segment.create("test", 4096)
    for _ in range(2):
        with pytest.raises((OSError, ValueError)):
            mine.follow(1 << 20)  # the file itself was never grown
    assert mine.nbytes == 4096
    mine.close()


def test_a_segment_gives_its_descriptor_back_once():
    segment = Segment.create("test", 4096)
    fd = segment.fd
    segment.close()
    other = os.memfd_create("test")
    assert other == fd  # the number is free again
    segment.close()
    os.fstat(other)
    os.close(other)


def test_views_outlive_the_segment():
    segment = Segment.create("test", 4096)
    view = segment.tensor(segment.put(0, torch.arange(4)))
    segment.close()
    del segment
    assert view.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_packed_segment_holds_every_dtype_and_shape_in_its_own_place(dtype):
    made = [torch.randn(shape).mul(5).to(dtype) for shape in ((), (0,), (3,), (2, 0, 3), (5, 7))]
    segment, refs = pack("test", made)
    assert all(ref.offset % ALIGN == 0 for ref in refs)
    assert [bits(segment.tensor(ref)) for ref in refs] == [bits(tensor) for tensor in made]
    assert [segment.tensor(ref).shape for ref in refs] == [tensor.shape for tensor in made]
    segment.close()


def test_shared_memory_that_the_system_refuses_is_one_sentence_and_no_descriptor():
    before = len(os.listdir("/proc/self/fd"))
    with largest_file(1 << 20), pytest.raises(SharedMemoryFull) as caught:
        Segment.create("test", 3 << 20)
    assert str(caught.value) == (
        "Shared memory is full: 3.0 MiB more could not be reserved (File too large); "
        "close other programs, choose a smaller image or batch, or raise the memory limit of this container."
    )
    assert len(os.listdir("/proc/self/fd")) == before


# -- arena ---------------------------------------------------------------------------------------------------------------


def test_an_arena_that_cannot_grow_says_so_and_stays_usable():
    arena = Arena(nbytes=64 << 10)
    kept = arena.put(torch.arange(100.0))
    with largest_file(256 << 10):
        for _ in range(2):
            with pytest.raises(SharedMemoryFull):
                arena.put(torch.zeros(1 << 20))
        assert arena.nbytes == 64 << 10
        small = arena.put(torch.arange(50.0))  # there is still room for this without growing
        assert arena.nbytes == 64 << 10
        medium = arena.put(torch.ones(30 << 10))  # 120 KiB: fits below the limit
    large = arena.put(torch.full((1 << 20,), 3.0))
    for ref, expected in ((kept, torch.arange(100.0)), (small, torch.arange(50.0)), (medium, torch.ones(30 << 10))):
        assert torch.equal(arena.segment.tensor(ref), expected)
    assert arena.segment.tensor(large).min() == 3.0
    arena.close()


def test_an_arena_grows_by_what_is_needed_where_doubling_is_refused():
    arena = Arena(nbytes=64 << 10)
    with largest_file(100 << 10):
        ref = arena.put(torch.ones(16 << 10, dtype=torch.uint8))
        second = arena.put(torch.ones(60 << 10, dtype=torch.uint8))
    assert arena.segment.tensor(ref).sum() == 16 << 10
    assert arena.segment.tensor(second).sum() == 60 << 10
    arena.close()


def test_a_frame_writes_storage_that_appears_twice_once(arena):
    base = torch.randn(4, 6)
    with arena.frame() as frame:
        first, again = frame.put(base), frame.put(base[:])
        assert first == again
        others = [frame.put(base.t()), frame.put(base[1:]), frame.put(base.clone()), frame.put(base.view(torch.int32))]
        assert len({first.offset, *(ref.offset for ref in others)}) == 5
        assert torch.equal(arena.segment.tensor(others[0]), base.t())
        assert torch.equal(arena.segment.tensor(others[1]), base[1:])


def test_a_frame_never_takes_a_new_tensor_for_one_that_is_gone(arena):
    with arena.frame() as frame:
        refs = [frame.put(torch.full((300,), float(n))) for n in range(20)]  # each may get the address of the one before
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
    allocator = Allocator(BOARD_BYTES)
    live: dict[int, int] = {}  # offset -> bytes
    for gives, number in operations:
        if gives and live:
            offset = sorted(live)[number % len(live)]
            allocator.give(offset, live.pop(offset))
        else:
            offset = allocator.take(number)
            assert offset >= BOARD_BYTES
            assert offset % ALIGN == 0
            assert offset + number <= allocator.end
            assert offset not in live
            live[offset] = number
        places = sorted((offset, offset + max(1, number)) for offset, number in live.items())
        assert all(end <= begin for (_, end), (begin, _) in pairwise(places))
    end = allocator.end
    for offset, number in live.items():
        allocator.give(offset, number)
    if end > BOARD_BYTES:
        assert allocator.take(end - BOARD_BYTES) == BOARD_BYTES  # one free block, from the start to the end
    assert allocator.end == end


@settings(deadline=None)
@given(st.lists(st.integers(0, 5000), min_size=1, max_size=12), st.lists(st.integers(0, 5000), max_size=6), st.randoms())
def test_a_pattern_that_repeats_does_not_grow(pattern, kept, random):
    allocator = Allocator(BOARD_BYTES)
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
    assert ends[0] == BOARD_BYTES + sum(max(ALIGN, aligned(number)) for number in [*kept, *pattern])


def test_the_board_shows_each_ranks_line_to_every_process(arena):
    from pipemesh.parallel_runtime.wire.arena import Board

    theirs = Board(Segment(os.dup(arena.segment.fd), arena.nbytes))
    for rank in range(MAX_RANKS):
        theirs.enter(rank, PHASES[rank % len(PHASES)], request=rank)
        for _ in range(rank):
            theirs.tick(rank)
    arena.board.cancel(2**40)
    assert theirs.cancelled_request == arena.board.cancelled_request == 2**40
    assert [arena.board.progress(rank) for rank in range(MAX_RANKS)] == [rank + 1 for rank in range(MAX_RANKS)]
    assert [arena.board.phase(rank) for rank in range(MAX_RANKS)] == [PHASES[rank % len(PHASES)] for rank in range(MAX_RANKS)]


def test_the_board_is_never_handed_out_and_survives_growth(arena):
    board = arena.board
    first = arena.put(torch.ones(10))
    assert first.offset >= BOARD_BYTES
    board.cancel(5)
    arena.put(torch.ones(1 << 20))
    board.tick(0)
    theirs = arena.segment.tensor(TensorRef(0, (BOARD_BYTES // 8,), "int64"))
    assert theirs[0] == 5
    assert theirs[8] == 1


def test_a_scalar_that_is_not_finite_crosses():
    values = decode_tree(encode_tree([inf, -inf, float("nan")], lambda _path, _tensor: TensorRef(0, (), "uint8")), lambda ref: None)
    assert values[:2] == [inf, -inf]
    assert values[2] != values[2]
