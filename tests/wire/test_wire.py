"""The border: trees, the channel, segments, the arena. No process is started here."""

import gc
import os
import socket
import threading
import weakref
from contextlib import closing, suppress
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pipemesh.parallel_runtime.wire.arena import BOARD_BYTES, Arena
from pipemesh.parallel_runtime.wire.channel import HEADER, Channel, ChannelClosed
from pipemesh.parallel_runtime.wire.messages import Close, Done, FromRank, Memory, Release, ToRank
from pipemesh.parallel_runtime.wire.segment import TensorRef
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


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()


# -- trees


@st.composite
def tensors(draw) -> torch.Tensor:
    shape, dtype = draw(SHAPES), draw(st.sampled_from(DTYPES))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32 - 1)))
    tensor = (torch.randn(shape, generator=generator) * 8).to(dtype)
    return tensor.transpose(0, -1) if tensor.ndim > 1 and draw(st.booleans()) else tensor


SCALARS = st.one_of(
    *(st.none(), st.booleans(), st.integers(-(2**63), 2**64 - 1), st.floats()),
    *(st.text(max_size=8), st.binary(max_size=8)),
)
PLAIN = SCALARS | st.sampled_from(DTYPES)
ITEMS = st.recursive(
    PLAIN,
    lambda inner: st.lists(inner, max_size=3).map(tuple) | st.frozensets(inner, max_size=3),
    max_leaves=4,
)
LEAVES = PLAIN | tensors() | st.frozensets(ITEMS, max_size=4) | st.sets(ITEMS, max_size=4)
KEYS = st.text(max_size=6) | st.integers(-(2**63), 2**63 - 1)
TREES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(KEYS, inner, max_size=4)
    ),
    max_leaves=12,
)


def same(one, other) -> bool:
    """Equal in content, in every type and to the bit."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return (one.shape, one.dtype, bits(one)) == (other.shape, other.dtype, bits(other))
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (set, frozenset)):
        return len(one) == len(other) and all(any(same(item, also) for also in other) for item in one)
    return one == other or (one != one and other != other)  # not a number


@settings(deadline=None, max_examples=150)
@given(TREES)
def test_a_tree_of_tensors_and_plain_data_crosses_unchanged(tree):
    arena = Arena(nbytes=BOARD_BYTES + (64 << 10))
    with closing(arena), arena.frame() as frame:
        body = encode_tree(tree, lambda _path, tensor: frame.put(tensor))
        assert same(tree, decode_tree(body, arena.segment.tensor))
    assert is_plain(tree)


def encoded(tree):
    return encode_tree(tree, lambda _path, _tensor: TensorRef(0, (1,), "float32"))


class Foreign:
    pass


@pytest.mark.parametrize(
    ("tree", "path"),
    [
        ({"a": [1, {"b": (2, Foreign())}]}, "a/1/b/1"),
        ({"transformer_options": {"patches": {"attn": [print]}}}, "transformer_options/patches/attn/0"),
        ({"a": {1, Foreign()}}, "an item of a"),
        ({"a": [frozenset((torch.zeros(1),))]}, "an item of a/0"),
        ({"seed": 2**64}, "seed"),
        ({"seed": -(2**63) - 1}, "seed"),
        ({"file": "name-\udc80"}, "file"),
        ({"n": [torch.device("cpu")]}, "n/0"),
    ],
)
def test_what_cannot_cross_is_named_by_its_path(tree, path):
    with pytest.raises(NotPlain) as caught:
        encoded(tree)
    assert caught.value.path == path
    assert str(caught.value).startswith(f"{path} is a ")
    assert not is_plain(tree)


@pytest.mark.parametrize("key", [None, 1.5, (1, 2), True, 2**64, "\udc80"])
def test_a_key_that_cannot_cross_is_named_by_its_dict(key):
    with pytest.raises(NotPlain, match=r"^a key of options/deep is a "):
        encoded({"options": {"deep": {key: 1}}})


def test_equal_sets_are_equal_bytes():
    """Else an argument would be new to the ranks because of the order in which a set was filled."""
    ascending, descending = set(range(0, 800, 8)), set(range(792, -8, -8))
    assert list(ascending) != list(descending)
    assert encoded(ascending) == encoded(descending)


def test_tensors_are_offered_under_their_path():
    paths, one = [], torch.zeros(1)
    tree = {"control": {"input": [one, None, one]}, "x": one, 7: (one,)}
    encode_tree(tree, lambda path, _tensor: paths.append(path) or TensorRef(0, (1,), "float32"))
    assert paths == ["control/input/0", "control/input/2", "x", "7/0"]


PACKED = msgspec.msgpack.encode


def extension(number, content):
    return PACKED(msgspec.msgpack.Ext(number, content))


@pytest.mark.parametrize(
    "body",
    [
        PACKED([msgspec.msgpack.Ext(9, b"")]),
        extension(3, b"nn"),
        extension(3, b"no_such_dtype"),
        extension(1, PACKED("not a reference")),
        extension(1, PACKED([0, [1], "nn", 0])),
        extension(2, PACKED([msgspec.msgpack.Ext(8, b"")])),
        extension(4, PACKED([[1]])),
        extension(5, PACKED(1)),
        *(b"\xc1", b""),
    ],
)
def test_a_foreign_extension_is_rejected(body, arena):
    with pytest.raises(msgspec.DecodeError):
        decode_tree(body, arena.segment.tensor)


def test_what_a_tree_was_read_from_is_let_go_at_once():
    """Not when the garbage collector comes by: it may be a segment that holds a whole model."""
    source = Foreign()
    source.get = lambda ref: torch.zeros(1)
    body = encoded({"a": ([torch.zeros(1)], torch.float32)})
    gone = weakref.ref(source)
    gc.disable()
    try:
        decode_tree(body, lambda ref, source=source: source.get(ref))
        del source
        assert gone() is None
    finally:
        gc.enable()


# -- channel


@pytest.fixture
def ends():
    """The UI's and a rank's end, and the rank's raw socket."""
    ours, theirs = socket.socketpair()
    pair = Channel(ours, FromRank), Channel(theirs, ToRank), theirs
    yield pair
    pair[0].close()
    pair[1].close()


