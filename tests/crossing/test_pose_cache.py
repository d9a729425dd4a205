"""The cache of a pose's tokens that newer ComfyUIs' WanAnimate2Cache attaches: ranks keep it as
ComfyUI does, each its own rows.
"""

from functools import partial, wraps
from random import Random

import pytest
import torch
from greenlet import getcurrent
from pipemesh.lab.commands.parity import BOUND, Case, conditioning, relative_error, rms, sample
from pipemesh.parallel_runtime.client.remote_patcher import parallelize
from pipemesh.parallel_runtime.crossing.block_code import InBlockPatches
from pipemesh.parallel_runtime.crossing.kept_tokens import KEPT, WINDOW
from pipemesh.parallel_runtime.crossing.named_code import options_made
from pipemesh.parallel_runtime.crossing.options import crossing_options
from pipemesh.parallel_runtime.errors import Refused
from pipemesh.parallel_runtime.families.sample import keeping
from pipemesh.parallel_runtime.layout import Layout
from pipemesh.parallel_runtime.patches import Part
from pipemesh.parallel_runtime.worker.resident_model import ResidentModel

from ..kit.bounds import assert_same
from ..kit.collectives import World
from ..kit.models import run
from ..kit.patched import execute
from ..weights.test_sharded_families import CPU, serving

model_animate2 = pytest.importorskip("comfy.ldm.wan.model_animate2", reason="this ComfyUI has no such cache")

from pipemesh.parallel_runtime.families.wan_animate2 import ANIMATE2, PLAN, driven  # noqa: E402

pytestmark = pytest.mark.host
OPTION = PLAN.kept.option
SENT = InBlockPatches(torch.nn.Module(), PLAN, {})
LATENT = torch.zeros(1, 16, 7, 5, 6)


def stock_model(heads=5):
    return ANIMATE2.form.random_model(ANIMATE2.tiny.size(heads))


def sampled_video(model, cfg=3.0, texts=(13, 13)):
    """A video that is longer than a window."""
    positive, negative = (
        [[text, {**more, **driven(LATENT)}]]
        for side, tokens in enumerate(texts)
        for text, more in conditioning(side, tokens)
    )
    return run(model, cfg=cfg, latent=LATENT, positive=positive, negative=negative)


def windowed(model):
    options = 4, 1, "standard_static", 1, False, "pyramid", 2, False, "0"
    return execute("nodes_context_windows", "ContextWindowsManual", model, *options)


@pytest.mark.parametrize("degrees", [{"ulysses": 2}, {"ulysses": 1, "cfg": 2}], ids=str)
def test_each_window_keeps_its_pose_for_the_run_and_the_video_is_stocks(clients, degrees):
    client = clients(**degrees)
    ours = windowed(keeping(parallelize(stock_model(), client, 0.0), PLAN.kept))
    plain = windowed(stock_model())
    assert relative_error(sampled_video(stock_model()), sampled_video(plain)) > 100 * BOUND, (
        "the windows do nothing"
    )
    assert_same(sampled_video, ours, windowed(keeping(stock_model(), PLAN.kept)))
    # ComfyUI's own cache fails at these: it compares what it keeps of several windows
    assert_same(partial(sampled_video, texts=(13, 7)), ours, plain)
    assert_same(partial(sampled_video, cfg=1.0), ours, plain)
    sent = [one.sent_bytes for one in client.runs.last.evaluations]
    if "cfg" in degrees:
        assert sent == [0, 0, 0], "each group computes one of a step's two windows by itself"
        return
    assert len(sent) == 6
    assert max(sent[2::2]) < sent[0] and max(sent[3::2]) < sent[1], "a pose was computed again"


def calls_of(poses, heads=5):
    """The arguments of an evaluation of each of ``poses``, as stock calls the model, and what it
    computes.
    """
    model, calls = stock_model(heads), []
    transformer = model.model.diffusion_model
    own = transformer._forward

    def forward(*args, **kwargs):
        out = own(*args, **kwargs)
        calls.append((kwargs | dict(zip(("x", "timestep", "context"), args, strict=False)), out))
        return out

    transformer._forward = forward
    for pose in poses:
        sample(model, Case(ANIMATE2.name, "ulysses1", "odd", heads, 1.0, False, "euler"), steps=1)
        arguments, _ = calls.pop()
        arguments = {**arguments, "pose_latents": arguments["pose_latents"] + pose}
        with torch.inference_mode():
            calls.append((arguments, own(**{**arguments, "transformer_options": {}})))
    return calls


