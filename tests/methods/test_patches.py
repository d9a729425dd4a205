"""A patch through the model with stale neighbours: exact where nothing is stale, fresh again after
as many rounds as layers.
"""

from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pipemesh.lab.commands.parity import BOUND, Case, relative_error, stock_model
from pipemesh.lab.reference import PatchForward
from pipemesh.parallel_runtime.errors import ModelError
from pipemesh.parallel_runtime.families import plan_for
from pipemesh.parallel_runtime.families.catalogue import FAMILIES, PLAIN, REPRESENTATIVES, SAMPLES
from pipemesh.parallel_runtime.families.plan import Insert, TokenPlan
from pipemesh.parallel_runtime.forward import forward_name
from pipemesh.parallel_runtime.layout import Layout
from pipemesh.parallel_runtime.methods.inserts import modules_at
from pipemesh.parallel_runtime.methods.usp import SequenceParallel
from pipemesh.parallel_runtime.patches import TokenGrid, assembled

from ..fixtures import ALL
from ..kit.collectives import World
from ..kit.models import asked_of, in_one


def odd(one):
    return Case(one.name, "ulysses1", "odd", one.heads[-1], 1.0, one.masks is not None, "euler")


CASES = [Case(PLAIN, "ulysses1", "even", 12, 1.0, False, "euler"), *map(odd, REPRESENTATIVES.values())]
OTHERS = [odd(one) for one in SAMPLES.values() if one.name not in REPRESENTATIVES]
PATCHES = [*((case, patches) for case in CASES for patches in (1, 2, 3, 5)), *((case, 3) for case in OTHERS)]
SLICED = SimpleNamespace(arg="sliced_between")  # a word of a container of blocks


class Model:
    """A stock transformer and what its sampler asks of it in the first steps of a case."""

    def __init__(self, case: Case, plan: TokenPlan | None = None):
        patcher = stock_model(case.heads, family=case.family)
        self.module = patcher.model.diffusion_model
        self.forward, self.asked = asked_of(patcher, case)
        self.plan = plan or plan_for(type(self.module))
        self.method = PatchForward(self.module, self.plan)
        self.method.attach()

    @torch.inference_mode()
    def serial(self, arguments: dict) -> torch.Tensor:
        self.method.detach()
        out = self.forward(**arguments)
        self.method.attach()
        return in_one(out)

    @torch.inference_mode()
    def warm(self, arguments: dict) -> torch.Tensor:
        return in_one(self.method.forward(self.forward, arguments, "cond", None))

    @torch.inference_mode()
    def round(self, arguments: dict, patches: int, is_cut: bool = False) -> torch.Tensor:
        """All patches one after another; their rows together. Of a model whose patches nobody
        samples all at once, unless it ``is_cut`` all the same.
        """
        if self.plan.together.always and not is_cut:
            return self.warm(arguments)
        latent = next(iter(arguments.values()))
        if isinstance(latent, list):
            raise ValueError("several latents have no patches")
        grid = TokenGrid.of(latent.shape, self.plan.patch_size_of(self.module))
        outputs = [self.method.forward(self.forward, arguments, "cond", patch) for patch in grid.cut(patches)]
        return assembled(outputs, self.plan.leaves_behind_blocks)


@pytest.fixture(scope="module", params=CASES, ids=str)
def model(request):
    return Model(request.param)


@pytest.mark.cover(6)
@pytest.mark.parametrize(("model", "patches"), PATCHES, ids=str, indirect=["model"])
def test_with_constant_inputs_every_patch_equals_the_serial_forward(model, patches):
    truth = model.serial(model.asked[0])
    assert relative_error(model.warm(model.asked[0]), truth) == 0
    for _ in range(2):
        assert relative_error(model.round(model.asked[0], patches), truth) <= BOUND


def words_of(family):
    """Every word of a family's plans that says how an argument runs along tokens, or which tokens
    the model slices between blocks; and the plan without it. Whole queries look at keys of all
    ranks, so of a plan that has them parity tells.
    """
    for plan in (one for one in family.plans if not any(group.whole_queries for group in one.blocks)):
        groups = [*plan.blocks, plan.leave]
        for place, group in enumerate(groups):
            without = [
                (word, {kind: tuple(other for other in getattr(group, kind) if other is not word)})
                for kind in ("along", "ranges")
                for word in getattr(group, kind)
            ]
            if getattr(group, SLICED.arg, ()):
                without.append((SLICED, {SLICED.arg: ()}))
            if inserts := getattr(group, "inserts", ()):
                without.append((inserts[0], {"inserts": ()}))
            for word, changed in without:
                less = [*groups[:place], replace(group, **changed), *groups[place + 1 :]]
                yield word, plan, replace(plan, blocks=tuple(less[:-1]), leave=less[-1])


def chosen(words):
    """Of each kind of word the first, or all of them where the environment asks for it: once, where
    plans share one.
    """
    seen = set()
    for family, (word, plan, less) in words:
        marks = [name for name in ("repeated", "masks_keys", "after") if getattr(word, name, None)]
        kind = id(word) if ALL else (type(word), *marks)
        if kind not in seen:
            seen.add(kind)
            named = word.path if isinstance(word, Insert) else word.arg
            yield pytest.param(family, plan, less, id=f"{family.name}-{named}")


