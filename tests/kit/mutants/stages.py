"""Mutants of a pipeline's stages: slow ones, such as fail, such as have no memory."""

from __future__ import annotations

import time
import weakref
from threading import Event
from types import SimpleNamespace

from .seams import at_every_method, models, put, rooms


def slow_stage():
    """The second stage takes a good deal longer than the first."""

    def make(real):
        def receive(self, *args, **how):
            hidden = real(self, *args, **how)
            time.sleep(0.4)
            return hidden

        return receive

    put(rooms.stage_link.StageLink, "receive", make)


def dear_first_blocks():
    """The model's first two blocks take longer than all the others."""

    def make(real):
        def make_method(model, plan, mesh, rank, stages=(), *kernels):
            method = real(model, plan, mesh, rank, stages, *kernels)
            for index, (container, place, _group) in enumerate(rooms.blocks.blocks_of(model, plan)):
                if index < 2 and not hasattr(container[place], "stands_for"):
                    container[place].forward = slowed(container[place].forward)
            return method

        return make_method

    def slowed(forward):
        def slow(*args, **kwargs):
            time.sleep(0.1)
            return forward(*args, **kwargs)

        return slow

    put(rooms.resident_model, "make_method", make)


def falls_over(error=ZeroDivisionError):
    """The last stage fails before it has received what was sent to it."""

    def change(method, mesh, now):
        evaluate = method.forward

        def fall_over(forward, *args):
            def falls(**given):
                if mesh.rank == 1 and now.part.patch is not None:
                    raise error("made")
                return forward(**given)

            return evaluate(falls, *args)

        method.forward = fall_over

    at_every_method(change)


def leaves_out_its_blocks():
    """The first stage's forward returns its input."""

    def change(method, mesh, _now):
        evaluate = method.forward

        def left_out(forward, arguments, number):
            def leave_out(**given):
                return next(iter(given.values()))

            return evaluate(leave_out if mesh.rank == 0 else forward, arguments, number)

        method.forward = left_out

    at_every_method(change)


def has_no_memory_left():
    falls_over(MemoryError)


def hangs_before_it_sends():
    """Rank 0, all its blocks behind it, does not send the first patch."""

    def change(_method, mesh, now):
        def make(real):
            def send(self, *args, **how):
                if mesh.rank == 0 and now.part.patch is not None:
                    Event().wait()
                real(self, *args, **how)

            return send

        put(rooms.stage_link.StageLink, "send", make)

    at_every_method(change)


def cannot_read_its_input():
    """The last stage, of the second patch."""

    def change(method, mesh, _now):
        begin, patches = method.begin, set()

        def fail(part):
            begin(part)
            if part.patch is not None:
                patches.add(part.patch)
            if mesh.rank == 1 and len(patches) == 2:
                raise MemoryError("made")

        method.begin = fail

    at_every_method(change)


def must_receive_ahead(rank_of=lambda rank: rank):
    """Nothing is broken: a second stage that the first is far ahead of falls over if it had not
    posted a receive it could have.
    """
    slow_stage()
    posted, seen = [], set()

    def change(_method, _mesh, now):
        def noted(real):
            def expect(self, *args):
                posted.append(args)
                real(self, *args)

            return expect

        def checked(real):
            def receive(self, *args, **how):
                assert now.part not in seen or len(posted) == 1, "received late"
                seen.add(now.part)
                hidden = real(self, *args, **how)
                posted.pop(0)
                return hidden

            return receive

        put(rooms.stage_link.StageLink, "expect", noted)
        put(rooms.stage_link.StageLink, "receive", checked)

    at_every_method(change, rank_of)


def receives_late():
    """The receive of a patch is posted when it is wanted."""
    must_receive_ahead(
        lambda rank: SimpleNamespace(tick=rank.tick, reserve=rank.reserve, next_part=lambda: None)
    )


def patches_its_own_weights():
    """Nothing is broken: a stage falls over if it patches weights of other stages' blocks, or
    leaves out its own.
    """

    def make(real):
        def patch(self, patches_id, patches, *rest):
            before = dict(self.patcher.model.named_parameters())
            is_there = real(self, patches_id, patches, *rest)
            patched = {
                name for name, weight in self.patcher.model.named_parameters() if weight is not before[name]
            }
            own = set(patches) & set(before)
            assert patched == own and 0 < len(own) < len(patches), (len(patched), len(own), len(patches))
            return is_there

        return patch

    put(rooms.resident_model.ResidentModel, "patch", make)


# -- memory


def no_memory_before_a_slow_stage():
    slow_stage()
    no_memory_on_ranks([0])


def no_memory_beside_another_model():
    no_memory_on_ranks(range(99), lambda: len(models) > 1)


def no_memory_on_ranks(ranks, when=lambda: True):
    def change(_method, mesh, _now):
        if mesh.rank in ranks:
            put(rooms.device_memory, "system_memory", lambda real: lambda: (0, 1 << 30) if when() else real())

    at_every_method(change)


def counts_what_it_keeps():
    """Nothing is broken: a stage falls over if its K/V buffers are not what it reserved, not freed
    with their run, or not where they were.
    """
    buffers, reserved, places = {}, {}, {}  # by (branch, layer), by branch, by (run, branch, layer)
    of_rank = {}

    def rank_of(rank):
        def reserve(nbytes):
            reserved[of_rank["now"].part.branch] = nbytes
            rank.reserve(nbytes)

        return SimpleNamespace(tick=rank.tick, next_part=rank.next_part, reserve=reserve)

    def change(method, _mesh, now):
        of_rank["now"] = now
        begin, evaluate, run = method.begin, method.forward, [None]

        def checked_begin(part):
            kept = part.run != run[0] and [buffer for buffer in buffers.values() if buffer() is not None]
            begin(part)
            assert not kept, "kept beyond its run"
            if part.run != run[0]:
                buffers.clear()
                reserved.clear()
            run[0] = part.run

        def checked_evaluate(*args):
            out = evaluate(*args)
            kept = dict.fromkeys((branch for branch, _layer in buffers), 0)
            for (branch, _layer), buffer in buffers.items():
                kept[branch] += buffer().nbytes
            assert kept == reserved, (kept, reserved)
            return out

        method.begin, method.forward = checked_begin, checked_evaluate

    def make(real):
        def update(self, layer, *args):
            buffer, part = real(self, layer, *args), of_rank["now"].part
            buffers[part.branch, layer] = weakref.ref(buffer)
            assert places.setdefault((*part[:2], layer), buffer.data_ptr()) == buffer.data_ptr(), (
                "made anew within a run"
            )
            return buffer

        return update

    put(rooms.kv_buffer.KVBuffers, "update", make)
    at_every_method(change, rank_of)
