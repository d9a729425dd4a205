"""What the tests that run everywhere leave out of a product of cases."""

from hypothesis import given
from hypothesis import strategies as st

from .cover import chosen

SIZES = st.lists(st.integers(1, 4), min_size=1, max_size=3)


def product_of(sizes):
    cases = [{}]
    for number, size in enumerate(sizes):
        cases = [{**case, f"p{number}": value} for case in cases for value in range(size)]
    return cases


@given(SIZES, st.integers(1, 5))
def test_a_cover_is_one_case_in_as_many_as_it_says(sizes, share):
    cases = product_of(sizes)
    numbers = chosen(cases, share)
    assert len(numbers) == -(-len(cases) // share)
    assert sorted(set(numbers)) == numbers and set(numbers) <= set(range(len(cases)))


@given(SIZES, st.integers(1, 5))
def test_every_value_of_every_parameter_is_in_a_cover_that_has_room_for_it(sizes, share):
    cases = product_of(sizes)
    covered = [cases[number] for number in chosen(cases, share)]
    if len(covered) >= max(sizes):
        for name in cases[0]:
            assert {case[name] for case in covered} == {case[name] for case in cases}


def test_of_one_list_every_so_many_th_is_taken():
    assert chosen([{"family": number} for number in range(7)], 3) == [0, 3, 6]
