"""A rank without torch or ComfyUI: speaks the channel as the wire's schema says, and misbehaves
where a rule tells it to.

``fake_worker.py SOCKET_FD PARENT_PID RULE...``. A rule ``RANK:MESSAGE=DEED`` says what this rank
does with such a message (``*``: any rank, any message; the last rule that fits wins, no rule means
``answer``). A model's name may be such rules too, with spaces between: they hold for that message.
The board is written as ``wire/arena.py`` lays it out; its word 1, unused there, is a
gate that a test opens.
"""

from __future__ import annotations

import mmap
import os
import select
import signal
import socket
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
BOARD_BYTES, LINE_BYTES, GATE = 4096, 64, 8
PHASES = (
    "starting",
    "importing",
    "joining",
    "waiting",
    "loading",
    "patching",
    "computing",
    "releasing",
    "compiling",
)
PHASE = {
    "Start": "importing",
    "Load": "loading",
    "ReadWeights": "loading",
    "SetWeightPatches": "patching",
    "DropSets": "releasing",
    "Release": "releasing",
    "EndRun": "releasing",
    "Forward": "computing",
}
MEMORY = [3 << 20, 4 << 20, 1 << 20]  # free, total, model
LESS_MEMORY = [1 << 20, 4 << 20, 3 << 20]
TICK_S = 0.01
OUTPUT, CONTENT = "fake-output", b"written apart"  # a memfd, and what it holds


class Board:
    def __init__(self, fd: int, rank: int):
        self._map = mmap.mmap(fd, BOARD_BYTES)
        self._line = LINE_BYTES * (rank + 1)

    def word(self, at: int) -> int:
        return struct.unpack_from("<q", self._map, at)[0]

    def _write(self, at: int, value: int) -> None:
        struct.pack_into("<q", self._map, at, value)

    def tick(self) -> None:
        self._write(self._line, self.word(self._line) + 1)

    def enter(self, phase: str, request: int = 0) -> None:
        self._write(self._line + 8, PHASES.index(phase))
        self._write(self._line, request << 32 if request else self.word(self._line) + 1)
        if request:
            self.count(0, 0)

    def count(self, done: int, total: int) -> None:
        self._write(self._line + 16, done)
        self._write(self._line + 24, total)


def parsed(rules: list[str]) -> list[list[str]]:
    return [rule.replace(":", "=").split("=") for rule in rules]


