"""Kernels that return LSE, and the merge: attention over parts of the keys equals attention over
all of them. Kernels that compute anything else are refused by name.
"""

import math
import sys
from functools import reduce
from importlib import import_module

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pipemesh.lab.dry_run.device import dry_device
from pipemesh.lab.dry_run.ranks import IdleRank, joined
from pipemesh.parallel_runtime.attention import kernels
from pipemesh.parallel_runtime.attention.kernels import (
    CPU_FLASH,
    CUDA_CUDNN,
    CUDA_EFFICIENT,
    CUDA_FLASH,
    EXPLICIT,
    TORCHS,
    Ask,
    Usable,
    capability_of,
    explicit,
    partial_attention,
)
from pipemesh.parallel_runtime.attention.merge_operation import in_one
from pipemesh.parallel_runtime.attention.merging import Partial, merge_partials
from pipemesh.parallel_runtime.attention.trial import chosen_merge, tried_kernels, usual
from pipemesh.parallel_runtime.layout import Layout
from pipemesh.parallel_runtime.methods.factory import make_method
from pipemesh.parallel_runtime.patches import Part
from pipemesh.parallel_runtime.planner.dry_device import DEVICE
from torch._subclasses.fake_tensor import FakeTensorMode

from ..kit import joint_model

TURING, AMPERE, ADA, HOPPER, BLACKWELL = (7, 5), (8, 0), (8, 9), (9, 0), (12, 0)


def ask(dtype=torch.float16, dim=128, masked=False, capability=HOPPER, device="cuda"):
    return Ask(device, dtype, dim, masked, capability)


# -- which kernel suits what


@pytest.mark.parametrize(
    ("asked", "kernel"),
    [
        (ask(capability=TURING), CUDA_EFFICIENT),
        (ask(capability=AMPERE), CUDA_FLASH),
        (ask(masked=True), CUDA_EFFICIENT),
        (ask(torch.float32), CUDA_EFFICIENT),
        (ask(torch.bfloat16, 264), CUDA_EFFICIENT),
        (ask(torch.bfloat16, 60), EXPLICIT),
        (ask(torch.bfloat16, capability=TURING), EXPLICIT),  # before Ampere there is no bf16
        (ask(device="xpu"), EXPLICIT),
        (ask(dim=60, masked=True, device="cpu"), CPU_FLASH),
    ],
)
def test_torchs_own_kernels_are_chosen_for_what_they_take(asked, kernel):
    assert TORCHS.choose(asked) is kernel


def test_cudnns_kernel_comes_first_from_hopper_on_where_it_was_tried_and_nowhere_else():
    assert TORCHS.choose(ask()) is CUDA_FLASH
    for asked, kernel in (
        (ask(), CUDA_CUDNN),
        (ask(torch.bfloat16, 64, capability=BLACKWELL), CUDA_CUDNN),
        (ask(capability=ADA), CUDA_FLASH),
        (ask(dim=96), CUDA_FLASH),
        (ask(masked=True), CUDA_EFFICIENT),
    ):
        assert tried_kernels(CPU).choose(asked) is kernel


def test_gpus_of_amds_are_not_taken_for_nvidias_of_the_same_version(monkeypatch):
    monkeypatch.setattr("torch.version.hip", "6.4", raising=False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 4))  # as gfx942 says
    assert capability_of(torch.device("cuda")) == AMPERE
    assert not CUDA_CUDNN.suits(ask(capability=AMPERE))


# -- what is wrong is refused by name


def off_by(change):
    """A right kernel but for ``change`` of (out, lse)."""
    return lambda q, k, v, mask, scale: change(*explicit(q, k, v, mask, scale))


def wrong_in_fp16(q, k, v, mask, scale):
    out, lse = explicit(q, k, v, mask, scale)
    return out, lse * 2 if q.dtype == torch.float16 else lse


def causal(q, k, v, mask, scale):
    closed = torch.full((q.shape[2], k.shape[2]), -math.inf).triu(k.shape[2] - q.shape[2] + 1)
    return explicit(q, k, v, closed, scale)


