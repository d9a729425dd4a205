"""Mutants of what a patch attends to."""

from __future__ import annotations

from types import SimpleNamespace

from .seams import put, rooms


def rows_of_the_buffer():
    """A patch's keys and values are written one row too far."""

    def make(real):
        def update(self, layer, kv, pieces, tokens):
            if sum(piece.size for piece in pieces) < tokens:
                pieces = [
                    one._replace(there=one.there + (1 if one.there + one.size < tokens else -1))
                    for one in pieces
                ]
            return real(self, layer, kv, pieces, tokens)

        return update

    put(rooms.kv_buffer.KVBuffers, "update", make)


def anchors_are_kept():
    """The keys of the one text token that a patch carries for the host's sake are taken for the
    text's first.
    """

    def make(real):
        def choose_rows(self, all_tokens):
            rows = real(self, all_tokens)
            division = rows.division
            for stream, (_start, count) in division.active.items():
                if count == 0:
                    division.active[stream] = (0, 1)
                    division.splits[stream] = rooms.shards.Split.even(1, division.size)
            return rows

        return choose_rows

    put(rooms.patch_sharding.PatchSharding, "choose_rows", make)


def text_is_dropped():
    """The first patch comes without its text, whose keys and values stay those of the warm-up."""

    def make(real):
        def choose_rows(self, all_tokens):
            patch = self.patch
            self.patch = patch and SimpleNamespace(
                start=patch.start, size=patch.size, last=patch.last, first=False
            )
            return real(self, all_tokens)

        return choose_rows

    put(rooms.patch_sharding.PatchSharding, "choose_rows", make)


def stale_message():
    """The second stage computes with what came in before."""
    last = {}

    def make(real):
        def receive(self, number, count, *of, **how):
            new = real(self, number, count, *of, **how)
            last[count], old = new.clone(), last.get(count, new)
            return old

        return receive

    put(rooms.stage_link.StageLink, "receive", make)


def mask_of_all_queries():
    """Every patch takes the mask's first rows."""
    put(
        rooms.patch_sharding,
        "mask_of_own_queries",
        lambda _real: lambda mask, call, ranks: mask[..., : call.joint.active_tokens, :],
    )
