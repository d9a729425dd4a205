"""A model of any numbers computes one evaluation in fp32: as its copy in fp32 does, and no longer
than that.
"""

import pytest
import torch
from pipemesh.lab.commands.parity import Case, relative_error, stock_model
from pipemesh.parallel_runtime.crossing.rows import tensors_in
from pipemesh.parallel_runtime.families import plan_for
from pipemesh.parallel_runtime.families.catalogue import PLAIN, SAMPLES
from pipemesh.parallel_runtime.weights.fp32_forward import arguments_in_fp32, computing_in_fp32
from pipemesh.parallel_runtime.weights.quantisation import is_quantised
from pipemesh.pool.trial.comparisons import WIDE_HEADS, int8_model
from torch.utils._pytree import tree_map_only

from ..kit.models import asked_of

IN_FP32 = 1e-4  # of the output's scale; rounding in bf16 makes 0.02 and more


def asked_first(patcher, family):
    """The forward of a MODEL, and the arguments of the first evaluation of a run."""
    facts = SAMPLES[family]
    forward, (asked, *_) = asked_of(
        patcher, Case(family, "ulysses1", "odd", facts.heads[-1], 1.0, facts.masks is not None, "euler")
    )
    return forward, asked


@torch.inference_mode()
def computed(forward, arguments):
    """The tensors of an output; what the model is given may be written to."""
    return tensors_in(forward(**tree_map_only(torch.Tensor, torch.clone, arguments)))


def weights_of(model):
    """What a model computes with, by identity, and what is applied to it."""
    return [
        (path, name, id(value))
        for path, module in model.named_modules()
        for name, value in {**module._parameters, **module._buffers}.items()
    ] + [(getattr(one, "weight_function", None), getattr(one, "dtype", None)) for one in model.modules()]


@pytest.mark.cover(12)
@pytest.mark.parametrize("family", SAMPLES)
def test_a_model_in_bf16_computes_as_its_copy_in_fp32_does_once(family):
    stock = stock_model(SAMPLES[family].heads[-1], torch.bfloat16, family=family)
    transformer = stock.model.diffusion_model
    if hasattr(transformer, "dec_net"):
        pytest.skip("behind its blocks it casts what comes in to its weights' numbers")
    forward, asked = asked_first(stock, family)
    before, plain = weights_of(transformer), computed(forward, asked)
    widened = arguments_in_fp32(asked, ())
    prefix = plan_for(type(transformer)).prefix
    with computing_in_fp32(transformer, "" if prefix is None else prefix.forget):
        found = computed(forward, widened)
    assert weights_of(transformer) == before
    assert all(map(torch.equal, computed(forward, asked), plain)), "in bf16 again"
    for module in transformer.float().modules():
        module.dtype = torch.float32
    if prefix is not None and prefix.forget:
        getattr(transformer, prefix.forget)()
    for one, truth in zip(found, computed(forward, widened), strict=True):
        assert one.dtype == torch.float32
        assert relative_error(one, truth) <= IN_FP32


def test_of_cudnn_nothing_but_tf32_is_off():
    cudnn = torch.backends.cudnn

    def flags():
        return cudnn.enabled, cudnn.benchmark, cudnn.deterministic, cudnn.allow_tf32

    with cudnn.flags(enabled=True, benchmark=True, deterministic=True, allow_tf32=True):
        with computing_in_fp32(torch.nn.Linear(1, 1)):
            assert flags() == (True, True, True, False)
        assert flags() == (True, True, True, True)


def test_quantised_weights_are_dequantised_and_what_comes_in_is_not_quantised():
    sample = SAMPLES[PLAIN]
    model = int8_model(sample.form, sample.tiny.size(WIDE_HEADS))
    transformer = model.model.diffusion_model
    forward, asked = asked_first(model, PLAIN)
    (plain,) = computed(forward, asked)
    with computing_in_fp32(transformer):
        (found,) = computed(forward, asked)
    for module in transformer.modules():
        if is_quantised(weight := getattr(module, "weight", None)):
            module.weight, module.layout_type = torch.nn.Parameter(weight.dequantize()), None
    (truth,) = computed(forward, asked)
    assert relative_error(found, truth) <= IN_FP32 < relative_error(plain, truth)
