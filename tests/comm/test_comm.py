"""The groups through a rank are those of the layout, and what travels between them: how many
messages, when, with as many kernels for eight ranks as for two; and it arrives as it was.
"""

import weakref
from itertools import accumulate, count
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from pipemesh.lab.bench.forwards import StandinExchange, StandinRing, standin
from pipemesh.lab.commands.parity import stock_model
from pipemesh.lab.dry_run.ranks import joined as lone_rank
from pipemesh.parallel_runtime.comm import exchange as exchange_module
from pipemesh.parallel_runtime.comm import ring as ring_module
from pipemesh.parallel_runtime.comm.exchange import Comparison
from pipemesh.parallel_runtime.comm.mesh import open_weights
from pipemesh.parallel_runtime.comm.parts import Parts, counts_of, flags_of, padded, runs_of, to_all
from pipemesh.parallel_runtime.comm.ring import Ring
from pipemesh.parallel_runtime.comm.shares import EVEN
from pipemesh.parallel_runtime.comm.traffic import no_wish
from pipemesh.parallel_runtime.layout import Layout, Split
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ..kit.models import evaluate


def test_the_group_of_all_ranks_serves_an_axis_that_has_them_all_and_weights_have_their_own(monkeypatch):
    gathered, gather = [], dist.all_gather_into_tensor
    monkeypatch.setattr(
        dist,
        "all_gather_into_tensor",
        lambda whole, *args, group, **more: (
            gathered.append((whole.numel(), group)) or gather(whole, *args, group=group, **more)
        ),
    )
    with lone_rank(Layout(ulysses=4), 1) as mesh:
        assert mesh.sequence.ulysses.group is mesh.sequence.world.group is dist.group.WORLD
        for _ in range(2):
            open_weights(mesh)
        (opened,) = gathered
        assert opened[0] == 4 and opened[1] is not dist.group.WORLD
        assert dist.get_process_group_ranks(opened[1]) == [0, 1, 2, 3]


# -- messages


def test_no_message_keeps_the_buffer_that_a_larger_one_has_outgrown():
    exchange = StandinExchange(0, 2)

    def pass_on(count):
        exchange.all_to_all([to_all(torch.ones(count), 2)], [torch.empty(2, count)])
        return weakref.ref(exchange._buffers["receive", torch.float32, torch.device("cpu")].untyped_storage())

    small = pass_on(8)
    assert small() is not None and pass_on(8)() is small(), (
        "the second message of a kind has places of its own"
    )
    large = pass_on(64)
    assert small() is None and pass_on(8)() is large()
    exchange.free_buffers()
    assert large() is None


def test_each_group_of_ranks_counts_by_itself_what_it_compared(monkeypatch):
    """Else groups that computed more would stop to compare before the others, in a joined one."""
    monkeypatch.setattr(exchange_module, "MOST_COMPARED", 3)
    comparison, told = Comparison(), []
    own, joined = StandinExchange(0, 2), StandinExchange(0, 4)
    for exchange in (own, joined):
        largest = exchange.largest
        exchange.largest = lambda flags, of=exchange, real=largest: told.append(of) or real(flags)

    def compares(exchange, part):
        told.clear()
        comparison.part = part
        comparison.compare(exchange, ("img", 5), 5, EVEN, torch.device("cpu"))
        return told == [exchange]

    assert all(compares(own, part) for part in range(3)) and not compares(own, 2)
    assert compares(joined, 9) and not compares(joined, 9)
    assert compares(own, 3) and compares(own, 2), "what is more than the bound is compared again"


def test_memory_of_messages_stays_from_run_to_run_where_it_is_little():
    comm = standin(Layout(ulysses=2), 0)
    for room, stays in ((-1, False), (1 << 30, True)):
        comm.ulysses.all_to_all([to_all(torch.ones(8), 2)], [torch.empty(2, 8)])
        comm.free_buffers(room)
        assert bool(comm.buffers) is stays


class TakesNothing(TorchDispatchMode):
    """Notes every operation that makes a tensor with memory of its own while ``is_on``."""

    is_on = False

    def __init__(self):
        super().__init__()
        self.taken = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        known = {
            one.untyped_storage().data_ptr()
            for one in tree_leaves((args, kwargs))
            if isinstance(one, torch.Tensor)
        }
        if self.is_on and isinstance(made, torch.Tensor) and made.untyped_storage().data_ptr() not in known:
            self.taken.append(func)
        return made


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["exchange", "ring"])
def test_once_a_message_is_sent_no_memory_is_taken_until_its_flags_are_read(monkeypatch, kind, dtype):
    """A rank that had none would fail inside a message, and no other can be at that place."""
    watch = TakesNothing()
    tensor = torch.ones(2, 1, 4, 8, 16, dtype=dtype)
    exchange, ring = StandinExchange(0, 2), StandinRing(0, 2)
    for of, name in ((exchange, "_exchange"), (ring, "_pass_on")):
        real = getattr(of, name)

        def sent(*args, real=real):
            watch.is_on = True
            return real(*args)

        monkeypatch.setattr(of, name, sent)

    def take():
        if kind == "exchange":
            exchange.all_to_all([to_all(tensor, 2)], [torch.empty(2, *tensor.shape, dtype=dtype)], no_wish)
        else:
            list(ring.walk(tensor, [8, 8], no_wish))

    take()
    watch.is_on = False
    with watch:
        take()
        assert watch.is_on, "nothing was sent"
        assert watch.taken == []


