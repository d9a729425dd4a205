"""The contract of every method: it leaves no trace on the model, keeps nothing beyond its run, and
refuses what it cannot run. And what a stage counts of its messages.
"""

import gc
import weakref
from dataclasses import astuple, dataclass, replace

import pytest
import torch
from pipemesh.benchmarks.forwards import standin
from pipemesh.parallel_runtime.comm.mesh import Axis, Mesh
from pipemesh.parallel_runtime.comm.stage_link import StageLink
from pipemesh.parallel_runtime.errors import LayoutError, ModelError, NoRoom, Refused
from pipemesh.parallel_runtime.families.plan import Along, Leave, Ranges
from pipemesh.parallel_runtime.layout import Layout, axis
from pipemesh.parallel_runtime.methods.factory import make_method
from pipemesh.parallel_runtime.methods.hooks import require_fit
from pipemesh.parallel_runtime.methods.pipefusion.messages_done import MessagesDone
from pipemesh.parallel_runtime.methods.pipefusion.stage import PipeFusion
from pipemesh.parallel_runtime.methods.usp import SequenceParallel
from pipemesh.parallel_runtime.patches import Part, TokenGrid

from .joint_model import CONDS, IMAGE, PLAN, Model
from .models import IdleRank

PATCHES = [astuple(patch) for patch in TokenGrid((IMAGE, 1), (1, 1)).cut(3)]


@pytest.fixture(params=["ulysses", "pipefusion"])
def make(request):
    """Makes a model and its method: of one of two ranks whose messages are any numbers, or of the
    only stage of a pipeline.
    """

    def make():
        sequence = request.param == "ulysses"
        mesh = mesh_of(Layout(ulysses=2)) if sequence else mesh_of(Layout(), StageLink(None, None, via_cpu=True))
        model = Model(2)
        return model, make_method(model, PLAN, mesh, IdleRank())

    return make


@pytest.fixture
def made(make):
    return make()


def mesh_of(layout, link=None):
    axes = {name: Axis(0, layout.group(name, 0), None) for name in layout.degrees()}
    return Mesh(0, layout.degrees(), axes, standin(layout, 0), link)


def evaluate(made, run=1, number=1, branch=0, patch=None):
    model, method = made
    method.begin(Part(run, branch, patch))
    with torch.inference_mode():
        return method.evaluate(model, CONDS[branch], number)


def whole_run(made, run):
    """Evaluations of both branches; under PipeFusion in patches, too."""
    for branch in (0, 1):
        evaluate(made, run, branch=branch)
    for patch in PATCHES if isinstance(made[1], PipeFusion) else ():
        evaluate(made, run, patch=patch)


def traces_on(model):
    """Whatever a method could leave on a model."""
    return [
        (name, sorted(vars(module)), len(module._forward_pre_hooks), len(module._forward_hooks)) for name, module in model.named_modules()
    ]


def test_a_detached_method_leaves_no_trace_and_can_be_attached_again(made):
    model, method = made
    untouched = traces_on(model)
    with torch.inference_mode():
        truth = model(**CONDS[0])
    for run in (1, 2):
        method.attach()
        assert traces_on(model) != untouched
        whole_run(made, run)
        method.detach()
        assert traces_on(model) == untouched
        with torch.inference_mode():
            assert torch.equal(model(**CONDS[0]), truth)


def tensors():
    gc.collect()
    return sum(issubclass(type(one), torch.Tensor) for one in gc.get_objects())


@pytest.mark.parametrize("end", [lambda method: method.end_run(), lambda method: method.begin(Part(9, 0))], ids=["told", "by the next run"])
def test_nothing_is_kept_beyond_a_run(made, end):
    _model, method = made
    method.attach()
    before = tensors()
    whole_run(made, 1)
    assert tensors() > before
    end(method)
    assert tensors() == before


def test_a_released_model_is_freed_at_once(make):
    """Without the garbage collector, which may not run for long."""
    model, method = make()
    method.attach()
    whole_run((model, method), 1)
    method.detach()
    kept = weakref.ref(model), weakref.ref(model.blocks[0].qkv.weight)
    gc.collect()
    gc.disable()
    try:
        del model, method
        assert [one() for one in kept] == [None, None]
    finally:
        gc.enable()


