"""A ControlNet's residuals are as large as all hidden states together: a rank takes the rows it computes, and no others."""

import weakref
from types import SimpleNamespace

import pytest
import torch
from pipemesh.parallel_runtime.families.plan import Blocks, Leave, TokenPlan
from pipemesh.parallel_runtime.methods.patches import PatchForward
from pipemesh.parallel_runtime.patches import Patch
from pipemesh.parallel_runtime.wire.arena import Arena
from pipemesh.parallel_runtime.worker.engine import Engine

PLAN = TokenPlan(
    family="plain",
    models=(),
    streams=("img",),
    blocks=(Blocks(path="blocks", tokens={"x": ("img",)}),),
    leave=Leave(path="head", stream="img"),
    control={"output": "img"},
)
ROWS, PATCH = 10, Patch(3, 4, False)


class Block(torch.nn.Module):
    def forward(self, x):
        return x


class Plain(torch.nn.Module):
    """Adds the residuals as hosts do: read where the blocks are run."""

    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.ModuleList([Block()])
        self.head = Block()

    def forward(self, x, control, transformer_options):
        x = self.blocks[0](x)
        self.added = control["output"]
        return self.head(x)


@pytest.mark.parametrize(("patch", "rows"), [(PATCH, slice(3, 7)), (None, slice(0, ROWS))], ids=["a patch", "all rows"])
def test_a_rank_brings_the_rows_it_computes_to_its_device_and_leaves_the_others_where_they_lie(patch, rows):
    model = Plain()
    method = PatchForward(model, PLAN)
    residual, other = torch.randn(1, ROWS, 2), torch.randn(1, ROWS, 2)
    control = {"output": [residual, None, other, residual.view_as(residual)], "middle": [residual]}
    arguments = {"x": torch.zeros(1, ROWS, 2), "control": control, "transformer_options": {}}
    model(**method.begin_patch(arguments, "cond", patch))
    assert torch.equal(model.added[0], residual[:, rows]) and model.added[1] is None and torch.equal(model.added[2], other[:, rows])
    assert model.added[0].untyped_storage().data_ptr() == residual.untyped_storage().data_ptr(), "copied within the same device"
    assert control["output"][0] is residual

    model.to("meta")
    model(**method.begin_patch({**arguments, "x": torch.zeros(1, ROWS, 2, device="meta")}, "cond", patch))
    assert model.added[0].device.type == "meta" and model.added[0].shape == (1, rows.stop - rows.start, 2)
    assert model.added[0].untyped_storage().nbytes() == model.added[0].nbytes, "moved whole, then cut"
    assert model.added[3] is model.added[0] is not model.added[2], "what a host repeats is brought once"


def test_what_was_brought_goes_with_the_forward():
    model = Plain()
    method = PatchForward(model, PLAN)
    residual = torch.randn(1, ROWS, 2)
    arguments = method.begin_patch(
        {"x": torch.zeros(1, ROWS, 2), "control": {"output": [residual]}, "transformer_options": {}}, "cond", PATCH
    )
    model(**arguments)
    brought = weakref.ref(model.added[0])
    assert torch.equal(brought(), residual[:, 3:7])
    del arguments, model.added
    assert brought() is None


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_what_is_read_in_place_is_not_copied_whole_and_all_else_that_changes_is(device):
    arena = Arena()
    rank = SimpleNamespace(_arena=arena.segment, _device=torch.device(device), _versions={})
    with arena.frame() as frame:
        tensor = torch.randn(4, 3)
        in_place, whole = (Engine._input(rank, frame.put(tensor, in_place=in_place)) for in_place in (True, False))
        assert in_place.device.type == "cpu" and whole.device.type == device
        assert torch.equal(in_place, tensor)
        arena.segment.tensor(frame.put(tensor)).zero_()
        assert not in_place.any()
        assert device == "meta" or torch.equal(whole, tensor)
    del in_place
    arena.close()