WRONG = {
    "log2": off_by(lambda out, lse: (out, lse / math.log(2))),
    "lse of another layout": off_by(lambda out, lse: (out, lse.transpose(1, 2))),
    "out of another layout": off_by(lambda out, lse: (out.transpose(1, 2), lse)),
    "lse in half precision": off_by(lambda out, lse: (out, lse.bfloat16())),
    "lse of zeros": off_by(lambda out, lse: (out, torch.zeros_like(lse))),
    "lse without the largest score": off_by(lambda out, lse: (out, lse - lse.amax(-1, keepdim=True))),
    "lse padded": off_by(lambda out, lse: (out, torch.nn.functional.pad(lse, (0, 31)))),
    "no number": off_by(lambda out, lse: (out * math.nan, lse)),
    "another out": off_by(lambda out, lse: (out * 1.1, lse)),
    "one wrong dtype": wrong_in_fp16,
    "the usual scale": lambda q, k, v, mask, scale: explicit(q, k, v, mask, None),
    "one key less": lambda q, k, v, mask, scale: explicit(
        q, k[:, :, :-1], v[:, :, :-1], None if mask is None else mask[..., :-1], scale
    ),
    "causal": causal,
}


def tried_beside_explicit(kernel):
    """What comes of trying a kernel, with no other one but the explicit."""
    return tried_kernels(CPU, [Usable("theirs", kernel, CPU_FLASH.suits), EXPLICIT])


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_kernel_is_refused_by_name(what):
    found = tried_beside_explicit(WRONG[what])
    assert found.order == (EXPLICIT,)
    (sentence,) = found.refused  # one wrong dtype is enough
    assert sentence.startswith("theirs is not used: for head dim 64 in ") and sentence.endswith(".")


def test_a_kernel_that_takes_nothing_is_refused_with_what_it_says():
    def none(q, k, v, mask, scale):
        raise TypeError("got an unexpected keyword argument 'softcap'")

    (sentence,) = tried_beside_explicit(none).refused
    assert "it cannot run (TypeError: got an unexpected keyword argument 'softcap')" in sentence


def test_torchs_kernel_for_cpus_passes_here_and_is_the_one_that_is_named():
    found = tried_kernels(CPU)
    assert found.refused == () and usual(found, CPU) == CPU_FLASH.name


def test_attention_runs_on_the_kernel_that_was_chosen():
    q = torch.randn(1, 2, 3, 64)
    asked = []
    marked = Usable(
        "marked", lambda q, k, v, mask, scale: (q + 7, q[..., 0]), lambda one: asked.append(one) or True
    )
    kernels = TORCHS._replace(order=(marked, *TORCHS.order))
    assert torch.equal(partial_attention(q, q, q, None, None, kernels).out, q + 7)
    assert asked == [Ask("cpu", torch.float32, 64, False)]


def test_a_ring_attends_by_the_ranks_own_kernels():
    asked = []

    def suits(one):
        asked.append(one.device)
        return False

    mode = FakeTensorMode(allow_non_fake_inputs=True)
    kernels = TORCHS._replace(order=(Usable("marked", explicit, suits), *TORCHS.order))
    with joined(Layout(ring=2), 1) as mesh, dry_device(mode), DEVICE:
        model, arguments = joint_model.Model(2), joint_model.inputs(5)
        method = make_method(model, joint_model.PLAN, mesh, IdleRank([Part(1, 0)]), kernels=kernels)
        method.attach()
        method.begin(Part(1, 0))
        method.forward(
            model,
            {name: t.to(DEVICE) if isinstance(t, torch.Tensor) else t for name, t in arguments.items()},
            1,
        )
    assert set(asked) == {"cuda"} and len(asked) >= 4


def test_ranks_around_a_ring_tell_which_kernel_they_use_and_others_have_none(clients):
    for degrees, used in (((1, 2), CPU_FLASH.name), ((2,), "")):
        clients(*degrees).sessions.open(lambda: False)
        pool = clients(*degrees).sessions.live.pool
        assert [(one.kernel, one.refused_kernels) for one in pool.ready] == [(used, ())] * 2


CPU = torch.device("cpu")
BOUND = {torch.float32: 5e-6, torch.bfloat16: 4e-2}


