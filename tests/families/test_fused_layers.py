"""Helpers of ComfyUI's that compute with a layer's weights past the layer's own forward: with its
weights shared out, or in main memory, a model computes what it does with them whole, to the last
bit. All ranks in one process, each a ResidentModel of its own.
"""

import itertools
from pathlib import Path

import comfy.ops
import comfy.utils
import pytest
import torch
from comfy.ldm.lumina.model import FeedForward
from greenlet import getcurrent
from pipemesh.lab.quantised_files import FORMATS
from pipemesh.parallel_runtime.families.catalogue import FAMILIES, classes_of
from pipemesh.parallel_runtime.watch.fingerprint import host_files
from pipemesh.parallel_runtime.weights.quantisation import is_quantised
from pipemesh.pool.trial.comparisons import model_of

from ..fixtures import ALL, COMFYUI
from ..weights import test_sharded_families
from ..weights.test_kept_weights import aligned
from ..weights.test_quantised import SAMPLE_OF, WITHOUT_STAGES, loaded, size_of, with_lora, written
from ..weights.test_sharded_families import LAYOUTS, asked, computed, is_equal

__all__ = ["written"]  # a fixture
HELPER = "linear_input_act"  # of comfy.ops: an activation, and the layer behind it
INT8 = [form for form, one in FORMATS.items() if "int8" in one.algorithm]


@pytest.mark.host
@pytest.mark.parametrize(("number", "form"), [*enumerate(INT8)])
def test_int8_weights_that_a_helper_computes_with_are_the_whole_ones(written, monkeypatch, number, form):
    """Each format, both ways to keep weights, over families in turn."""
    files, ways = host_files(Path(COMFYUI)), ("sharded", "offloaded")
    fused = [family for family in FAMILIES if calls_the_helper(files, family)]
    every = [(family, way) for family in fused for way in ways]
    for family, weights in every if ALL else [(fused[number % len(fused)], ways[number % 2])]:
        name = family.samples[0].name
        path = aligned(Path(written(name, form)))
        with monkeypatch.context() as patch:
            given = spied(patch)
            calls = asked(path, name)[:1]
        assert given and all(map(is_quantised, given)), "the helper is given layers that are not quantised"
        patches = with_lora(loaded(path), written(name, "lora"), True).patches if weights == "sharded" else {}
        for ranks in ("2", "stages") if ALL and name not in WITHOUT_STAGES else ("2",):
            assert_equal(monkeypatch, LAYOUTS[ranks], weights, path, calls, patches)


def calls_the_helper(files, family):
    """Whether code of the family's models may call it."""
    return ("comfy.ops", HELPER) in files.reached(*(classes_of(plan)[0] for plan in family.plans))


def spied(monkeypatch):
    """The weights of the layers that the helper is given from now on."""
    own, given = getattr(comfy.ops, HELPER), []
    monkeypatch.setattr(
        comfy.ops, HELPER, lambda linear, *args: given.append(linear.weight) or own(linear, *args)
    )
    return given


def assert_equal(monkeypatch, layout, weights, path, calls, patches):
    """Ranks that keep weights so compute what they do with whole ones, to the last bit."""
    outputs = {}
    for kept in ("whole", weights):
        with monkeypatch.context() as patch:
            outputs[kept], _ = computed(patch, layout, kept, path, calls, patches)
    truth, ours = outputs.values()
    assert any(out is not None for out in truth.values())
    for key in truth:
        assert is_equal(truth[key], ours[key]), key


# -- doubles of helpers that other versions of the host have, or will


KIND = "comfy.ldm.lumina"
LUMINA = next(one.samples[0].name for one in FAMILIES if classes_of(one.plans[0])[0].startswith(KIND))


def cast(linear, x):
    weight, bias, offload_stream = comfy.ops.cast_bias_weight(linear, x, offloadable=True)
    comfy.ops.uncast_bias_weight(linear, weight, bias, offload_stream)
    return weight, bias


def gated(feed_forward, x, w1, w3):
    return feed_forward._forward_silu_gating(w1(x), w3(x))


def one_at_a_time(self, x):
    x = gated(self, x, self.w1, self.w3)
    return torch.nn.functional.linear(x, *cast(self.w2, x))


def all_at_once(self, x):
    """More of them than there is room for."""
    w1, w3, w2 = (cast(linear, x) for linear in (self.w1, self.w3, self.w2))
    linear = torch.nn.functional.linear
    return linear(gated(self, x, lambda x: linear(x, *w1), lambda x: linear(x, *w3)), *w2)


def by_the_ranks_tokens(self, x):
    """One rank computes in the layers' forward, one past it, and one tries that first."""
    rank = getattr(getcurrent(), "rank", 0)
    x = gated(self, x, self.w1, self.w3)
    found = cast(self.w2, x) if rank else None
    return torch.nn.functional.linear(x, *found) if rank == 1 else self.w2(x)


HELPERS = (one_at_a_time, all_at_once, by_the_ranks_tokens)
# Such layers in int8 are tried above: on a CPU, this model's products of int8 take a minute
IN_TURN = [(one_at_a_time, "float16", "2"), (all_at_once, "", "3"), (by_the_ranks_tokens, "", "stages")]
EVERY = itertools.product(HELPERS, ("", "float16", "int8"), ("3", "stages"))


@pytest.mark.parametrize(("helper", "kind", "ranks"), EVERY if ALL else IN_TURN)
def test_a_layer_whose_weights_are_cast_past_its_forward_has_its_turn(
    written, monkeypatch, helper, kind, ranks
):
    def half(path):
        state = comfy.utils.load_torch_file(path)
        return model_of(SAMPLE_OF[LUMINA].form, size_of(LUMINA), state, torch.float16)

    path = aligned(Path(written(LUMINA, kind if kind == "int8" else "")))
    calls = asked(path, LUMINA)[:1]
    monkeypatch.setattr(FeedForward, "forward", helper)
    if kind == "float16":
        monkeypatch.setattr(test_sharded_families, "loaded", torch.inference_mode()(half))
    before = comfy.ops.cast_bias_weight
    assert_equal(monkeypatch, LAYOUTS[ranks], "sharded", path, calls, {})
    assert comfy.ops.cast_bias_weight is before
