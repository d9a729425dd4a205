"""Objects of ours that stand in for ComfyUI's have what its code asks of them, by its own text, and
what we put around its functions takes whatever a later ComfyUI gives them.
"""

import ast
import inspect
import re
import textwrap
from pathlib import Path
from types import FunctionType

import comfy.model_patcher
import comfy.patcher_extension
import comfy.samplers
import comfy.sd
import comfy_extras.nodes_upscale_model as upscaling
import pytest
from comfy.model_patcher import ModelPatcher
from pipemesh.lab.commands.parity import stock_model
from pipemesh.nodes.auto.seam import OF_VAES, GuiderSeam, UpscalerSeam, VAESeam
from pipemesh.nodes.timing import Steps
from pipemesh.parallel_runtime.client.patching import Patching
from pipemesh.parallel_runtime.client.remote_forward import RemoteForward
from pipemesh.parallel_runtime.client.remote_patcher import RemotePatcher
from pipemesh.parallel_runtime.client.remote_upscaler import ForNode
from pipemesh.parallel_runtime.client.remote_vae import FirstStage, VAEInPool, VAEPatcher
from pipemesh.parallel_runtime.client.separability import WRAPPER_KEY
from pipemesh.parallel_runtime.client.windows import WindowsTogether
from pipemesh.parallel_runtime.layout import Layout

from ..fixtures import COMFYUI
from ..kit.in_groups import in_groups

pytestmark = pytest.mark.host
PATCHERS = re.compile(
    r"\b(?:(?:model_|current_)?patcher|(?:loaded_model|shift_model|cur)\.model)\.([a-z_]\w*)"
)
OVERRIDING = [RemotePatcher, VAEPatcher, VAEInPool, WindowsTogether]
TILED = ("decode_tiled_", "decode_tiled_3d", "encode_tiled_", "encode_tiled_3d")
# What ComfyUI's VAE calls of its module beside decode and encode: what computes nothing of the
# picture (the first line), what is of VAEs that take tiles by themselves, which no rank computes,
# and what is called when a VAE is made, of which ours is a copy.
OF_MODULE = {
    *("comfy_memory_used_decode", "decode_output_shape", "state_dict"),
    *("decode_tiled", "encode_tiled"),
    *("eval", "load_state_dict", "to"),
}


def asked_of(code, what):
    """The attributes of an expression that code names, and those of them that it calls."""
    nodes = list(ast.walk(ast.parse(textwrap.dedent(inspect.getsource(code)))))
    called = [node.func for node in nodes if isinstance(node, ast.Call)]
    found = [one for one in nodes if isinstance(one, ast.Attribute) and ast.unparse(one.value) == what]
    return {one.attr for one in found}, {one.attr for one in found if one in called}


def takes_all(function):
    """True for a function that takes arguments that nobody knows of yet."""
    kinds = {one.kind for one in inspect.signature(function, follow_wrapped=False).parameters.values()}
    return kinds >= {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}


def test_an_upscale_model_in_a_pool_has_what_comfyuis_node_asks_of_one():
    asked, called = asked_of(upscaling.ImageUpscaleWithModel.execute, "upscale_model")
    assert "patcher" in asked
    made = ForNode(object(), VAEPatcher, 2.0, None, 0, "")
    assert {name for name in asked if not hasattr(made, name)} == set()
    assert called <= {"to"}


def test_a_vae_in_a_pool_computes_whatever_comfyuis_asks_its_module_to():
    _, called = asked_of(comfy.sd.VAE, "self.first_stage_model")
    assert {"decode", "encode"} == called & vars(FirstStage).keys()
    assert called - vars(FirstStage).keys() <= OF_MODULE
    for name in OF_VAES + TILED:
        asked, called = asked_of(getattr(comfy.sd.VAE, name), "self.first_stage_model")
        if name in TILED:  # there the module is a namespace of one function
            assert asked == called == {name.partition("_")[0]}
        else:
            assert called <= {*OF_MODULE, name.partition("_")[0]}


def test_whatever_comfyui_asks_of_a_model_is_of_its_patchers_class_or_asked_of_a_dynamic_one_alone():
    """Ours is a ModelPatcher, and none that is dynamic."""
    own = {*dir(comfy.model_patcher), *dir(ModelPatcher), *vars(stock_model(5))}
    found = set()
    for file in (
        one
        for folder in ("comfy", "comfy_execution", "comfy_extras")
        for one in Path(COMFYUI, folder).glob("*.py")
    ):
        if file.name != "model_patcher.py":
            found |= {*PATCHERS.findall(file.read_text(encoding="utf-8"))} - own
    assert found <= {"get_non_dynamic_delegate", "register_load_device"}
    assert not {*dir(RemotePatcher)} & {"get_non_dynamic_delegate", "register_load_device"}


def test_a_forward_is_called_and_asked_for_nothing_else():
    asked, _ = asked_of(comfy.patcher_extension.WrapperExecutor, "self.original")
    assert {name for name in asked if not hasattr(RemoteForward, name)} == set()


@pytest.mark.parametrize("kind", OVERRIDING)
def test_what_replaces_a_method_of_comfyuis_takes_what_a_later_one_may_be_given(kind):
    ours = {
        name
        for name, method in vars(kind).items()
        if isinstance(inspect.unwrap(method), FunctionType)
        and not name.startswith("__")
        and any(name in vars(base) for base in kind.__mro__[1:] if base.__module__.startswith("comfy."))
    }
    assert ours
    assert {name for name in ours if not takes_all(inspect.unwrap(vars(kind)[name]))} == set()


@pytest.mark.parametrize("patching", [None, Patching(2, 1)])
def test_wrappers_of_a_model_take_what_a_later_comfyui_may_give_them(patching):
    layout = Layout(pipefusion=2) if patching else Layout(cfg=2)
    model, _ = in_groups(layout, stock_model(5), patching)
    wrappers = [one for of_kind in model.wrappers.values() for one in of_kind.get(WRAPPER_KEY, ())]
    assert len(wrappers) >= 5
    assert [one for one in wrappers if not takes_all(inspect.unwrap(one))] == []


@pytest.mark.parametrize("kind", [GuiderSeam, VAESeam, UpscalerSeam])
def test_what_stands_before_a_method_of_comfyuis_takes_what_a_later_one_may_be_given(kind, monkeypatch):
    import nodes

    monkeypatch.setitem(nodes.NODE_CLASS_MAPPINGS, "ImageUpscaleWithModel", upscaling.ImageUpscaleWithModel)
    seam = kind(*[None] * (len(inspect.signature(kind).parameters)))
    for name, around in seam._around.items():
        made = around(vars(seam._owner)[name])
        assert takes_all(getattr(made, "__func__", made)), name
    assert takes_all(Steps.__call__)