@pytest.fixture(scope="module")
def flux():
    return stock_model(heads=5).model.diffusion_model


@pytest.mark.parametrize(("ulysses", "ring"), [(2, 1), (1, 3), (2, 2)])
def test_q_k_and_v_are_one_exchange_and_k_and_v_one_message_of_a_ring(flux, monkeypatch, ulysses, ring):
    moved, passed = [], []
    monkeypatch.setattr(StandinExchange, "_exchange", counting(moved, StandinExchange._exchange))
    monkeypatch.setattr(StandinRing, "_pass_on", counting(passed, StandinRing._pass_on))
    attentions = len(flux.double_blocks) + len(flux.single_blocks)
    evaluate(flux, standin(Layout(ulysses=ulysses, ring=ring), 0))
    gather = 1
    assert len(moved) == (2 * attentions if ulysses > 1 else 0) + gather  # q, k and v there, the output back
    assert len(passed) == (ring - 1) * attentions


@pytest.mark.cover(2)
@pytest.mark.parametrize(("ulysses", "ring"), [(2, 1), (1, 2)])
def test_the_stand_in_makes_the_calls_of_real_ranks_and_counts_their_bytes(ranks, ulysses, ring):
    for said in ranks(Layout(ulysses=ulysses, ring=ring), "calls"):
        real, alone = said["real"], said["standin"]
        assert real["calls"] == alone["calls"]
        assert real["sent_bytes"] == alone["sent_bytes"] > 0
        assert {name for name, *_ in real["calls"]} == {"_pass", *(["_pass_on"] if ring > 1 else [])}


def walked(monkeypatch, size, wishing):
    """The kernels of a walk beside its messages, and the largest wish, where one rank wishes."""
    ring, kernels, at = StandinRing(0, size), Kernels(), count(1)

    def passed_on(current, arriving):
        before = kernels.count
        arriving.fill_(-1.0)[0] = float(next(at) == wishing)
        kernels.count = before
        return []

    monkeypatch.setattr(ring, "_pass_on", passed_on)
    walk = ring.walk(torch.ones(2, 1, 4, 8, 16), [8] * size, no_wish)
    blocks = iter(walk)
    for source in (0, *range(size - 1, 0, -1)):
        with kernels:
            block = next(blocks)
        assert block.source == source and block.kv.eq(-1.0 if source else 1.0).all()
    with kernels:
        assert next(blocks, None) is None
    return kernels.count, float(walk.flag)


@pytest.mark.parametrize("size", [3, 4, 7, 8])
def test_a_walk_of_any_number_of_ranks_is_the_kernels_of_two_and_tells_of_the_largest_wish(monkeypatch, size):
    of_two, _ = walked(monkeypatch, 2, 1)
    for wishing in range(size):
        assert walked(monkeypatch, size, wishing) == (of_two, float(wishing > 0))


@pytest.mark.cover(3)
@pytest.mark.parametrize(("ulysses", "ring"), [(2, 2), (2, 1), (1, 2)])
def test_real_ranks_with_unlike_tokens_or_shares_all_say_so_and_compute_on(ranks, ulysses, ring):
    """Over gloo a message that is shorter than its place passes for whole, and a longer one ends
    the receiver.
    """
    of_all = ranks(Layout(ulysses=ulysses, ring=ring), "unlike")
    start, end = "The workers of one image differ in ", ": queue again, and if they differ again, bypass"
    tokens = "the tokens that they compute ({} on one, {} on another)"
    fewer, more = tokens.format(9, 13), tokens.format(13, 15)
    due = [fewer, more, "the shares that each takes", True, True, fewer, True, True, more, True]
    for said in of_all:
        told = [
            one.removeprefix(start).partition(end)[0] if isinstance(one, str) else one <= 1e-5 for one in said
        ]
        assert told == due


def counting(calls, real):
    def call(self, *args):
        calls.append(args)
        return real(self, *args)

    return call


