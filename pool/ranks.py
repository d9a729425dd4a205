"""Send to the ranks of a pool and listen to them, on whichever machine they are."""

from __future__ import annotations

import contextlib
import selectors
from collections.abc import Callable, Collection, Sequence
from typing import Any

import msgspec

from ..parallel_runtime.errors import PoolFailed, PoolSpent, RunCancelled
from ..parallel_runtime.wire.arena import Arena
from ..parallel_runtime.wire.channel import ChannelClosed
from ..parallel_runtime.wire.messages import Cancel, Close, Request
from .crew import Crew
from .devices import Placement
from .rank_setup import RankSetup
from .remote_machine import RemoteMachine, join
from .rendezvous import MachineMissing, net_for, new_meeting
from .supervisor import Supervisor
from .verdict import Facts, sentence_of_death, sentence_of_lost_machine

FINISH_S = 5.0  # for other machines to end their ranks
CUT_S = 0.1  # a cancelled run returns within 0.5 s, whatever is still on its way to other machines
DEATH_WAIT_S = 2.0  # for a process to be reaped whose connection has closed


class Lost(Exception):
    """Ranks were lost, and the pool with them. ``rank``: the one whose last log lines say more.
    ``error``: the class of the error that callers get.
    """

    def __init__(
        self, sentence: str, rank: int | None = None, error: type[PoolFailed | PoolSpent] = PoolFailed
    ):
        super().__init__(sentence)
        self.sentence = sentence
        self.rank = rank
        self.error = error


