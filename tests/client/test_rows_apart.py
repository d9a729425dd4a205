"""Models whose rows of a batch are not images by themselves: frames of one video stay together, and
what mixes rows is found by comparing, whatever its class is called.
"""

import sys
from functools import partial
from types import ModuleType

import pytest
import torch
from comfy.model_management import InterruptProcessingException
from pipemesh.parallel_runtime.branches import Batch, plan_branches
from pipemesh.parallel_runtime.client.first_results import FirstResults
from pipemesh.parallel_runtime.client.shared_evaluation import Admission
from pipemesh.parallel_runtime.crossing.rows import NotAlike, batched
from pipemesh.parallel_runtime.errors import ModelError, OutOfMemory, PoolFailed, Refused, RunCancelled
from pipemesh.parallel_runtime.layout import Layout
from torch import nn
from torch.backends import cudnn

from ..kit.bounds import assert_same
from ..kit.foreign_pack import unet, video_unet
from ..kit.in_groups import GroupsHere, beside_stock, in_groups
from ..kit.models import conditioning, run

FRAMES = 4
sampled = partial(run, steps=2, latent=torch.zeros(FRAMES, 4, 8, 8))
ALONE = "^The rows of this batch are the frames of one video, .*: sample with a cfg above 1 and set cfg of"
MIXED = (
    "^UNetModel has no token plan, and its prompts and images cannot be shared out: computed apart, its first"
)
DATA = Layout(data=2)


@pytest.mark.parametrize("layout", [Layout(cfg=2), DATA, Layout(cfg=2, data=2)], ids=str)
def test_a_videos_frames_stay_together_and_its_two_prompts_go_to_two_groups(layout):
    stock, ours, pool = beside_stock(video_unet, layout)
    assert_same(partial(sampled, cfg=2.5), ours, stock)
    assert {rows for _, rows, _ in pool.asked} == {FRAMES}
    assert len({ranks for ranks, _, _ in pool.asked}) == 2
    assert len(pool.asked) == 4, "of which nothing is compared"
    if layout.cfg == layout.data:
        return
    pool.asked.clear()
    with pytest.raises(Refused, match=ALONE):
        sampled(ours, cfg=1.0)
    assert not pool.asked, "frames alone are refused before anything is computed"


def test_two_prompts_that_are_computed_one_after_the_other_are_no_frames_alone():
    stock, ours, pool = beside_stock(video_unet, DATA)
    for one in (stock, ours):
        one.set_model_unet_function_wrapper(
            lambda apply, args: apply(args["input"], args["timestep"], **args["c"])
        )
    assert_same(partial(sampled, cfg=2.5, negative=conditioning(2, 7)), ours, stock)
    assert {rows for _, rows, _ in pool.asked} == {FRAMES}


def test_frames_of_one_group_or_a_single_one_are_nothing_to_refuse():
    for layout, frames in ((Layout(), FRAMES), (DATA, 1)):
        stock, ours, _ = beside_stock(video_unet, layout)
        assert_same(partial(run, steps=2, latent=torch.zeros(frames, 4, 8, 8)), ours, stock)


class MotionModule(nn.Module):
    """Layers as nodes put behind those of an image model: each pixel attends over all rows."""

    def __init__(self, channels, least=1):
        super().__init__()
        self.norm, self.least = nn.BatchNorm2d(channels, track_running_stats=False), least

    def forward(self, x):
        if len(x) % self.least:
            raise ModelError(f"Rank 1 failed while computing: shape {tuple(x.shape)} is invalid")
        rows = x.flatten(1)
        return x + (torch.softmax(rows @ rows.T / rows.shape[1], 0) @ rows).view_as(x)


class FailingRows(GroupsHere):
    """Raises ``error`` in what ``fails`` says, of a latent and the ranks that compute it."""

    tried, error, fails = 0, None, staticmethod(lambda x, group: len(x) == FRAMES)

    def _computed(self, arguments, part, group):
        if self.fails(arguments["x"], group):
            self.tried += 1
            raise self.error
        return super()._computed(arguments, part, group)


class Normalised(MotionModule):
    def forward(self, x):
        return self.norm(x)


def animated(kind=MotionModule, **options):
    made = unet()
    made.model.diffusion_model.middle_block.append(kind(64, **options))
    return made