@pytest.mark.parametrize("size", [2, 3, 4])
def test_the_next_block_is_on_its_way_while_the_current_one_is_computed_with(monkeypatch, size):
    events = []

    def post(arriving, sending, received, sent, group, async_op):
        step = sum(event.startswith("posted") for event in events)
        events.append(f"posted {step}")
        arriving.fill_(step)
        assert async_op
        assert [place for place, count in enumerate(sent) if count] == [1]
        assert [place for place, count in enumerate(received) if count] == [size - 1]
        return SimpleNamespace(wait=lambda: events.append(f"waited {step}"))

    monkeypatch.setattr(ring_module.dist, "get_backend", lambda group: "nccl")
    monkeypatch.setattr(ring_module.dist, "all_to_all_single", post)
    ring = Ring(None, range(size), 0, via_cpu=False)
    for number, block in enumerate(ring.walk(torch.full((2, 1, 1, 3, 4), -1.0), [3] * size, no_wish)):
        assert block.source == -number % size
        events.append(f"computed {number}")
    due = [f"{what} {step}" for step in range(size) for what in ("posted", "computed", "waited")]
    assert events == [*due[:-3], f"computed {size - 1}"]


DTYPES = (torch.float32, torch.bfloat16)


def parts(counts, is_flagged, dtype):
    sizes = padded(counts, is_flagged, dtype)
    buffer = torch.full((sum(sizes),), torch.nan, dtype=dtype)
    return Parts(buffer, sizes, flags_of(buffer, sizes) if is_flagged else [], {})


@settings(max_examples=60)
@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 4)), min_size=2, max_size=5),
    st.integers(1, 3),
    st.sampled_from(DTYPES),
    st.booleans(),
)
def test_each_rank_gets_its_heads_of_all_tokens_whatever_the_split(sizes, tensors, dtype, is_flagged):
    heads, tokens = zip(*sizes, strict=True)
    whole = torch.randn(tensors, 2, sum(heads), sum(tokens), 3).to(dtype)
    local = whole.split(tokens, 3)
    sent = [parts(counts_of([runs_of(t, 1, heads) for t in own]), is_flagged, dtype) for own in local]
    for rank, (to, own) in enumerate(zip(sent, local, strict=True)):
        to.put([runs_of(t, 1, heads) for t in own])
        for flags in to.flags:
            flags.fill_(rank)
    for rank, start in enumerate(accumulate(heads[:-1], initial=0)):
        into = torch.full((tensors, 2, heads[rank], sum(tokens), 3), torch.nan, dtype=dtype)
        came = parts(counts_of([runs_of(into, 3, tokens)]), is_flagged, dtype)
        pieces = [to.buffer.split(to.sizes)[rank] for to in sent]
        assert [len(piece) for piece in pieces] == came.sizes
        came.buffer.copy_(torch.cat(pieces))
        came.take(runs_of(into, 3, tokens))
        assert torch.equal(into, whole[:, :, start : start + heads[rank]])
        assert is_flagged == (came.flags != [])
        if is_flagged:
            assert torch.cat(came.flags).tolist() == [*range(len(heads))]


@given(st.lists(st.integers(0, 300), min_size=1, max_size=8), st.booleans(), st.sampled_from(DTYPES))
def test_every_part_begins_at_an_aligned_place_and_has_room_for_its_flag(counts, is_flagged, dtype):
    sizes = padded(counts, is_flagged, dtype)
    assert all(start * dtype.itemsize % 128 == 0 for start in accumulate(sizes))
    assert all(
        count + is_flagged <= size < count + is_flagged + 128
        for count, size in zip(counts, sizes, strict=True)
    )


class Kernels(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        self.count += func._schema.is_mutable or not (
            func.is_view or "empty" in func._opname or "new_" in func._opname
        )
        return made


def kernels_of(ranks, heads, tokens):
    """Of the exchange of q, k and v on the last rank."""
    split = Split.even(heads, ranks)
    q = torch.randn(1, heads, tokens[-1], 4)
    exchange = StandinExchange(ranks - 1, ranks)
    into = torch.empty(3, 1, split.sizes[-1], sum(tokens), 4)
    with Kernels() as kernels:
        exchange.all_to_all(
            [runs_of(t, 1, split.sizes) for t in (q, q, q)], runs_of(into, 3, tokens), no_wish
        )
    return kernels.count - ranks  # the stand-in writes each part's flag


@pytest.mark.parametrize("ranks", [4, 8])
def test_an_exchange_of_any_number_of_ranks_is_the_kernels_of_two_and_twice_that_where_it_is_uneven(ranks):
    of_two = kernels_of(2, 24, [6, 6])
    assert of_two == kernels_of(ranks, 24, [6] * ranks)
    assert of_two < kernels_of(ranks, 25, [7] + [6] * (ranks - 1)) <= 2 * of_two
