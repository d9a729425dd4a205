"""Code of a node pack that ranks import from their own copy: opted in, unchanged since ComfyUI
imported it, with the values that nodes set in its modules, and given what it needs.
"""

import importlib.util
import sys
import types
from random import Random
from types import SimpleNamespace

import folder_paths
import pytest
import torch
from pipemesh.lab.commands.parity import BOUND, conditioning, relative_error, stock_model
from pipemesh.parallel_runtime.client.remote_patcher import Patching
from pipemesh.parallel_runtime.crossing.block_code import IN_BLOCK, InBlockPatches, put_patches
from pipemesh.parallel_runtime.crossing.code import imported
from pipemesh.parallel_runtime.crossing.options import crossing_options
from pipemesh.parallel_runtime.crossing.patch_objects import Assembly, Disassembly
from pipemesh.parallel_runtime.crossing.source import call_factory
from pipemesh.parallel_runtime.errors import Refused
from pipemesh.parallel_runtime.families import plan_for
from pipemesh.parallel_runtime.layout import Layout
from pipemesh.parallel_runtime.patches import Part
from pipemesh.parallel_runtime.watch.python_file import file_hash
from pipemesh.parallel_runtime.weights.weight_patches import known_functions, pack_patches
from pipemesh.parallel_runtime.worker.resident_model import ResidentModel

from ..comm.test_collectives import Rank
from ..kit.collectives import World
from ..kit.in_groups import in_groups
from ..kit.in_ranks import CPU, Crossed, across, evaluated_in_ranks
from ..kit.models import asked_first, run
from .test_patches_by_reference import ATTACHED, WAN, Patched

KJNODES = '''
"""In place of KJNodes, from its published behaviour: methods of modules, bound to what nodes set."""

import enum
import threading
import types

import torch

from . import settings
from .settings import spread

SCALE, TABLE = 2.0, {"steps": [1]}
WAYS, CACHE = {"exp": torch.exp}, {"lock": threading.Lock()}  # each process's own


class Mode(enum.Enum):
    whole = 1


MODE = Mode.whole


def chunk_scale(more=0):
    assert MODE is Mode.whole and WAYS and CACHE and spread
    return SCALE * settings.GAIN * Settings.gain + len(TABLE["steps"]) - 1 + more


class Settings:
    gain = 1.0


def twice_attended(module, x, context, guide, scale, **kwargs):
    """Guides the first half of a batch, which is of one prompt, and all of a batch of one."""
    forward = type(module).forward
    real = forward(module, x, context, **kwargs)
    ours = slice(None) if context.shape[0] == 1 else slice(0, context.shape[0] // 2)
    other = forward(module, x[ours], guide.expand(x[ours].shape[0], -1, -1), **kwargs)
    guided = real[ours] * scale - other * (scale - 1)
    guided = guided * real[ours].norm(dim=-1, keepdim=True) / guided.norm(dim=-1, keepdim=True)
    return torch.cat([guided, real[ours.stop:]]) if ours.stop else guided


class WanCrossAttentionPatch:
    def __init__(self, guide, scale):
        self.guide = guide
        self.scale = scale

    def __get__(self, obj, objtype=None):
        def wrapped_attention(module, *args, **kwargs):
            return twice_attended(module, *args, guide=self.guide, scale=self.scale, **kwargs)

        return types.MethodType(wrapped_attention, obj)


class WanffnChunkPatch:
    def __init__(self, chunks):
        self.chunks = chunks

    def __get__(self, obj, objtype=None):
        def wrapped_forward(module, x):
            return torch.cat([chunk_scale() * torch.nn.Sequential.forward(module, chunk) for chunk in x.chunk(self.chunks, dim=1)], dim=1)

        return types.MethodType(wrapped_forward, obj)


class Mixing:
    def __call__(self, args):
        tokens = torch.cat([args["txt"], args["img"]], 1)
        order = torch.arange(tokens.shape[1]).view(1, -1, 1) / tokens.shape[1]
        args["img"] += (tokens * order).mean(1, keepdim=True)
        return {**args, "txt": args["txt"] + args["img"][:, :1]}


class NotMadeAgain:
    def __init__(self, opened):
        opened()
'''