@pytest.fixture
def of_comfyui(monkeypatch):
    """Makes MODELs that have such layers as a newer ComfyUI may."""
    home = ModuleType("comfy.ldm.motion")
    monkeypatch.setitem(sys.modules, home.__name__, home)

    def made(kind=MotionModule, **options):
        if not hasattr(home, kind.__name__):
            setattr(home, kind.__name__, type(kind.__name__, (kind,), {"__module__": home.__name__}))
        return animated(getattr(home, kind.__name__), **options)

    return made


@pytest.mark.parametrize("kind", [MotionModule, Normalised])
def test_layers_that_mix_rows_are_found_once_in_a_class_that_is_known(kind, of_comfyui):
    known = Admission()
    ours, pool = in_groups(DATA, of_comfyui(kind), admission=known)
    with pytest.raises(Refused, match=rf"{MIXED} evaluation is [\d.]+% off from that of one GPU"):
        sampled(ours)
    assert len(pool.asked) == 6, "two rows each, and all of them; once more in fp32, without TF32"
    with pytest.raises(Refused, match=MIXED):
        in_groups(DATA, of_comfyui(kind), admission=known)
    in_groups(Layout(), of_comfyui(kind), admission=known)
    in_groups(DATA, unet(), admission=known)


def test_such_layers_of_a_pack_are_refused_by_their_name():
    ours, pool = in_groups(DATA, animated())
    with pytest.raises(Refused, match=r"middle_block\.3 .* is of a class of another pack \(.*MotionModule\)"):
        sampled(ours)
    assert not pool.asked


def test_layers_that_fail_at_some_of_the_rows_are_found_too(of_comfyui):
    says = MIXED + r" evaluation fails \(Rank 1 .* is invalid\), and on one GPU it does not\. Sample it on"
    known = Admission()
    with pytest.raises(Refused, match=says):
        sampled(in_groups(DATA, of_comfyui(least=FRAMES), admission=known)[0])
    with pytest.raises(Refused, match=says):
        in_groups(DATA, of_comfyui(least=FRAMES), admission=known)


@pytest.mark.parametrize(("error", "least"), [(None, 3), (PoolFailed("rank 0 was killed"), FRAMES)])
def test_what_fails_on_one_gpu_too_or_loses_the_pool_keeps_its_error(of_comfyui, error, least):
    known, made = Admission(), FailingRows if error else GroupsHere
    ours, pool = in_groups(DATA, of_comfyui(least=least), made=made, admission=known)
    pool.error = error
    with pytest.raises(ModelError, match="is invalid"):
        sampled(ours)
    in_groups(DATA, of_comfyui(least=least), admission=known)


def test_a_rank_without_memory_says_nothing_of_rows_and_the_weights_leave_more(monkeypatch):
    stock, ours, pool = beside_stock(unet, DATA, made=FailingRows)
    pool.error, pool.fails = OutOfMemory("Rank 1 ran out of memory."), lambda x, group: group == (1,)
    more = partial(setattr, pool, "fails", lambda *_: False)
    monkeypatch.setattr(ours.remote.pool.memory_needs, "leave_more", lambda _: more() is None)
    assert_same(sampled, ours, stock)
    assert pool.tried


@pytest.mark.parametrize("least", [1, FRAMES])
def test_stop_while_rows_are_compared_is_no_error(of_comfyui, least):
    ours, pool = in_groups(DATA, of_comfyui(least=least), made=FailingRows)
    pool.error = RunCancelled("The run was cancelled.")
    with pytest.raises(InterruptProcessingException):
        sampled(ours)


def test_images_are_shared_out_and_compared_once_for_each_form_of_model():
    known, stock = Admission(), unet("SDXL")
    for rows, width in (([2, 2, FRAMES, 2, 2], 8), ([2, 2, 2, 2], 8), ([2, 2, 2, 2], 16)):
        ours, pool = in_groups(DATA, unet("SDXL"), admission=known)
        assert_same(partial(sampled, latent=torch.zeros(FRAMES, 4, 8, width)), ours, stock)
        assert [asked for _, asked, _ in pool.asked][: len(rows)] == rows


