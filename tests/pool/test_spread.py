"""What crosses between ComfyUI and another machine: the right bytes, once, into the same places of
both arenas; and the model file each machine has.
"""

import fcntl
import select
import socket
import termios
import threading
import time
from contextlib import ExitStack, closing, nullcontext
from types import SimpleNamespace

import msgspec
import pytest
import torch
from pipemesh.parallel_runtime.checkpoint import END_BYTES, check_copy, ends_of, stat_file
from pipemesh.parallel_runtime.crossing.source import call_factory, find_here
from pipemesh.parallel_runtime.errors import Refused
from pipemesh.parallel_runtime.wire import tcp
from pipemesh.parallel_runtime.wire.arena import Arena
from pipemesh.parallel_runtime.wire.channel import HEADER, Carried, ChannelClosed, close_all
from pipemesh.parallel_runtime.wire.messages import (
    Beat,
    Cancel,
    Done,
    Failed,
    FromMachine,
    Load,
    Memory,
    Release,
    Said,
    ToMachine,
)
from pipemesh.parallel_runtime.wire.parcel import Parcel
from pipemesh.parallel_runtime.wire.segment import Segment, segment_over
from pipemesh.parallel_runtime.wire.tcp import PARCEL, Link, notice_loss
from pipemesh.parallel_runtime.wire.tree import decode_tree, encode_tree
from pipemesh.pool.leader import BEAT_S, LentRanks
from pipemesh.pool.remote_machine import RemoteMachine

from ..kit.fake_pools import DEADLINE_S, TOO_LONG, fake_setup, forward
from ..wire.test_arena import largest_file

MEMORY = Memory(0, 0, 0)
LOST_S = 3.0
LARGE = 24 << 20  # bytes: more than sockets take that nobody reads


