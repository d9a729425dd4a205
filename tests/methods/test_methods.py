"""The contract of every method: it leaves no trace on the model, keeps nothing beyond its run, and
refuses what it cannot run. And what a stage counts of its messages.
"""

import gc
import weakref
from collections import deque
from contextlib import contextmanager
from dataclasses import astuple, replace
from math import prod
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from pipemesh.lab.bench.forwards import standin
from pipemesh.parallel_runtime.comm import stage_link
from pipemesh.parallel_runtime.comm.exchange import Comparison
from pipemesh.parallel_runtime.comm.mesh import Mesh
from pipemesh.parallel_runtime.comm.stage_link import StageLink
from pipemesh.parallel_runtime.errors import ModelError, NoRoom, Refused
from pipemesh.parallel_runtime.families import plan as plans
from pipemesh.parallel_runtime.families.plan import Along, Leave, Prefix
from pipemesh.parallel_runtime.layout import Layout
from pipemesh.parallel_runtime.methods.factory import make_method
from pipemesh.parallel_runtime.methods.fit import require_fit
from pipemesh.parallel_runtime.methods.hooks import TokenHooks
from pipemesh.parallel_runtime.methods.method import Method
from pipemesh.parallel_runtime.methods.pipefusion.stage import PipeFusion
from pipemesh.parallel_runtime.methods.pipefusion.stage_hooks import Stub
from pipemesh.parallel_runtime.methods.pipefusion.stage_messages import StageMessages
from pipemesh.parallel_runtime.methods.shards import Rows
from pipemesh.parallel_runtime.methods.usp import SequenceParallel
from pipemesh.parallel_runtime.patches import Part, TokenGrid

from ..kit.joint_model import CONDS, IMAGE, PLAN, Model
from ..kit.models import IdleRank

NUMBER = 1  # of every request here
# Names that the joint model has, but for `pose`
PREFIX = Prefix(stream="prompt", counted_by="mask", kept_in="mask", forget="forward")
BRANCH = plans.BranchTokens(
    entry="forward", stream="ahead", keys=("txt", "img"), frame="mask", counted_by="head", tokens="txt",
    along=(Along(arg="pose", dim=1, streams=("ahead",)),),
)  # fmt: skip
PATCHES = [astuple(patch) for patch in TokenGrid((IMAGE, 1), (1, 1)).cut(3)]


class Foreseeing(IdleRank):
    """Sees every request but the first of a run while the one before it is at hand."""

    def __init__(self):
        self.coming = []

    def next_part(self):
        return self.coming[0] if self.coming else None


class Made(NamedTuple):
    model: Model
    method: Method
    rank: Foreseeing


def arrived(buffer, _rank, _group):
    """A message of the right request, of zeros, that is here already."""
    buffer.zero_()[-1:] = NUMBER
    return SimpleNamespace(wait=lambda: None)


STAGES = {  # their place in the pipeline, of how many, and the axes that share a stage's tokens
    "only stage": (0, 1, {}),
    "first stage": (0, 3, {}),
    "middle stage of two ranks": (1, 3, {"ulysses": 2}),
    "first stage of a ring": (0, 2, {"ring": 2}),
    "last stage": (2, 3, {}),
}


@pytest.fixture(params=["ulysses", "ring", *STAGES])
def make(request, monkeypatch):
    """Makes a model and its method: of one of two ranks that share a sequence, or of one stage.
    Messages come from no rank.
    """
    sent = lambda _buffer, _rank, _group: SimpleNamespace(wait=lambda: None)  # noqa: E731
    monkeypatch.setattr(stage_link, "dist", SimpleNamespace(irecv=arrived, isend=sent))

    def make():
        if request.param in STAGES:
            stage, count, within = STAGES[request.param]
            before, after = stage - 1 if stage else None, stage + 1 if stage + 1 < count else None
            link = StageLink(before, after, via_cpu=True)
            mesh = mesh_of(Layout(pipefusion=count, **within), link, stage * prod(within.values()))
        else:
            mesh = mesh_of(Layout(**{request.param: 2}))
        model, rank = Model(3), Foreseeing()
        return Made(model, make_method(model, PLAN, mesh, rank), rank)

    return make


