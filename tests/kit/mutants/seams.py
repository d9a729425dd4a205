"""Where mutants break a rank: at public names, so that a change behind them cannot disarm one."""

from __future__ import annotations

import weakref
from importlib import import_module
from types import SimpleNamespace

ROOMS = (
    "comm.ring",
    "comm.rows",
    "comm.stage_link",
    "methods.blocks",
    "methods.ring_attention",
    "methods.sequence_attention",
    "methods.shards",
    "worker.device_memory",
    "worker.resident_model",
    "worker.resident_vae",
)

models = weakref.WeakSet()  # that this rank holds


class Rooms:
    """The modules that are broken here, by their last name."""

    def enter(self):
        """Once the pack can be imported."""
        for name in ROOMS:
            setattr(self, name.rpartition(".")[2], import_module(f"pipemesh.parallel_runtime.{name}"))

    @property
    def owners(self):
        modules = list(vars(self).values())
        classes = [one for module in modules for one in vars(module).values() if isinstance(one, type)]
        return [
            *modules,
            *(one for one in classes if one.__module__ in {module.__name__ for module in modules}),
        ]


rooms = Rooms()


def put(owner, name, make):
    """Puts ``make(real)`` in the place of a function or a class. Fails where there is none: what
    breaks nothing proves nothing.
    """
    setattr(owner, name, make(getattr(owner, name)))


def at_every_method(change):
    """``change(method, mesh, now)`` of every method that is made; ``now.part`` is the part that is
    computed.
    """

    def make(real):
        def make_method(model, plan, mesh, rank, stages=(), *kernels):
            method, now = real(model, plan, mesh, rank, stages, *kernels), SimpleNamespace(part=None)
            begin = method.begin

            def noted_begin(part):
                now.part = part
                begin(part)

            method.begin = noted_begin
            change(method, mesh, now)
            return method

        return make_method

    put(rooms.resident_model, "make_method", make)
