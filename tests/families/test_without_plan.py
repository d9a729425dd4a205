"""Models without a token plan: prompts and images are shared out, and the image is that of one GPU,
or the model stays on one and a sentence says why.
"""

import re
import sys
from enum import Enum
from functools import partial
from types import ModuleType

import pytest
import torch
from pipemesh.lab.commands.parity import conditioning, stock_model
from pipemesh.parallel_runtime.client.remote_patcher import parallelize
from pipemesh.parallel_runtime.errors import Refused
from pipemesh.parallel_runtime.families import plan_for, plan_or_whole
from pipemesh.parallel_runtime.families.catalogue import PLAIN
from pipemesh.parallel_runtime.families.sample import Form, Size
from pipemesh.parallel_runtime.families.unplanned_models import UNTRIED
from pipemesh.parallel_runtime.layout import Layout
from pipemesh.parallel_runtime.refusals import ON_ONE_GPU
from pipemesh.pool.trial.tiny_samples import POOLED_DIM

from ..kit.bounds import assert_same
from ..kit.in_groups import in_groups
from ..kit.models import run

NO_SIZE = Size(heads=0, head_dim=0, blocks=())
FEATURES = {"hidden_size": 80, "num_heads": 5, "depth": 2, "depth_single_blocks": 2, "context_in_dim": 64}
LEVELS = {"c_hidden": [64, 64], "nhead": [2, 2], "blocks": [[1, 1], [1, 1]], "c_r": 16, "c_cond": 64}
CLIP = {"c_clip_text": 64, "c_clip_text_pooled": POOLED_DIM, "c_clip_img": 768, "c_clip_seq": 4}
# Of ComfyUI's own, whose inputs are no more than a latent and a prompt
HOSTS = {
    "Hunyuan3Dv2": ({"in_channels": 64, **FEATURES}, (64, 24)),
    "Stable_Cascade_C": ({"stable_cascade_stage": "c", **LEVELS, **CLIP}, (16, 8, 8)),
}


def hosts_model(kind):
    return Form(config_class=kind, config=lambda size: dict(HOSTS[kind][0])).random_model(NO_SIZE)


class Unplanned:
    """What a ComfyUI that nobody has looked at may bring: it does something ``around`` a plain
    transformer's forward.
    """

    def _forward(
        self,
        x,
        timestep,
        context,
        y=None,
        guidance=None,
        refs=None,
        control=None,
        transformer_options=None,
        **_,
    ):
        forward, rest = super()._forward, (timestep, context, y, guidance, refs, control, transformer_options)
        return self.around(x, lambda x: forward(x, *rest))

    def around(self, x, forward):
        return forward(x)


def unplanned(name, around):
    return type(name, (Unplanned,), {"around": around})


