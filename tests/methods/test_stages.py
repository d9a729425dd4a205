"""Blocks shared out over stages; and a stage whose ranks pass keys and values around a ring: it
keeps each token's once, and computes what the plain loop over patches does, in one process.
"""

from functools import cache
from itertools import combinations, pairwise
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pipemesh.lab.commands.parity import stock_model
from pipemesh.lab.reference import PatchForward
from pipemesh.parallel_runtime.errors import LayoutError
from pipemesh.parallel_runtime.families import plan_for
from pipemesh.parallel_runtime.forward import forward_name
from pipemesh.parallel_runtime.layout import Layout
from pipemesh.parallel_runtime.methods.factory import make_method
from pipemesh.parallel_runtime.methods.pipefusion.kept_rows import KeptRows
from pipemesh.parallel_runtime.methods.pipefusion.kv_buffer import KVBuffers
from pipemesh.parallel_runtime.methods.shards import Division
from pipemesh.parallel_runtime.patches import Part, Patch
from pipemesh.parallel_runtime.planner.balance import best_sizes
from pipemesh.parallel_runtime.stages import Stage, cut, share_out, slowest

from ..comm.test_collectives import BACKENDS, PIPELINES, WARM, assert_sound, traced
from ..fixtures import ALL
from ..kit.collectives import World
from ..kit.joint_model import BLOCKS, CONDS, HEADS, PLAN, Model
from ..kit.models import ATTENDS_TWICE, VIDEO, IdleRank, asked_of
from ..kit.pipelines import case

__all__ = ["traced"]  # a fixture
STREAMS = ("txt", "img")
UNEVEN = ((0, 1, False), (1, 7, False), (8, 5, True))  # the first has fewer tokens than a stage has ranks
REQUESTS = WARM + [Part(1, branch, patch) for _ in range(2) for patch in UNEVEN for branch in (0, 1)]


# -- which rows are where


def places_of(totals, patch, ulysses, ring, streams):
    """The ranges that each place of the ring computes of a patch (begin, size), or of all."""
    active = patch and {"txt": (0, 0 if patch[0] else totals["txt"]), "img": patch}
    joint = Division(totals, 0, ulysses * ring, active).joint(streams)
    return [joint.ranges_of(range(index * ulysses, (index + 1) * ulysses)) for index in range(ring)]


def tokens_of(ranges):
    return [token for begin, size in ranges for token in range(begin, begin + size)]


class PlaceHere:
    """A K/V buffer whose rows say of which token they are, and when that was computed."""

    def __init__(self):
        self.buffer = None

    def begin(self, rows, fresh, now):
        """Return what the place sends around."""
        self.rows, self.buffer = rows, self.buffer or [None] * rows.tokens
        stale = [row for here, _, size in rows.stale for row in self.buffer[here : here + size]]
        return stale + [(token, now) for token in tokens_of(fresh)]

    def take(self, source, sent):
        new = sent[len(sent) - self.rows.fresh[source] :]
        for here, there, size in self.rows.taken[source]:
            self.buffer[there : there + size] = new[here : here + size]


