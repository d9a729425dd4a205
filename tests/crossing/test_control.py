"""A ControlNet's residuals are as large as all hidden states together: a rank takes the rows it
computes, and no others.
"""

import importlib
import inspect
import re
import weakref
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from pipemesh.lab.bench.forwards import standin
from pipemesh.lab.commands.parity import BOUND, Case, relative_error, stock_model
from pipemesh.lab.reference import PatchForward
from pipemesh.parallel_runtime.crossing.block_code import can_serve
from pipemesh.parallel_runtime.crossing.named_code import options_by_name
from pipemesh.parallel_runtime.crossing.options import OF_COMFYUI
from pipemesh.parallel_runtime.errors import Refused
from pipemesh.parallel_runtime.families.catalogue import FAMILIES, PLANS, classes_of
from pipemesh.parallel_runtime.families.plan import Blocks, Leave, TokenPlan
from pipemesh.parallel_runtime.layout import Layout
from pipemesh.parallel_runtime.methods.pipefusion.stage import PipeFusion
from pipemesh.parallel_runtime.methods.whole_forward import WholeForward
from pipemesh.parallel_runtime.patches import Part, Patch, TokenGrid, assembled
from pipemesh.parallel_runtime.stages import Stage
from pipemesh.parallel_runtime.wire.arena import Arena
from pipemesh.parallel_runtime.worker.arena_io import ArenaIO

from ..kit.in_ranks import evaluated_in_ranks
from ..kit.models import IdleRank, asked_of

PLAN = TokenPlan(
    streams=("img",),
    blocks=(Blocks(path="blocks", tokens={"x": ("img",)}, control="output"),),
    leave=Leave(path="head", stream="img"),
)
ROWS, PATCH = 10, Patch(3, 4, False)


class Block(torch.nn.Module):
    def forward(self, x):
        return x


class Plain(torch.nn.Module):
    """Adds the residuals as hosts do: read where the blocks are run, each behind its block."""

    def __init__(self, blocks=1):
        super().__init__()
        self.blocks = torch.nn.ModuleList([Block() for _ in range(blocks)])
        self.head = Block()

    def forward(self, x, control, transformer_options):
        self.control = control
        for index, block in enumerate(self.blocks):
            x = block(x)
            self.added = control["output"]
            if index < len(self.added) and self.added[index] is not None:
                x = x + self.added[index]
        return self.head(x)


@pytest.mark.parametrize(
    ("patch", "rows"), [(PATCH, slice(3, 7)), (None, slice(0, ROWS))], ids=["a patch", "all rows"]
)
def test_a_rank_brings_the_rows_it_computes_to_its_device_and_leaves_the_others_where_they_lie(patch, rows):
    model = Plain()
    method = PatchForward(model, PLAN)
    method.attach()
    residual, other = torch.randn(1, ROWS, 2), torch.randn(1, ROWS, 2)
    # Of more blocks than there are
    control = {"output": [residual, None, other, residual.view_as(residual)], "middle": [residual]}
    arguments = {"x": torch.zeros(1, ROWS, 2), "control": control, "transformer_options": {}}
    method.forward(model, arguments, "cond", patch)
    assert (
        torch.equal(model.added[0], residual[:, rows])
        and model.added[1] is None
        and torch.equal(model.added[2], other[:, rows])
    )
    assert model.added[0].untyped_storage().data_ptr() == residual.untyped_storage().data_ptr(), (
        "copied within the same device"
    )
    assert control["output"][0] is residual

    model.to("meta")
    method.forward(model, {**arguments, "x": torch.zeros(1, ROWS, 2, device="meta")}, "cond", patch)
    assert model.added[0].device.type == "meta" and model.added[0].shape == (1, rows.stop - rows.start, 2)
    assert model.added[0].untyped_storage().nbytes() == model.added[0].nbytes, "moved whole, then cut"
    assert model.added[3] is model.added[0] is not model.added[2], "what a host repeats is brought once"


def test_a_model_that_is_computed_whole_has_all_residuals_on_its_device():
    control = {"output": [torch.zeros(1, ROWS, 2), None], "middle": [torch.zeros(1, ROWS, 2)]}
    arguments = {"x": torch.zeros(1, ROWS, 2, device="meta"), "control": control}
    method = WholeForward(Plain(), SimpleNamespace())
    moved = method.forward(lambda **given: given["control"], arguments, 1)
    assert moved["output"][1] is None and control["output"][0].device.type == "cpu"
    assert {one.device.type for one in (moved["output"][0], *moved["middle"])} == {"meta"}


def test_what_was_brought_goes_with_the_forward():
    model = Plain()
    method = PatchForward(model, PLAN)
    method.attach()
    residual = torch.randn(1, ROWS, 2)
    arguments = {"x": torch.zeros(1, ROWS, 2), "control": {"output": [residual]}, "transformer_options": {}}
    method.forward(model, arguments, "cond", PATCH)
    brought = weakref.ref(model.added[0])
    assert torch.equal(brought(), residual[:, 3:7])
    del arguments, model.added, model.control
    assert brought() is None


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_what_is_read_in_place_is_not_copied_whole_and_all_else_that_changes_is(device):
    arena = Arena()
    io = ArenaIO(arena.segment, torch.device(device))
    with arena.frame() as frame:
        tensor = torch.randn(4, 3)
        in_place, whole = (io.tensor(frame.put(tensor, in_place=in_place)) for in_place in (True, False))
        assert in_place.device.type == "cpu" and whole.device.type == device
        assert torch.equal(in_place, tensor)
        arena.segment.tensor(frame.put(tensor)).zero_()
        assert not in_place.any()
        assert device == "meta" or torch.equal(whole, tensor)
    del in_place
    arena.close()


