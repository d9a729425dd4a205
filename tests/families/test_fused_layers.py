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
from pipemesh.parallel_runtime.layout import Layout
from pipemesh.parallel_runtime.watch.fingerprint import host_files
from pipemesh.parallel_runtime.weights.quantisation import is_quantised
from pipemesh.pool.trial.comparisons import model_of

from ..fixtures import ALL, COMFYUI
from ..weights import test_sharded_families
from ..weights.test_kept_weights import aligned
from ..weights.test_quantised import SAMPLE_OF, WITHOUT_STAGES, loaded, size_of, with_lora, written
from ..weights.test_sharded_families import asked, computed

__all__ = ["written"]  # a fixture
HELPER = "linear_input_act"  # of comfy.ops: an activation, and the layer behind it
INT8 = [form for form, one in FORMATS.items() if "int8" in one.algorithm]
LAYOUTS = {"2": Layout(ulysses=2), "3": Layout(ring=3), "stages": Layout(ring=2, pipefusion=2)}


def calls_the_helper(family):
    """Whether code of the family's models may call it."""
    kinds = [classes_of(plan)[0] for plan in family.plans]
    return ("comfy.ops", HELPER) in host_files(Path(COMFYUI)).reached(*kinds)


FUSED = [family.samples[0].name for family in FAMILIES if calls_the_helper(family)]
PRODUCT = [
    (family, form, ranks, weights)
    for family, form, ranks, weights in itertools.product(
        FUSED, INT8, ("2", "stages"), ("sharded", "offloaded")
    )
    if not (ranks == "stages" and family in WITHOUT_STAGES)
]


def cover():
    """Each format, both ways to keep weights, over families and layouts in turn."""
    ways = zip(
        itertools.cycle(FUSED), INT8, itertools.cycle(("sharded", "offloaded", "sharded")), strict=False
    )
    return [(family, form, "2", weights) for family, form, weights in ways]


@pytest.mark.host
@pytest.mark.parametrize(("family", "form", "ranks", "weights"), PRODUCT if ALL else cover())
def test_int8_weights_that_a_helper_computes_with_are_the_whole_ones(
    written, monkeypatch, family, form, ranks, weights
):
    path = aligned(Path(written(family, form)))
    with monkeypatch.context() as patch:
        given = spied(patch)
        calls = asked(path, family)[:1]
    assert given and all(map(is_quantised, given)), "the helper is given layers that are not quantised"
    patches = with_lora(loaded(path), written(family, "lora"), True).patches if weights == "sharded" else {}
    assert_equal(monkeypatch, LAYOUTS[ranks], weights, path, calls, patches)


def spied(monkeypatch):
    """The weights of the layers that the helper is given from now on."""
    own, given = getattr(comfy.ops, HELPER), []

    def helper(linear, *args):
        given.append(linear.weight)
        return own(linear, *args)

    monkeypatch.setattr(comfy.ops, HELPER, helper)
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
        assert (truth[key] is None and ours[key] is None) or torch.equal(truth[key], ours[key]), key


# -- doubles of helpers that other versions of the host have, or will


LUMINA = next(
    family.samples[0].name
    for family in FAMILIES
    if classes_of(family.plans[0])[0].startswith("comfy.ldm.lumina")
)


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
KINDS = (("", torch.float32), ("", torch.float16), ("int8", torch.float32))
# Such layers in int8 are tried above: on a CPU, this model's products of int8 take a minute
IN_TURN = [
    (one_at_a_time, KINDS[1], "2"),
    (all_at_once, KINDS[0], "3"),
    (by_the_ranks_tokens, KINDS[0], "stages"),
]


@pytest.mark.parametrize(
    ("helper", "kind", "ranks"), list(itertools.product(HELPERS, KINDS, ("3", "stages"))) if ALL else IN_TURN
)
def test_a_layer_whose_weights_are_cast_past_its_forward_has_its_turn(
    written, monkeypatch, helper, kind, ranks
):
    def half(path):
        state = comfy.utils.load_torch_file(path)
        return model_of(SAMPLE_OF[LUMINA].form, size_of(LUMINA), state, torch.float16)

    form, dtype = kind
    path = aligned(Path(written(LUMINA, form)))
    calls = asked(path, LUMINA)[:1]
    monkeypatch.setattr(FeedForward, "forward", helper)
    if dtype == torch.float16:
        monkeypatch.setattr(test_sharded_families, "loaded", torch.inference_mode()(half))
    before = comfy.ops.cast_bias_weight
    assert_equal(monkeypatch, LAYOUTS[ranks], "sharded", path, calls, {})
    assert comfy.ops.cast_bias_weight is before
