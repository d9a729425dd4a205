"""A rank's weights on another device than the CPU: how they get there, what stays beside them, and
what comes back.
"""

import gc
import weakref

import comfy.sd
import pytest
import torch
from pipemesh.lab.quantised_files import FORMATS, write_quantised
from pipemesh.parallel_runtime.weights.device_weights import DeviceWeights
from pipemesh.parallel_runtime.weights.quantisation import stored_bytes, stored_tensors, taken_apart
from safetensors.torch import load_file

from ..kit.fake_device import DEVICE, Device
from ..kit.models import write_model

META = torch.device("meta")
QKV = "double_blocks.0.img_attn.qkv.weight"


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("models") / "model.safetensors", blocks=(1, 1))


@pytest.fixture(scope="module")
def quantised(file):
    def written(form):
        return write_quantised(file.parent / f"{form}.safetensors", file, form)

    return written


@torch.inference_mode()
def transformer(path, form=""):
    """As a rank loads it: on the file's pages, a file without scales in the dtype that it has."""
    dtype = FORMATS[form].dtype if form and not FORMATS[form].algorithm else None
    state = comfy.sd.comfy.utils.load_torch_file(str(path))
    with pytest.MonkeyPatch.context() as patch:
        stock_load = comfy.model_base.BaseModel.load_model_weights
        patch.setattr(
            comfy.model_base.BaseModel,
            "load_model_weights",
            lambda model, sd, prefix="", assign=False: stock_load(model, sd, prefix, True),
        )
        return comfy.sd.load_diffusion_model_state_dict(state, {"dtype": dtype}).model.diffusion_model


def moved(model, device):
    with torch.inference_mode():
        return DeviceWeights(model, device, lambda nbytes: None)


@pytest.mark.parametrize("form", FORMATS)
def test_weights_of_every_format_move_to_another_device_type(quantised, form):
    path = quantised(form)
    model = transformer(path, form)
    weights = moved(model, META)
    assert {one.device for weight in model.parameters() for one in stored_tensors(weight)} == {META}
    said = (".comfy_quant", "scaled_fp8")  # about the others
    on_file = sum(tensor.nbytes for name, tensor in load_file(path).items() if not name.endswith(said))
    assert weights.nbytes == stored_bytes(model.parameters()) == on_file


@pytest.mark.parametrize("form", ["", "fp8_scaled", "nvfp4"])
def test_nothing_stays_on_the_device_beside_a_patched_weight(file, quantised, form):
    model = transformer(quantised(form) if form else file)
    weights, weight = moved(model, META), model.get_parameter(QKV)
    unpatched, before = [weakref.ref(tensor) for tensor in stored_tensors(weight)], weights.nbytes
    with torch.inference_mode():
        patched = weight.to("meta", copy=True)
        del weight
        weights.replace(f"diffusion_model.{QKV}", taken_apart(patched))
    gc.collect()
    assert not any(ref() is not None for ref in unpatched)
    assert weights.nbytes == before


@pytest.mark.parametrize("cast", [False, True], ids=["", "in another dtype than the file's"])
def test_a_weight_that_was_patched_on_the_device_is_the_files_again(file, cast):
    model = transformer(file)
    module = model.double_blocks[0].img_attn.qkv
    if cast:
        module.weight_comfy_model_dtype = torch.float16
    with torch.inference_mode(), Device():
        weights = DeviceWeights(model, DEVICE, lambda nbytes: None)
        assert module.weight.device == DEVICE
        weights.replace(f"diffusion_model.{QKV}", torch.ones(2, 2))
        assert module.weight.device == DEVICE and module.weight.shape == (2, 2)
        weights.restore()
        expected = load_file(file)[QKV].to(torch.float16 if cast else torch.float32)
        assert module.weight.device == DEVICE and module.weight.dtype == expected.dtype
        assert torch.equal(module.weight.to("cpu"), expected)


def test_a_parameter_that_two_modules_share_stays_one():
    model = torch.nn.ModuleDict({"a": torch.nn.Linear(3, 3), "b": torch.nn.Linear(3, 3)})
    model.b.weight = model.a.weight
    moved(model, META)
    assert model.a.weight is model.b.weight and model.a.weight.device == META


@pytest.mark.parametrize("device", [META, torch.device("cpu")], ids=str)
def test_a_parameter_that_is_registered_as_a_buffer_stays_one(device):
    """As the text embedding of PixArt's."""
    model = torch.nn.Linear(2, 2)
    model.register_buffer("embedding", torch.nn.Parameter(torch.ones(3), requires_grad=False))
    moved(model, device)
    assert set(model._buffers) == {"embedding"} and model.embedding.device == device


def test_a_stage_has_the_weights_of_its_own_blocks_alone():
    weights = moved(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Identity()), torch.device("cpu"))
    names = "0.weight", "1.weight", "2.weight", "0.in_features"
    assert [weights.has(f"diffusion_model.{name}") for name in names] == [True, False, False, False]
