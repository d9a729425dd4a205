"""Kernels of other packages are taken where they compute attention and its log-sum-exp, and refused
by name where they compute anything else.
"""

import math
from enum import Enum
from types import ModuleType, SimpleNamespace

import pytest
import torch
from pipemesh.lab.dry_run.device import dry_device
from pipemesh.lab.dry_run.ranks import IdleRank, joined
from pipemesh.parallel_runtime.attention import packages, trial
from pipemesh.parallel_runtime.attention.kernels import (
    CPU_FLASH,
    CUDA_CUDNN,
    CUDA_EFFICIENT,
    CUDA_FLASH,
    EXPLICIT,
    TO_TRY,
    TORCHS,
    Ask,
    Usable,
    capability_of,
    explicit,
    partial_attention,
)
from pipemesh.parallel_runtime.attention.packages import FLASH_2, FLASH_3, PACKAGES, YUNCHANG, Candidate
from pipemesh.parallel_runtime.attention.trial import tried_kernels, usual
from pipemesh.parallel_runtime.layout import Layout
from pipemesh.parallel_runtime.methods.factory import make_method
from pipemesh.parallel_runtime.patches import Part
from pipemesh.parallel_runtime.planner.dry_device import DEVICE
from torch._subclasses.fake_tensor import FakeTensorMode

from . import joint_model

CPU = torch.device("cpu")
TURING, AMPERE, ADA, HOPPER, BLACKWELL = (7, 5), (8, 0), (8, 9), (9, 0), (12, 0)
BY_NAME = {one.name: one for one in PACKAGES}


def ask(dtype=torch.float16, dim=128, masked=False, capability=HOPPER, device="cuda", host=""):
    return Ask(device, dtype, dim, masked, capability, host)


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


@pytest.mark.parametrize(
    ("capability", "threes", "twos"),
    [(TURING, False, False), (ADA, False, True), (HOPPER, True, True), (BLACKWELL, False, True)],
)
def test_flash_kernels_are_tried_only_on_gpus_that_run_them(capability, threes, twos):
    for name, suits in {
        "flash-attn 3": threes,
        "flash-attn 3 (yunchang)": threes,
        "flash-attn 2": twos,
    }.items():
        assert BY_NAME[name].suits(ask(capability=capability)) is suits
    assert not any(one.suits(ask(masked=True)) or one.suits(ask(torch.float32)) for one in PACKAGES)


def test_a_kernel_that_rounds_more_is_used_only_where_the_host_attends_by_it():
    sage = BY_NAME["SageAttention (yunchang)"]
    assert sage.suits(ask(host="attention_sage")) and not sage.suits(ask(host="attention_pytorch"))
    assert [one.name for one in PACKAGES if one.stands_for] == [sage.name]


def test_gpus_of_amds_are_not_taken_for_nvidias_of_the_same_version(monkeypatch):
    monkeypatch.setattr("torch.version.hip", "6.4", raising=False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 4))  # as gfx942 says
    assert capability_of(torch.device("cuda")) == AMPERE
    assert not BY_NAME["flash-attn 3"].suits(ask(capability=AMPERE))


# -- how packages are called: doubles that compute by ``explicit``, and take what the real ones do


def by_tokens(q, k, v, scale):
    """(B, tokens, H, D) as the packages have them -> out likewise, lse (B, H, Q)."""
    out, lse = explicit(*(t.transpose(1, 2) for t in (q, k, v)), None, scale)
    return out.transpose(1, 2), lse


def flash_2(q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, return_attn_probs=False):
    out, lse = by_tokens(q, k, v, softmax_scale)
    return (out, lse, None) if return_attn_probs else out


def flash_3(q, k, v, softmax_scale=None, causal=False):
    """As it was once: lse without a word for it."""
    return by_tokens(q, k, v, softmax_scale)


def through_yunchang(
    q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, return_softmax
):
    assert isinstance(softcap, float) and not causal and dropout_p == 0.0
    return by_tokens(q, k, v, softmax_scale)


def flashinfer(q, k, v, **options):
    if q.shape[0] > 1:
        raise ValueError("batch size > 1 is not supported")
    return through_yunchang(q, k, v, **options)


def sage(q, k, v, tensor_layout="NHD", is_causal=False, sm_scale=None, smooth_k=True, **ignored):
    return by_tokens(q, k, v, sm_scale)


class AttnType(Enum):
    FA = "fa"
    FA3 = "fa3"
    AITER = "aiter"
    FLASHINFER = "flashinfer"
    SAGE_AUTO = "sage_auto"

    @classmethod
    def from_string(cls, name):
        return cls(name)