def swapping_halves(self, x, forward):
    out = forward(x)
    return out.roll(len(out) // 2, 0) if len(out) > 1 else out


def doing(act):
    """Does that with the transformer before each evaluation."""
    return lambda self, x, forward: (act(self, x), forward(x))[1]


class Sort(Enum):
    VIDEO = "video"


class GivesAnObject(Unplanned):
    def forward(self, *args, **kwargs):
        return super().forward(*args, sort=Sort.VIDEO, **kwargs)


CANNOT = "has no token plan, and its prompts and images cannot be shared out"
REFUSED = {  # how a sentence names what the class does
    rf"SwapsHalves {CANNOT}: computed apart,": unplanned("SwapsHalves", swapping_halves),
    f"LooksAcross {CANNOT}": unplanned(
        "LooksAcross", lambda self, x, forward: forward(x + 0.1 * x.mean(0, keepdim=True))
    ),
    r"Draws draws random numbers, .*: sample it on one GPU": unplanned(
        "Draws", lambda self, x, forward: forward(x + 1e-6 * torch.randn(x.shape))
    ),
    r"^The argument sort \(.*Sort\) of this MODEL's transformer is no plain data": GivesAnObject,
    r"Keeps keeps before from one evaluation to the next, .*: sample it on one GPU": unplanned(
        "Keeps", doing(lambda self, x: setattr(self, "before", x))
    ),
    r"KeepsInPlace keeps pe_embedder\.calls from one": unplanned(
        "KeepsInPlace", doing(lambda self, x: self.pe_embedder.calls.append(1))
    ),
    r"KeepsAModule keeps before from one": unplanned(
        "KeepsAModule", doing(lambda self, x: setattr(self, "before", type(self.pe_embedder)(4, 10, [4])))
    ),
    r"KeepsALayer keeps img_in\.before from one": unplanned(
        "KeepsALayer", doing(lambda self, x: setattr(self.img_in, "before", torch.nn.Identity()))
    ),
}


@pytest.fixture
def of_class(monkeypatch):
    """A stock MODEL whose transformer is of such a class, which ComfyUI has under its name."""

    def made(kind, home="comfy.ldm.unplanned"):
        model = stock_model(5)
        transformer = model.model.diffusion_model
        transformer.pe_embedder.calls = []
        module = ModuleType(home)
        transformer.__class__ = type(kind.__name__, (kind, type(transformer)), {"__module__": home})
        setattr(module, kind.__name__, type(transformer))
        monkeypatch.setitem(sys.modules, home, module)
        return model

    return made


@pytest.mark.parametrize("layout", [Layout(cfg=2), Layout(data=2), Layout(cfg=2, data=2)], ids=str)
def test_groups_share_out_what_nobody_has_looked_at_and_compute_the_first_evaluation_in_both_ways(
    of_class, layout
):
    stock = of_class(Unplanned)
    assert plan_or_whole(type(stock.model.diffusion_model)) is UNTRIED
    ours, pool = in_groups(layout, stock)
    assert_same(partial(run, cfg=4.0, batch=2), ours, stock)
    rows = [asked for _, asked, _ in pool.asked]
    assert {ranks for ranks, _, _ in pool.asked} == {(rank,) for rank in range(layout.world_size)}
    whole = max(rows)
    assert (rows.count(whole) == 1) == (whole > min(rows)), "once in one piece, where rows were taken apart"
    pool.asked.clear()
    run(ours, cfg=4.0, batch=2)
    assert all(asked < whole or whole == min(rows) for _, asked, _ in pool.asked), "compared once"


@pytest.mark.parametrize("sentence", REFUSED, ids=lambda sentence: REFUSED[sentence].__name__)
def test_what_would_be_another_image_in_groups_is_refused_in_the_first_evaluation(of_class, sentence):
    ours, pool = in_groups(Layout(data=2), of_class(REFUSED[sentence]))
    with pytest.raises(Refused, match=sentence):
        run(ours, batch=2)
    assert len(pool.asked) <= 6, "two in groups and one of both, and all of it once more in fp32"


@pytest.mark.host
@pytest.mark.parametrize("kind", HOSTS)
def test_comfyuis_own_classes_without_a_plan_are_sampled_in_groups_of_real_ranks(clients, kind):
    stock, ours = hosts_model(kind), parallelize(hosts_model(kind), clients(1, cfg=2), 0.0)
    assert plan_for(type(stock.model.diffusion_model)) is None
    latent, (prompt, other) = torch.zeros(2, *HOSTS[kind][1]), (conditioning(number, 9) for number in (1, 2))
    assert_same(partial(run, cfg=4.0, steps=2, latent=latent, positive=prompt, negative=other), ours, stock)


def test_a_class_of_a_pack_and_one_that_is_not_found_by_its_name_stay_on_one_gpu(of_class):
    """Ranks import ComfyUI without the pack, and would build another class."""
    of_a_pack, not_found = of_class(Unplanned, "a_pack.model"), of_class(Unplanned)
    sys.modules["comfy.ldm.unplanned"].Unplanned = None
    for model, why in (
        (of_a_pack, r"it is a_pack\.model\.Unplanned, of another pack, not ComfyUI's own; docs"),
        (not_found, "no plan has been written yet"),
    ):
        with pytest.raises(Refused, match=rf"^Unplanned has no token plan \({why}"):
            in_groups(Layout(cfg=2), model)


def test_a_packs_class_of_the_same_name_as_comfyuis_is_told_with_its_file(of_class):
    home = "/home/me/ComfyUI/custom_nodes/own-models"
    kind = type(stock_model(5).model.diffusion_model).__name__
    model = of_class(type(kind, (Unplanned,), {}), f"{home}.nodes.model")
    sys.modules[f"{home}.nodes.model"].__file__ = f"{home}/nodes/model.py"
    says = (
        f"{kind} has no token plan (it is own-models.nodes.model.{kind} in"
        " custom_nodes/own-models/nodes/model.py, of another pack, not ComfyUI's own; docs/FAMILIES.md of"
        f" the repository lists the models that have one): {ON_ONE_GPU}."
    )
    with pytest.raises(Refused, match=f"^{re.escape(says)}$"):
        in_groups(Layout(ulysses=2), model)


def test_a_model_with_a_plan_is_never_compared(of_class):
    stock = stock_model(5)
    ours, pool = in_groups(Layout(data=2), stock)
    run(ours, batch=2, steps=2)
    assert len(pool.asked) == 4, PLAIN
