"""Kernels are taken if they compute attention and its log-sum-exp, and refused by name if they
compute anything else.
"""

import math

import pytest
import torch
from pipemesh.lab.dry_run.device import dry_device
from pipemesh.lab.dry_run.ranks import IdleRank, joined
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
from pipemesh.parallel_runtime.attention.trial import tried_kernels, usual
from pipemesh.parallel_runtime.layout import Layout
from pipemesh.parallel_runtime.methods.factory import make_method
from pipemesh.parallel_runtime.patches import Part
from pipemesh.parallel_runtime.planner.dry_device import DEVICE
from torch._subclasses.fake_tensor import FakeTensorMode

from ..kit import joint_model

CPU = torch.device("cpu")
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


def ignoring_scale(q, k, v, mask, scale):
    return explicit(q, k, v, mask, None)


def without_last_key(q, k, v, mask, scale):
    return explicit(q, k[:, :, :-1], v[:, :, :-1], None if mask is None else mask[..., :-1], scale)


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
    "the usual scale": ignoring_scale,
    "one key less": without_last_key,
    "causal": causal,
}


def tried_beside_explicit(kernel):
    """What comes of trying a kernel, with no other one but the explicit."""
    return tried_kernels(CPU, [Usable("theirs", kernel, CPU_FLASH.suits), EXPLICIT])


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_kernel_is_refused_by_name(what):
    found = tried_beside_explicit(WRONG[what])
    assert found.order == (EXPLICIT,)
    (sentence,) = found.refused
    assert sentence.startswith("theirs is not used: for head dim 64 in ") and sentence.endswith(".")


def test_a_kernel_that_takes_nothing_is_refused_with_what_it_says():
    def none(q, k, v, mask, scale):
        raise TypeError("got an unexpected keyword argument 'softcap'")

    (sentence,) = tried_beside_explicit(none).refused
    assert "it cannot run (TypeError: got an unexpected keyword argument 'softcap')" in sentence


def test_one_wrong_dtype_is_enough():
    def wrong_in_fp16(q, k, v, mask, scale):
        out, lse = explicit(q, k, v, mask, scale)
        return out, lse * 2 if q.dtype == torch.float16 else lse

    found = tried_beside_explicit(wrong_in_fp16)
    assert found.order == (EXPLICIT,) and len(found.refused) == 1


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
    for degrees, kernels in (((1, 2), [CPU_FLASH.name] * 2), ((2,), ["", ""])):
        clients(*degrees).sessions.open(lambda: False)
        pool = clients(*degrees).sessions.live.pool
        assert [(one.kernel, one.refused_kernels) for one in pool.ready] == [
            (kernel, ()) for kernel in kernels
        ]
