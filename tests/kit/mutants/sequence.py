"""Mutants of sequence parallelism."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace

from .seams import put, rooms


def gather_order():
    """Rank 0 puts the other ranks' rows before its own."""

    def make(real):
        def leave(self, rows, out):
            return real(self, rows, out).roll(-rows.division.splits["img"].sizes[0], dims=1)

        return leave

    put(rooms.sequence_attention.SequenceAttention, "leave", make)


def token_order():
    """Tokens are handed back to the wrong ranks' heads: the heads of two ranks change places."""

    def make(real):
        def attend(self, rows, attention, q, k, v, heads, *rest, **options):
            out_BlC = real(self, rows, attention, q, k, v, heads, *rest, **options)
            return out_BlC.unflatten(-1, (heads, -1)).roll(1, dims=2).flatten(2)

        return attend

    put(rooms.sequence_attention.SequenceAttention, "attend", make)


def mask_permutation():
    """The mask stays in the host's token order."""
    put(rooms.shards.Joint, "rank_major", lambda real: lambda self: real(self).sort().values)


def mask_dropped():
    """As peers do it."""

    def make(real):
        return lambda self, rows, attention, q, k, v, heads, mask, **options: real(
            self, rows, attention, q, k, v, heads, None, **options
        )

    put(rooms.sequence_attention.SequenceAttention, "attend", make)


def pe_slice():
    """Every rank takes rank 0's positions."""

    def make(real):
        def slice_(self, tensor, dim, streams):
            if len(streams) == 1:
                return real(self, tensor, dim, streams)
            local, self.local = self.local, {name: (0, size) for name, (_start, size) in self.local.items()}
            try:
                return real(self, tensor, dim, streams)
            finally:
                self.local = local

        return slice_

    put(rooms.shards.Rows, "slice", make)


def uneven_split():
    """Tokens are split as if they divided: parts begin where even ones would, though the first are
    longer.
    """

    def make(real):
        class AsIfEven(real):
            @property
            def starts(self):
                return tuple(part * (self.total // len(self.sizes)) for part in range(len(self.sizes)))

        return AsIfEven

    put(rooms.shards, "Split", make)


def lse_merge():
    """Partial outputs are merged as if every key weighed the same, whatever its score."""

    def make(real):
        def partial_attention(*args):
            part = real(*args)
            return part._replace(lse=part.lse * 0 + math.log(part.keys))

        return partial_attention

    put(rooms.ring_attention, "partial_attention", make)


def ring_order():
    """Blocks of two ranks that have as many tokens are taken for each other's: the mask's columns
    no longer fit the keys.
    """

    def make(real):
        def walked(self):
            for block in real(self):
                yield replace(block, source={1: 2, 2: 1}.get(block.source, block.source))

        return walked

    put(rooms.ring.Walk, "__iter__", make)


def runs_out_of_memory():
    """One rank does, in every run with an odd number: another rank, in another place, in another
    evaluation of the run each time.
    """
    seen = SimpleNamespace(part=None, evaluation=0, fails=False)

    def fail_at(place):
        if seen.fails and seen.place == place:
            seen.fails = False
            raise MemoryError("made")

    def make_method(real):
        def made(model, plan, mesh, rank, stages=(), *kernels):
            method = real(model, plan, mesh, rank, stages, *kernels)
            begin, watched = method.begin, []

            def counted(part):
                begin(part)
                number, world = part.run // 2, mesh.layout.world_size
                if seen.part is None or seen.part.run != part.run:  # stages may be cut anew between runs
                    watch_own_blocks()
                seen.evaluation = seen.evaluation + 1 if seen.part and seen.part.run == part.run else 0
                seen.part, seen.place = part, PLACES[number // world % len(PLACES)]
                is_turn = part.run % 2 and seen.evaluation == 3 * number % 7
                seen.fails = bool(is_turn) and mesh.rank == number % world
                fail_at("input")

            def watch_own_blocks():
                own = [block for block in model_blocks(model, plan) if not hasattr(block, "stands_for")]
                while watched:
                    watched.pop().remove()
                watched.append(own[0].register_forward_pre_hook(lambda *_: fail_at("first block")))
                watched.append(own[-1].register_forward_hook(lambda *_: fail_at("last block"), prepend=True))

            method.begin = counted
            return method

        return made

    def model_blocks(model, plan):
        return [container[place] for container, place, _group in rooms.blocks.blocks_of(model, plan)]

    def failing(real):
        def computed(*args):
            fail_at("attention")
            return real(*args)

        return computed

    put(rooms.resident_model, "make_method", make_method)
    put(rooms.sequence_attention.AttentionCall, "compute", failing)
    put(rooms.ring_attention, "partial_attention", failing)


PLACES = ("input", "first block", "attention", "last block")


def a_vae_sees_no_rows_beside_its_band():
    def beside(real):
        def broken(self, x, window):
            x, above, below = real(self, x, window)
            return x, above, None if below is None else below.zero_()

        return broken

    put(rooms.rows.RowExchange, "beside", beside)