@pytest.fixture
def made(make):
    return make()


def mesh_of(layout, link=None, rank=0):
    return Mesh(rank, layout, standin(Layout(ulysses=layout.ulysses, ring=layout.ring), 0), link)


def evaluate(made, part):
    made.method.begin(part)
    with torch.inference_mode():
        return made.method.forward(made.model, CONDS[part.branch], NUMBER)


def whole_run(made, run):
    """Evaluations of both branches; under PipeFusion in patches, too."""
    patches = PATCHES if isinstance(made.method, PipeFusion) else ()
    parts = [*(Part(run, branch) for branch in (0, 1)), *(Part(run, 0, patch) for patch in patches * 2)]
    for number, part in enumerate(parts, 1):
        made.rank.coming = parts[number:]
        evaluate(made, part)


def traces_on(model):
    """Whatever a method could leave on a model."""
    return [
        (name, sorted(vars(module)), len(module._forward_pre_hooks), len(module._forward_hooks))
        for name, module in model.named_modules()
    ]


def test_a_detached_method_leaves_no_trace_and_can_be_attached_again(made):
    model, method, _rank = made
    untouched = traces_on(model)
    for run in (1, 2):
        method.attach()
        assert traces_on(model) != untouched
        whole_run(made, run)
        method.detach()
        assert traces_on(model) == untouched
        if not any(isinstance(block, Stub) for block in model.blocks):  # else it runs as a stage only
            with torch.inference_mode():
                assert torch.equal(model(**CONDS[0]), Model(3)(**CONDS[0]))


def tensors():
    gc.collect()
    return sum(issubclass(type(one), torch.Tensor) for one in gc.get_objects())


def sizes(method):
    """Of every container that the method holds, by its place; those of the model are left out, and
    what was compared, which a number bounds.
    """
    found, seen, todo = {}, set(), [("", method)]
    while todo:
        path, one = todo.pop()
        if isinstance(one, torch.nn.Module | torch.Tensor | type | Comparison) or id(one) in seen:
            continue
        seen.add(id(one))
        if isinstance(one, dict | list | set | deque):
            found[path] = len(one)
        if isinstance(one, dict | list | tuple | deque):
            todo += [(f"{path}[]", item) for item in (one.values() if isinstance(one, dict) else one)]
        elif type(one).__module__.startswith("pipemesh."):
            todo += [(f"{path}.{name}", value) for name, value in getattr(one, "__dict__", {}).items()]
    return found


def begin_the_next(method):
    """The memory of messages stays: ranks have told that they have it."""
    method.begin(Part(9, 0))
    method._comm.free_buffers()


@pytest.mark.cover(3)
@pytest.mark.parametrize(
    "end", [lambda method: method.end_run(), begin_the_next], ids=["told", "by the next run"]
)
def test_nothing_is_kept_beyond_a_run(made, end):
    method = made.method
    method.attach()
    tensors_before, sizes_before = tensors(), sizes(method)
    whole_run(made, 1)
    assert tensors() > tensors_before
    end(method)
    assert sizes(method) == sizes_before
    assert tensors() == tensors_before


