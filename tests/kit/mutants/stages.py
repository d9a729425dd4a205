"""Mutants of a pipeline's stages: slow ones, one that fails, such as have no memory."""

from __future__ import annotations

import time

from .seams import at_every_method, models, put, rooms


def slow_stage():
    """The second stage takes a good deal longer than the first."""

    def make(real):
        def receive(self, *args, **how):
            hidden = real(self, *args, **how)
            time.sleep(0.2)
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


def falls_over():
    """The last stage fails before it has received what was sent to it."""

    def change(method, mesh, now):
        evaluate = method.forward

        def fall_over(forward, *args):
            def falls(**given):
                if mesh.rank == 1 and now.part.patch is not None:
                    raise ZeroDivisionError("made")
                return forward(**given)

            return evaluate(falls, *args)

        method.forward = fall_over

    at_every_method(change)


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
