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


def test_a_function_is_the_same_by_its_code_and_what_it_holds():
    assert is_same(described(closure(2)), described(closure(2)))
    assert not is_same(described(closure(2)), described(closure(3)))
    assert not is_same(described(closure(2)), described(closure(2, default=3)))
    assert not is_same(described(closure(2)), described(alike))
    held = torch.ones(1)
    kept = described(closure(held), cpu_copy)
    held.zero_()
    assert not is_same(kept, described(closure(held)))


def test_a_partial_and_a_method_are_the_same_by_what_they_call():
    assert is_same(described(functools.partial(alike, 1)), described(functools.partial(alike, 1)))
    assert not is_same(described(functools.partial(alike, 1)), described(functools.partial(alike, 2)))
    one, other = {}, {}
    assert is_same(described(st.integers), described(st.integers))
    text, another = CONDRegular(one), CONDRegular(other)
    assert is_same(described(text.concat), described(text.concat))
    assert not is_same(described(text.concat), described(another.concat))


def test_conds_are_the_same_by_their_class_and_what_they_hold_under_another_id():
    def cond(kind, value, uuid):
        return [{"model_conds": {"c": kind(value)}, "uuid": uuid}]

    one = described(cond(CONDRegular, torch.ones(2), 1), cpu_copy)
    assert is_same(one, described(cond(CONDRegular, torch.ones(2), 2)))
    assert not is_same(one, described(cond(CONDRegular, torch.zeros(2), 1)))
    assert not is_same(one, described(cond(CONDConstant, torch.ones(2), 1)))


def test_an_object_of_unknown_kind_is_itself_alone():
    one, other = object(), object()
    assert is_same(described({"a": one}), described({"a": one}))
    assert not is_same(described({"a": one}), described({"a": other}))


def test_a_description_keeps_nothing_in_memory_but_tensors():
    model = torch.nn.Linear(2, 2)
    kept = described({"model": model, "method": model.forward})
    assert is_same(kept, described({"model": model, "method": model.forward}))
    gone = weakref.ref(model)
    del model
    assert gone() is None
    assert not is_same(kept, kept), "nobody can tell any more"
