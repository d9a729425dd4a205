"""A prompt that every rank computes whole, and whose keys and values the model keeps: on layouts in
one process.
"""

from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from pipemesh.lab.commands.parity import stock_model
from pipemesh.parallel_runtime.errors import ModelError
from pipemesh.parallel_runtime.families.plan import Blocks, Leave, Prefix, TokenPlan
from pipemesh.parallel_runtime.layout import Layout
from pipemesh.parallel_runtime.methods.factory import make_method
from pipemesh.parallel_runtime.patches import Part
from pipemesh.parallel_runtime.worker.resident_model import ResidentModel

from ..kit.collectives import outputs_of
from ..kit.joint_model import HEADS, WIDTH, attention_basic
from ..kit.models import IdleRank

PROMPT = 5
LAYOUTS = [Layout(ulysses=u, ring=r) for u, r in ((2, 1), (3, 1), (4, 1), (1, 2), (1, 3), (2, 2))]
PREFIX = Prefix(stream="prompt", counted_by="ahead", kept_in="kept", forget="forget")
GROUP = Blocks(path="blocks", tokens={"x": ("prompt", "img")}, returns=("x", "kept"), prefix=PREFIX)
PLAN = TokenPlan(streams=("img",), blocks=(GROUP,), leave=Leave(path="blocks", stream="img"))


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = torch.nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x, kept, ahead, options):
        q, k, v = self.qkv(x).chunk(3, -1)
        first = ahead
        if kept:
            k, v, first = torch.cat((kept[0], k), 1), torch.cat((kept[1], v), 1), 0
        attend = options.get("optimized_attention_override", lambda attention, *args: attention(*args))
        alone = [attention_basic(q[:, :first], k[:, :first], v[:, :first], HEADS)] if first else []
        return x + torch.cat([*alone, attend(attention_basic, q[:, first:], k, v, HEADS)], 1), (
            k[:, :ahead],
            v[:, :ahead],
        )


