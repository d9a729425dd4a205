"""What is the same for every patch of a run is made once, and made anew where anything about it is
different.
"""

from dataclasses import astuple
from itertools import count

import pytest
import torch
from pipemesh.lab.bench.forwards import standin
from pipemesh.lab.commands.parity import Case, relative_error, stock_model
from pipemesh.parallel_runtime.comm.stage_link import StageLink
from pipemesh.parallel_runtime.families import plan_for
from pipemesh.parallel_runtime.families.every import FAMILIES
from pipemesh.parallel_runtime.layout import Layout
from pipemesh.parallel_runtime.methods.blocks import blocks_of
from pipemesh.parallel_runtime.methods.pipefusion.rope_cache import KEPT, RopeCache
from pipemesh.parallel_runtime.methods.pipefusion.stage import PipeFusion
from pipemesh.parallel_runtime.patches import Part, TokenGrid, assembled
from pipemesh.parallel_runtime.stages import Stage

from .models import IdleRank, asked_of


class Twice(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.asked, self.factor = [], 2

    def forward(self, positions):
        self.asked.append(positions)
        return self.factor * positions


@pytest.fixture
def twice():
    return Twice()


def test_equal_positions_are_embedded_once_and_others_anew(twice):
    RopeCache(twice).attach()
    first = torch.arange(6.0).reshape(2, 3)
    for positions in (first, first.clone(), first + 1, first[:1], first.int(), first.clone()):
        assert torch.equal(twice(positions), 2 * positions)
    assert len(twice.asked) == 4
    first += 5
    assert torch.equal(twice(first), 2 * first), "written to since"
    for index in range(KEPT):
        twice(torch.full((2,), float(index)))
    kept = len(twice.asked)
    twice(torch.arange(6.0).reshape(2, 3))
    assert len(twice.asked) == kept + 1, "more is kept than a forward asks for in turn"


def test_what_is_forgotten_is_made_anew_and_a_detached_module_is_as_it_was(twice):
    cache = RopeCache(twice)
    cache.attach()
    twice(torch.ones(2))
    cache.end_run()
    twice.factor = 3
    assert torch.equal(twice(torch.ones(2)), torch.full((2,), 3.0))
    cache.detach()
    assert "forward" not in vars(twice)


@pytest.mark.parametrize(
    "family",
    [
        family.samples[0].name
        for family in FAMILIES
        if family.plans[0].positions and family.samples[0].stands_for
    ],
)
def test_a_stage_embeds_positions_once_in_a_run_and_anew_in_the_next(family, monkeypatch):
    case = Case(family, "ulysses1", "odd", 4, 1.0, False, "euler")
    patcher = stock_model(case.heads, family=case.family)
    model = patcher.model.diffusion_model
    forward, (arguments, *_) = asked_of(patcher, case)
    with torch.inference_mode():
        truth = forward(**arguments)
    plan = plan_for(type(model))
    (path,) = plan.positions
    embedder, made = model.get_submodule(path), []
    real = type(embedder).forward
    monkeypatch.setattr(
        type(embedder),
        "forward",
        lambda self, ids: (self is embedder and made.append(ids)) or real(self, ids),
    )
    blocks = len(list(blocks_of(model, plan)))
    link = StageLink(None, None, via_cpu=True)
    stage = PipeFusion(model, plan, Stage(0, blocks, blocks), standin(Layout(), 0), link, IdleRank())
    stage.attach()
    numbers = count(1)
    grid = TokenGrid.of(next(iter(arguments.values())).shape, plan.patch_size_of(model))

    def evaluate(part):
        stage.begin(part)
        return stage.forward(forward, arguments, next(numbers))

    for run in (1, 2):
        with torch.inference_mode():
            whole = evaluate(Part(run, 0))
            parts = [evaluate(Part(run, 0, astuple(patch))) for patch in grid.cut(3)]
        assert (
            relative_error(whole, truth) < 1e-6
            and relative_error(assembled(parts, plan.leaves_behind_blocks), truth) < 1e-5
        )
        assert len(made) == run
    stage.detach()
    assert "forward" not in vars(model.get_submodule(path))
