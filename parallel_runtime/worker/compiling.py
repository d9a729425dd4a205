"""Note that a rank compiles: minutes may pass without a block."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from ..errors import Refused
from ..methods.method import Rank

TICK_S = 0.5


@contextmanager
def compilation_noted(rank: Rank) -> Iterator[None]:
    """Note the phase, and progress all the while, whenever ``torch.compile`` makes a graph. Raises
    Refused if it cannot.
    """
    from torch._dynamo.callback import callback_handler
    from torch._dynamo.exc import TorchDynamoException

    ticking: list[tuple[threading.Event, threading.Thread]] = []

    def start(_args: object) -> None:
        over = threading.Event()
        rank.note("compiling")
        ticking.append((over, threading.Thread(target=tick_until, args=(rank, over), daemon=True)))
        ticking[-1][1].start()

    def end(_args: object) -> None:
        while ticking:
            over, thread = ticking.pop()
            over.set()
            thread.join()  # a tick after this would be of the evaluation
        rank.note("computing")

    callback_handler.register_start_callback(start)
    callback_handler.register_end_callback(end)
    try:
        yield
    except TorchDynamoException as error:
        why = " ".join(str(error).split("\n\n")[0].split())
        raise Refused(
            f"torch.compile failed in a rank ({why}): repair it there, or remove the node that compiles this"
            " MODEL."
        ) from error
    finally:
        callback_handler.remove_start_callback(start)
        callback_handler.remove_end_callback(end)
        end(None)


def tick_until(rank: Rank, over: threading.Event) -> None:
    while not over.wait(TICK_S):
        rank.tick()
