"""Which rank computes which patched weight: no rank has much more to do than another."""

from hypothesis import given, settings
from hypothesis import strategies as st
from pipemesh.parallel_runtime.client.patched_weights import share_out_weights

SIZES = st.dictionaries(st.text(max_size=3), st.integers(0, 6400), min_size=1, max_size=12)


@settings(deadline=None)
@given(SIZES, st.integers(1, 5))
def test_every_weight_has_one_rank_and_the_loads_are_as_even_as_the_largest_weight_allows(sizes, ranks):
    shared, segment = share_out_weights(range(ranks), sizes)
    segment.close()
    assert {key: ref.nbytes for key, (_, ref) in shared.items()} == sizes
    given_to = [[ref.nbytes for owner, ref in shared.values() if owner == rank] for rank in range(ranks)]
    loads, largest = [sum(sizes) for sizes in given_to], max(sizes.values())
    assert max(loads) <= sum(loads) / ranks + largest
    assert all(sum(sizes) - min(sizes) <= min(loads) for sizes in given_to if sizes), (
        "the last one that a rank got is its smallest"
    )


@settings(deadline=None)
@given(SIZES)
def test_no_two_weights_share_a_place(sizes):
    shared, segment = share_out_weights((0, 1), sizes)
    for number, (_, ref) in enumerate(shared.values()):
        segment.tensor(ref).fill_(number)
    assert all((segment.tensor(ref) == number).all() for number, (_, ref) in enumerate(shared.values()))
    segment.close()