YUNCHANGS = dict.fromkeys(("fa", "fa3", "aiter"), through_yunchang) | {
    "flashinfer": flashinfer,
    "sage_auto": sage,
}


@pytest.fixture
def installed(monkeypatch):
    """kinds of yunchang's kernels -> functions, and modules -> modules: these are installed."""

    def install(kinds=YUNCHANGS, **modules):
        kernels = ModuleType("yunchang.kernels")
        kernels.AttnType = AttnType
        kernels.select_flash_attn_impl = lambda kind, stage: (
            kinds[kind.value] if stage == "fwd-only" else None
        )
        found = {"yunchang.kernels": kernels, **modules}
        monkeypatch.setattr(packages, "import_module", lambda name: found[name])
        monkeypatch.setattr(
            packages, "find_spec", lambda name: True if name in (YUNCHANG, *modules) else None
        )

    return install


ALL_INSTALLED = {
    FLASH_2: SimpleNamespace(flash_attn_func=flash_2),
    FLASH_3: SimpleNamespace(flash_attn_func=flash_3),
    "aiter": None,
    "flashinfer": None,
    "sageattention": None,
}


@pytest.fixture
def on_hopper(monkeypatch):
    """The CPU stands for a Hopper: it computes what kernels there are asked for."""

    def asks(device, dims, host=""):
        halves = (torch.float16, torch.bfloat16)
        return [
            ask(dtype, dim, masked, host=host) for dim in dims for dtype in halves for masked in (False, True)
        ]

    monkeypatch.setattr(trial, "asks", asks)
    monkeypatch.setattr(trial, "RELEASED_DIMS", (64, 128))


@pytest.mark.parametrize("name", BY_NAME)
def test_each_package_is_called_as_it_wants_it_and_found_right(installed, on_hopper, name):
    installed(**ALL_INSTALLED)
    found = tried_kernels(CPU, packages=[BY_NAME[name]], torchs=[EXPLICIT])
    assert [usable.name for usable in found.order] == [name, EXPLICIT.name] and found.refused == ()
    q, k, v = (torch.randn(2, 3, count, 64, dtype=torch.bfloat16) for count in (5, 7, 7))
    for scale in (None, 0.3):
        for ours, due in zip(
            found.order[0].kernel(q, k, v, None, scale), explicit(q, k, v, None, scale), strict=True
        ):
            assert torch.allclose(ours, due, atol=1e-6)


def test_a_package_is_not_imported_where_an_earlier_one_takes_all(installed, on_hopper):
    installed(**ALL_INSTALLED)
    found = tried_kernels(CPU, torchs=[EXPLICIT])
    assert [usable.name for usable in found.order] == [
        "SageAttention (yunchang)",
        "flash-attn 3 (yunchang)",
        EXPLICIT.name,
    ]
    assert found.choose(ask()).name == "flash-attn 3 (yunchang)"
    assert found.choose(ask(host="attention_sage")).name == "SageAttention (yunchang)"
    assert found.choose(ask(dim=40)) is EXPLICIT, "it was not tried for these"


def test_no_package_is_imported_for_a_device_that_it_does_not_suit(installed, monkeypatch):
    installed(**ALL_INSTALLED)
    monkeypatch.setattr(packages, "import_module", None)
    assert tried_kernels(CPU).refused == ()


def test_what_is_not_installed_is_neither_used_nor_refused(installed):
    installed()
    assert tried_kernels(CPU).refused == () and tried_kernels(CPU).order == TO_TRY


def test_a_package_that_cannot_be_imported_is_named_with_the_error(installed, on_hopper, monkeypatch):
    def broken(name):
        raise OSError("libcudart.so.12: cannot open shared object file\nand more")

    installed(flash_attn=None)
    monkeypatch.setattr(packages, "import_module", broken)
    found = tried_kernels(CPU, torchs=[EXPLICIT])
    assert found.order == (EXPLICIT,)
    assert (
        "flash-attn 2 is not used: it cannot be loaded (OSError: libcudart.so.12: cannot open shared object"
        " file)." in found.refused
    )


def test_yunchang_is_not_needed_for_flash_attn_alone(installed, on_hopper):
    installed(kinds={}, **{FLASH_2: ALL_INSTALLED[FLASH_2]})
    found = tried_kernels(CPU, torchs=[EXPLICIT])
    assert found.order[0].name == "flash-attn 2"
    (refused,) = found.refused
    assert refused.startswith("flash-attn 2 (yunchang) is not used: it cannot be loaded (KeyError")


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