@settings(deadline=None)
@given(
    ulysses=st.integers(1, 3),
    ring=st.integers(1, 4),
    totals=st.fixed_dictionaries({stream: st.integers(1, 12) for stream in STREAMS}),
    cuts=st.sets(st.integers(1, 11), max_size=3),
    order=st.lists(st.integers(-1, 3), max_size=6),
    streams=st.sampled_from([STREAMS, ("img",)]),
)
def test_all_places_together_send_every_token_once_as_last_seen_and_keep_it_once(
    ulysses, ring, totals, cuts, order, streams
):
    borders = [0, *sorted(cut for cut in cuts if cut < totals["img"]), totals["img"]]
    patches = [(begin, end - begin) for begin, end in pairwise(borders)]
    last_seen, places, kept = (
        {},
        [PlaceHere() for _ in range(ring)],
        places_of(totals, None, ulysses, ring, streams),
    )
    for now, number in enumerate([-1, *order]):
        fresh = places_of(
            totals, None if number < 0 else patches[number % len(patches)], ulysses, ring, streams
        )
        last_seen |= {token: now for ranges in fresh for token in tokens_of(ranges)}
        sent = [
            place.begin(KeptRows(index, kept, fresh), fresh[index], now) for index, place in enumerate(places)
        ]
        assert sorted(row for rows in sent for row in rows) == sorted(last_seen.items())
        for place, own in zip(places, kept, strict=True):
            assert [[token for token, _ in rows] for rows in sent] == [
                tokens_of(ranges) for ranges in place.rows.sent
            ]
            for source, rows in enumerate(sent):
                place.take(source, rows)
            assert place.buffer == [(token, last_seen[token]) for token in sorted(tokens_of(own))]
    assert sum(len(place.buffer) for place in places) == sum(totals[stream] for stream in streams)


# -- what is computed


def inputs(at, part):
    """Other ones for every evaluation, so that what is stale is not fresh; with masks."""
    evaluation = 0 if part.patch is None else 1 + (at - len(WARM)) // (len(UNEVEN) * len(WARM))
    given, generator = CONDS[part.branch], torch.Generator().manual_seed(evaluation)
    changed = {
        stream: given[stream] + torch.randn(given[stream].shape, generator=generator) for stream in STREAMS
    }
    tokens = sum(given[stream].shape[1] for stream in STREAMS)
    by_head = torch.randn(1, HEADS, tokens, tokens, generator=torch.Generator().manual_seed(9))
    return {**given, **changed, "mask": given["mask"] if part.branch == 0 else by_head}


@cache
def of_the_plain_loop():
    model = Model(BLOCKS)
    method = PatchForward(model, PLAN)
    method.attach()
    with torch.inference_mode():
        return [
            method.forward(model, inputs(at, part), part.branch, part.patch and Patch(*part.patch))
            for at, part in enumerate(REQUESTS)
        ]


def largest_error(outputs, layout):
    """The largest difference from the plain loop in any output."""
    return max(
        float((outputs[layout.writer, at] - truth).abs().max())
        for at, truth in enumerate(of_the_plain_loop())
    )


@pytest.mark.cover(4)
@pytest.mark.parametrize(
    ("layout", "backend"),
    [
        pytest.param(layout, backend, id=f"{layout.equation()} {backend}")
        for number, layout in enumerate(PIPELINES)
        for backend in (BACKENDS if ALL else BACKENDS[number % 2 :][:1])
    ],
)
def test_stages_compute_what_the_plain_loop_does_whoever_shares_their_tokens(traced, layout, backend):
    world, traces, outputs = traced(layout, backend, REQUESTS, inputs=inputs)
    assert_sound(world, traces)
    assert largest_error(outputs, layout) < 1e-5
    used = {axis for axis, degree in layout.degrees().items() if degree > 1}
    waited_for = {
        axis for mesh in world.meshes for axis, spent_s in mesh.sequence.traffic.waited_s.items() if spent_s
    }
    assert waited_for == used | ({"gather"} if used != {"pipefusion"} else set()), (
        "each axis counts its own messages"
    )


def test_the_plain_loop_is_not_the_model_so_that_what_is_stale_matters():
    with torch.inference_mode():
        whole = Model(BLOCKS)(**inputs(len(REQUESTS) - 1, REQUESTS[-1]))
    last = [
        out
        for out, part in zip(of_the_plain_loop(), REQUESTS, strict=True)
        if part.branch == REQUESTS[-1].branch
    ][-len(UNEVEN) :]
    assert float((sum(last) - whole).abs().max()) > 1e-3


