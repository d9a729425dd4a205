"""Patches of nodes inside blocks, rebuilt in the ranks from their own copies of the code: as in
stock, with an effect, or refused by name.
"""

import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from types import SimpleNamespace

import comfy.ldm.anima.lllite as lllite
import comfy.ldm.wan.model_multitalk as multitalk
import comfy.ops
import pytest
import torch
from comfy.ldm.lumina.controlnet import ZImage_Control
from comfy.ldm.wan.uni3c import WanUni3CControlnet
from comfy.model_patcher import ModelPatcher
from pipemesh.lab.commands.parity import BOUND, Case, relative_error, sample, stock_model
from pipemesh.lab.reference import PatchForward
from pipemesh.parallel_runtime.client.remote_patcher import Patching, parallelize
from pipemesh.parallel_runtime.crossing.block_code import encode_images
from pipemesh.parallel_runtime.crossing.patch_objects import Assembly, Disassembly
from pipemesh.parallel_runtime.errors import Refused
from pipemesh.parallel_runtime.families import plan_for
from pipemesh.parallel_runtime.families.catalogue import FAMILIES, PLAIN, SAMPLES
from pipemesh.parallel_runtime.families.sample import random_tensor
from pipemesh.parallel_runtime.layout import Layout
from pipemesh.parallel_runtime.patches import TokenGrid, assembled
from pipemesh.parallel_runtime.refusals import patch_name
from pipemesh.parallel_runtime.wire.tree import decode_plain, encode_tree

from ..fixtures import ALL
from ..kit.in_ranks import CPU, Crossed, evaluated_in_ranks
from ..kit.models import asked_of
from ..kit.patched import execute, node

NODES = "comfy_extras.nodes_model_patch"
OPERATIONS = comfy.ops.manual_cast
MODEL_PATCHES = "nodes_model_patch"
ANY_NODE = {MODEL_PATCHES: "ModelPatchLoader"}


class Vae:
    """Encodes pixels as means over squares of eight."""

    def __init__(self, video=False):
        self.video = video

    def spacial_compression_encode(self):
        return 8

    def temporal_compression_decode(self):
        return 4

    def encode(self, pixels):
        small = torch.nn.functional.avg_pool2d(pixels.movedim(-1, 1), 8)
        latent = torch.stack([small.mean(1) * (channel + 1) for channel in range(16)], 1)
        return latent[::4].movedim(0, 1)[None] if self.video else latent


class ImageVae(Vae):
    """Of images whose latents have a time."""

    def encode(self, pixels):
        return super().encode(pixels)[:, :, None]


@cache
def nodes_of(module):
    """ComfyUI's module of extra nodes, as its server loads it."""
    return sys.modules[node(module, ANY_NODE[module]).__module__]


def model_patch(module):
    """A model that a patch brings along, with random weights."""
    for name, parameter in module.named_parameters():
        parameter.data = random_tensor(name, tuple(parameter.shape), 5, torch.float32)
    return ModelPatcher(module, load_device=CPU, offload_device=CPU)


def pixels(shape, frames=1):
    return torch.rand(frames, 8 * shape[-2], 8 * shape[-1], 3, generator=torch.Generator().manual_seed(8))


def sample_for(code, **config):
    """The first sample that a patch is known for, of such a config."""
    for family in FAMILIES:
        for sample_ in family.samples if any(plan.block_patch(code) for plan in family.plans) else ():
            if config.items() <= sample_.form.config(sample_.tiny.size(sample_.heads[-1])).items():
                return sample_
    raise LookupError(code)


def diffsynth(model, shape, strength=0.7):
    nodes, transformer = nodes_of(MODEL_PATCHES), model.model.diffusion_model
    net = nodes.QwenImageBlockWiseControlNet(
        len(transformer.transformer_blocks), dim=transformer.inner_dim, operations=OPERATIONS
    )
    apply = nodes.QwenImageDiffsynthControlnet().diffsynth_controlnet
    return apply(model, model_patch(net), ImageVae(), pixels((10, 12)), strength)[0]