def qkv_of(seed, batch, heads, queries, keys, dim, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    shapes = ((batch, heads, queries, dim), (batch, heads, keys, dim), (batch, heads, keys, dim))
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def closing_mask(seed, shape, kind):
    closed = torch.rand(shape, generator=torch.Generator().manual_seed(seed)) > 0.5
    if kind == "bool":
        return ~closed
    return torch.zeros(shape).masked_fill(closed, -math.inf if kind == "inf" else -10000.0)


def softmax_of(q, k, v, mask):
    """fp64 softmax; a query that may look at nothing gives 0."""
    scores = q.double() @ k.double().transpose(-1, -2) * q.shape[-1] ** -0.5
    if mask is not None:
        if mask.dtype == torch.bool:
            mask = torch.zeros(mask.shape).masked_fill(~mask, -math.inf)
        scores = scores + (mask.double().unsqueeze(1) if mask.ndim == 3 else mask.double())
    return (scores.softmax(-1).nan_to_num(0.0) @ v.double()).float()


def in_parts(q, k, v, mask, cuts):
    """Attention over ``cuts`` consecutive keys at a time, merged one part after another, as a ring
    does.
    """
    partial, offset = None, 0
    for size in cuts:
        part = slice(offset, offset + size)
        here = partial_attention(q, k[:, :, part], v[:, :, part], None if mask is None else mask[..., part])
        partial = here if partial is None else merge_partials(partial, here)
        offset += size
    return partial.out


mask_kinds = st.sampled_from([None, "inf", "big", "bool"])
mask_forms = st.sampled_from(["QK", "BQK", "B1QK", "BHQK", "B11K"])


@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 99),
    cuts=st.lists(st.integers(0, 11), min_size=1, max_size=4),
    queries=st.integers(0, 7),
    heads=st.integers(1, 3),
    kind=mask_kinds,
    form=mask_forms,
)
def test_merged_parts_equal_the_whole(seed, cuts, queries, heads, kind, form):
    keys, batch, dim = sum(cuts), 2, 16
    q, k, v = qkv_of(seed, batch, heads, queries, keys, dim)
    shapes = {
        "QK": (queries, keys),
        "BQK": (batch, queries, keys),
        "B1QK": (batch, 1, queries, keys),
        "BHQK": (batch, heads, queries, keys),
        "B11K": (batch, 1, 1, keys),
    }
    mask = None if kind is None else closing_mask(seed, shapes[form], kind)
    if kind == "big" and keys:
        mask[..., 0] = 0.0  # all keys at -10000 leave fp32 three digits, for everybody
    out = in_parts(q, k, v, mask, cuts)
    expected = softmax_of(q, k, v, mask) if keys else torch.zeros_like(q)
    assert not out.isnan().any()
    assert torch.allclose(out, expected, atol=BOUND[torch.float32], rtol=0)


