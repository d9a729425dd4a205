"""Submit evaluations, collect or abandon them. There is no other way to compute one.

Sequence parallelism submits a whole evaluation and collects it; a pipeline has many patches in
flight.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from ..crossing.rows import latents_of, tensors_in
from ..errors import ModelError, PoolFailed, Refused, RunCancelled
from ..layout import ALONE
from ..refusals import patch_name
from ..wire.arena import Frame, identity
from ..wire.messages import Done, Forward
from ..wire.segment import Segment, TensorRef, aligned, segment_over
from ..wire.tree import NotPlain, decode_tree, encode_tree
from .branch import Branch
from .residency import Residency
from .run import Run, measured
from .session import Session, Sessions, Ticket, WrittenArguments

CONTROL = "control"  # the argument that brings a ControlNet's residuals
IN_PLACE = (CONTROL, "samples")  # ranks take the rows that they need from where it lies
# With every evaluation; the last is of a second latent
CHANGING = (CONTROL, "transformer_options", "a_timestep")


Answers = Mapping[int, Done]  # by rank


@dataclass(frozen=True, eq=False)
class Work:
    """An evaluation, or rows of one, for ``ranks`` (empty: all). ``arguments`` by name; the first
    two change with every evaluation. ``width``: how many neighbouring groups compute the evaluation
    together, as one longer sequence. ``ALONE``: a single rank computes it, for a comparison.
    ``in_fp32``: it is computed once more, in fp32. Neither counts as an evaluation of the run.
    """

    arguments: dict[str, Any]
    branch: Branch
    ranks: tuple[int, ...] = ()
    width: int = 1
    in_fp32: bool = False


class Evaluations:
    """Computes every model's evaluations on one pool handle. ``session`` is the session that has
    evaluations in flight, even if its pool was lost meanwhile: the evaluations report that loss.
    None if no evaluation is in flight.
    """

    def __init__(self, sessions: Sessions, residency: Residency):
        self.session: Session | None = None
        self._sessions = sessions
        self._residency = residency

    def dispatch(
        self, run: Run, works: Sequence[Work], interrupted: Callable[[], bool], assumes: bool = True
    ) -> list[Any]:
        """Submits whole evaluations, each to its ranks, and returns their outputs. No cancelled
        request may be outstanding, because ranks may still read its memory. ``assumes``: ranks
        begin with the conditioning that the branch sent last before it is compared, and compute
        again if it has changed. Not for ranks that run a node's code, which may count the
        evaluations.
        """
        began = time.perf_counter()
        answered: list[tuple[Any, Answers]] = []
        with one_thread():
            while not answered:
                tickets: list[Ticket] = []
                try:
                    for work in works:
                        tickets.append(self.submit(run, work, assume=assumes, began=began))
                    if all([ticket.written.is_right() for ticket in tickets]):
                        answered = [self._await_output(ticket, interrupted) for ticket in tickets]
                    else:
                        self._retract(tickets, interrupted)
                except BaseException:
                    self.abandon()
                    raise
        if works[0].width != ALONE and not works[0].in_fp32:
            run.evaluations.append(
                measured(began, [replies for _, replies in answered], None, works[0].arguments)
            )
        return [output for output, _ in answered]

    def submit(
        self,
        run: Run,
        work: Work,
        patch: tuple[int, int, bool] | None = None,
        *,
        assume: bool = False,
        began: float | None = None,
    ) -> Ticket:
        """Starts one patch of an evaluation, or the whole evaluation. ``collect`` must follow in
        the order of submission, or ``abandon``. Call it while torch computes on ``one_thread``.

        Patches of the same arguments that are in flight together share the written arguments. With
        ``assume``, conditioning is taken to be the one that this branch sent last; then ask
        ``written.is_right``. ``began`` is the time of the first attempt. Raises PoolFailed.
        """
        arguments = work.arguments
        session = self.session or self._sessions.live
        if session is None:
            raise PoolFailed(
                "The pool was lost in the middle of a run: run again, a fresh one will be started."
            )
        began = time.perf_counter() if began is None else began
        latent = next(iter(arguments.values()))
        latents = latent if isinstance(latent, list) else [latent]
        latent_bytes = sum(aligned(one.numel() * 4) for one in latents)
        written = next(
            (other.written for other in session.tickets if other.written.arguments is arguments), None
        )
        frame = Frame(session.pool.arena)
        try:
            out = frame.blank(latent_bytes)
            written = written or write_arguments(session, arguments, work.branch, assume)
        except BaseException:  # nobody else knows of the frame yet
            frame.release()
            raise
        ranks, part = work.ranks or session.pool.facts.everyone, run.names.part(work.branch, patch)
        number, device = session.pool.next_request(), latents[0].device
        ticket = Ticket(number, run, part, written, frame, device, began)
        session.tickets.append(ticket)
        self.session = session
        request = Forward(
            request=number,
            model=run.model.name,
            patches_id=work.branch.weights,
            arguments=written.tree,
            out=out,
            part=part,
            width=work.width,
            in_fp32=work.in_fp32,
            record=run.model in session.models and session.models[run.model].is_held_up,
        )
        try:
            session.pool.submit(request, ranks)
        except BaseException:
            self._done_with(session, ticket)
            raise
        return ticket

    def collect(self, ticket: Ticket, interrupted: Callable[[], bool]) -> Any:
        """Waits for the output; returns own tensors on the latent's device. Raises RunCancelled,
        ModelError, Refused, OutOfMemory, PoolFailed; after an error the caller must abandon the
        evaluations in flight.
        """
        output, replies = self._await_output(ticket, interrupted)
        timed = {rank: reply.block_s for rank, reply in replies.items() if reply.block_s}
        if timed:
            speeds = self._sessions.speeds_of_stages(timed)
            ticket.run.model.balance.learn(ticket.part, timed.values(), speeds)
        ticket.run.evaluations.append(
            measured(ticket.began, [replies], ticket.part, ticket.written.arguments)
        )
        return output

    def _await_output(self, ticket: Ticket, interrupted: Callable[[], bool]) -> tuple[Any, Answers]:
        """Waits for the output. Raises what ``collect`` raises. The first output of each branch of
        a run is checked in place for numbers that are not finite: a fault in all outputs is in the
        first.
        """
        session = self.session
        if session is None or ticket not in session.tickets:  # it was abandoned with another run's
            raise PoolFailed(
                "An evaluation of another MODEL in the same pool failed, and ended this one: run again."
            )
        replies = session.pool.collect(ticket.number, interrupted)
        if any(reply.cancelled for reply in replies.values()):
            raise RunCancelled("The run was cancelled.")
        reply = next((reply for reply in replies.values() if reply.output), None)
        if reply is None:
            raise PoolFailed(
                "No rank returned an output: restart ComfyUI, and report it if it happens again."
            )
        run, arena = ticket.run, session.pool.arena.segment
        if run.model in session.models:
            told = [reply.idle for reply in replies.values() if reply.idle is not None]
            session.models[run.model].is_held_up = any(told) if told else session.models[run.model].is_held_up
        # Else memory of its own, in which it stays
        segment = arena if reply.apart is None else segment_over(reply.apart.fd)
        branch = ticket.part.branch, ticket.part.attempt
        if run.is_told and branch not in run.names.looked_at:
            run.names.looked_at.add(branch)
            kept = session.models[run.model].weights.kept if run.model in session.models else "whole"
            made_by = f"{self._sessions.layout.product()} with {kept} weights"
            require_finite(decode_tree(reply.output, segment.tensor), ticket.written.arguments, made_by)
        output = own_tensors(segment, reply.output, ticket.device, is_own=segment is not arena)
        self._done_with(session, ticket)
        if session.leaving:
            self._residency.release_leaving(session)
        return output, replies

    def _retract(self, tickets: Sequence[Ticket], interrupted: Callable[[], bool]) -> None:
        """Sets the cancel flag of all evaluations in flight, and waits without a limit until ranks
        have left them.
        """
        session = self.session
        assert session is not None and session.tickets == tickets
        session.pool.call_back()
        for ticket in tickets:
            session.pool.collect(ticket.number, interrupted)
        for ticket in tickets:
            self._done_with(session, ticket)

    def abandon(self) -> None:
        """Ends all requests that were submitted and not collected."""
        if (session := self.session) is not None:
            session.pool.abandon()
            for ticket in list(session.tickets):
                ticket.run.names.failed += 1
                self._done_with(session, ticket)
            self._residency.release_leaving(session)

    def _done_with(self, session: Session, ticket: Ticket) -> None:
        session.tickets.remove(ticket)
        self.session = session if session.tickets else None
        session.conditioning.collected.update(ticket.written.versions)
        ticket.out.release()
        if not any(other.written is ticket.written for other in session.tickets):
            ticket.written.frame.release()
        if session.conditioning.nbytes > session.conditioning.limit_bytes:
            session.evict()


def own_tensors(segment: Segment, output: bytes, device: torch.device, *, is_own: bool = False) -> Any:
    """Copies an output to a device. The copy is complete when this returns, because others may then
    overwrite the output, unless the segment ``is_own``.
    """
    direct = segment.is_pinned and device.type == "cuda"
    made = decode_tree(
        output, lambda ref: segment.tensor(ref).to(device, copy=not is_own, non_blocking=direct)
    )
    if direct:
        torch.cuda.current_stream(device).synchronize()
    return made


def write_arguments(
    session: Session, arguments: dict[str, Any], branch: Branch, assume: bool
) -> WrittenArguments:
    """Writes into a frame the arguments that may differ in every evaluation. Conditioning is named,
    and written only if its content is new; its content is compared unless a request in flight has
    the very same tensor.
    """
    frame = Frame(session.pool.arena)
    session.conditioning.collected.clear()  # what of it comes again is in flight from now on
    changing = {*list(arguments)[:2], *CHANGING}
    checks: list[Callable[[], bool]] = []
    places: dict[tuple, tuple[torch.Tensor, TensorRef]] = {}
    versions: set[int] = set()

    def put(path: str, tensor: torch.Tensor) -> TensorRef:
        argument = path.partition("/")[0]
        if argument in changing:
            return frame.put(tensor, in_place=argument in IN_PLACE)
        if assume:
            ref, is_right = session.conditioning.assume(branch, path, tensor, branch.origins)
            checks.append(is_right)
            versions.add(ref.version)
            return ref
        key = identity(tensor)
        known = next(
            (other.written.places[key] for other in session.tickets if key in other.written.places), None
        )
        # The tensor keeps its address
        places[key] = known or (tensor, session.conditioning.put(branch, path, tensor, branch.origins))
        versions.add(places[key][1].version)
        return places[key][1]

    try:
        tree = encode_tree(arguments, put)
        frame.settle()
        return WrittenArguments(
            arguments,
            tree,
            frame,
            places,
            versions,
            lambda: all([is_right() for is_right in checks]),
        )
    except BaseException as error:
        frame.release()
        if isinstance(error, NotPlain):
            raise Refused(
                f"The argument {error.path} ({patch_name(error.value)}) of this MODEL's transformer is no"
                " plain data and cannot be sent to the pool: sample it on one GPU, without PipeMesh"
                " Parallelize."
            ) from None
        raise


def require_finite(output: Any, arguments: Mapping[str, Any], made_by: str) -> None:
    """Raises ModelError if the output has NaN or infinite numbers and the arguments have none: with
    such arguments the host computes such numbers too. ``made_by`` names the layout, and how it
    keeps weights. An output on the CPU is checked without waiting for a device.
    """
    outputs = tensors_in(output)
    lost, numbers = sum(not_finite(one) for one in outputs), sum(one.numel() for one in outputs)
    if (
        not lost
        or any(not_finite(one) for one in latents_of(dict(arguments)))
        or any(bool(one.isnan().any()) for one in tensors_in(arguments))
    ):
        return
    raise ModelError(
        f"The first output of this MODEL from {made_by} has {lost} of {numbers} numbers that are NaN or"
        " infinite, and would make a black picture: sample it on one GPU, without PipeMesh Parallelize. If"
        " the picture is black there too, the cause is the MODEL, its dtype or a LoRA; if not, set weights"
        " of PipeMesh Pool to whole, and report it."
    )


def not_finite(tensor: torch.Tensor) -> int:
    return 0 if bool(tensor.isfinite().all()) else int(tensor.numel() - tensor.isfinite().sum())


@contextmanager
def one_thread() -> Iterator[None]:
    """Has torch compute on one thread inside. Copies of a megabyte gain nothing from more, and
    torch's waiting threads spin on the cores that CPU ranks need.
    """
    threads = torch.get_num_threads()
    if threads == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