def control(model, shape, layers=15):
    size = model.model.diffusion_model
    net = ZImage_Control(
        dim=size.dim, n_heads=size.n_heads, n_kv_heads=size.n_heads, multiple_of=16, n_control_layers=layers, additional_in_dim=17,
        refiner_control=True, operations=OPERATIONS,
    )  # fmt: skip
    apply = nodes_of(MODEL_PATCHES).ZImageFunControlnet().diffsynth_controlnet
    del net.control_layers[3:]  # as many as the sample's blocks come to
    return apply(model, model_patch(net), Vae(), image=pixels(shape), strength=0.7)[0]


def control_of_few_layers(model, shape):
    """In a model of so few blocks, ComfyUI goes on from one evaluation to the next."""
    return control(model, shape, layers=3)


def uni3c(model, shape):
    dim = model.model.diffusion_model.dim
    net = WanUni3CControlnet(
        in_channels=36, conv_out_dim=dim, dim=48, ffn_dim=64, num_heads=2, num_layers=3, time_embed_dim=dim, out_proj_dim=dim,
        add_channels=7, mid_channels=16, operations=OPERATIONS,
    )  # fmt: skip
    video = pixels(shape, 4 * (shape[2] - 1) + 1)
    return (
        nodes_of(MODEL_PATCHES)
        .WanUni3CControlnetApply()
        .apply_patch(model, model_patch(net), Vae(True), video, 0.7, 0.0, 1.0)[0]
    )


def anima_lllite(model, shape):
    dim = model.model.diffusion_model.model_channels
    state = {
        "lllite_conditioning1.conv1.weight": torch.empty(4, 3, 4, 4),
        "lllite_conditioning1.conv3.weight": torch.empty(8, 4, 4, 4),
        "lllite_conditioning1.proj.weight": torch.empty(12, 8, 1, 1),
        "lllite_conditioning1.resblocks.0.conv1.weight": torch.empty(8, 8, 3, 3),
    }
    for target in ("self_attn_q_proj", "self_attn_v_proj", "cross_attn_q_proj", "mlp_layer1"):
        for block in (0, 2):
            state[f"lllite_dit_blocks_{block}_{target}.down.weight"] = torch.empty(6, dim)
            state[f"lllite_dit_blocks_{block}_{target}.cond_to_film.weight"] = torch.empty(12, 12)
    net = lllite.AnimaLLLite(state, {}, operations=OPERATIONS)
    return (
        nodes_of(MODEL_PATCHES)
        .AnimaLLLiteApply()
        .apply_patch(model, model_patch(net), pixels(shape), 2.0, 0.0, 1.0)[0]
    )