@pytest.mark.parametrize("closed", [-1e9, torch.finfo(torch.float32).min])
@pytest.mark.parametrize("cuts", [(6, 6), (7, 5), (4, 4, 4), (1, 3, 8), (5, 0, 7)], ids=str)
def test_rows_that_a_large_finite_number_closes_everywhere_are_those_of_one_stock_softmax(closed, cuts):
    q, k, v = qkv_of(8, 2, 3, 5, 12, 16)
    mask = torch.zeros(5, 12)
    mask[1] = mask[3] = closed
    mask[4, :6] = -math.inf
    stock = (q @ k.transpose(-1, -2) * 16**-0.5 + mask).softmax(-1) @ v
    assert torch.allclose(in_parts(q, k, v, mask, cuts), stock, atol=BOUND[torch.float32], rtol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_in_parts_is_as_near_the_truth_as_a_host_that_upcasts(dtype):
    """Scores of 1e5 before their scale: more than fp16 holds."""
    from comfy.ldm.modules.attention import attention_basic, attention_sub_quad

    q, k, v = qkv_of(9, 1, 2, 6, 12, 64, dtype)
    q, k = q + 40, k + 40
    expected = softmax_of(q, k, v, None)
    ours = (in_parts(q, k, v, None, (5, 4, 3)) - expected).abs().max()
    for host in (attention_basic, attention_sub_quad):
        theirs = host(q, k, v, 2, attn_precision=torch.float32, skip_reshape=True, skip_output_reshape=True)
        assert ours <= 1.2 * (theirs.float() - expected).abs().max() <= BOUND[torch.bfloat16]


def test_a_scale_of_the_hosts_choice_is_honoured():
    q, k, v = qkv_of(3, 1, 2, 5, 6, 16)
    out = partial_attention(q, k, v, None, scale=0.5).out
    assert torch.allclose(out, softmax_of(q * 0.5 * 4, k, v, None), atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("masked", [False, True])
def test_attention_without_a_fused_kernel_is_the_truth_in_the_dtype_of_the_query(dtype, masked):
    q, k, v = qkv_of(3, 2, 3, 33, 20, 64, dtype)
    mask = closing_mask(4, (33, 20), "inf") if masked else None
    if masked:
        mask[:, 0] = 0.0
    out, lse = kernels.explicit(q, k, v, mask, None)
    assert (out.dtype, lse.dtype) == (dtype, torch.float32)
    assert (out.float() - softmax_of(q, k, v, mask)).abs().max() <= BOUND[dtype]


@pytest.mark.parametrize("shape", [(3, 5), (1, 1, 3, 5), (2, 4, 3, 5), (2, 1, 1, 5), (1, 1, 3, 1)], ids=str)
def test_bias_rows_for_the_efficient_kernel_begin_aligned_and_are_held_once(shape):
    mask = closing_mask(1, shape, "big")
    bias = kernels.aligned_bias(mask, torch.zeros(2, 4, 3, 16), 5)
    assert torch.equal(bias, mask.expand(2, 4, 3, 5))
    assert all(stride % kernels.ALIGN == 0 for stride in bias.stride()[:3]) and bias.stride(3) == 1
    assert bias.untyped_storage().nbytes() == 4 * kernels.ALIGN * math.prod(shape[:-1])


def step_by_step(parts):
    """Merged as by the formula, operation by operation: the bits that a merge must have."""
    out, level, weight = parts[0].out, parts[0].lse - math.log(parts[0].keys), parts[0].keys
    for part in parts[1:]:
        own = part.lse - math.log(part.keys)
        top = torch.maximum(level, own)
        a, b = (
            many * (here - torch.where(top == -math.inf, 0.0, top)).exp()
            for many, here in ((weight, level), (part.keys, own))
        )
        level, weight = top, torch.where(top == -math.inf, 1.0, a + b)
        out = out.float() * (a / weight).unsqueeze(-1) + part.out.float() * (b / weight).unsqueeze(-1)
    return out, level, weight


def parts_of(seed, shape, dtype, count=4):
    """Some rows look at nothing. As kernels have it, tokens may lie before heads."""
    generator = torch.Generator().manual_seed(seed)
    batch, heads, queries, dim = shape
    parts = []
    for number in range(count):
        out = torch.randn(batch, queries, heads, dim, generator=generator).to(dtype).transpose(1, 2)
        lse = 9 * torch.randn(batch, heads, queries, generator=generator)
        lse[torch.rand(lse.shape, generator=generator) < 0.3] = -math.inf
        parts.append(Partial(out.contiguous() if number % 2 else out, lse, float(3 + number)))
    return parts


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("merge", [merge_partials, in_one])
def test_a_merge_and_one_operation_of_it_have_the_bits_of_the_formula(merge, dtype):
    for seed, shape in enumerate([(2, 3, 7, 16), (1, 5, 1, 40), (2, 3, 0, 8)]):
        parts = parts_of(seed, shape, dtype)
        with torch.inference_mode(seed % 2 == 0):
            made = reduce(merge, parts)
        for found, due in zip((made.out, made.lse, made.weight), step_by_step(parts), strict=True):
            assert torch.equal(found, due)
        assert made.out.dtype == made.lse.dtype == made.weight.dtype == torch.float32


@pytest.fixture
def interpreted(monkeypatch):
    """The merge of a GPU, by Triton's interpreter on the CPU."""
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    name = "pipemesh.parallel_runtime.attention.fused_merge"
    monkeypatch.delitem(sys.modules, name, raising=False)

    def merge(*parts):
        out, level, weight = import_module(name).fused(*parts)
        return Partial(out, level, weight=weight)

    yield merge
    sys.modules.pop(name, None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(2, 3, 7, 16), (1, 5, 33, 40), (2, 3, 0, 8)], ids=str)
def test_the_kernel_of_a_gpu_merges_as_its_operations_do(interpreted, shape, dtype):
    parts = parts_of(1, shape, dtype)
    made, due = (
        merge(reduce(merge, parts[:3]), merge(*parts[2:])) for merge in (interpreted, merge_partials)
    )
    assert 0 in shape or made.out.stride() == due.out.stride()
    for one, other in zip(made, due, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)


def test_a_merge_in_one_kernel_is_used_where_it_is_right_and_refused_by_what_is_wrong(interpreted):
    assert chosen_merge(CPU, interpreted) == (interpreted, [])

    def wrong(change):
        return chosen_merge(CPU, lambda *parts: change(merge_partials(*parts)))

    def fails(part):
        raise ModuleNotFoundError("No module named 'triton'")

    for change, why in (
        (lambda part: part._replace(lse=part.lse + 0.1), "it is off by"),
        (lambda part: part._replace(out=part.out * torch.nan), "it is off by nan"),
        (lambda part: part._replace(weight=part.weight * 1.01), "it is off by"),
        (fails, "it cannot run (ModuleNotFoundError: No module named 'triton')."),
    ):
        merge, (sentence,) = wrong(change)
        assert merge is merge_partials and sentence.startswith(f"The merge in one kernel is not used: {why}")