def connection() -> tuple[socket.socket, socket.socket]:
    """Both ends of one over the network."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return socket.create_connection(server.getsockname()), server.accept()[0]


class TwoArenas:
    """ComfyUI's end of a machine that has rank 1, and what its leader does there with its own
    arena.
    """

    def __init__(self, stack):
        near, far = connection()
        for sock in (near, far):
            notice_loss(sock, LOST_S)
        self.here, self.there = Arena(), Arena()
        self.machine = RemoteMachine("far", (1,), near, self.here)
        self.link = Link(far, ToMachine)
        self.lent = LentRanks(self.link, "127.0.0.1", fake_setup())
        self.crew = SimpleNamespace(ranks=(1,), channels={})  # they hear nothing
        self.numbers = 0
        for end in (self.machine.link, self.link, self.here, self.there):
            stack.callback(end.close)
        stack.enter_context(self.lent._speaking())

    def tree(self, **refs) -> bytes:
        return encode_tree({name: torch.empty(0) for name in refs}, lambda path, _tensor: refs[path])

    def request(self, arguments: bytes, model: str = "m"):
        self.numbers += 1
        message = forward(self.numbers, model)
        return msgspec.structs.replace(message, arguments=arguments)

    def send(self, arguments: bytes) -> list[int]:
        """Sends an evaluation, takes it there, and returns the bytes of each tensor that came."""
        self.machine.send(self.request(arguments), (1,), (), lambda: None)
        ((message, fds),) = [self.link.receive()]
        self.lent._request(self.crew, self.there.segment, message, fds)
        close_all(fds)
        return [nbytes for _offset, nbytes in message.pieces]

    def answer(self, answer, ranges=()):
        """What ComfyUI hears where rank 1 answers this."""
        self.lent._say(Said(1, answer), ranges)
        return self.heard()

    def heard(self):
        """The next answer; the leader beats when a second has passed."""
        heard = []
        while not heard:
            select.select([self.machine.link], [], [], DEADLINE_S)
            heard = self.machine.pump()
        ((rank, answer),) = heard
        assert rank == 1
        return answer


def assert_full(failure, phase):
    """It says so of request 1."""
    assert (failure.request, failure.kind, failure.phase) == (1, "error", phase)
    assert failure.text.startswith("Shared memory is full: ")


@pytest.fixture
def arenas():
    with ExitStack() as stack:
        yield TwoArenas(stack)


def test_conditioning_goes_once_and_what_changes_goes_every_time(arenas):
    here, tree = arenas.here, arenas.tree
    text, other = here.put(torch.ones(6), version=1), here.put(torch.full((7,), 3.0), version=2)
    x, nothing = here.put(torch.arange(5.0)), here.put(torch.ones(0))
    assert arenas.send(tree(x=x, context=text, y=nothing)) == [20, 24]
    assert arenas.send(tree(x=x, context=text, again=text)) == [20]
    assert arenas.send(tree(x=x, twice=x, context=other)) == [20, 28]
    assert arenas.send(tree(context=text)) == []
    for ref in (text, other, x):
        assert torch.equal(arenas.there.segment.tensor(ref), here.segment.tensor(ref))


def test_patches_of_one_evaluation_have_its_arguments_sent_once(arenas):
    arguments = arenas.tree(x=arenas.here.put(torch.ones(5)))
    assert [arenas.send(arguments) for _ in range(3)] == [[20], [], []]
    assert arenas.send(bytes(bytearray(arguments))) == [20], "of another evaluation, in the same places"


def test_what_could_not_be_sent_or_kept_is_sent_again(arenas):
    arguments = arenas.tree(context=arenas.here.put(torch.ones(6), version=1))
    with pytest.raises(OverflowError):
        arenas.machine.send(arenas.request(arguments, TOO_LONG), (1,), (), lambda: None)
    assert arenas.send(arguments) == [24]
    failure = Failed(request=1, kind="error", phase="receiving", text="", trace="", memory=MEMORY)
    assert arenas.answer(failure) == failure
    assert arenas.send(arguments) == [24]


def test_a_machine_without_room_for_inputs_says_that_its_ranks_have_begun_nothing(arenas):
    arguments = arenas.tree(x=arenas.here.put(torch.ones(1 << 19)))
    with largest_file(1 << 20):
        assert arenas.send(arguments) == [1 << 21]
    assert_full(failure := arenas.heard(), "receiving")
    assert (failure.at, failure.complete) == ((0, 0), False)


def test_what_had_no_room_is_told_of_its_own_message_also_where_another_came_with_it(arenas):
    load, release = Load(request=1, model="m", source=b""), Release(request=2, model="m")
    with closing(Segment.create("model", 1 << 11)) as segment, largest_file(1 << 10):
        arenas.machine.send(load, (1,), [segment.fd], lambda: None)
        arenas.machine.send(release, (1,), (), lambda: None)
        arenas.lent._pass_on(arenas.crew, arenas.there.segment, None)
    assert_full(arenas.heard(), "receiving")


def test_an_output_comes_back_into_the_same_place(arenas):
    ref = arenas.there.put(torch.arange(600.0))
    wrote = (ref.offset, ref.nbytes)
    done, output = Done(request=1, memory=MEMORY, wrote=wrote), [(arenas.there.segment.fd, *wrote)]
    assert arenas.answer(done, output) == done
    assert torch.equal(arenas.here.segment.tensor(ref), torch.arange(600.0))
    with largest_file(1 << 10):
        assert_full(arenas.answer(done, output), "sending")


def test_an_output_apart_comes_as_memory_of_its_own_or_as_a_failure_where_there_is_no_room(arenas):
    output = torch.arange(600.0)
    answers = [
        Done(request=1, memory=MEMORY, output=parcel.tree, apart=Carried(parcel.segment.fd))
        for parcel in (Parcel([output]), Parcel([output]))
    ]
    done = arenas.answer(answers.pop())
    assert torch.equal(*decode_tree(done.output, segment_over(done.apart.fd).tensor), output)
    with largest_file(1 << 10):
        assert_full(arenas.answer(answers.pop()), "sending")


def test_a_large_output_and_large_inputs_pass_each_other(arenas):
    """ComfyUI sends first and reads then: a leader that waited for it would never read."""
    ref = arenas.there.put(torch.zeros(LARGE, dtype=torch.uint8))
    came = []

    def lead():
        output = [(arenas.there.segment.fd, ref.offset, LARGE)]
        arenas.lent._say(Said(1, Done(request=1, memory=MEMORY)), output)
        came.append(arenas.link.receive())

    leader = threading.Thread(target=lead, daemon=True)
    leader.start()
    x = arenas.here.put(torch.ones(LARGE, dtype=torch.uint8))
    arenas.machine.send(arenas.request(arenas.tree(x=x)), (1,), (), lambda: None)
    ((_rank, done),) = arenas.machine.pump()
    leader.join(DEADLINE_S)
    ((message, fds),) = came
    assert (done.request, message.pieces) == (1, ((x.offset, LARGE),))
    close_all(fds)


# -- the model file


def test_a_file_is_found_at_the_same_path_or_in_this_comfyuis_models(tmp_path, monkeypatch):
    import comfy

    monkeypatch.setattr(comfy, "__path__", [str(tmp_path / "here" / "comfy")])
    own = tmp_path / "here" / "models" / "unet" / "flux.safetensors"
    own.parent.mkdir(parents=True)
    own.write_bytes(b"12345")
    assert find_here(str(own)) == str(own)
    assert find_here("/elsewhere/ComfyUI/models/unet/flux.safetensors") == str(own)
    assert find_here("/models/ComfyUI/models/unet/flux.safetensors") == str(own)
    missing = "/elsewhere/ComfyUI/models/unet/other.safetensors"
    assert find_here(missing) == str(own.with_name("other.safetensors"))
    assert find_here("/elsewhere/flux.safetensors") == "/elsewhere/flux.safetensors"


def test_on_another_machine_size_and_ends_decide(tmp_path):
    file, copy, content = tmp_path / "flux.safetensors", tmp_path / "copy", bytearray(3 * END_BYTES)
    file.write_bytes(content)

    def checks():
        check_copy(str(copy), stat_file(str(file)), ends_of(str(file)))

    differs = rf"^The checkpoint {copy} on machine .* differs from {file} of ComfyUI's machine "
    other = r"\(as many bytes, but different ones\): copy the same file to every machine\.$"
    missing = (
        rf"^The checkpoint {file} of ComfyUI's machine is missing as {copy} on machine .*: copy it there, or"
    )
    for there, sentence in (
        (content, ""),
        (content[1:], rf"{differs}\({len(content) - 1} bytes, not {len(content)}\): copy the same file"),
        (b"1" + content[1:], differs + other),
        (content[1:] + b"1", differs + other),
        (None, missing + r" choose another in the loader node\.$"),
    ):
        copy.write_bytes(there) if there is not None else copy.unlink()
        with pytest.raises(Refused, match=sentence) if sentence else nullcontext():
            checks()
    for one in (file, copy):
        one.write_bytes(b"12345")
    checks()


def test_a_rank_calls_comfyuis_own_loaders_only():
    sentence = r"^The model's loader os:system is not ComfyUI's own: use a stock loader\.$"
    with pytest.raises(Refused, match=sentence):
        call_factory("os:system", ("true",), None)


def test_a_machine_that_stops_in_the_middle_of_a_message_is_lost():
    """Its kernel still answers for it."""
    near, far = connection()
    notice_loss(near, 0.2)
    body = msgspec.msgpack.encode(Said(1, Done(request=1, memory=MEMORY)))
    with far, closing(Link(near, FromMachine)) as link:
        far.sendall(HEADER.pack(len(body), 1) + body + PARCEL.pack(1 << 20) + b"a part of it")
        with pytest.raises(ChannelClosed, match="in the middle of a message"):
            link.receive()


def test_a_leader_that_falls_silent_is_lost(arenas, monkeypatch):
    """Also one that never spoke. One that was just sent something has not had the time."""
    machine, clock = arenas.machine, [time.monotonic()]
    monkeypatch.setattr(tcp, "time", SimpleNamespace(monotonic=lambda: clock[0]))

    def beat():
        arenas.link.send(Beat({}))
        select.select([machine.link], [], [], DEADLINE_S)
        machine.link.check()
        assert machine.pump() == []

    for hear in (lambda: None, beat, lambda: machine.link.send(Cancel(1))):
        hear()
        machine.link.check()
        clock[0] += LOST_S + 2 * BEAT_S  # until then our kernel may still tell of a cut cable
        until_known(machine)
        machine.link.check()
        clock[0] += 1.5 * BEAT_S
        with pytest.raises(ChannelClosed, match=r"^nothing came for 6 s$"):
            machine.link.check()


def until_known(machine):
    """A machine's kernel may take a moment to say that it has what was sent."""
    deadline = time.monotonic() + DEADLINE_S
    while any(fcntl.ioctl(machine.link.fileno(), termios.TIOCOUTQ, bytes(4))):
        assert time.monotonic() < deadline


def test_messages_before_one_that_cannot_be_read_are_taken(arenas):
    bodies = [msgspec.msgpack.encode(one) for one in (Beat({}), Cancel(1))]
    arenas.link._sock.sendall(b"".join(HEADER.pack(len(body), 0) + body for body in bodies))
    link = arenas.machine.link
    select.select([link], [], [], DEADLINE_S)
    came = link.pump()
    assert next(came) == (Beat({}), [])
    with pytest.raises(msgspec.ValidationError):
        next(came)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_leader_that_can_say_no_more_closes_the_connection(arenas):
    arenas.lent._say(object())
    select.select([arenas.machine.link], [], [], DEADLINE_S)
    with pytest.raises(ChannelClosed):
        arenas.machine.link.receive()


def test_a_file_that_is_shorter_than_was_said_ends_the_connection(arenas):
    nbytes = arenas.there.nbytes
    with pytest.raises(ChannelClosed, match="shorter than announced"):
        behind = [(arenas.there.segment.fd, nbytes, 8)]
        arenas.link.send(Said(1, Done(request=1, memory=MEMORY)), ranges=behind)