@pytest.mark.cover(4)
@pytest.mark.parametrize("layout", [layout for layout in PIPELINES if layout.ring > 1], ids=Layout.equation)
def test_the_places_of_a_ring_share_out_the_memory_of_keys_and_values(traced, monkeypatch, layout):
    kept, real = {}, KVBuffers.update

    def update(self, layer, *args):
        buffer = real(self, layer, *args)
        kept[id(self), self._part.branch, layer] = self, buffer
        return buffer

    monkeypatch.setattr(KVBuffers, "update", update)
    traced(layout, "nccl", WARM, blocks=2 * layout.pipefusion)
    for branch in (0, 1):
        tokens = sum(CONDS[branch][stream].shape[1] for stream in STREAMS)
        held = sum(
            buffer.shape[2] * buffer.shape[3] for (_, of, _), (_, buffer) in kept.items() if of == branch
        )
        assert held == 2 * layout.pipefusion * tokens * HEADS


@pytest.mark.parametrize("family", [ATTENDS_TWICE, VIDEO])
def test_a_stage_reserves_what_it_keeps_of_a_branch(monkeypatch, family):
    of, told = case(family), []
    arguments = asked_of(stock_model(of.heads, family=family), of)[1][0]

    def work(mesh, run):
        module, rank, reserved = stock_model(of.heads, family=family).model.diffusion_model, IdleRank(), []
        rank.reserve = reserved.append
        method = make_method(module, plan_for(type(module)), mesh, rank)
        method.attach()
        method.begin(Part(1, 0))
        method.forward(getattr(module, forward_name(module)), arguments, 1)
        told.append((sum(reserved), method.kept_bytes))

    with torch.inference_mode():
        World(Layout(ulysses=2, pipefusion=2), "gloo", monkeypatch).run(work, Random(7).choice)
    assert len(told) == 4 and all(reserved == kept > 0 for reserved, kept in told)


COSTS = st.lists(st.integers(1, 9).map(float), min_size=1, max_size=9)


@settings(deadline=None)
@given(COSTS, st.integers(1, 5))
def test_no_other_way_to_share_blocks_out_has_a_faster_slowest_stage(costs, stages):
    if stages > len(costs):
        with pytest.raises(
            LayoutError,
            match=f"pipefusion {stages}, and the model has {len(costs)} blocks?: lower the degree",
        ):
            share_out(costs, stages)
        return
    made = share_out(costs, stages)
    assert [made[0].first, made[-1].end] == [0, len(costs)] and all(
        one.end == other.first for one, other in pairwise(made)
    )
    assert all(stage.end > stage.first for stage in made) and len(made) == stages
    ways = combinations(range(1, len(costs)), stages - 1)
    best = min(
        slowest(costs, [Stage(*ends, len(costs)) for ends in pairwise((0, *way, len(costs)))]) for way in ways
    )
    assert slowest(costs, made) == best


@given(st.lists(st.integers(1, 9), min_size=1, max_size=5), st.integers(1, 30))
def test_stages_cut_by_hand_have_all_blocks_of_the_model_or_are_refused(sizes, blocks):
    if sum(sizes) != blocks:
        with pytest.raises(LayoutError, match=f"share out {sum(sizes)} blocks, and the model has {blocks}:"):
            cut(sizes, blocks)
        return
    made = cut(sizes, blocks)
    assert [stage.size for stage in made] == sizes and made[0].is_first and made[-1].is_last
    assert [[stage.holds(block) for stage in made].count(True) for block in range(blocks)] == [1] * blocks


def test_blocks_of_two_kinds_are_shared_out_by_what_they_cost():
    assert [stage.end for stage in share_out([2.0] * 19 + [1.0] * 38, 2)] == [19, 57]
    assert [stage.end for stage in share_out([1.0] * 57, 2)] == [28, 57]


def test_blocks_are_cut_anew_where_the_slowest_stage_gains_and_not_where_it_is_as_good():
    assert best_sizes([1.0, 1.0, 1.0, 1.01], 2) == ()
    assert best_sizes([3.0, 1.0, 1.0, 1.0], 2) == (1, 3)