class Ranks:
    """The processes of ``placement``. Not started until ``start``; ``arena``'s board tells their
    phase.
    """

    def __init__(self, placement: Placement, setup: RankSetup, arena: Arena, facts: Facts):
        self.are_killed = False
        self.fault = ""  # why the pool has failed, with the last log lines of the rank that it is about
        self._placement = placement
        self._facts = facts
        self._setup = setup
        self._arena = arena
        self._crew = Crew(placement, "", setup)
        self._machines: list[RemoteMachine] = []
        self._sides: dict[int, Supervisor | RemoteMachine] = {}  # of ranks on other machines
        self._selector = selectors.DefaultSelector()

    @property
    def pids(self) -> list[int]:
        """Process ids by rank; 0 for a rank on another machine. Empty before the start."""
        pids = self._crew.supervisor.pids
        return [pids.get(rank, 0) for rank in range(len(self._placement.devices))] if pids else []

    def start(self) -> None:
        """Starts every rank; each will say Ready. Raises MachineMissing, LayoutError, OSError.

        Other machines are asked first: one that is missing is named before any process starts here.
        """
        names = self._placement.other_machines
        for name in names:
            machine = join(name, self._placement.ranks_on(name), self._setup, self._arena)
            self._machines.append(machine)
            self._sides |= dict.fromkeys(machine.ranks, machine)
            self._selector.register(machine.link, selectors.EVENT_READ, machine)
        net = net_for(self._setup, self._machines[0].own_address, new_meeting()) if names else None
        self._crew.start(self._arena.segment, net)
        for rank, channel in self._crew.channels.items():
            self._selector.register(channel, selectors.EVENT_READ, rank)
        if net is not None:
            for machine in self._machines:
                machine.open(self._placement, self._setup, net.meeting.name, self._arena.nbytes)

    def send(
        self, request: Request, group: Sequence[int], fds: Sequence[int], check: Callable[[], None]
    ) -> None:
        """Sends ``request`` to the ranks of ``group``, over the network first, once for each
        machine.

        ``check`` is called between the pieces that go to another machine, and may raise
        RunCancelled: then the stream is cut, and all ranks are ended before it is raised. Raises
        Lost. Any other error is raised before a rank has got a byte.
        """
        source: int | RemoteMachine = 0
        try:
            for source in self._machines:
                there = tuple(rank for rank in group if rank in source.ranks)
                if there:
                    source.send(request, there, fds, check)
            for source, channel in self._crew.channels.items():
                if source in group:
                    channel.send(request, fds)
        except RunCancelled:
            self.stop(0, CUT_S)
            raise
        except ChannelClosed as error:
            raise self._gone(source, error) from None
        except OSError as error:
            name = (
                f"Machine {source.name}" if isinstance(source, RemoteMachine) else self._facts.where(source)
            )
            raise Lost(f"{name} could not be reached ({error}): run again to start a fresh pool.") from error

    def cancel(self, number: int) -> None:
        """Sets all ranks' cancel flag for request ``number``, and for all requests before it."""
        self._arena.board.cancel(number)
        for machine in self._machines:
            with contextlib.suppress(ChannelClosed):  # its loss is told when it is listened to
                machine.link.send(Cancel(number))

    def listen(self, wait_s: float) -> list[tuple[int, Any]]:
        """Waits for messages; returns each with the rank that sent it. Raises Lost."""
        said: list[tuple[int, Any]] = []
        for key, _ in self._selector.select(wait_s):
            source: int | RemoteMachine = key.data  # a machine speaks for all of its ranks
            try:
                if isinstance(source, RemoteMachine):
                    said += source.pump()
                else:
                    said += [(source, message) for message, _fds in self._crew.channels[source].pump()]
            except ChannelClosed as error:
                raise self._gone(source, error) from None
            except MachineMissing as error:
                raise Lost(str(error)) from error
            except msgspec.DecodeError as error:
                rank = source.ranks[0] if isinstance(source, RemoteMachine) else source
                sentence = (
                    f"{self._facts.where(rank)} sent a message this version of PipeMesh does not know"
                    f" ({error}): restart ComfyUI."
                )
                raise Lost(sentence, rank) from error
        for rank, message in said:
            if message is None:
                raise self._died(rank)
        return said

    def check(self, owing: Collection[int]) -> None:
        """Raises Lost if the leader of a machine whose ranks owe an answer has fallen silent."""
        for machine in self._machines:
            if not {*machine.ranks}.isdisjoint(owing):
                try:
                    machine.link.check()
                except ChannelClosed as error:
                    machine.link.finish(0)  # it would not close its side
                    raise self._gone(machine, error) from None

    def has_lost_one(self, idle: bool) -> bool:
        """True if a rank's process has ended, or a machine is gone. While ``idle``, a machine sends
        nothing else.
        """
        return bool(self._crew.supervisor.ended) or (
            idle and any(machine.has_news() for machine in self._machines)
        )

    def loss(self) -> str:
        """Says which rank of this machine ended first; empty if all live."""
        ended = self._crew.supervisor.ended
        return f"{self._died(ended[0])}{self.last_lines(ended[0])}" if ended else ""

    def last_lines(self, rank: int) -> str:
        """Returns the last lines of the rank's log, for the end of an error; empty if the log is
        empty.
        """
        lines = self._sides.get(rank, self._crew.supervisor).tail(rank)
        return f"\nLast lines of rank {rank}:\n  " + "\n  ".join(lines) if lines else ""

    def kill(self) -> None:
        """Ends the ranks of this machine at once; those of another end with its connection. May be
        called from any thread.
        """
        self.are_killed = True
        self._crew.supervisor.kill()

    def stop(self, grace_s: float, machines_s: float = FINISH_S) -> None:
        """Ends every rank and closes every connection; ranks that are to have some time for that
        are told to leave. Safe in every state, any number of times.
        """
        links = [machine.link for machine in self._machines]
        for channel in [*links, *self._crew.channels.values()] if grace_s else ():
            with contextlib.suppress(ChannelClosed):  # gone already
                channel.send(Close())
        self._crew.stop(grace_s)
        for link in links:  # upon which the leader ends its ranks
            link.finish(machines_s)
        self._selector.close()

    def _gone(self, source: int | RemoteMachine, error: ChannelClosed) -> Lost:
        if not isinstance(source, RemoteMachine):
            return self._died(source)
        there = {rank: self._placement.devices[rank].name for rank in source.ranks}
        return Lost(
            sentence_of_lost_machine(source.name, self._arena.board.phase(source.ranks[0]), there, error)
        )

    def _died(self, rank: int) -> Lost:
        status = self._sides.get(rank, self._crew.supervisor).exit_of(rank, wait_s=DEATH_WAIT_S)
        return Lost(sentence_of_death(self._facts.where(rank), self._arena.board.phase(rank), status), rank)