class Pipe:
    """A link within one process."""

    def __init__(self):
        self.hidden = None

    def free_buffers(self):
        pass

    def check(self):
        pass

    def prepare(self, *of):
        pass

    def expect(self, *of):
        pass

    def receive(self, number, *of, **how):
        return self.hidden

    def send(self, number, hidden, **how):
        self.hidden = hidden


@pytest.mark.parametrize("cuts", [(1, 3), (2, 3), (3, 3)], ids=str)
def test_a_stage_brings_the_residuals_that_it_adds_and_together_they_add_all(cuts):
    residuals = [torch.full((1, ROWS, 2), 10.0**power) for power in range(4)]
    arguments = {"x": torch.zeros(1, ROWS, 2), "control": {"output": residuals}, "transformer_options": {}}
    with torch.inference_mode():
        whole = Plain(4)(**arguments)
        pipe, brought = Pipe(), []
        for first, end in pairwise((0, *sorted({*cuts}), 4)):
            model, stage = Plain(4), Stage(first, end, 4)
            method = PipeFusion(model, PLAN, stage, standin(Layout(), 0), pipe, IdleRank())
            method.attach()
            method.begin(Part(1, 0))
            out = method.forward(model, arguments, 1)
            brought += [index for index, rows in enumerate(model.control["output"]) if rows is not None]
    assert torch.equal(out, whole) and whole.unique().item() == 1111
    assert sorted(brought) == [0, 1, 2, 3], "each by one stage"


def planned(model):
    module, _, name = model.partition(":")
    kind = getattr(importlib.import_module(module), name)
    return "".join(inspect.getsource(one) for one in kind.__mro__ if one.__module__.startswith("comfy.ldm."))


@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: classes_of(plan)[0].rpartition(":")[2])
def test_what_a_forward_reads_of_residuals_options_and_patches_is_planned_or_refused(plan):
    for model in classes_of(plan):
        pytest.importorskip(model.partition(":")[0], reason="of a newer ComfyUI")
        source = planned(model)
        residuals = set(re.findall(r"control\w*(?:\.get\(|\[)[\"'](\w+)[\"']", source))
        assert residuals == {group.control for group in plan.blocks} - {""}, (
            f"{model}: residuals that no group names, or that nobody reads"
        )
        options = set(re.findall(r"transformer_options(?:\.get\(|\[)[\"'](\w+)[\"']", source))
        assert options & OF_COMFYUI <= {"patches", "patches_replace"}, (
            f"{model}: options that stay in ComfyUI"
        )
        for point in re.findall(r"patches(?:\.get\(|\[)[\"'](\w+)[\"']", source):
            asked = {"patches": {point: [unknown_patch]}}
            if not can_serve(plan, point, unknown_patch):
                with pytest.raises(Refused, match=f"unknown_patch.*{point}"):
                    options_by_name(asked)


def unknown_patch(args):
    return args


@pytest.mark.parametrize(
    "layout", [Layout(ulysses=2), Layout(ring=3), None], ids=["ulysses", "ring", "a patch"]
)
def test_residuals_behind_the_last_block_are_added_where_all_rows_leave(layout, monkeypatch):
    plan = next(plan for plan in PLANS if plan.leaves_behind_blocks and plan.blocks[-1].control)
    sample = next(family for family in FAMILIES if plan in family.plans).samples[0]
    stock = stock_model(sample.heads[-1], family=sample.name)
    model = stock.model.diffusion_model
    forward, (asked, *_) = asked_of(
        stock, Case(sample.name, "ulysses1", "odd", sample.heads[-1], 1.0, False, "euler")
    )
    tokens = TokenGrid.of(sample.latents["odd"], plan.patch_size_of(model)).tokens
    random = torch.Generator().manual_seed(3)
    control = {
        group.control: [
            torch.randn(1, tokens, model.hidden_size, generator=random)
            for _ in model.get_submodule(group.path)
        ]
        for group in plan.blocks
    }
    asked = {**asked, "guiding_frame_index": None, "control": control}
    with torch.inference_mode():
        truth = forward(**asked)
        assert (
            relative_error(
                truth, forward(**{**asked, "control": {**control, "output": control["output"][:-1]}})
            )
            > 100 * BOUND
        )
        if layout is None:
            method = PatchForward(model, plan)
            method.attach()
            method.forward(forward, asked, "cond", None)
            grid = TokenGrid.of(sample.latents["odd"], plan.patch_size_of(model))
            ours = assembled(
                [method.forward(forward, asked, "cond", patch) for patch in grid.cut(3)],
                plan.leaves_behind_blocks,
            )
            method.detach()
        else:
            (ours,) = evaluated_in_ranks(layout, stock, [asked], monkeypatch)
    assert relative_error(ours, truth) <= BOUND
