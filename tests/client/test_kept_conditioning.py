"""What ranks keep of a run's conditioning: no more bytes than the bound beside what an evaluation
names, always what the UI means, and nothing once the run is over.
"""

from contextlib import suppress

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pipemesh.parallel_runtime.client.conditioning import ConditioningCache
from pipemesh.parallel_runtime.wire.arena import BOARD_BYTES, Arena
from pipemesh.parallel_runtime.wire.tree import encode_tree
from pipemesh.parallel_runtime.worker.arena_io import ArenaIO

LIMIT = 4 << 10
SIZES = (1, 100, 300, 900, 1500)  # floats; the last is larger than the limit
NUMBERS = range(8)
CPU = torch.device("cpu")


def content(number):
    return torch.full((SIZES[number % len(SIZES)],), float(number))


class Full(Exception):
    pass


class Ends:
    """A UI and the ranks of two groups, on one arena."""

    def __init__(self):
        self.arena = Arena(nbytes=BOARD_BYTES + (1 << 10))
        self.cache = ConditioningCache(self.arena, LIMIT)
        self.ranks = [ArenaIO(self.arena.segment, CPU, conditioning_bytes=LIMIT) for _ in range(3)]

    def group(self, index):
        return (self.ranks[:2], self.ranks[2:], self.ranks)[index]

    def evaluate(self, group, branch, numbers, assumes, fails_at=-1):
        """Has the ranks of a group read it, as one evaluation that may fail in the middle."""
        wanted, checks = {str(name): content(number) for name, number in enumerate(numbers)}, []
        refs = set()

        def put(path, tensor):
            ref, is_right = (
                self.cache.assume((branch,), path, tensor)
                if assumes
                else (self.cache.put((branch,), path, tensor), lambda: True)
            )
            checks.append(is_right)
            refs.add(ref)
            return ref

        tree = encode_tree(wanted, put)
        right = all([check() for check in checks])
        for rank in self.group(group):
            rank.arena.follow()
            with suppress(Full):
                read = rank.read(tree) if fails_at < 0 else without_memory(rank, fails_at, tree)
                assert not right or all(torch.equal(read[name], wanted[name]) for name in wanted)
            named = sum(tensor.nbytes for tensor in {number: content(number) for number in numbers}.values())
            assert rank.conditioning.nbytes <= LIMIT + (named if right else max(SIZES) * 4 * len(numbers))
        self.cache.evict(ref.version for ref in refs)
        assert self.cache.nbytes <= LIMIT + sum(ref.nbytes for ref in refs)
        if not right:
            self.evaluate(group, branch, numbers, assumes=False)

    def end_run(self, group):
        for rank in self.group(group):
            rank.conditioning.forget()


def without_memory(rank, at, tree):
    """Reads, with no memory for the copy number ``at``."""
    real, left = rank._copied, iter(range(at))

    def copied(view):
        if next(left, None) is None:
            raise Full
        return real(view)

    rank._copied = copied
    try:
        return rank.read(tree)
    finally:
        rank._copied = real


EVALUATIONS = st.tuples(
    st.just("evaluate"), st.integers(0, 2), st.sampled_from("ab"),
    st.lists(st.sampled_from(NUMBERS), min_size=1, max_size=4), st.booleans(), st.sampled_from([-1, -1, 0, 1]),
)  # fmt: skip
ENDS = st.tuples(st.just("end_run"), st.integers(0, 2))
STEPS = st.lists(st.one_of(EVALUATIONS, EVALUATIONS, ENDS, st.tuples(st.just("begin_run"))), max_size=30)


@settings(max_examples=60, deadline=None)
@given(STEPS)
def test_ranks_read_what_the_ui_means_and_keep_no_more_than_the_bound_in_whatever_order_runs_go(steps):
    ends = Ends()
    try:
        for name, *args in steps:
            if name == "begin_run":
                ends.cache.begin_run()
            else:
                getattr(ends, name)(*args)
        ends.end_run(2)
        assert [rank.conditioning.nbytes for rank in ends.ranks] == [0, 0, 0]
    finally:
        ends.arena.close()


def test_what_an_evaluation_names_stays_the_same_object_however_large(request):
    ends = Ends()
    request.addfinalizer(ends.arena.close)
    tree = encode_tree([content(4), content(3)], lambda path, tensor: ends.cache.put(("a",), path, tensor))
    rank = ends.ranks[0]
    rank.arena.follow()
    assert all(one is again for one, again in zip(rank.read(tree), rank.read(tree), strict=True))
