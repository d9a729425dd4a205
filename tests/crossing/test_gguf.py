"""MODELs of ComfyUI-GGUF: their weights stay as they are stored, in the ranks too, and are
dequantised by the pack's own operations.
"""

import importlib.util
import shutil
import sys
from pathlib import Path

import comfy.model_patcher
import comfy.sd
import comfy.utils
import pytest
import torch
from pipemesh.lab.commands.parity import BOUND, relative_error, rms
from pipemesh.parallel_runtime.crossing.source import build_from_state, describe_source, state_source
from pipemesh.parallel_runtime.errors import Refused
from pipemesh.parallel_runtime.families import plan_for
from pipemesh.parallel_runtime.layout import Layout
from pipemesh.parallel_runtime.planner.keeping import WeightsWish, model_bytes
from pipemesh.parallel_runtime.wire.messages import Memory

from ..fixtures import ROOT
from ..kit.models import load, run, with_lora
from ..weights.test_quantised import LAYOUTS, in_pool


@pytest.fixture(scope="module")
def gguf_pack(tmp_path_factory):
    """The pack's operations, imported from a folder as ComfyUI imports packs."""
    folder = tmp_path_factory.mktemp("custom_nodes") / "ComfyUI-GGUF"
    shutil.copytree(ROOT / "tests/kit/gguf_double", folder, ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "__init__.py").write_text("from . import ops\n")
    spec = importlib.util.spec_from_file_location(
        "gguf_double_pack", folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    yield module
    for name in [name for name in sys.modules if name.startswith(spec.name)]:
        del sys.modules[name]


@pytest.fixture
def gguf(gguf_pack, files):
    """Make MODELs as the pack's loader does: large layers in Q8_0, others plain, in its own
    class.
    """
    from gguf_double_pack.dequant import quantize

    class GGUFModelPatcher(comfy.model_patcher.ModelPatcher):
        patch_on_device = False

        def patch_weight_to_device(self, key, device_to=None, inplace_update=False, **options):
            weight = comfy.utils.get_attr(self.model, key)
            if getattr(weight, "tensor_type", None) in gguf_pack.ops.PLAIN:
                return super().patch_weight_to_device(key, device_to, inplace_update, **options)
            if key in self.patches:
                weight.patches = [(self.patches[key], key)]
            return None

        def unpatch_model(self, device_to=None, unpatch_weights=True):
            for weight in self.model.parameters() if unpatch_weights else ():
                if getattr(weight, "patches", []):
                    weight.patches = []
            return super().unpatch_model(device_to, unpatch_weights)

    def made():
        state = {}
        for name, weight in comfy.utils.load_torch_file(files["model"]).items():
            large = weight.dim() == 2 and min(weight.shape) >= 128
            kind = (
                gguf_pack.ops.GGMLQuantizationType.Q8_0 if large else gguf_pack.ops.GGMLQuantizationType.F32
            )
            content = quantize(weight) if large else weight
            state[name] = gguf_pack.ops.GGMLTensor(content, tensor_type=kind, tensor_shape=weight.shape)
        with torch.inference_mode():
            model = comfy.sd.load_diffusion_model_state_dict(
                state, {"custom_operations": gguf_pack.ops.GGMLOps()}
            )
        model.__class__ = GGUFModelPatcher
        return model

    return made


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_ranks_compute_what_stock_does_with_and_without_a_lora(gguf, files, clients, layout):
    exact, stock = load(files["model"]), gguf()
    truths = [run(stock), run(with_lora(stock, files, 1.0))]
    assert rms(truths[0] - run(exact)) > 1e-3 * rms(truths[0]), "nothing is quantised"
    assert relative_error(truths[1], truths[0]) > 0.05, "the LoRA does nothing"
    parallel = in_pool(gguf(), clients, layout)
    for lora, model in enumerate((parallel, with_lora(parallel, files, 1.0), parallel)):
        assert relative_error(run(model), truths[lora % 2]) <= BOUND


@pytest.mark.parametrize("asked", ["auto", "sharded"])
@pytest.mark.parametrize("layout", [Layout(ulysses=2), Layout(ulysses=2, pipefusion=2)], ids=Layout.equation)
def test_ranks_on_gpus_get_such_a_file_whole_as_none_of_its_layers_can_be_shared(gguf, asked, layout):
    model = gguf().model.diffusion_model
    size = model_bytes(model, plan_for(type(model)))
    names = [f"cuda:{rank}" for rank in range(layout.world_size)]
    keeping, _ = WeightsWish(asked, size).cut_for(
        names, layout, [Memory(1 << 40, 1 << 40, 0)] * len(names), (), ()
    )
    assert keeping.kept == ("whole" if asked == "auto" else "sharded")
    assert size.shareable.layers and 0 < keeping.nbytes <= size.weight_bytes


def test_weights_cross_as_they_are_stored(gguf):
    model = gguf()
    name = "double_blocks.0.img_attn.qkv.weight"
    sent = state_source(model)["ggml"][name]
    assert sent["content"].dtype == torch.uint8 and sent["shape"] == (768, 256)
    assert sent["content"].nbytes == 768 * 256 // 32 * 34


@pytest.mark.cover(4)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_byte_of_a_weight_that_a_node_wrote_reaches_the_ranks(gguf, files, clients, layout):
    stock, model = gguf(), gguf()
    parallel, before = in_pool(model, clients, layout), run(stock)
    for _ in range(2):
        assert relative_error(run(parallel), before) <= BOUND
    for one in (stock, model):
        weight = one.model.diffusion_model.double_blocks[0].img_attn.qkv.weight
        weight.as_subclass(torch.Tensor).numpy().reshape(768, -1)[211, 35] ^= 0x70
    truth = run(stock)
    assert relative_error(truth, before) > 10 * BOUND, "the write does nothing"
    with pytest.raises(Refused, match=r"the weight double_blocks.0.img_attn.qkv.weight of .*: run again"):
        run(parallel)
    assert relative_error(run(parallel), truth) <= BOUND
    assert relative_error(run(with_lora(parallel, files, 1.0)), run(with_lora(stock, files, 1.0))) <= BOUND


def test_settings_of_the_packs_node_reach_the_ranks(gguf, gguf_pack, clients, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(gguf_pack.ops.GGMLOps.Linear, "dequant_dtype", torch.bfloat16)
        stock, ours = run(gguf()), run(in_pool(gguf(), clients, "ulysses"))
    assert relative_error(ours, stock) <= BOUND
    assert relative_error(run(gguf()), stock) > 10 * BOUND, "the setting does nothing"


def test_another_version_of_the_pack_in_the_ranks_is_refused_by_name(gguf, gguf_pack):
    file = Path(gguf_pack.__file__).parent / "dequant.py"
    sent, content = state_source(gguf()), file.read_text()
    file.write_text(content + "# another version\n")
    with pytest.raises(Refused, match="is another version than ComfyUI runs"):
        build_from_state(sent)
    file.write_text(content)
    sent["operations"]["folder"] += "-not-there"
    with pytest.raises(Refused, match=r"has no node pack at .*-not-there"):
        build_from_state(sent)


def test_operations_of_no_known_pack_are_refused_by_name(files):
    strange = type("Strange", (comfy.ops.manual_cast,), {})
    state = comfy.utils.load_torch_file(files["model"])
    model = comfy.sd.load_diffusion_model_state_dict(state, {"custom_operations": strange})
    with pytest.raises(Refused, match=r"operations of its own \(.*Strange\)"):
        describe_source(model)