@contextmanager
def without_collections():
    """Garbage is not looked for, which may not happen for long."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def test_a_released_model_is_freed_at_once(make):
    made = make()
    made.method.attach()
    whole_run(made, 1)
    made.method.detach()
    kept = weakref.ref(made.model), weakref.ref(made.model.head.weight)
    with without_collections():
        del made
        assert [one() for one in kept] == [None, None]


def test_a_model_for_which_there_was_no_room_is_freed_too():
    class Full(IdleRank):
        def reserve(self, nbytes):
            raise NoRoom("made")

    model = Model(2)
    method = make_method(model, PLAN, mesh_of(Layout(), StageLink(None, None, via_cpu=True)), Full())
    method.attach()
    try:
        evaluate(Made(model, method, Foreseeing()), Part(1, 0))
    except NoRoom:
        method.detach()
    kept = weakref.ref(model)
    with without_collections():
        del model, method
        assert kept() is None


# -- what is refused


IMAGE_ROWS = Along(arg="pe", dim=1, streams=("img",))
FRAMES = plans.Frames(stream="img", each={}, tokens="x")


def with_blocks(**changed):
    return replace(PLAN, blocks=(replace(PLAN.blocks[0], **changed),))


@pytest.mark.parametrize(
    ("plan", "name"),
    [
        (with_blocks(path="layers"), "layers"),
        (with_blocks(local=("cross",)), "blocks.0.cross"),
        (with_blocks(tokens={"text": ("txt",), "img": ("img",)}), "blocks(text=)"),
        (with_blocks(along=(IMAGE_ROWS,)), "blocks(pe=)"),
        (with_blocks(ranges=(plans.Ranges(arg="spans", streams=("img",)),)), "blocks(spans=)"),
        (replace(PLAN, leave=Leave(path="tail", stream="img")), "tail"),
        (replace(PLAN, leave=replace(PLAN.leave, along=(IMAGE_ROWS,))), "head(pe=)"),
        (replace(PLAN, leave=Leave(path="head", stream="img", instead="tail")), "tail"),
        (with_blocks(inserts=(plans.Insert(path="gates.*"),)), "gates.*"),
        (with_blocks(inserts=(plans.Insert(path="blocks.*.qkv", frames=FRAMES),)), "blocks.*.qkv(x=)"),
        (with_blocks(branch=BRANCH), "blocks(pose=)"),
        (with_blocks(prefix=replace(PREFIX, forget="drop")), "drop"),
        (with_blocks(prefix=replace(PREFIX, counted_by="past")), "past"),
        (with_blocks(prefix=replace(PREFIX, kept_in="kv")), "blocks(kv=)"),
        (with_blocks(prefix=Prefix(stream="ahead", counted_by="count")), "blocks(count=)"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_plan_that_names_what_the_host_renamed_is_refused_by_name(plan, name):
    require_fit(Model(2), PLAN)
    for check, axis in ((SequenceParallel.check, "ulysses"), (PipeFusion.check, "pipefusion")):
        with pytest.raises(Refused) as refused:
            check(Model(2), plan, Layout(**{axis: 2}))
        assert str(refused.value).startswith(f"Model of this ComfyUI has no {name}, which its plan names: ")


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"prefix": PREFIX}, "it keeps the keys and values of the prompt"),
        ({"interleaved": True}, "its blocks run among its other blocks"),
    ],
    ids=["prefix", "interleaved"],
)
def test_a_model_of_which_no_stage_can_hold_a_part_is_refused_with_the_reason(changed, why):
    sentence = rf"^Model cannot be divided into stages, because {why}.*set pipefusion to 1"
    with pytest.raises(Refused, match=sentence):
        PipeFusion.check(Model(4), with_blocks(**changed), Layout(pipefusion=2))


def test_a_forward_that_leaves_out_a_stages_block_is_refused_before_a_step_is_made_of_it():
    """Rank 0 of two stages: its first block sends nothing on."""
    mesh = mesh_of(Layout(pipefusion=2), StageLink(None, 1, via_cpu=True))
    method = make_method(Model(3), PLAN, mesh, IdleRank())
    method.attach()
    method.begin(Part(1, 0))
    with pytest.raises(Refused, match=r"^This model's forward left out a block at which a stage"):
        method.forward(lambda **given: given["img"], CONDS[0], NUMBER)


# -- messages


@pytest.mark.parametrize("is_last", [True, False])
@pytest.mark.parametrize("is_first", [True, False])
def test_a_stage_counts_the_messages_of_its_place_in_the_pipeline(is_first, is_last):
    messages = StageMessages(SimpleNamespace(is_first=is_first, is_last=is_last), None, None)
    assert not messages.left.any
    for run in (1, 1, 2):
        messages.begin(Part(run, 0), NUMBER)
        left = messages.left
        seen = [left.any]
        left.receive = False
        seen.append(left.any)
        left.send = False
        assert [*seen, left.any] == [not (is_first and is_last), not is_last, False]


def test_a_patch_is_refused_while_messages_of_its_run_are_pending_and_another_run_is_not():
    messages = StageMessages(SimpleNamespace(is_first=False, is_last=False), None, None)
    messages.begin(Part(1, 0), NUMBER)
    messages.left.receive = False
    with pytest.raises(ModelError, match="A patch before this one failed"):
        messages.begin(Part(1, 0), NUMBER)
    messages.begin(Part(2, 0), NUMBER)
    assert messages.left.any


class Apart(torch.nn.Module):
    def forward(self, txt, img):
        return img + 1, txt + 1


class Joined(torch.nn.Module):
    def forward(self, x):
        return 2 * x


class LeavesBehindBlocks(torch.nn.Module):
    """Takes all tokens of the image behind its blocks, and knows of them by the text's length."""

    PLAN = plans.TokenPlan(
        streams=("txt", "img"),
        blocks=(
            plans.Blocks(path="apart", tokens={"txt": ("txt",), "img": ("img",)}, returns=("img", "txt")),
            plans.Blocks(path="joined", tokens={"x": ("txt", "img")}),
        ),
        leave=Leave(path="joined", stream="img"),
    )

    def __init__(self):
        super().__init__()
        self.apart = torch.nn.ModuleList([Apart()])
        self.joined = torch.nn.ModuleList([Joined(), Joined()])

    def forward(self, txt, img, transformer_options):
        img, txt = self.apart[0](txt, img)
        x = torch.cat((txt, img), 1)
        for block in self.joined:
            x = block(x)
        return x[:, txt.shape[1] :].flip(1)