class Prompted(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.blocks = torch.nn.ModuleList([Block() for _ in range(3)])
        self.forget()

    def forget(self):
        self.kept = ((), (), ())

    def forward(self, prompt, img, ahead, transformer_options):
        x = img if self.kept[0] else torch.cat((prompt, img), 1)
        kept = []
        for block, own in zip(self.blocks, self.kept, strict=True):
            x, own = block(x, own, ahead, transformer_options)
            kept.append(own)
        self.kept = tuple(kept)
        return x[:, -img.shape[1] :].flip(1)


def arguments(number, image, prompt=PROMPT):
    generator = torch.Generator().manual_seed(7)
    text = torch.randn(1, prompt, WIDTH, generator=generator)
    img = torch.randn(1, image, WIDTH, generator=generator) + number
    return {"prompt": text, "img": img, "ahead": prompt, "transformer_options": {}}


def two_evaluations(model, plan, mesh, given):
    """Number -> what a rank computed of two evaluations; and its method. ``given``: number -> their
    arguments.
    """
    method, outputs = make_method(model, plan, mesh, IdleRank()), {}
    method.attach()
    for number in (1, 2):
        method.begin(Part(1, 0))
        outputs[number] = method.forward(model, given(number), number)
    return outputs, method


def assert_right(outputs, stock, given):
    for number in (1, 2):
        assert torch.allclose(outputs[0][number], stock(**given(number)), atol=1e-5)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("image", [13, 2], ids=["13 tokens", "fewer than ranks"])
def test_what_is_kept_of_a_prompt_is_seen_by_every_rank(monkeypatch, layout, image):
    """The first evaluation computes it, the second finds it, and the run's end forgets it."""
    stock, models = Prompted(), []

    def compute(mesh):
        model = Prompted()
        models.append(model)
        outputs, method = two_evaluations(model, PLAN, mesh, partial(arguments, image=image))
        assert model.kept[0][0].shape[1] == PROMPT
        method.end_run()
        return outputs

    assert_right(outputs_of(layout, compute, monkeypatch), stock, partial(arguments, image=image))
    assert len(models) == layout.world_size and not any(model.kept[0] for model in models)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("cold", [0, 1])
def test_what_an_attempt_that_failed_kept_is_void_in_the_next_one(monkeypatch, layout, cold):
    """One rank failed before it had kept the prompt, the others behind that, at one place."""
    stock, image, seen = Prompted(), 13, {}

    def compute(mesh):
        model = Prompted()
        method = make_method(model, PLAN, mesh, IdleRank())
        method.attach()
        method.begin(Part(1, 0))
        kept, forward = model.kept, model.forward

        def failing(*args, **kwargs):
            forward(*args, **kwargs)
            if mesh.rank == cold:
                model.kept = kept
            raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            method.forward(failing, arguments(1, image), 1)
        method.begin(Part(1, 0, attempt=1))
        seen[mesh.rank] = bool(model.kept[0])
        outputs = {1: method.forward(model, arguments(1, image), 2)}
        method.begin(Part(1, 0, attempt=1))
        outputs[2] = method.forward(model, arguments(2, image), 3)
        return outputs

    assert_right(outputs_of(layout, compute, monkeypatch), stock, partial(arguments, image=image))
    assert not any(seen.values())


class Segmented(Block):
    """In the form of Qwen-Image 2.1's: ``count`` says how many of the tokens are the prompt's, and
    ``attend`` looks at segments of the whole sequence.
    """

    def forward(self, x, attend, count):
        q, k, v = self.qkv(x).chunk(3, -1)
        return x * (1 + (torch.arange(x.shape[1]) < count)[:, None]) + attend(q, k, v)


class Kept(torch.nn.Module):
    """Where it ``keeps``, the first evaluation calls each block on the prompt alone as well."""

    def __init__(self, keeps):
        super().__init__()
        torch.manual_seed(3)
        self.blocks = torch.nn.ModuleList([Segmented() for _ in range(3)])
        self.keeps, self.kept = keeps, {}

    def forward(self, prompt, img, transformer_options):
        attention = transformer_options.get(
            "optimized_attention_override", lambda function, *args: function(*args)
        )
        ahead, total = prompt.shape[1], prompt.shape[1] + img.shape[1]
        causal = torch.zeros(1, ahead - 2, ahead).masked_fill(torch.ones(ahead - 2, ahead).triu(3) > 0, -1e4)
        segments = [(0, 2, None), (2, ahead, causal), (ahead, total, None)]

        def over(some, keys=()):
            def attend(q, k, v):
                if keys:
                    k, v = (torch.cat(parts, 1) for parts in zip(keys, (k, v), strict=True))
                parts = [
                    attention(attention_basic, q[:, start:end], k[:, :end], v[:, :end], HEADS, mask)
                    for start, end, mask in some
                ]
                return torch.cat(parts, 1)

            return attend

        x, fills = torch.cat((prompt, img), 1), self.keeps and not self.kept
        if self.keeps:
            prompt, x = x[:, :ahead], x[:, ahead:]
        for number, block in enumerate(self.blocks):
            if fills:
                self.kept[number] = block.qkv(prompt).chunk(3, -1)[1:]
                prompt = block(prompt, over(segments[:-1]), ahead)
            if self.keeps:
                x = block(x, over([(0, total, None)], self.kept[number]), 0)
            else:
                x = block(x, over(segments), ahead)
        return x[:, -img.shape[1] :].flip(1)


@pytest.mark.parametrize("layout", [LAYOUTS[1], LAYOUTS[-1]], ids=str)
@pytest.mark.parametrize("image", [13, 2], ids=["13 tokens", "fewer than ranks"])
@pytest.mark.parametrize("keeping", ["no rank", "every rank", "some ranks"])
def test_a_prompt_that_blocks_get_ahead_of_the_image_or_alone_is_every_ranks(
    monkeypatch, layout, image, keeping
):
    """Ranks with room for its keys and values keep them, others compute them again."""
    counted = Prefix(stream="prompt", counted_by="count")
    plan = replace(PLAN, blocks=(replace(GROUP, returns=("x",), prefix=counted),))
    stock = Kept(False)

    def given(number):
        return {name: one for name, one in arguments(number, image).items() if name != "ahead"}

    def compute(mesh):
        model = Kept(keeping == "every rank" or (keeping == "some ranks" and mesh.rank % 2 == 1))
        outputs, method = two_evaluations(model, plan, mesh, given)
        method.end_run()
        return outputs

    assert_right(outputs_of(layout, compute, monkeypatch), stock, given)


def test_keys_that_no_plan_speaks_of_are_refused(monkeypatch):
    """Of a plan that lacks its prefix: never an exchange of rows that do not belong together."""
    unaware = replace(PLAN, blocks=(Blocks(path="blocks", tokens={"x": ("img",)}),))

    def compute(mesh):
        model = Prompted()
        model.kept = tuple((torch.zeros(1, PROMPT, WIDTH),) * 2 for _ in model.blocks)
        method = make_method(model, unaware, mesh, IdleRank())
        method.attach()
        sentence = r"^7 rows attend to 12 others: this model needs another plan\.$"
        with pytest.raises(ModelError, match=sentence):
            method.forward(model, arguments(1, 14), 1)

    outputs_of(Layout(ulysses=2), compute, monkeypatch)


@pytest.mark.parametrize("gathered", [False, True], ids=["whole weights", "gathered in turns"])
def test_a_model_is_told_of_its_run_as_comfyui_tells_it_and_keeps_nothing_of_other_weights(
    monkeypatch, gathered
):
    """Where weights are gathered it keeps nothing, so that all ranks compute the same layers."""

    def compute(mesh):
        patcher, rank, seen = stock_model(3), IdleRank(), []
        told = property(lambda _: seen[-1], lambda _, value: seen.append(value))
        patcher.model.__class__ = type("Told", (type(patcher.model),), {"current_patcher": told})
        load = SimpleNamespace(stages=(), weights="whole", budget=0, by_layer=False)
        resident = ResidentModel(patcher, torch.device("cpu"), mesh, rank, load)
        if gathered:
            turns = SimpleNamespace(end_run=lambda: None, evaluation=nullcontext, learn=lambda: None)
            own = {"restore": lambda: None, "applies": lambda _patches: True, "has": lambda _name: False}
            resident.weights = SimpleNamespace(turns=turns, **own)
        resident.method.forward = lambda *_: None

        def evaluate(part):
            resident.method.begin(part)
            resident.on_rank({}, 1)

        evaluate(Part(1, 0))
        evaluate(Part(1, 1))
        resident.patch("others", {}, {}, rank)
        evaluate(Part(1, 0))
        resident.end_run()
        evaluate(Part(2, 0))
        assert seen == ([None] * 4 if gathered else [patcher, patcher, None, patcher])

    outputs_of(Layout(), compute, monkeypatch)