@pytest.mark.parametrize(
    ("family", "plan", "less"), [*chosen((family, word) for family in FAMILIES for word in words_of(family))]
)
def test_every_word_of_a_plan_is_needed_for_a_patch_or_a_shard_to_equal_the_serial_forward(
    family, plan, less, monkeypatch
):
    cases = [
        replace(odd(one), mask=mask) for one in family.samples for mask in {False, one.masks is not None}
    ]
    cases = [case for case in cases if planned(case) is plan]
    lacks = [
        insert.path
        for group, other in zip(plan.blocks, less.blocks, strict=True)
        for insert in group.inserts[len(other.inserts) :]
    ]
    if lacks and not any(runs(Model(case), lacks) for case in cases):
        pytest.skip("its sample leaves these modules out: test_families.py runs them")
    if plan.together.always and any(is_wrong(Model(case)) for case in cases):  # no patch of it can be right
        assert any(is_wrong_by_shards(case, less, monkeypatch) for case in cases)
    else:
        assert any(is_wrong(Model(case, less)) for case in cases)


def planned(case):
    return plan_for(type(stock_model(case.heads, family=case.family).model.diffusion_model))


def runs(model, paths):
    """Whether a model runs one of these modules."""
    ran = []
    for module in (one for path in paths for one in modules_at(model.module, path)):
        module.register_forward_hook(lambda *_: ran.append(True))
    model.serial(model.asked[0])
    return bool(ran)


def is_wrong(model):
    asked = model.asked[0]
    truth = model.serial(asked)
    try:
        model.warm(asked)
        return relative_error(model.round(asked, 3, is_cut=True), truth) > 100 * BOUND
    except (ModelError, RuntimeError, ValueError, IndexError):
        return True


def test_two_ranks_in_one_process_compute_the_serial_forward(monkeypatch):
    """Else every word of a model that no patch can show would seem to be needed."""
    case = next(odd(one) for one in SAMPLES.values() if planned(odd(one)).together.always)
    assert not is_wrong_by_shards(case, None, monkeypatch)


@torch.inference_mode()
def is_wrong_by_shards(case, plan, monkeypatch):
    """True if two ranks, under Ulysses with this plan, do not compute the serial forward."""
    asked = Model(case).asked[0]
    outputs = {}

    def work(mesh, run):
        module = stock_model(case.heads, family=case.family).model.diffusion_model
        forward, own = getattr(module, forward_name(module)), plan or plan_for(type(module))
        if run.rank == 0:
            outputs["truth"] = in_one(forward(**asked))
        method = SequenceParallel(module, own, mesh.sequence)
        method.attach()
        outputs[run.rank] = in_one(method.forward(forward, asked, 1))

    try:
        World(Layout(ulysses=2), "gloo", monkeypatch).run(work, lambda ready: ready[0])
        return relative_error(outputs[0], outputs["truth"]) > 100 * BOUND
    except (ModelError, RuntimeError, ValueError, IndexError):
        return True


@pytest.mark.cover(3)
def test_after_a_change_stale_rows_are_fresh_again_in_as_many_rounds_as_there_are_layers(model):
    """The first layer's keys and values depend on the input alone, each further layer's on one
    layer before.
    """
    first, second = model.asked[:2]
    truth = model.serial(second)
    model.warm(first)
    errors = [relative_error(model.round(second, 3), truth) for _ in range(model.method.layers + 1)]
    assert errors[0] > 100 * BOUND
    assert errors[-1] <= BOUND


@pytest.mark.cover(3)
def test_branches_do_not_see_each_other(model):
    first, second = model.asked[:2]
    truth = model.serial(first)
    model.warm(first)
    with torch.inference_mode():
        model.method.forward(model.forward, second, "uncond", None)
    assert relative_error(model.round(first, 2), truth) <= BOUND


GRIDS = st.builds(
    TokenGrid.of,
    st.one_of(
        st.tuples(st.just(1), st.just(4), st.integers(1, 17), st.integers(1, 17)),
        st.tuples(st.just(1), st.just(4), st.integers(1, 5), st.integers(1, 9), st.integers(1, 9)),
    ),
    st.sampled_from([1, 2, (1, 2, 2)]),
)


@settings(deadline=None)
@given(grid=GRIDS, patches=st.integers(1, 12), ahead=st.integers(0, 60))
def test_patches_are_whole_lines_one_after_another_none_is_empty_and_none_is_waited_for(grid, patches, ahead):
    """``ahead``: tokens of text that are computed with the first one."""
    made, width = grid.cut(patches, ahead), grid.counts[-1]
    assert made[0].start == 0 and made[0].first and len(made) == min(grid.lines, patches)
    assert [patch.last for patch in made] == [False] * (len(made) - 1) + [True]
    assert all(after.start == before.start + before.size for before, after in pairwise(made))
    sizes = [patch.size for patch in made]
    assert sum(sizes) == grid.tokens and all(size and size % width == 0 for size in sizes)
    assert ahead or max(sizes) - min(sizes) <= width
    extra = round(ahead / width)
    most = max(-(-(grid.lines + extra) // len(made)), 1 + extra)
    assert all(lines <= most for lines in (sizes[0] // width + extra, *(size // width for size in sizes[1:])))
    assert len({*sizes[1:]}) <= 2


@settings(deadline=None)
@given(grid=GRIDS, patches=st.integers(1, 12), ahead=st.integers(0, 60))
def test_every_pixel_is_of_the_patch_that_has_its_token(grid, patches, ahead):
    tokens = torch.arange(grid.tokens).view(grid.counts)
    for dim, edge in enumerate(grid.edges):
        tokens = tokens.repeat_interleave(edge, dim)
    tokens = tokens[tuple(slice(size) for size in grid.extent)]
    for patch in grid.cut(patches, ahead):
        own = (tokens >= patch.start) & (tokens < patch.start + patch.size)
        assert torch.equal(grid.pixels(patch).expand(grid.extent), own)