def kept_poses(
    monkeypatch,
    layout,
    calls,
    attempts=(),
    weights="whole",
    free=lambda rank: 1 << 60,
    dtype="default",
    heads=5,
    more=None,
):
    """(rank, evaluation) -> outputs; by rank, how often a block computed a pose's tokens; and the
    residents.
    """
    world, outputs, residents, poses = World(layout, "gloo", monkeypatch), {}, {}, {}

    def free_bytes(_device):
        return free(getcurrent().rank)

    monkeypatch.setattr("pipemesh.parallel_runtime.crossing.kept_tokens.free_bytes", free_bytes)
    forward_pose = model_animate2.WanAnimate2Block.forward_pose

    @wraps(forward_pose)
    def counted(*args, **kwargs):
        poses[getcurrent().rank] = poses.get(getcurrent().rank, 0) + 1
        return forward_pose(*args, **kwargs)

    monkeypatch.setattr(model_animate2.WanAnimate2Block, "forward_pose", counted)
    cache = model_animate2.PoseBranchCache(dtype=dtype)

    def work(mesh, _run):
        rank, _, load = serving(mesh, weights, (1,), calls)
        resident = residents[mesh.rank] = ResidentModel(stock_model(heads), CPU, mesh, rank, load)
        for number, (arguments, _) in enumerate(calls):
            resident.method.begin(Part(1, 0, attempt=attempts[number] if attempts else 0))
            options = crossing_options({OPTION: cache, **(more or {})}, SENT)
            out = resident.on_rank({**arguments, "transformer_options": options}, number + 1)
            outputs[mesh.rank, number] = out

    with torch.inference_mode():
        world.run(work, Random(7).choice)
    return outputs, poses, residents


@pytest.mark.parametrize("weights", ["whole", "sharded"])
@pytest.mark.parametrize("layout", [Layout(ulysses=2), Layout(ring=3), Layout(ulysses=2, ring=2)], ids=str)
def test_ranks_compute_a_pose_once_and_keep_their_own_rows_of_it(monkeypatch, layout, weights):
    calls = calls_of([0.0, 0.5])
    calls = [calls[0], calls[0], calls[1], calls[0], calls[1]]
    outputs, poses, residents = kept_poses(monkeypatch, layout, calls, weights=weights)
    for number, (_, truth) in enumerate(calls):
        assert relative_error(outputs[layout.writer, number], truth) <= BOUND
    assert set(poses.values()) == {2 * 5}
    held = [resident.kept.nbytes for resident in residents.values()]
    alone = kept_poses(monkeypatch, Layout(), calls)[2][0].kept.nbytes
    assert max(held) < alone * (1 / layout.world_size + 0.3), "rows of other ranks are kept"
    for resident in residents.values():
        resident.end_run()
        assert resident.kept.nbytes == 0


def test_ranks_forget_a_pose_together_where_one_has_no_room(monkeypatch):
    layout, calls = Layout(ulysses=2), calls_of([0.0, 0.5])
    calls = [calls[0], calls[1], calls[0]]
    outputs, poses, _ = kept_poses(monkeypatch, layout, calls, free=lambda rank: rank << 60)
    for number, (_, truth) in enumerate(calls):
        assert relative_error(outputs[0, number], truth) <= BOUND
    assert poses == {0: 15, 1: 15}


@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_tokens_that_are_kept_quantised_are_as_far_from_the_truth_as_stocks(monkeypatch, dtype):
    calls = calls_of([0.0], heads=8) * 2
    options = {OPTION: model_animate2.PoseBranchCache(dtype=dtype)}
    forward = stock_model(heads=8).model.diffusion_model._forward
    with torch.inference_mode():
        _, stock = [forward(**{**one, "transformer_options": options}) for one, _ in calls]
    window = {WINDOW: object()}  # in which the first evaluation computes with what is kept too
    outputs, _, _ = kept_poses(monkeypatch, Layout(ulysses=2), calls, dtype=dtype, heads=8, more=window)
    far = rms(stock - calls[0][1])
    for number in (0, 1):
        assert 0.8 * far <= rms(outputs[0, number] - calls[0][1]) <= 1.2 * far


def test_what_an_evaluation_that_failed_kept_is_void(monkeypatch):
    calls = calls_of([0.0]) * 3
    _, poses, _ = kept_poses(monkeypatch, Layout(ulysses=2), calls, attempts=(0, 1, 1))
    assert poses == {0: 10, 1: 10}


def test_a_cache_that_does_not_fit_into_main_memory_is_refused_with_the_next_move(monkeypatch):
    monkeypatch.setattr("pipemesh.parallel_runtime.crossing.kept_tokens.system_memory", lambda: (1, 1))
    with pytest.raises(Refused, match=r"^WanAnimate2Cache needs .* free: set its dtype to int8 or"):
        kept_poses(monkeypatch, Layout(), calls_of([0.0]))


def test_a_cache_of_another_class_is_refused_by_name():
    class Other(model_animate2.PoseBranchCache):
        """Stands for another pack's."""

    with pytest.raises(Refused, match=rf"The option {OPTION} \(.*Other.*\) of this MODEL is no plain data"):
        crossing_options({OPTION: Other()}, SENT)
    crossed = options_made(crossing_options({OPTION: model_animate2.PoseBranchCache(dtype="int8")}, SENT))
    assert crossed[KEPT]["dtype"] == "int8" and not crossed[KEPT]["in_window"]