class OneOfTwo:
    """A rank with rows 1 to 3 of the text and 2 to 5 of the image; the other computes zeros."""

    def choose_rows(self, all_tokens):
        return Rows(all_tokens, {"txt": (1, 2), "img": (2, 3)})

    def enter_block(self):
        pass

    def leave(self, rows, out_BlC):
        (start, size), count = rows.local["img"], rows.all_tokens["img"]
        return torch.nn.functional.pad(out_BlC, (0, 0, start, count - start - size))


def test_behind_joined_blocks_the_leaving_stream_is_whole_and_the_others_stay_local():
    model, (txt, img) = LeavesBehindBlocks(), (torch.randn(1, 4, 2), torch.randn(1, 7, 2))
    truth = model(txt, img, {})
    hooks = TokenHooks(model, model.PLAN, OneOfTwo())
    hooks.attach()
    ours = model(**hooks.arguments({"txt": txt, "img": img, "transformer_options": {}}))
    hooks.detach()
    assert ours.shape == truth.shape
    assert torch.equal(ours[:, 2:5], truth[:, 2:5]) and not ours[:, :2].any() and not ours[:, 5:].any()


def test_an_argument_of_several_tensors_or_of_the_models_own_kind_is_cut_as_one_tensor_is():
    rows = Rows({"txt": 4, "img": 6}, {"txt": (1, 2), "img": (2, 3)})
    table, other, frames = torch.arange(20).view(1, 10, 2), torch.arange(10).view(10, 1), torch.arange(3)
    wanted = torch.tensor([1, 2, 6, 7, 8])

    def expanded(one, cut):
        return {**one, "rows": cut(one["frames"].repeat_interleave(2).view(1, 6))}

    along = Along(arg="pe", dim=1, streams=("txt", "img"))
    cos, split = rows.along((table, True), along)
    assert torch.equal(cos, table[:, wanted]) and split is True
    assert torch.equal(rows.along((other, other), replace(along, dim=0))[1], other[wanted])
    given = {"frames": frames}
    own = Along(arg="timestep", dim=1, streams=("img",), within=expanded)
    cut = rows.along(given, own)
    assert cut["rows"].tolist() == [[1, 1, 2]]
    assert rows.along(given, own) is cut, "made once for all blocks"
    as_tensor = rows.along(frames.view(1, 3).repeat(1, 2), own)  # it needs no more
    assert torch.equal(as_tensor, torch.tensor([[2, 0, 1]]))