def tried_beside_explicit(kernel, stands_for=""):
    """What comes of trying a package's kernel, with no other one but the explicit."""
    theirs = Candidate("theirs", ("torch",), packages.suits_flash, lambda: kernel, stands_for)
    return tried_kernels(CPU, [theirs], [EXPLICIT])


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_kernel_is_refused_by_name(on_hopper, what):
    found = tried_beside_explicit(WRONG[what])
    assert found.order == (EXPLICIT,)
    (sentence,) = found.refused
    assert sentence.startswith("theirs is not used: for head dim 64 in ") and sentence.endswith(".")


def test_so_is_one_of_torchs_own():
    found = tried_kernels(CPU, (), [Usable("torch's", WRONG["log2"], CPU_FLASH.suits), EXPLICIT])
    assert found.order == (EXPLICIT,)
    assert [sentence.partition(" is ")[0] for sentence in found.refused] == ["torch's"]


@pytest.mark.parametrize(
    "what", [what for what in WRONG if what not in ("lse in half precision", "another out")]
)
def test_a_kernel_that_rounds_more_is_still_refused_for_all_but_its_rounding(on_hopper, what):
    assert len(tried_beside_explicit(WRONG[what], "attention_sage").refused) == 1


def test_a_kernel_is_used_for_those_head_dims_alone_that_it_takes(on_hopper):
    def only_128(q, k, v, mask, scale):
        if q.shape[-1] != 128:
            raise RuntimeError("head dim is not supported")
        return explicit(q, k, v, mask, scale)

    found = tried_beside_explicit(only_128)
    assert found.choose(ask()).name == "theirs"
    assert found.choose(ask(dim=64)) is EXPLICIT and found.refused == ()


def test_a_kernel_that_takes_nothing_is_refused_with_what_it_says(on_hopper):
    def none(q, k, v, mask, scale):
        raise TypeError("got an unexpected keyword argument 'softcap'")

    (sentence,) = tried_beside_explicit(none).refused
    assert "it cannot run (TypeError: got an unexpected keyword argument 'softcap')" in sentence


def test_one_wrong_dtype_is_enough(on_hopper):
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

    def suits(one):
        asked.append(one)
        return one.host == "theirs"

    marked = Usable("marked", lambda q, k, v, mask, scale: (q + 7, q[..., 0]), suits, "theirs")
    kernels = TORCHS._replace(order=(marked, *TORCHS.order))
    assert torch.equal(partial_attention(q, q, q, None, None, kernels, "theirs").out, q + 7)
    assert torch.equal(
        partial_attention(q, q, q, None, None, kernels, "").out, partial_attention(q, q, q, None).out
    )
    assert asked[0] == Ask("cpu", torch.float32, 64, False, host="theirs")


@pytest.mark.parametrize("host", ["attention_pytorch", "attention_sage"])
def test_a_ring_attends_by_the_ranks_own_kernels_and_tells_them_how_the_host_attends(host):
    asked = []

    def suits(one):
        asked.append((one.device, one.host))
        return False

    mode = FakeTensorMode(allow_non_fake_inputs=True)
    sage = Usable("sage", explicit, lambda one: one.host == "attention_sage", "attention_sage")
    kernels = TORCHS._replace(order=(Usable("marked", explicit, suits), sage, *TORCHS.order))
    with joined(Layout(ring=2), 1) as mesh, dry_device(mode), DEVICE, pytest.MonkeyPatch.context() as patch:
        patch.setattr(joint_model.attention_basic, "__name__", host)
        model, arguments = joint_model.Model(2), joint_model.inputs(5)
        method = make_method(model, joint_model.PLAN, mesh, IdleRank([Part(1, 0)]), kernels=kernels)
        method.attach()
        method.begin(Part(1, 0))
        method.forward(
            model,
            {name: t.to(DEVICE) if isinstance(t, torch.Tensor) else t for name, t in arguments.items()},
            1,
        )
    told = "" if host == "attention_pytorch" else host  # exact attention has no name
    assert set(asked) == {("cuda", told)} and len(asked) >= 4


def test_ranks_around_a_ring_tell_which_kernel_they_use_and_others_have_none(clients):
    for degrees, kernels in (((1, 2), [CPU_FLASH.name] * 2), ((2,), ["", ""])):
        clients(*degrees).sessions.open(lambda: False)
        pool = clients(*degrees).sessions.live.pool
        assert [(one.kernel, one.refused_kernels) for one in pool.ready] == [
            (kernel, ()) for kernel in kernels
        ]