@pytest.fixture
def pack(tmp_path, monkeypatch):
    """A node pack as ComfyUI loads one, from a base directory of its own: its module in ComfyUI's
    process.
    """
    folder = tmp_path / "custom_nodes" / "ComfyUI-KJNodes"
    (folder / "nodes").mkdir(parents=True)
    (folder / "__init__.py").write_text("raise RuntimeError('the top level of a pack runs in no rank')")
    file = folder / "nodes" / "optimization.py"
    file.write_text(KJNODES)
    (folder / "nodes" / "settings.py").write_text(
        "from safetensors.torch import load_file as spread\n\nGAIN = 1.0\n"
    )
    for place in (folder, folder / "nodes"):
        package = types.ModuleType(str(folder) + ".nodes" * (place != folder))
        package.__path__ = [str(place)]
        monkeypatch.setitem(sys.modules, package.__name__, package)
    for part in ("settings", "optimization"):
        spec = importlib.util.spec_from_file_location(
            f"{folder}.nodes.{part}", folder / "nodes" / f"{part}.py"
        )
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, module.__name__, module)
        spec.loader.exec_module(module)
    monkeypatch.setitem(folder_paths.folder_names_and_paths, "custom_nodes", ([str(folder.parent)], set()))
    monkeypatch.setenv("PIPEMESH_PATCH_PACKS", folder.name)
    module.FILE = file
    return module


SET = {
    "in its module": lambda pack: setattr(pack, "SCALE", 1.5),
    "in another module": lambda pack: setattr(pack.settings, "GAIN", 0.7),
    "on a class": lambda pack: setattr(pack.Settings, "gain", 0.6),
    "in a table": lambda pack: pack.TABLE["steps"].append(2),
    "as a default": lambda pack: setattr(pack.chunk_scale, "__defaults__", (1,)),
}


def wan():
    return stock_model(WAN.heads[-1], family=WAN.name)


def replaced(model, pack):
    made = model.clone()
    guide = torch.randn(1, 6, model.model.diffusion_model.dim, generator=torch.Generator().manual_seed(6))
    for index, block in enumerate(model.model.diffusion_model.blocks):
        nag = pack.WanCrossAttentionPatch(guide, 3.0).__get__(block.cross_attn, type(block.cross_attn))
        chunked = pack.WanffnChunkPatch(2).__get__(block.ffn, type(block.ffn))
        made.add_object_patch(f"diffusion_model.blocks.{index}.cross_attn.forward", nag)
        made.add_object_patch(f"diffusion_model.blocks.{index}.ffn.forward", chunked)
    return made


@pytest.mark.parametrize("set_", SET)
def test_what_nodes_set_in_a_packs_modules_is_the_ranks_too_and_refused_while_the_model_samples(
    pack, monkeypatch, set_
):
    stock = wan()
    forward, asked = asked_first(stock, WAN)
    patcher = replaced(stock, pack)

    def truth():
        patcher.patch_model(load_weights=False)
        try:
            return forward(**asked)
        finally:
            patcher.unpatch_model(unpatch_weights=False)

    with torch.inference_mode():
        before = truth()
        state = Crossed(patcher).sent.state
        pack.CACHE["count"] = 1  # it holds a lock, so it was not sent
        state.require_unchanged()
        SET[set_](pack)
        after = truth()
    assert relative_error(before, after) > 100 * BOUND, "the value does nothing"
    with pytest.raises(
        Refused, match="was changed while the model samples, and a patch in the pool reads it"
    ):
        state.require_unchanged()
    (ours,) = evaluated_in_ranks(Layout(ulysses=2), patcher, [asked], monkeypatch)
    assert relative_error(ours, after) <= BOUND