def test_what_mixes_the_two_prompts_of_one_image_is_found_as_comfyui_batches_them(of_comfyui):
    ours, pool = in_groups(Layout(cfg=2), of_comfyui(Normalised))
    alike = {"positive": conditioning(1, 9), "negative": conditioning(2, 9)}
    one = partial(run, steps=2, cfg=4.0, latent=torch.zeros(1, 4, 8, 8), **alike)
    with pytest.raises(Refused, match=rf"{MIXED} evaluation is [\d.]+% off"):
        one(ours)
    assert [rows for _, rows, _ in pool.asked] == [1, 1, 2] * 2, "once more in fp32"
    stock, ours, pool = beside_stock(unet, Layout(cfg=2))
    assert_same(one, ours, stock)
    assert [rows for _, rows, _ in pool.asked][:5] == [1, 1, 2, 1, 1], "once"
    stock, ours, pool = beside_stock(unet, Layout(cfg=2))
    assert_same(partial(one, negative=conditioning(2, 7)), ours, stock)
    assert {rows for _, rows, _ in pool.asked} == {1}, "which ComfyUI would repeat to the same length"


def test_two_prompts_that_comfyui_would_not_batch_are_not_compared_as_one_batch():
    own = {"sigmas": torch.ones(1), "cond_or_uncond": [0], "uuids": ["a"], "scale": torch.ones(2)}
    one = {"x": torch.zeros(1, 4), "context": torch.zeros(1, 9, 4), "transformer_options": own}
    other = {**own, "sigmas": torch.zeros(1), "cond_or_uncond": [1], "uuids": ["b"], "scale": torch.ones(2)}
    both = batched([one, {**one, "transformer_options": other}])
    assert both["context"].shape == (2, 9, 4)
    assert both["transformer_options"]["cond_or_uncond"] == [0, 1]
    for more in ({"y": torch.zeros(1, 2)}, {"y": None}):
        for several in ([one, {**one, **more}], [{**one, **more}, one]):
            with pytest.raises(NotAlike):
                batched(several)
    for unlike in ({"scale": torch.zeros(2)}, {"patches": {"attn1": [object()]}}, {"mark": 1}):
        for several in ((own, {**other, **unlike}), ({**own, **unlike}, other)):
            with pytest.raises(NotAlike):
                batched([{**one, "transformer_options": options} for options in several])


@pytest.mark.parametrize("error", [OutOfMemory, ModelError])
def test_where_one_rank_cannot_compute_all_rows_the_next_run_tries_and_a_notice_says_so(monkeypatch, error):
    told = []
    known = Admission(firsts=FirstResults(notice=told.append))
    stock, ours, pool = beside_stock(unet, DATA, made=FailingRows, admission=known)
    pool.error = error("Rank 0 ran out of memory.")
    monkeypatch.setattr(ours.remote.pool.residency, "make_room", lambda *_, **__: pytest.fail("evicts"))
    for runs in (1, 2):
        assert_same(sampled, ours, stock)
        assert pool.tried == runs, "not at every step"
    assert {rows for _, rows, _ in pool.asked} == {2}
    (notice,) = told
    assert "UNetModel, of which each group" in notice and "(Rank 0 ran out of memory)" in notice


@pytest.mark.parametrize("numbers", [torch.bfloat16, torch.float32])
def test_rounding_in_small_numbers_and_in_tf32_is_decided_in_fp32(numbers):
    """A batch of other kernels than its rows': another order of adding up, 3 % of bf16's scale."""

    class Rounds(GroupsHere):
        in_fp32 = 0

        def _computed(self, arguments, part, group):
            out, rounds = super()._computed(arguments, part, group), cudnn.allow_tf32
            self.in_fp32 += not rounds
            return out * (1.04 if rounds and len(out) == FRAMES else 1.0)

    model = unet()
    model.model.diffusion_model.to(numbers).dtype = numbers
    model.model.manual_cast_dtype = None
    ours, pool = in_groups(DATA, model, made=Rounds)
    with cudnn.flags(enabled=True, allow_tf32=True):
        assert sampled(ours).isfinite().all()
    assert pool.in_fp32 == 3


@pytest.mark.parametrize("speeds", [(), (100.0, 60.0)])
def test_branches_that_stay_together_are_shared_out_whole(speeds):
    for branches, groups in ((1, 1), (2, 2), (3, 2)):
        plan = plan_branches([Batch(branches, 6, 1.0, together=True)], 2, (1,), speeds)
        cuts = [(share.start, share.end) for share in plan.shares]
        assert cuts == [(6 * number, 6 * number + 6) for number in range(branches)]
        assert len({share.group for share in plan.shares}) == groups