MEMORY = Memory(1, 2, 3)


def framed(message) -> bytes:
    body = PACKED(message)
    return HEADER.pack(len(body), 0) + body


@settings(deadline=None, max_examples=40)
@given(st.lists(st.integers(0, 300), min_size=1, max_size=4), st.data())
def test_messages_arrive_whole_however_the_bytes_are_cut(sizes, data):
    messages = [Done(request=index, memory=MEMORY, output=bytes(size)) for index, size in enumerate(sizes)]
    stream = b"".join(map(framed, messages))
    cuts = sorted(data.draw(st.sets(st.integers(1, len(stream) - 1), max_size=6)))
    ours, theirs = socket.socketpair()
    received = []
    with theirs, closing(Channel(ours, FromRank)) as channel:
        for begin, end in pairwise((0, *cuts, len(stream))):
            theirs.sendall(stream[begin:end])
            received += channel.pump()
    assert received == [(message, []) for message in messages]


def test_an_answer_has_only_the_fields_that_it_has_something_to_say_in():
    """An evaluation's is sent by each rank in each step."""
    sent = msgspec.msgpack.decode(framed(Done(request=1, memory=MEMORY, idle=True))[HEADER.size :])
    assert {*sent} == {"type", "request", "memory", "idle"}


def test_a_message_larger_than_the_sockets_buffer_arrives_whole(ends):
    ui, rank, _ = ends
    big = Done(request=1, memory=MEMORY, output=os.urandom(3 << 20))
    sender = threading.Thread(target=rank.send, args=(big,))
    sender.start()
    message, fds = ui.receive()
    sender.join()
    assert message == big
    assert fds == []


def inodes(fds):
    return [os.fstat(fd).st_ino for fd in fds]


def test_descriptors_arrive_with_the_message_they_were_sent_with(ends):
    ui, rank, _ = ends
    sent = [os.memfd_create(f"test-{n}") for n in range(3)]
    for request, (model, fds) in enumerate([("", []), ("two" * 50_000, sent[:2]), ("", []), ("", sent[2:])]):
        ui.send(Release(request=request, model=model), fds)
    received = [rank.receive() for _ in range(4)]
    every = [fd for _, fds in received for fd in fds]
    assert [message.request for message, _ in received] == [0, 1, 2, 3]
    assert [inodes(fds) for _, fds in received] == [[], inodes(sent[:2]), [], inodes(sent[2:])]
    assert not any(map(os.get_inheritable, every))
    for fd in [*sent, *every]:
        os.close(fd)


FAILED = {"type": "Failed", "request": 1, "phase": "", "text": "", "trace": "", "memory": [1, 2, 3]}


@pytest.mark.parametrize(
    "message",
    [
        {"type": "Nonsense"},
        {"type": "Release", "request": 1, "model": "a message for ranks"},
        {"type": "Done", "request": "one", "memory": [1, 2, 3]},
        {"type": "Done", "request": 1, "memory": [1, 2]},
        {**FAILED, "kind": "unheard of"},
        [1, 2, 3],
    ],
)
def test_a_message_of_the_wrong_schema_is_rejected(ends, message):
    ui, _, raw = ends
    raw.sendall(framed(message))
    with pytest.raises(msgspec.ValidationError):
        ui.receive()


def descriptors(name: str) -> list[str]:
    """This process's descriptors of the memfd of that name."""
    found = []
    for fd in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # the descriptor that listed the folder
            found += [fd] if f"memfd:{name} " in os.readlink(f"/proc/self/fd/{fd}") else []
    return found


def mappings(name: str) -> int:
    """How often this process has mapped the memfd of that name."""
    return Path("/proc/self/maps").read_text().count(f"memfd:{name} ")


def test_a_rejected_message_leaves_no_descriptor_open(ends):
    ui, rank, _ = ends
    held = os.memfd_create("rejected")
    ui.send(Done(request=1, memory=MEMORY), [held])  # the rank accepts no such message
    with pytest.raises(msgspec.ValidationError):
        rank.receive()
    assert descriptors("rejected") == [str(held)]
    os.close(held)


def test_descriptors_of_a_message_nobody_took_are_closed_with_the_channel(ends):
    ui, rank, _ = ends
    held = os.memfd_create("untaken")
    body = PACKED(Close())
    socket.send_fds(ui._sock, [HEADER.pack(len(body), 1) + body[:1]], [held])  # the rest never comes
    assert list(rank.pump()) == []
    os.close(held)
    assert len(descriptors("untaken")) == 1
    rank.close()
    assert descriptors("untaken") == []


def test_a_closed_peer_is_told_to_the_reader_after_what_it_said(ends):
    ui, rank, _ = ends
    rank.send(Done(request=1, memory=MEMORY))
    rank.close()
    assert ui.receive()[0].request == 1
    with pytest.raises(ChannelClosed):
        ui.receive()


def test_a_closed_peer_is_told_to_the_writer(ends):
    ui, rank, _ = ends
    rank.close()
    held = os.memfd_create("test")
    for fds in ([], [held]):
        with pytest.raises(ChannelClosed):
            ui.send(Close(), fds)
    os.close(held)