class Rank:
    def __init__(self, channel, rules: list[str]):
        self.channel = channel
        self.rules = parsed(rules)
        self.handled: list[str] = []
        self.rank = -1
        self.board: Board

    def deed(self, message: str, model: str = "") -> str:
        rules = self.rules + parsed(model.split() if "=" in model else [])
        deeds = [
            deed for rank, kind, deed in rules if rank in ("*", str(self.rank)) and kind in ("*", message)
        ]
        return deeds[-1] if deeds else "answer"

    def serve(self) -> None:
        if self.deed("*").startswith("die-unheard"):
            print("no library of that name", flush=True)
            os._exit(4)
        while True:
            message, fds = self.channel.receive()
            kind = message["type"]
            if kind == "Start":
                self.rank = message["rank"]
                self.board = Board(fds[0], self.rank)
            for fd in fds:
                os.close(fd)
            if kind == "Close":
                if self.deed(kind) == "hang":
                    self.hang()
                os._exit(0)
            self.handled.append(kind)
            self.board.enter(PHASE[kind], message.get("request", 0))
            deed = self.deed(kind, message.get("model", ""))
            if deed.startswith("kill-"):
                os.kill(os.getpid(), int(deed.removeprefix("kill-")))
            getattr(self, deed.replace("-", "_"))(message)
            self.board.enter("waiting")

    # -- deeds

    def answer(self, message: dict, **fields) -> None:
        """``output`` tells the test what this rank has handled so far."""
        if message["type"] == "Start":
            self.send({"type": "Ready", "device_name": "fake", "memory": MEMORY})
        else:
            output = " ".join(self.handled).encode()
            self.send(
                {"type": "Done", "request": message["request"], "memory": MEMORY, "output": output, **fields}
            )

    def say_speeds(self, message: dict) -> None:
        self.send({"type": "Ready", "device_name": " ".join(map(str, message["speeds"])), "memory": MEMORY})

    def fill_up(self, message: dict) -> None:
        """Answers with less memory free than before."""
        self.answer(message, memory=LESS_MEMORY)

    def die(self, message: dict) -> None:
        for line in range(20):
            print(f"line {line}")
        print("the last thing I saw", end="", flush=True)
        os._exit(3)

    def die_with_child(self, message: dict) -> None:
        """Leaves a grandchild behind that holds the log pipe open."""
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
        print(f"grandchild {child.pid}", flush=True)
        os._exit(3)

    def leave(self, message: dict) -> None:
        """Closes its end and lives on."""
        self.channel.close()
        signal.pause()

    def hang(self, message: dict | None = None) -> None:
        """Neither answers nor ticks; ends with the UI, as a real rank does."""
        poller = select.poll()
        poller.register(self.channel.fileno(), select.POLLHUP)
        poller.poll()
        os._exit(1)

    def joining_hang(self, message: dict) -> None:
        """As a rank that does not reach the others."""
        self.board.enter("joining")
        self.hang()

    def deaf(self, message: dict) -> None:
        """Answers, then never looks at its socket again."""
        self.answer(message)
        signal.pause()

    def error(self, message: dict) -> None:
        self.fail(message, "error", "RuntimeError: shapes do not match")

    def refuse(self, message: dict) -> None:
        self.fail(message, "refused", "This cannot be done: do something else.")

    def memory(self, message: dict) -> None:
        self.fail(message, "memory", "can't allocate memory: you tried to allocate 7 bytes.\nsecond line")

    def memory_silent(self, message: dict) -> None:
        """What a bare MemoryError says."""
        self.fail(message, "memory", "")

    def slow(self, message: dict) -> None:
        """Ticks for a while, then answers."""
        for _ in range(40):
            self.pause()
        self.answer(message)

    def half_done(self, message: dict) -> None:
        """Says that it has done half of the request, and answers when the gate opens."""
        self.board.count(1 << 30, 2 << 30)
        self.gated(message)

    def tick_then_hang(self, message: dict) -> None:
        """As a rank that reaches a collective and waits there for one that will not come."""
        for _ in range(20):
            self.pause()
        self.hang()

    def slow_then_die(self, message: dict) -> None:
        for _ in range(20):
            self.pause()
        self.die(message)

    def silent(self, message: dict) -> None:
        """Waits without a tick until the test opens the gate, then answers: as a GPU rank that
        waits for all it has enqueued.
        """
        while not self.board.word(GATE):
            self.pause(ticks=0)
        self.answer(message)

    def gated(self, message: dict) -> None:
        """Ticks until the test opens the gate, then answers."""
        while not self.board.word(GATE):
            self.pause()
        self.answer(message)

    def uneven_error(self, message: dict) -> None:
        """As a rank that left a message unfinished that others wait for."""
        self.fail(message, "error", "RuntimeError: shapes do not match", at=None, complete=False)

    def uneven_memory(self, message: dict) -> None:
        self.fail(message, "memory", "can't allocate memory", at=None, complete=False)

    def cancellable(self, message: dict) -> None:
        """Ticks until the cancel word names this request or a later one, then says that it left."""
        while self.board.word(0) < message["request"]:
            self.pause()
        self.answer(message, cancelled=True)

    def garbage(self, message: dict) -> None:
        self.send({"type": "Nonsense", "request": message.get("request", 0)})

    def apart(self, message: dict, **fields) -> None:
        """Answers with an output in memory of its own."""
        fd = os.memfd_create(OUTPUT)
        os.write(fd, CONTENT)
        done = {"type": "Done", "request": message["request"], "memory": MEMORY, "apart": True, **fields}
        self.send(done, (fd,))
        os.close(fd)

    def apart_twice(self, message: dict) -> None:
        self.apart(message)
        self.apart(message)

    def apart_and_strange(self, message: dict) -> None:
        self.apart(message, sent_bytes="many")

    # --

    def fail(self, message: dict, kind: str, text: str, **more: Any) -> None:
        """Behind the last message of an evaluation, unless ``more`` says another place."""
        where = {"request": message["request"], "phase": PHASE[message["type"]], "memory": MEMORY}
        where |= {"at": (0, 0), "complete": True}
        self.send({"type": "Failed", **where, "kind": kind, "text": text, "trace": "", **more})

    def pause(self, ticks: int = 1) -> None:
        """One tick, or none; ends with the UI."""
        for _ in range(ticks):
            self.board.tick()
        poller = select.poll()
        poller.register(self.channel.fileno(), select.POLLHUP)
        if poller.poll(1000 * TICK_S):
            os._exit(1)

    def send(self, message: dict, fds: tuple[int, ...] = ()) -> None:
        self.channel.send(message, fds)


def main() -> None:
    sys.path.insert(0, str(ROOT / "pool"))
    from package import register_package

    sys.path.pop(0)
    register_package(ROOT)
    from pipemesh.parallel_runtime.wire.channel import Channel, ChannelClosed
    from pipemesh.pool.worker_main import die_with_parent

    die_with_parent(int(sys.argv[2]))
    try:
        Rank(Channel(socket.socket(fileno=int(sys.argv[1])), dict), sys.argv[3:]).serve()
    except ChannelClosed:
        os._exit(0)


if __name__ == "__main__":
    main()
