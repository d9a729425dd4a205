"""Conditioning crosses once: recognised by content, told apart by content, and evicted down to a
bound, but not while an evaluation names it.
"""

import weakref
from types import SimpleNamespace

import pytest
import torch
from pipemesh.parallel_runtime.client.branch import Branch, Origin
from pipemesh.parallel_runtime.client.conditioning import KEYS, RECENT, ConditioningCache
from pipemesh.parallel_runtime.client.run import PooledModel
from pipemesh.parallel_runtime.client.runs import Runs
from pipemesh.parallel_runtime.wire.arena import BOARD_BYTES, Arena, Board
from pipemesh.parallel_runtime.wire.segment import Segment, TensorRef

from ..wire.test_wire import mappings

BRANCH, OTHER_BRANCH = ("uuid-1",), ("uuid-2",)


@pytest.fixture
def arena():
    arena = Arena(nbytes=BOARD_BYTES + (16 << 10))
    yield arena
    arena.close()


@pytest.fixture
def cache(arena):
    return ConditioningCache(arena)


def text(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A new tensor of the same content for the same seed, as the host makes one for every
    evaluation.
    """
    return torch.randn(shape or (1, 16, 8), generator=torch.Generator().manual_seed(seed)).to(dtype)


def shows(arena: Arena, ref: TensorRef, expected: torch.Tensor) -> bool:
    return torch.equal(arena.segment.tensor(ref), expected)


def test_the_same_content_is_uploaded_once_over_evaluations_branches_names_and_runs(arena, cache):
    branches, names = (BRANCH, OTHER_BRANCH, BRANCH), ("context", "y")
    refs = [cache.put(branch, name, text(1)) for branch in branches for name in names]
    cache.begin_run()
    refs.append(cache.put(("a new uuid",), "context", text(1)))
    assert cache.uploads == 1 and len(set(refs)) == 1
    assert refs[0].version > 0 and shows(arena, refs[0], text(1))


def test_what_was_expected_wrongly_is_found_out_and_looked_at_from_then_on(arena, cache):
    sent = cache.put(BRANCH, "context", text(1))
    ref, right = cache.assume(BRANCH, "context", text(2))
    assert ref == sent
    assert not right()
    for seed in (2, 1, 2):
        ref, right = cache.assume(BRANCH, "context", text(seed))
        assert shows(arena, ref, text(seed))
        assert right()
    assert cache.uploads == 2


def test_what_a_branch_sent_is_not_assumed_in_the_next_run(arena, cache):
    live = SimpleNamespace(conditioning=cache, models={}, owed=[], pool=SimpleNamespace(idle=True))
    runs = Runs(SimpleNamespace(live=live, at_close=[]))
    model = PooledModel("m", "m")
    runs.begin(model)
    sent = cache.put(BRANCH, "context", text(1))
    runs.begin(model)
    ref, right = cache.assume(BRANCH, "context", text(2))
    assert ref != sent and right()
    assert shows(arena, ref, text(2))


def test_content_that_is_not_contiguous_is_recognised(arena, cache):
    columns = text(1, 8, 16)
    ref = cache.put(BRANCH, "context", columns.t())
    assert cache.put(OTHER_BRANCH, "context", columns.t().contiguous()) == ref
    assert shows(arena, ref, columns.t())


def test_slices_that_alternate_under_one_branch_are_uploaded_once_each(arena, cache):
    whole = text(1, 1, 40, 8)
    windows = [(begin, begin + 10) for begin in range(0, 40, 10)]
    assert len(windows) <= RECENT
    refs = [
        [cache.put(BRANCH, "context", whole[:, low:high].clone()) for low, high in windows] for _ in range(20)
    ]
    assert cache.uploads == len(windows)
    assert all(row == refs[0] for row in refs)
    for ref, (low, high) in zip(refs[0], windows, strict=True):
        assert shows(arena, ref, whole[:, low:high])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("place", [0, 1700, -1])
def test_content_that_differs_in_one_element_is_uploaded_again(arena, cache, dtype, place):
    one, other = text(1, 1, 64, 64, dtype=dtype), text(1, 1, 64, 64, dtype=dtype)
    bits = other.view(torch.uint8).flatten()
    bits[place] ^= 8
    first, second = cache.put(BRANCH, "context", one), cache.put(BRANCH, "context", other)
    assert cache.uploads == 2
    assert first.version != second.version
    assert shows(arena, first, one)
    assert shows(arena, second, other)
    assert cache.put(BRANCH, "context", one.clone()) == first
    assert cache.put(BRANCH, "context", other.clone()) == second


def test_equal_bytes_of_another_shape_or_dtype_are_told_apart(arena, cache):
    zeros = torch.zeros(4, 8)
    refs = [
        cache.put(BRANCH, "context", value)
        for value in (zeros, zeros.view(8, 4), zeros.view(torch.int32), zeros.flatten())
    ]
    assert cache.uploads == 4
    assert [arena.segment.tensor(ref).shape for ref in refs] == [(4, 8), (8, 4), (4, 8), (32,)]
    assert arena.segment.tensor(refs[2]).dtype == torch.int32


def test_content_with_nans_is_recognised_too(cache):
    value = text(1)
    value[0, 3] = float("nan")
    assert cache.put(BRANCH, "context", value) == cache.put(BRANCH, "context", value.clone())
    assert cache.uploads == 1


@pytest.mark.parametrize(
    "value",
    [torch.tensor(3.5), torch.zeros(0, 4), torch.tensor([True, False])],
    ids=["scalar", "empty", "bool"],
)
def test_odd_tensors_cross(arena, cache, value):
    ref = cache.put(BRANCH, "guidance", value)
    assert shows(arena, ref, value)
    assert cache.put(BRANCH, "guidance", value.clone()) == ref


def test_a_tensor_the_host_writes_to_later_does_not_change_what_was_sent(arena, cache):
    value = text(1)
    ref = cache.put(BRANCH, "context", value)
    value.zero_()
    assert shows(arena, ref, text(1))
    assert cache.put(BRANCH, "context", value) != ref


def test_tensors_of_two_devices_are_never_compared(arena, cache):
    """torch.equal over devices raises; a stand-in device shows it without a GPU."""
    cache.put(BRANCH, "context", text(1))
    elsewhere = Elsewhere(text(1))
    ref = cache.put(BRANCH, "context", elsewhere)
    cache.put(OTHER_BRANCH, "context", Elsewhere(text(1)))
    assert shows(arena, ref, text(1))


class Elsewhere:
    """Behaves as a tensor of another device: leaves it only by ``to("cpu")``."""

    def __init__(self, local: torch.Tensor):
        self._local = local
        self.shape, self.dtype, self.device = local.shape, local.dtype, torch.device("meta")

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        assert all(isinstance(arg, Elsewhere) for arg in args), (
            "Expected all tensors to be on the same device"
        )
        return function(*(arg._local for arg in args))

    def detach(self):
        return self

    def clone(self):
        return Elsewhere(self._local.clone())

    def to(self, device: str) -> torch.Tensor:
        assert device == "cpu"
        return self._local


KIB = 1 << 10


def test_of_earlier_runs_the_least_recently_used_is_evicted_and_nothing_that_is_in_flight(arena):
    cache = ConditioningCache(arena, limit_bytes=3 * KIB)
    refs = {seed: cache.put(BRANCH, "context", text(seed, 256)) for seed in range(6)}  # 1 KiB each
    cache.put(OTHER_BRANCH, "context", text(1, 256))
    cache.begin_run()
    cache.evict(ref.version for ref in refs.values())
    assert cache.nbytes == 6 * KIB and all(shows(arena, refs[seed], text(seed, 256)) for seed in refs)
    cache.evict([refs[0].version])
    assert cache.nbytes == 4 * KIB
    for seed in (0, 1, 4, 5):
        assert cache.put(BRANCH, "context", text(seed, 256)) == refs[seed]
    assert cache.uploads == 6
    assert cache.put(BRANCH, "context", text(2, 256)) not in refs.values()


def test_what_comes_again_and_again_stays_and_no_more_is_sent_anew_than_the_bound_makes(arena):
    """Eight windows in turn of which three have room, and a text beside each: least recently used,
    every window would make room for the next.
    """
    cache = ConditioningCache(arena, limit_bytes=4 * KIB)
    for _ in range(5):
        for window in range(8):
            at = Branch(window=(window,))
            named = [cache.put(at, name, text(seed, 256)) for name, seed in (("y", window), ("text", 99))]
            assert all(
                shows(arena, ref, text(seed, 256)) for ref, seed in zip(named, (window, 99), strict=True)
            )
            cache.evict(())
            assert cache.nbytes <= 4 * KIB
    assert cache.uploads == 9 + 4 * 5


def test_what_was_evicted_is_neither_assumed_nor_recognised(arena):
    cache, made_of = ConditioningCache(arena, limit_bytes=0), text(7)
    origins = (Origin([made_of]),)
    for _ in range(2):
        ref, is_right = cache.assume(BRANCH, "context", text(1), origins)
        assert shows(arena, ref, text(1)) and is_right()
        cache.evict(())
    assert cache.uploads == 2 and cache.nbytes == 0


def test_what_is_kept_beside_conditioning_is_bounded_too(arena):
    cache = ConditioningCache(arena)
    for window in range(2 * KEYS):
        cache.put(Branch(window=(window,)), "text", text(1))
        cache.put(BRANCH, "context", text(window, 1))
    assert len(cache._sent) <= KEYS and len(cache._named) <= KEYS + 1


def test_a_closed_arena_leaves_no_copy_on_the_ui_s_gpu(arena):
    cache = ConditioningCache(arena)
    arena.at_close.append(cache.close)
    cache.put(BRANCH, "context", Elsewhere(text(1)))
    (copy,) = [weakref.ref(entry.copy) for entry in cache._entries.values()]
    arena.close()
    assert copy() is None and cache.nbytes == cache.copied_bytes == 0


def test_the_arena_does_not_grow_over_200_runs(arena):
    limit, per_run = 64 * KIB, 3
    cache = ConditioningCache(arena, limit_bytes=limit)
    # Floats: up to 16 KiB each
    sizes = torch.randint(1, 4 * KIB, (200, per_run), generator=torch.Generator().manual_seed(0)).tolist()
    room = []
    for run, counts in enumerate(sizes):
        cache.begin_run()
        cache.evict(())
        refs = [
            cache.put(BRANCH, f"{index}", text(per_run * run + index, count))
            for index, count in enumerate(counts)
        ]
        assert all(
            shows(arena, ref, text(per_run * run + index, counts[index])) for index, ref in enumerate(refs)
        )
        room.append(arena.nbytes)
    assert cache.uploads == 200 * per_run
    assert room[-1] == room[50]
    assert room[-1] <= 16 * KIB + 4 * (limit + per_run * 16 * KIB)


def test_a_cache_does_not_keep_a_closed_arenas_memory():
    arena = Arena()
    arena.segment = Segment.create("outlived", 64 << 10)
    arena.board = Board(arena.segment)
    cache = ConditioningCache(arena)
    cache.put(BRANCH, "context", text(1))
    assert mappings("pipemesh-outlived")
    arena.close()
    assert cache.uploads == 1
    assert mappings("pipemesh-outlived") == 0