def infinite_talk(model, shape, speakers=1):
    """As the node WanInfiniteTalkToVideo attaches it, which wants an audio encoder's output."""
    dim, (frames, height, width) = model.model.diffusion_model.dim, shape[2:]
    net = torch.nn.Module()
    net.blocks = torch.nn.ModuleList(
        multitalk.WanMultiTalkAttentionBlock(dim, 24, operations=OPERATIONS) for _ in range(5)
    )
    generator = torch.Generator().manual_seed(6)
    made = model.clone()
    made.model_options["transformer_options"]["audio_embeds"] = torch.randn(
        1, frames, 4 * speakers, 24, generator=generator
    )
    made.set_model_patch(multitalk.MultiTalkCrossAttnPatch(model_patch(net), 2.0), "attn2_patch")
    if speakers > 1:
        tokens = -(-height // 2) * -(-width // 2)
        masks = torch.stack([torch.arange(tokens) < tokens // 2, torch.arange(tokens) >= tokens // 2])
        made.set_model_patch(multitalk.MultiTalkGetAttnMapPatch(masks), "attn1_patch")
    return made


def two_speakers(model, shape):
    return infinite_talk(model, shape, speakers=2)


def uso(model, shape):
    nodes, hidden = nodes_of(MODEL_PATCHES), model.model.diffusion_model.hidden_size
    net = nodes.SigLIPMultiFeatProjModel(5, 4, 24, hidden, operations=OPERATIONS)
    seen = torch.randn(1, 21, 5, 24, generator=torch.Generator().manual_seed(2))
    vision = SimpleNamespace(all_hidden_states=seen, penultimate_hidden_states=seen[:, 20])
    return nodes.USOStyleReference().apply_patch(model, model_patch(net), vision)[0]


def references_kept(model, shape):
    return execute("nodes_flux", "FluxKVCache", model)


@dataclass(frozen=True)
class Attached:
    """``own_rows``: whether it can be called on the rows of one patch of PipeFusion."""

    attach: Callable
    sample: object
    own_rows: bool

    def __str__(self):
        return self.attach.__name__


WAN = sample_for(f"{NODES}:WanUni3CCnetPatch")
ATTACHED = [
    Attached(diffsynth, sample_for(f"{NODES}:DiffSynthCnetPatch"), True),
    Attached(anima_lllite, sample_for("comfy.ldm.anima.lllite:AnimaLLLiteMLPPatch"), True),
    Attached(uso, SAMPLES[PLAIN], True),
    Attached(control, sample_for(f"{NODES}:ZImageControlPatch", z_image_modulation=True), False),
    Attached(uni3c, WAN, False),
    Attached(infinite_talk, WAN, False),
    Attached(two_speakers, WAN, False),
    Attached(
        control_of_few_layers, sample_for(f"{NODES}:ZImageControlPatch", z_image_modulation=True), False
    ),
    Attached(references_kept, next(one for one in FAMILIES[0].samples if one.prompt_extras), False),
]


class Patched:
    """A stock MODEL with a patch of a node, and what its sampler asks of it."""

    def __init__(self, attached, tokens="odd"):
        name, heads = attached.sample.name, attached.sample.heads[-1]
        self.stock = stock_model(heads, family=name)
        self.shape = attached.sample.latents[tokens]
        self.case = Case(name, "ulysses1", tokens, heads, 1.0, False, "euler")
        with torch.inference_mode():
            self.patcher = attached.attach(self.stock, self.shape)
            encode_images(
                self.stock.model.diffusion_model,
                self.patcher.model_options["transformer_options"],
                self.shape,
            )
        self.forward, self.asked = asked_of(self.patcher, self.case)

    @torch.inference_mode()
    def truths(self):
        self.patcher.model_patches_call_function()  # its clean-up after the run before
        self.patcher.model_patches_to(CPU)  # as before each run
        return [self.forward(**one) for one in self.asked]

    @torch.inference_mode()
    def without(self):
        bare = [
            {**one, "transformer_options": {**one["transformer_options"], "patches": {}}}
            for one in self.asked
        ]
        return [self.forward(**one) for one in bare]


@pytest.fixture(scope="module", params=ATTACHED, ids=str)
def patched(request):
    return request.param, Patched(request.param)


LAYOUTS = (Layout(ulysses=2), Layout(ring=3))
CASES = [
    (one, layout)
    for place, one in enumerate(ATTACHED)
    for layout in (LAYOUTS if ALL else LAYOUTS[place % 2 :][:1])
]


@pytest.mark.cover(2)
@pytest.mark.parametrize(("patched", "layout"), CASES, ids=str, indirect=["patched"])
def test_ranks_of_a_sequence_compute_it_as_stock_does(patched, layout, monkeypatch):
    _attached, model = patched
    truths = model.truths()
    assert max(map(relative_error, truths, model.without())) > 100 * BOUND, "the patch does nothing"
    ours = evaluated_in_ranks(layout, model.patcher, model.asked, monkeypatch)
    for one, truth in zip(ours, truths, strict=True):
        assert relative_error(one, truth) <= BOUND


@pytest.mark.cover(2)
@pytest.mark.parametrize("patched", [one for one in ATTACHED if one.own_rows], ids=str, indirect=True)
def test_a_patch_of_pipefusion_computes_it_as_stock_does(patched):
    _attached, model = patched
    plan = plan_for(type(model.stock.model.diffusion_model))
    truth, crossed = model.truths()[0], Crossed(model.patcher)
    method = PatchForward(model.stock.model.diffusion_model, plan)
    method.attach()
    with torch.inference_mode():
        arguments = crossed.arguments(model.asked[0])
        method.forward(model.forward, arguments, "cond", None)
        grid = TokenGrid.of(
            next(iter(arguments.values())).shape, plan.patch_size_of(model.stock.model.diffusion_model)
        )
        outputs = [
            method.forward(model.forward, crossed.arguments(model.asked[0]), "cond", patch)
            for patch in grid.cut(3)
        ]
    method.detach()
    assert relative_error(assembled(outputs, plan.leaves_behind_blocks), truth) <= BOUND


@pytest.mark.cover(2)
@pytest.mark.parametrize("degrees", [(2, 1, 1), (1, 1, 2)], ids=["ulysses", "pipefusion"])
def test_it_runs_in_a_pool(clients, degrees):
    attached, tokens = ATTACHED[0], "odd"
    model, modes = Patched(attached, tokens), []
    patching = Patching(3, 9999) if degrees[2] > 1 else None
    parallel = parallelize(model.stock, clients(*degrees), 0.0, patching, modes.append)
    truth = sample(model.patcher, model.case, steps=2)
    for strength, expected in ((0.7, truth), (0.3, None)):
        made = attached.attach(parallel, model.shape, strength)
        ours = sample(made, model.case, steps=2)
        expected = (
            sample(attached.attach(model.stock, model.shape, strength), model.case, steps=2)
            if expected is None
            else expected
        )
        assert relative_error(ours, expected) <= BOUND
    assert (
        relative_error(sample(parallel, model.case, steps=2), sample(model.stock, model.case, steps=2))
        <= BOUND
    ), "it stays"
    said = [mode.partition(" (")[0] for mode in modes]
    patched, alone = ("single-timeline, because of patches", "free-running") if patching else ("", "")
    assert [mode.startswith(patched) for mode in said[:2]] + [
        mode.startswith(alone) for mode in said[2:]
    ] == [True] * 3 * bool(patching)


def test_what_needs_all_tokens_keeps_the_evaluations_of_a_pipeline_whole(clients):
    model, modes = Patched(ATTACHED[3]), []
    parallel = parallelize(model.stock, clients(1, 1, 2), 0.0, Patching(3, 1), modes.append)
    ours = sample(ATTACHED[3].attach(parallel, model.shape), model.case, steps=2)
    assert relative_error(ours, sample(model.patcher, model.case, steps=2)) <= BOUND
    assert "all of them at once, because of the patch" in modes[0] and "ZImageControlPatch" in modes[0]


def test_tensors_lie_in_memory_as_they_did():
    """A convolution of an image that lies otherwise adds up in another order."""
    tensors = [
        torch.arange(120.0).reshape(2, 3, 4, 5).movedim(-1, 1),
        torch.arange(4.0).view(4, 1).expand(4, 3),
        torch.tensor(1.0),
    ]
    apart = Disassembly(torch.nn.Sequential())
    again = Assembly(torch.nn.Sequential(), apart.models, CPU).put(apart.take(tensors, "patch"))
    assert all(torch.equal(one, other) for one, other in zip(again, tensors, strict=True))
    assert again[0].stride() == tensors[0].stride() != again[0].contiguous().stride()


def test_a_gpu_that_a_patch_names_is_each_ranks_own_and_other_text_stays():
    own = torch.device("meta")
    held = {"device": torch.device("cuda", 0), "by name": ["cuda:0", "cuda", "img 0"]}
    apart = Disassembly(torch.nn.Sequential())
    taken = decode_plain(encode_tree(apart.take(held, "patch"), None))
    again = Assembly(torch.nn.Sequential(), apart.models, own).put(taken)
    assert again == {"device": own, "by name": ["meta", "cuda", "img 0"]}


@pytest.mark.cover(2)
@pytest.mark.parametrize(
    "hold, named",
    [
        (threading.Lock, r"_thread\.lock"),
        (lambda: relative_error, r"relative_error"),
        (lambda: weighted_patch(), "weight patches of its own"),
    ],
    ids=["lock", "code", "patched model"],
)
def test_what_cannot_cross_is_refused_by_name(hold, named):
    model = Patched(ATTACHED[0])
    (patch,) = model.patcher.model_options["transformer_options"]["patches"]["double_block"]
    patch.strength = hold()
    with pytest.raises(Refused, match=f"DiffSynthCnetPatch.*strength.*{named}.*remove the node"):
        Crossed(model.patcher)


def weighted_patch():
    made = model_patch(torch.nn.Linear(2, 2))
    made.patches = {"weight": [(1.0, torch.zeros(2, 2), 1.0, None, None)]}
    return made


def test_a_message_names_the_code_of_a_pack_by_its_folder_and_not_by_the_path_before_it():
    """On a node two lines are seen, which a path would fill."""
    code = type("Patch", (), {"__module__": "/home/someone/ComfyUI/custom_nodes/a pack.nodes.inner"})
    assert patch_name(code) == patch_name(code()) == "a pack.nodes.inner.Patch"
    assert patch_name(patch_name) == "pipemesh.parallel_runtime.refusals.patch_name"