def test_a_model_for_which_there_was_no_room_is_freed_too():
    class Full(IdleRank):
        def reserve(self, nbytes):
            raise NoRoom("made")

    model = Model(2)
    method = make_method(model, PLAN, mesh_of(Layout(), StageLink(None, None, via_cpu=True)), Full())
    method.attach()
    try:
        evaluate((model, method))
    except NoRoom:
        method.detach()
    kept = weakref.ref(model)
    gc.disable()
    try:
        del model, method
        assert kept() is None
    finally:
        gc.enable()


# -- what is refused


def with_blocks(**changed):
    return replace(PLAN, blocks=(replace(PLAN.blocks[0], **changed),))


@pytest.mark.parametrize(
    ("plan", "name"),
    [
        (with_blocks(path="layers"), "layers"),
        (with_blocks(local=("cross",)), "blocks.0.cross"),
        (with_blocks(tokens={"text": ("txt",), "img": ("img",)}), "blocks(text=)"),
        (with_blocks(along=(Along(arg="pe", dim=1, streams=("img",)),)), "blocks(pe=)"),
        (with_blocks(ranges=(Ranges(arg="spans", stream="img"),)), "blocks(spans=)"),
        (replace(PLAN, positions=("rope",)), "rope"),
        (replace(PLAN, leave=Leave(path="tail", stream="img")), "tail"),
        (replace(PLAN, leave=Leave(path="head", stream="img", along=(Along(arg="e", dim=1, streams=("img",)),))), "head(e=)"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_plan_that_names_what_the_host_renamed_is_refused_by_name(plan, name):
    require_fit(Model(2), PLAN)
    for check, layout in ((SequenceParallel.check, Layout(ulysses=2)), (PipeFusion.check, Layout(pipefusion=2))):
        with pytest.raises(Refused) as refused:
            check(Model(2), plan, layout)
        assert str(refused.value).startswith(f"Model of this ComfyUI has no {name}, which the joint plan names: ")


def test_a_layout_that_a_method_cannot_run_is_refused():
    with pytest.raises(LayoutError, match=r"^pipefusion 3, and the model has 2 blocks: lower the degree\.$"):
        PipeFusion.check(Model(2), PLAN, Layout(pipefusion=3))
    with pytest.raises(LayoutError, match="has one stage, set pipefusion to 1"):
        SequenceParallel.check(Model(2), PLAN, Layout(pipefusion=2))


# -- messages


@pytest.mark.parametrize(
    ("receives", "sends", "progress"),
    [
        (True, True, ["none", "some", "all"]),
        (True, False, ["none", "all", "all"]),
        (False, True, ["none", "none", "all"]),
        (False, False, ["all", "all", "all"]),
    ],
    ids=["in the middle", "last", "first", "only"],
)
def test_a_stage_counts_the_messages_of_its_place_in_the_pipeline(receives, sends, progress):
    done = MessagesDone(receives, sends)
    for run in (1, 1, 2):
        done.begin(run)
        seen = [done.progress]
        done.received()
        seen.append(done.progress)
        done.sent()
        assert [*seen, done.progress] == progress


def test_a_patch_is_refused_while_messages_of_its_run_are_pending_and_another_run_is_not():
    done = MessagesDone(receives=True, sends=True)
    done.begin(1)
    done.received()
    with pytest.raises(ModelError, match="A patch before this one failed"):
        done.begin(1)
    assert done.progress == "some", "of the patch that failed"
    done.begin(2)
    assert done.progress == "none"


# -- axes


@dataclass(frozen=True, kw_only=True)
class Wider(Layout):
    """An axis more."""

    cfg: int = axis(row="branch")


def test_an_axis_is_one_line():
    layout = Wider(ulysses=2, pipefusion=2, cfg=2)
    assert layout.equation() == "ulysses 2 x pipefusion 2 x cfg 2 = 8 ranks"
    assert layout.coordinates(6) == {"ulysses": 0, "ring": 0, "pipefusion": 1, "cfg": 1}
    assert layout.group("cfg", 2) == (2, 6) and layout.writer == 2
    assert layout.grid().splitlines()[::3] == ["branch 0 stage 0:   0   1", "branch 1 stage 1:   6   7"]
