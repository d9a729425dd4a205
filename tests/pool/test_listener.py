"""A leader's port: the exchange of secrets and versions, and strangers who hold it up."""

from __future__ import annotations

import errno
import hmac
import logging
import re
import select
import socket
import threading
import time
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from pipemesh.parallel_runtime.wire.channel import HEADER
from pipemesh.parallel_runtime.wire.tcp import (
    COMFYUI,
    LEADER,
    Hello,
    SecretRefused,
    proof,
    prove,
    shake_hands,
)
from pipemesh.pool.listener import SeldomLog, Unproved, accept
from pipemesh.pool.package import VERSION
from pipemesh.pool.rendezvous import store_key

from ..kit.fake_pools import DEADLINE_S, SECRET, fake_setup

ROOT = Path(__file__).resolve().parents[2]
SETUP = replace(fake_setup(), secret=SECRET, lost_s=DEADLINE_S)
NEAR, FAR = Hello(version=VERSION, machine="near"), Hello(version=VERSION, machine="far")


def soon() -> float:
    return time.monotonic() + DEADLINE_S


@contextmanager
def leader(setup=SETUP, unproved=None):
    """The address of a leader in this process."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        taking = threading.Thread(target=accept, args=(listener, FAR, setup, unproved))
        taking.start()
        yield listener.getsockname()
        listener.shutdown(socket.SHUT_RDWR)
        taking.join()


# -- secrets and versions


@contextmanager
def meeting(there):
    """ComfyUI's end of a connection, at whose other end this is called."""
    one, other = socket.socketpair()
    theirs = threading.Thread(target=there, args=(other,))
    theirs.start()
    with one, other:
        yield one
        theirs.join()


def shaken(sock, secret, role, own):
    """What one side knows of the other then, and how long it waits for it; or why it does not."""
    try:
        return shake_hands(sock, secret, role, own, DEADLINE_S), sock.gettimeout()
    except SecretRefused as error:
        sock.close()
        return str(error)


@pytest.mark.parametrize(
    ("secret", "ended"),
    [
        (SECRET, [(FAR, None), (NEAR, None)]),  # for ever: the kernel notices an end between runs
        (SECRET + "?", ["the other side closed the connection", "the other side holds another secret"]),
    ],
    ids=["the same", "another"],
)
def test_both_sides_trust_the_same_secret_only_and_then_know_each_others_version(secret, ended):
    said = []
    with meeting(lambda other: said.append(shaken(other, secret, LEADER, FAR))) as sock:
        ours = shaken(sock, SECRET, COMFYUI, NEAR)
    assert [ours, *said] == ended


def test_a_proof_sent_back_to_its_sender_is_refused():
    another = pytest.raises(SecretRefused, match=r"^the other side holds another secret$")
    with meeting(lambda other: [other.sendall(other.recv(32)) for _ in range(2)]) as sock, another:
        prove(sock, SECRET, COMFYUI, soon())


@pytest.mark.parametrize(
    "header", [HEADER.pack(1 << 30, 0), HEADER.pack(2, 0) + b"no"], ids=["long", "other"]
)
def test_a_first_message_that_is_no_hello_ends_the_handshake_and_is_not_waited_for(header):
    """Whatever length it announces."""

    def speak(other):
        prove(other, SECRET, LEADER, soon())
        other.sendall(header)

    no_hello = pytest.raises(ConnectionError, match=r"^the other side does not say its version$")
    with meeting(speak) as sock, no_hello:
        shake_hands(sock, SECRET, COMFYUI, NEAR, DEADLINE_S)


def test_what_versions_meet_by_never_changes():
    """Or another version would look like a machine that has not joined, or has another secret."""
    assert store_key("far") == "pipemesh/hosts/far"
    assert proof(SECRET, COMFYUI, b"nonces") == hmac.digest(SECRET.encode(), b"pipemesh-1uinonces", "sha256")
    assert proof(SECRET, LEADER, b"nonces") == hmac.digest(SECRET.encode(), b"pipemesh-1hostnonces", "sha256")


