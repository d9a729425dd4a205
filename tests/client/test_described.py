"""A description is equal to another where all that it tells of is, and stays as it was made."""

import functools
import weakref

import pytest
import torch
from comfy.conds import CONDConstant, CONDRegular
from hypothesis import given
from hypothesis import strategies as st
from pipemesh.parallel_runtime.client.description import cpu_copy, described, is_same, tensors_of

PLAIN = st.one_of(st.none(), st.booleans(), st.integers(-2, 2), st.sampled_from([0.5, 1.0, "a", "b"]))
TREES = st.recursive(
    PLAIN,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
    ),
    max_leaves=8,
)


def alike(one, other):
    """What is to be found, by another way: the type of each leaf and each collection counts."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(alike(one[name], other[name]) for name in one)
    if isinstance(one, (list, tuple)) and type(one) is type(other):
        return len(one) == len(other) and all(map(alike, one, other))
    return type(one) is type(other) and not isinstance(one, (dict, list, tuple)) and one == other


@given(TREES, TREES)
def test_trees_of_plain_data_are_the_same_where_types_and_values_are(one, other):
    assert is_same(described(one), described(one))
    assert is_same(described(one), described(other)) == alike(one, other)


@given(st.lists(st.sampled_from([0.0, 1.0]), min_size=1, max_size=4), st.integers(0, 3))
def test_a_tensor_is_the_same_by_its_content_and_is_kept_as_it_was(values, at):
    tensor = torch.tensor(values)
    kept = described({"deep": [(tensor,)]}, cpu_copy)
    assert is_same(kept, described({"deep": [(tensor.clone(),)]}))
    assert [one.nbytes for one in tensors_of(kept)] == [tensor.nbytes]
    tensor[at % len(values)] += 1
    assert not is_same(kept, described({"deep": [(tensor,)]}))


@pytest.mark.parametrize(
    "other",
    [torch.ones(2, dtype=torch.float64), torch.ones(2, 1), torch.ones(3), torch.ones(2, device="meta"), None],
    ids=str,
)
def test_a_tensor_of_another_kind_is_another(other):
    assert not is_same(described(torch.ones(2)), described(other))


def closure(value, default=1):
    def function(x, more=default):
        return x + value + more

    return function


def conds_of(kind, value, uuid=1):
    return [{"model_conds": {"c": kind(value)}, "uuid": uuid}]


TEXT, THING = CONDRegular({}), object()
SAME = [
    (closure(2), closure(2)),
    (functools.partial(alike, 1), functools.partial(alike, 1)),
    (st.integers, st.integers),
    (TEXT.concat, TEXT.concat),
    (conds_of(CONDRegular, torch.ones(2)), conds_of(CONDRegular, torch.ones(2), uuid=2)),
    ({"a": THING}, {"a": THING}),
]
OTHERS = [
    (closure(2), closure(3)),
    (closure(2), closure(2, default=3)),
    (closure(2), alike),
    (functools.partial(alike, 1), functools.partial(alike, 2)),
    (TEXT.concat, CONDRegular({}).concat),
    (conds_of(CONDRegular, torch.ones(2)), conds_of(CONDRegular, torch.zeros(2))),
    (conds_of(CONDRegular, torch.ones(2)), conds_of(CONDConstant, torch.ones(2))),
    ({"a": THING}, {"a": object()}),
]


@pytest.mark.parametrize("pair", SAME + OTHERS, ids=lambda pair: type(pair[0]).__name__)
def test_code_conds_and_objects_are_the_same_by_their_kind_and_what_they_hold(pair):
    one, other = map(described, pair)
    assert is_same(one, other) == any(pair is same for same in SAME)


def test_a_function_is_kept_with_what_it_holds_as_it_was():
    held = torch.ones(1)
    kept = described(closure(held), cpu_copy)
    assert is_same(kept, described(closure(held)))
    held.zero_()
    assert not is_same(kept, described(closure(held)))


def test_a_description_keeps_nothing_in_memory_but_tensors():
    model = torch.nn.Linear(2, 2)
    kept = described({"model": model, "method": model.forward})
    assert is_same(kept, described({"model": model, "method": model.forward}))
    gone = weakref.ref(model)
    del model
    assert gone() is None
    assert not is_same(kept, kept), "nobody can tell any more"
