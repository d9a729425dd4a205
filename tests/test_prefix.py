"""A prompt that every rank computes whole, and whose keys and values the model keeps: on layouts in
one process.
"""

from random import Random

import pytest
import torch
from pipemesh.parallel_runtime.errors import ModelError
from pipemesh.parallel_runtime.families.plan import Blocks, Leave, Prefix, TokenPlan
from pipemesh.parallel_runtime.layout import Layout
from pipemesh.parallel_runtime.methods.factory import make_method
from pipemesh.parallel_runtime.patches import Part

from .collectives import World
from .joint_model import HEADS, WIDTH, attention_basic
from .models import IdleRank

PROMPT = 5
LAYOUTS = [
    Layout(ulysses=ulysses, ring=ring) for ulysses, ring in ((2, 1), (3, 1), (4, 1), (1, 2), (1, 3), (2, 2))
]
PLAN = TokenPlan(
    family="prompted",
    models=(),
    streams=("img",),
    blocks=(
        Blocks(
            path="blocks",
            tokens={"x": ("prompt", "img")},
            returns=("x", "kept"),
            prefix=Prefix(stream="prompt", counted_by="ahead", kept_in="kept", forget="forget"),
        ),
    ),
    leave=Leave(path="blocks", stream="img"),
)


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


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("image", [13, 2], ids=["13 tokens", "fewer than ranks"])
def test_what_is_kept_of_a_prompt_is_seen_by_every_rank(monkeypatch, layout, image):
    """The first evaluation computes it, the second finds it, and the run's end forgets it."""
    stock, outputs, models = Prompted(), {}, []

    def work(mesh, _run):
        model = Prompted()
        models.append(model)
        method = make_method(model, PLAN, mesh, IdleRank())
        method.attach()
        for number in (1, 2):
            method.begin(Part(1, 0))
            outputs[mesh.rank, number] = method.forward(model, arguments(number, image), number)
        assert model.kept[0][0].shape[1] == PROMPT
        method.end_run()

    with torch.inference_mode():
        World(layout, "gloo", monkeypatch).run(work, Random(7).choice)
        for number in (1, 2):
            assert torch.allclose(outputs[0, number], stock(**arguments(number, image)), atol=1e-5)
    assert len(models) == layout.world_size and not any(model.kept[0] for model in models)


def test_keys_that_no_plan_speaks_of_are_refused(monkeypatch):
    """Of a plan that lacks its prefix: never an exchange of rows that do not belong together."""
    unaware = TokenPlan(
        family="unaware",
        models=(),
        streams=("img",),
        blocks=(Blocks(path="blocks", tokens={"x": ("img",)}),),
        leave=Leave(path="blocks", stream="img"),
    )

    def work(mesh, _run):
        model = Prompted()
        model.kept = tuple((torch.zeros(1, PROMPT, WIDTH),) * 2 for _ in model.blocks)
        method = make_method(model, unaware, mesh, IdleRank())
        method.attach()
        with pytest.raises(
            ModelError, match=r"^7 rows attend to 12 others: this model needs another plan\.$"
        ):
            method.forward(model, arguments(1, 14), 1)

    with torch.inference_mode():
        World(Layout(ulysses=2), "gloo", monkeypatch).run(work, Random(7).choice)
