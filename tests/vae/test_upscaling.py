"""Upscale Image (using Model): each rank computes whole tiles, and the picture is ComfyUI's own."""

import math

import comfy.model_management as mm
import comfy.utils
import comfy_extras.nodes_upscale_model as host
import hypothesis
import pytest
import torch
from comfy.model_patcher import CoreModelPatcher
from comfy_api.latest import io
from hypothesis import strategies as st
from pipemesh.nodes.auto.decoding import TRIES, VAETimes
from pipemesh.nodes.auto.mode import Auto
from pipemesh.nodes.auto.seam import OF_UPSCALERS, UPSCALER, HostChanged, UpscalerSeam
from pipemesh.nodes.auto.switch import Switch
from pipemesh.parallel_runtime.client.remote_upscaler import RemoteUpscaler, UpscalerInPool, largest_share
from pipemesh.parallel_runtime.errors import Refused
from spandrel import ImageModelDescriptor, ModelLoader
from spandrel.architectures.Compact import Compact, CompactArch

import nodes

from ..kit.shared_runtime import settings, switched
from ..kit.vaes import noise, random

NODE = host.ImageUpscaleWithModel
__all__ = ["settings", "switched"]  # fixtures


def upscaler(features=8, layers=2):
    """As ComfyUI's loader makes it, with random weights."""
    made = Compact(num_in_ch=3, num_out_ch=3, num_feat=features, num_conv=layers, upscale=2)
    made = ModelLoader().load_from_state_dict(random(made).state_dict()).eval()
    made.patcher = CoreModelPatcher(
        made.model, load_device=mm.get_torch_device(), offload_device=mm.unet_offload_device()
    )
    return made


def picture(*shape):
    return noise(*shape, 3).sigmoid()


def by_stock(model, image):
    return NODE.execute(model, image).args[0]


def upscaled(model, client, image):
    return standing_for(model, client).through(lambda one: by_stock(one, image))


def standing_for(model, client):
    return UpscalerInPool(lambda: model, lambda: client, holds_ui_device=False)


@pytest.fixture(autouse=True)
def without_gradients():
    with torch.inference_mode():
        yield


@pytest.mark.host
@pytest.mark.parametrize("shape", [(1, 530, 1000), (2, 40, 560), (1, 32, 48)])
def test_an_upscaled_picture_is_stocks_to_the_bit(shape, client, requests):
    model, image = upscaler(), picture(*shape)
    truth = by_stock(model, image)
    assert not requests["Forward"]
    assert torch.equal(upscaled(model, client, image), truth) and requests["Forward"]


def test_a_tile_without_room_has_the_node_take_smaller_ones_as_without_a_pool(client, monkeypatch):
    model, image, refused, compute = upscaler(), picture(1, 530, 560), [], RemoteUpscaler.compute_whole

    def has_room(tiles, most):
        if max(tile.shape[-1] for tile in tiles) > most:
            refused.append(most)
            raise torch.OutOfMemoryError("Rank 1 on cpu ran out of memory while computing")

    def confined(remote, work, tiles):
        has_room(tiles, 128)
        return compute(remote, work, tiles)

    call = ImageModelDescriptor.__call__
    monkeypatch.setattr(ImageModelDescriptor, "__call__", lambda one, a: has_room([a], 128) or call(one, a))
    truth = by_stock(model, image)
    assert refused == [128, 128], "as 512 and 256 pixels"
    monkeypatch.setattr(ImageModelDescriptor, "__call__", call)
    monkeypatch.setattr(RemoteUpscaler, "compute_whole", confined)
    assert torch.equal(upscaled(model, client, image), truth) and refused == [128] * 4
    monkeypatch.setattr(RemoteUpscaler, "compute_whole", lambda remote, work, tiles: has_room(tiles, 0))
    with pytest.raises(torch.OutOfMemoryError, match=r"^Rank 1 on cpu ran out of memory"):
        upscaled(model, client, image)


def test_what_ranks_make_of_the_weights_is_compared_with_comfyuis_first(client):
    model, image = upscaler(), picture(1, 40, 48)
    model.model.body[0].padding_mode = "circular"  # which spandrel does not read from the weights
    with pytest.raises(Refused, match=r"^SRVGGNetCompact in the pool is [\d.]+% off from what one device"):
        upscaled(model, client, image)


def test_a_weight_that_is_written_to_after_the_load_ends_the_work_and_is_the_ranks_own_then(client, requests):
    model, image = upscaler(), picture(1, 32, 48)
    made, before = standing_for(model, client), by_stock(model, image)

    def ours():
        return made.through(lambda one: by_stock(one, image))

    for _ in range(2):
        assert torch.equal(ours(), before)
    assert requests["Load"] == 1
    model.model.body[0].weight.data[4, 1, 1, 1] += 1
    with pytest.raises(Refused, match=r"to the weight body\.0\.weight of SRVGGNetCompact .*: run again"):
        ours()
    truth = by_stock(model, image)
    assert torch.equal(ours(), truth) and not torch.equal(truth, before)


def test_weights_that_spandrel_does_not_know_again_are_refused(client):
    model = upscaler()
    foreign = torch.nn.Sequential(torch.nn.Conv2d(3, 3, 3, padding=1))
    made = ImageModelDescriptor(foreign, foreign.state_dict(), CompactArch(), "SR", [], True, True, 1, 3, 3)
    made.patcher = CoreModelPatcher(foreign, model.patcher.load_device, model.patcher.offload_device)
    with pytest.raises(Refused, match="spandrel does not recognise the weights of this Sequential"):
        upscaled(made, client, picture(1, 40, 48))