def test_a_hello_is_read_whatever_later_versions_add_to_it():
    later = msgspec.msgpack.encode({"type": "Hello", "version": "9.0", "machine": "far", "torch": "3.0"})
    assert msgspec.msgpack.decode(later, type=Hello) == Hello(version="9.0", machine="far")


def test_a_leader_turns_another_version_away_and_says_why_in_its_log(caplog):
    caplog.set_level(logging.WARNING)
    with leader() as address, socket.create_connection(address) as sock:
        theirs = shake_hands(sock, SECRET, COMFYUI, Hello(version="0.9.0", machine="near"), DEADLINE_S)
        assert theirs == FAR
        assert sock.recv(1) == b""
    assert re.search(
        rf"turned away: Machine far has PipeMesh {VERSION} and ComfyUI's machine near has PipeMesh 0\.9\.0: ",
        caplog.text,
    )


# -- strangers


def test_a_stranger_who_sends_a_byte_now_and_then_is_turned_away():
    with leader(replace(SETUP, lost_s=0.5)) as address, socket.create_connection(address) as stranger:
        stranger.recv(32)
        for _ in range(60):  # of the 64 that would end the exchange
            stranger.send(b"x")
            if select.select([stranger], [], [], 0.1)[0]:
                break
        assert select.select([stranger], [], [], 0)[0], "it is still listened to"


def test_strangers_who_say_nothing_hold_a_few_connections_and_keep_nobody_out():
    strangers = []
    with leader(unproved=Unproved(most=3)) as address:
        for _ in range(12):
            strangers.append(socket.create_connection(address))
            strangers[-1].settimeout(DEADLINE_S)
            strangers[-1].recv(32)
        with socket.create_connection(address) as friend:
            prove(friend, SECRET, COMFYUI, soon())
        for stranger in strangers[:9]:  # the oldest are cut off
            assert stranger.recv(1) == b""
        for stranger in strangers:
            stranger.close()


class Listener:
    """``accept`` raises these, one by one, then what a closed socket does."""

    def __init__(self, *errors: int):
        self._errors = [*errors, errno.EBADF]

    def accept(self):
        raise OSError(self._errors.pop(0), "no")


def test_a_leader_that_has_no_descriptor_left_waits_for_one_and_goes_on(caplog):
    room = []
    unproved = Unproved()
    unproved.make_room = room.append
    accept(Listener(errno.EMFILE, errno.ECONNABORTED, errno.ENOBUFS), FAR, SETUP, unproved)
    assert len(room) == 2
    # What an earlier test's threads still say
    said = [message for message in caplog.messages if "turned away" not in message]
    assert said == ["[PipeMesh] no connection can be taken (no): newcomers wait"]
    with pytest.raises(OSError, match="no"):  # what will not pass: torchrun starts it again
        accept(Listener(errno.EOPNOTSUPP), FAR, SETUP)


def test_strangers_get_a_line_and_then_a_count_in_a_while(caplog):
    now = [0.0]
    strangers = SeldomLog(60.0, lambda: now[0])
    for second in (0.0, 1.0, 59.0, 60.0, 61.0):
        now[0] = second
        for peer in range(1000):
            strangers.warn(f"10.0.0.{peer} was turned away: no secret")
    assert caplog.messages == [
        "[PipeMesh] 10.0.0.0 was turned away: no secret",
        "[PipeMesh] 10.0.0.0 was turned away: no secret (2999 more such lines were left out)",
    ]


def test_a_leader_writes_one_line_of_many_strangers_and_knows_who_has_the_secret_all_the_same(caplog):
    with leader() as address:
        for _ in range(20):
            with socket.create_connection(address) as sock:
                sock.shutdown(socket.SHUT_WR)
                while sock.recv(1 << 10):
                    pass
        with socket.create_connection(address) as sock:
            assert shake_hands(sock, SECRET, COMFYUI, NEAR, DEADLINE_S) == FAR
    assert len([one for one in caplog.messages if "turned away" in one]) == 1


def test_the_version_is_the_one_of_the_project_file_and_of_the_changelog():
    project = re.search(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(encoding="utf-8"), re.M)
    changelog = re.search(r"^## \[(\d.+)\]", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.M)
    assert project[1] == changelog[1] == VERSION