def test_models_that_a_rank_holds_at_once_compute_each_with_what_its_own_nodes_set(pack, monkeypatch):
    """The first, the second, and the first again, of whose patches nothing is sent anew."""
    (_, asked), world, outputs = asked_first(wan(), WAN), World(Layout(), "gloo", monkeypatch), []

    def work(mesh, _run):
        rank = Rank([Part(1, 0)] * 3, ahead=False)
        rank.count = lambda done, total: None
        load, residents = SimpleNamespace(stages=(), weights="whole", budget=0, by_layer=False), []
        for pack.SCALE in (1.5, 0.6):
            patcher = replaced(wan(), pack)
            sent = Crossed(patcher).sent
            resident = ResidentModel(patcher.clone(), CPU, mesh, rank, load)
            resident.patch("set", {}, across(sent.objects), rank)
            residents.append((resident, across(crossing_options(asked["transformer_options"], sent))))
        for rank.at, (resident, options) in enumerate([*residents, residents[0]]):
            resident.method.begin(Part(1, 0))
            outputs.append(resident.on_rank({**asked, "transformer_options": options}, rank.at + 1))

    with torch.inference_mode():
        world.run(work, Random(7).choice)
    assert torch.equal(outputs[0], outputs[2]) and relative_error(outputs[1], outputs[0]) > 100 * BOUND


def test_a_function_that_another_pack_put_into_a_packs_module_is_named(pack, monkeypatch):
    patcher = replaced(wan(), pack)
    monkeypatch.setattr(pack, "chunk_scale", asked_first)
    with pytest.raises(Refused, match=r"optimization.chunk_scale was replaced .*asked_first"):
        Crossed(patcher)


def test_a_file_that_was_edited_after_it_was_imported_is_named_for_functions_and_for_instances(pack):
    patcher, instance = replaced(wan(), pack), Patched(ATTACHED[0]).stock.clone()
    instance.set_model_double_block_patch(pack.Mixing())
    pack.FILE.write_text(KJNODES.replace("opened()", "opened(1)", 1))  # in another class
    says = r"optimization.py was edited after ComfyUI imported it \(.* differs\): restart ComfyUI"
    for one in (patcher, instance):
        with pytest.raises(Refused, match=says):
            Crossed(one)


@pytest.mark.parametrize(
    ("layout", "patching"),
    [(Layout(cfg=2), None), (Layout(cfg=2, pipefusion=2), Patching(2, 9999))],
    ids=["groups", "pipelines"],
)
def test_what_comfyui_batched_stays_together_for_code_that_may_look_at_the_batch(pack, layout, patching):
    """KJNodes guides the first half of a batch, which is the positive prompt's, and all of one."""
    ours, pool = in_groups(layout, wan(), patching)
    given = {"cfg": 4.0, "latent": torch.zeros(WAN.latents["even"])}
    given |= {"positive": conditioning(1, 16), "negative": conditioning(2, 16)}
    run(ours, **given)
    assert {rows for _group, rows, _tokens in pool.asked} == {1}
    pool.asked.clear()
    here = run(replaced(ours, pack), **given)
    assert {rows for _group, rows, _tokens in pool.asked} == {2}
    assert relative_error(here, run(replaced(wan(), pack), **given)) <= BOUND


def test_no_evaluation_is_begun_twice_for_code_that_may_count_them(pack):
    """Conditioning changes at each step, which is seen before it is sent, not meanwhile."""

    def faded(apply, given):
        text = given["c"]["c_crossattn"] * given["timestep"].view(-1, 1, 1)
        return apply(given["input"], given["timestep"], **{**given["c"], "c_crossattn": text})

    for of, times in ((lambda model: replaced(model, pack), 3), (lambda model: model.clone(), 4)):
        ours, pool = in_groups(Layout(), wan())
        model = of(ours)
        model.set_model_unet_function_wrapper(faded)
        run(model, latent=torch.zeros(WAN.latents["even"]), positive=conditioning(1, 16))
        assert len(pool.asked) == times