# -- auto mode


@pytest.fixture(autouse=True)
def node_is_there(monkeypatch):
    monkeypatch.setitem(nodes.NODE_CLASS_MAPPINGS, UPSCALER, NODE)
    monkeypatch.setattr(VAETimes, "is_slower", lambda *_: False)


def test_the_third_picture_of_a_kind_is_upscaled_in_the_pool_and_noted_and_is_the_same(switched, requests):
    model, image = upscaler(), picture(1, 40, 560)
    truth, _ = (by_stock(model, image) for _ in range(TRIES))
    assert not requests["Forward"]
    assert torch.equal(by_stock(model, image), truth) and requests["Forward"]
    noted = [(one.work, one.in_pool) for one in switched.times.prompts._vae[""]]
    assert noted == [*[("upscale", False)] * TRIES, ("upscale", True)]
    made = requests["Forward"]
    assert torch.equal(NODE().upscale(model, image).args[0], truth) and requests["Forward"] > made
    switched(False)
    made = requests["Forward"]
    assert torch.equal(by_stock(model, image), truth) and requests["Forward"] == made
    assert not switched.said()


def test_a_picture_of_one_tile_and_a_model_of_a_size_not_timed_are_left_to_comfyui(switched, requests):
    model = upscaler()
    for _ in range(TRIES + 2):
        by_stock(model, picture(1, 40, 512))
    by_stock(upscaler(features=12), picture(2, 40, 512))
    assert not requests["Forward"]
    by_stock(model, picture(2, 40, 512))
    assert requests["Forward"], "two of them are shared out"


class LaterNode(NODE):
    """As of a ComfyUI to come: it moves the model, asks for more of it, and has an input more."""

    @classmethod
    def execute(cls, upscale_model, image, tile=512, *, train=False):
        steps = (mm.load_models_gpu, comfy.utils.tiled_scale, mm.raise_non_oom)
        device, made = upscale_model.patcher.load_device, []
        model = upscale_model.train(False) if train else upscale_model.to(device).eval()
        assert model.input_channels == 3 and model.dtype == torch.float32
        for part in (image, 1 - image):
            x = part.movedim(-1, -3).to(device)
            scale = upscale_model.scale
            made.append(comfy.utils.tiled_scale(x, lambda a: model(a), tile, tile, 32, upscale_amount=scale))
        return io.NodeOutput(torch.cat(made), steps)

    upscale = execute


@pytest.fixture
def later_node(monkeypatch, switched):
    """Auto mode that finds this node in ComfyUI."""
    monkeypatch.setitem(nodes.NODE_CLASS_MAPPINGS, UPSCALER, LaterNode)
    own = [vars(LaterNode)[name] for name in OF_UPSCALERS]
    auto = Auto(lambda: switched.runtime, Switch({}, lambda: switched.file), switched.notices, switched.times)
    auto.install()
    yield
    auto.remove()
    assert [vars(LaterNode)[name] for name in OF_UPSCALERS] == own


def test_a_later_node_that_asks_for_more_is_served_and_given_what_it_was_given(
    later_node, switched, requests
):
    model, image = upscaler(), picture(1, 40, 560)
    truth, *_ = (LaterNode.execute(upscale_model=model, image=image, tile=256).args[0] for _ in range(TRIES))
    assert not requests["Forward"]
    assert torch.equal(LaterNode().upscale(model, image, 256).args[0], truth) and requests["Forward"]
    assert not switched.said()
    LaterNode.execute(model, image=image, train=True)
    (said,) = switched.said()
    assert "Upscale Image (using Model) of this ComfyUI asks an upscale model for train, which" in said
    with pytest.raises(TypeError, match="upscale_model"):
        LaterNode.execute(image=image)


@hypothesis.settings(max_examples=20)
@hypothesis.given(st.integers(1, 3), st.integers(1, 1600), st.integers(1, 1600), st.integers(2, 8))
def test_a_ranks_share_is_of_the_tiles_that_the_node_asks_for(batch, height, width, ranks):
    asked = []

    class Counting:
        patcher, scale = upscaler().patcher, 0

        def __call__(self, tile):
            asked.append(tile)
            return tile.new_zeros(1, 1, 1, 1)

    by_stock(Counting(), torch.zeros(batch, height, width, 3))
    share = largest_share(torch.empty(batch, height, width, 3, device="meta"), ranks)
    assert share == math.ceil(len(asked) / ranks) / len(asked)


def test_what_the_pool_refuses_is_upscaled_by_stock_with_one_notice(switched, requests):
    model, image = upscaler(), picture(1, 40, 560)
    model.model.forward = model.model.forward
    truth, *others = (by_stock(model, image) for _ in range(5))
    assert all(torch.equal(one, truth) for one in others) and not requests["Forward"]
    assert switched.said() == [
        "This upscale model is computed by ComfyUI on one device: a node has put code of its own into it."
    ]


def test_the_node_is_comfyuis_again_when_auto_mode_goes_and_another_is_left_alone(monkeypatch):
    own = {name: vars(NODE)[name] for name in OF_UPSCALERS}
    seam = UpscalerSeam(lambda model, work, image, call: call(model))
    seam.install()
    assert all(vars(NODE)[name] is not own[name] for name in OF_UPSCALERS)
    seam.remove()
    assert {name: vars(NODE)[name] for name in OF_UPSCALERS} == own
    monkeypatch.setattr(NODE, "execute", classmethod(lambda cls, upscale_model, image: None))
    with pytest.raises(HostChanged, match=r"has another ImageUpscaleWithModel\.execute: update PipeMesh"):
        seam.install()