@pytest.mark.parametrize("attached", [ATTACHED[0], ATTACHED[3]], ids=["streams apart", "streams in one"])
def test_a_patch_of_a_pack_of_which_nothing_is_known_is_given_all_tokens(pack, attached, monkeypatch):
    patcher = stock_model(attached.sample.heads[-1], family=attached.sample.name)
    patcher.set_model_double_block_patch(pack.Mixing())
    forward, asked = asked_first(patcher, attached.sample)
    with torch.inference_mode():
        truth = forward(**asked)
        plain = forward(**{**asked, "transformer_options": {**asked["transformer_options"], "patches": {}}})
    assert relative_error(truth, plain) > 100 * BOUND, "the patch does nothing"
    (ours,) = evaluated_in_ranks(Layout(ulysses=2), patcher, [asked], monkeypatch)
    assert relative_error(ours, truth) <= BOUND


def test_objects_are_made_without_their_constructors_and_shared_ones_stay_shared(pack):
    opened = []
    made = pack.NotMadeAgain(lambda: opened.append(1))
    made.self, made.numbers, made.twice = made, {1, 2}, [tensor := torch.ones(2), tensor]
    made.layer = torch.nn.Linear(2, 2)
    apart, other = Disassembly(torch.nn.Sequential(made.layer)), torch.nn.Sequential(torch.nn.Linear(2, 2))
    taken = apart.take(made, "patch")
    again = Assembly(other, apart.models, CPU).put(taken)
    assert opened == [1] and type(again).__name__ == "NotMadeAgain"
    assert again.self is again and again.numbers == {1, 2}
    assert again.twice[0] is again.twice[1] and again.layer is other[0]


# -- code that no rank runs


def test_a_pack_that_was_not_opted_in_is_named(pack, monkeypatch):
    monkeypatch.delenv("PIPEMESH_PATCH_PACKS")
    says = r"wrapped_attention.*PIPEMESH_PATCH_PACKS.*optimization\.py is neither.*remove the node"
    with pytest.raises(Refused, match=says):
        Crossed(replaced(wan(), pack))


def test_a_rank_imports_no_other_version_of_a_file(pack):
    stock = wan()
    transformer, patches = stock.model.diffusion_model, replaced(stock, pack).object_patches
    sent = InBlockPatches(transformer, plan_for(type(transformer)), {}, patches).objects
    pack.FILE.write_text(KJNODES + "\n")
    with pytest.raises(Refused, match=r"optimization\.py is missing here, or another version"):
        put_patches(stock.model, sent[IN_BLOCK], CPU)


def test_a_pack_that_this_machine_does_not_trust_is_not_imported(tmp_path):
    """Although the file is the one that ComfyUI runs."""
    file = tmp_path / "inner.py"
    file.write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()\n")
    with pytest.raises(Refused, match=r"^A rank may not import the node pack at .*PIPEMESH_PATCH_PACKS"):
        imported((str(tmp_path), "inner.py", file_hash(file)))
    assert not (tmp_path / "ran").exists()


def test_a_loader_that_is_not_comfyuis_is_not_called(tmp_path):
    with pytest.raises(Refused, match=r"^The model's loader os:mkdir is not ComfyUI's own: use a stock"):
        call_factory("os:mkdir", (str(tmp_path / "made"),), None)
    assert not (tmp_path / "made").exists()


def test_a_weight_patch_with_a_function_of_a_nodes_is_refused_by_the_functions_name():
    (known,) = known_functions().values()
    key, patch = "diffusion_model.a", ("diff", (torch.ones(2),))
    assert pack_patches({key: [(1.0, patch, 1.0, None, known)]})
    with pytest.raises(Refused, match=rf"^The weight patch of {key} carries the function .*asked_first"):
        pack_patches({key: [(1.0, patch, 1.0, None, asked_first)]})
