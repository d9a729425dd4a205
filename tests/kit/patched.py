"""Stock MODELs sampled in patches in one process, and stock nodes as a server loads them."""

import asyncio
import gc
from functools import cache, partial
from pathlib import Path

import comfy.controlnet
import comfy.ldm.modules.attention as attention
import comfy.ops
import comfy.samplers
import pytest
import torch
from comfy.ldm.flux.controlnet import ControlNetFlux
from comfy.model_patcher import ModelPatcher
from comfy.patcher_extension import WrappersMP
from pipemesh.lab.commands.parity import conditioning
from pipemesh.lab.in_process import reference
from pipemesh.parallel_runtime.client.coroutines import Coroutine
from pipemesh.parallel_runtime.crossing.named_code import OVERRIDE
from pipemesh.parallel_runtime.families.flux import FILE, guided_config
from pipemesh.parallel_runtime.families.sample import Form, Size

FREE = "free-running"
ALL_WARM = 9999
SIZE = (13, 10)  # 7 lines of 5 tokens, the last one padded by the host
SAMPLERS = [name for name in comfy.samplers.SAMPLER_NAMES if name != "ar_video"]
SMALL = Size(heads=2, head_dim=16, blocks=(1, 1))
GUIDED = Form(config_class="Flux", config=guided_config, file=FILE)  # its guidance is a conditioning too
# Image and mask beside the latent
FILL = Form(config_class="Flux", config=lambda size: {**guided_config(size), "in_channels": 96})
TILED = {"size": (12, 20), "steps": 8, "cfg": 1.0}
TILES = (0, 10)  # their left edges, and as wide


class Patched:
    """A stock MODEL sampled in patches, and the modes of its runs."""

    def __init__(self, patcher, patches=3, warm_up=ALL_WARM):
        self.modes = []
        self.model = reference(patcher, patches, warm_up, self.modes.append)

    @property
    def mode(self):
        (mode,) = self.modes
        self.modes.clear()
        return mode


def built(fill=False):
    return (FILL if fill else GUIDED).random_model(SMALL)


stock = cache(built)


@cache
def patched(patches=3, warm_up=ALL_WARM, fill=False):
    return Patched(built(fill), patches, warm_up)


@pytest.fixture
def one_cond_at_a_time(monkeypatch):
    """Let ComfyUI believe that memory is short: then it evaluates conds one by one, with the same
    arithmetic as conds in flight, to the last bit.
    """
    monkeypatch.setattr(ModelPatcher, "get_free_memory", lambda self, device: 0)


@pytest.fixture(scope="module", autouse=True)
def models_let_go():
    yield
    stock.cache_clear()
    patched.cache_clear()


def latent(seed=1, size=SIZE, channels=16):
    return torch.randn(1, channels, *size, generator=torch.Generator().manual_seed(seed))


def pass_through(executor, *args, **kwargs):
    return executor(*args, **kwargs)


def cloned(model, change, *given):
    """A clone of a MODEL, on which this method of it was called."""
    clone = model.clone()
    getattr(clone, change)(*given)
    return clone


def with_object(model, name, value):
    return cloned(model, "add_object_patch", name, value)


def with_option(model, **options):
    clone = model.clone()
    clone.model_options["transformer_options"].update(options)
    return clone


def with_override(model, override):
    return with_option(model, **{OVERRIDE: override})


def halved(q, k, v, heads, mask=None, **kwargs):
    return attention.attention_basic(q, k, v, heads, mask, **kwargs) / 2


def control_net(config, seed):
    """ComfyUI's own class around its own architecture, with random weights."""
    net = ControlNetFlux(operations=comfy.ops.disable_weight_init, **config)
    random = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=random) * 0.05)
    return comfy.controlnet.ControlNet(net, load_device=torch.device("cpu"), extra_conds=["y", "guidance"])


def as_comfyui_chooses(optimized_attention):
    """As ModelPatcher.set_model_optimized_attention of later ComfyUIs."""

    def optimized_attention_override(_, *args, **kwargs):
        return optimized_attention(*args, **kwargs)

    return optimized_attention_override


def together(model):
    """Add a foreign wrapper that does nothing, so that patches may not run ahead of each other."""
    return cloned(model, "add_wrapper", WrappersMP.PREDICT_NOISE, pass_through)


@cache
def node(module, name):
    """Load a stock node as ComfyUI's server does it: from a module under its path."""
    import nodes

    if not module:
        return nodes.NODE_CLASS_MAPPINGS[name]
    nodes.NODE_CLASS_MAPPINGS.pop(name, None)
    assert asyncio.run(
        nodes.load_custom_node(
            str(Path(nodes.__file__).parent / "comfy_extras" / f"{module}.py"), module_parent="comfy_extras"
        )
    )
    return nodes.NODE_CLASS_MAPPINGS[name]


def execute(module, name, *args, **kwargs):
    kind = node(module, name)
    made = (
        kind.execute(*args, **kwargs).result
        if hasattr(kind, "execute")
        else getattr(kind(), kind.FUNCTION)(*args, **kwargs)
    )
    return made[0] if len(made) == 1 else made


def in_windows(model, **options):
    given = {"context_schedule": "standard_static", "context_stride": 1, "closed_loop": False}
    given |= {"fuse_method": "pyramid", "dim": 2, "freenoise": False}
    return execute("nodes_context_windows", "ContextWindowsManual", model, **given | options)


custom = partial(execute, "nodes_custom_sampler")


def advanced(model, guider=None, sampler=None, image=None, steps=4, seed=3):
    """Run SamplerCustomAdvanced -> (output, denoised output)."""
    guider = guider or custom("CFGGuider", model, conditioning(1, 13), conditioning(2, 7), 3.0)
    sampler = sampler or custom("KSamplerSelect", "euler")
    sigmas = comfy.samplers.calculate_sigmas(model.get_model_object("model_sampling"), "simple", steps)
    noise = custom("RandomNoise", seed)
    image = image or {"samples": torch.zeros(1, 16, *SIZE)}
    with torch.inference_mode():
        return custom("SamplerCustomAdvanced", noise, guider, sampler, sigmas, image)


def suspended_coroutines():
    return [thing for thing in gc.get_objects() if isinstance(thing, Coroutine) and thing]


def wrapped(model, wrapper):
    return cloned(model, "set_model_unet_function_wrapper", wrapper)


def of_tile(conditioning, own):
    """The arguments of a call; ``own``: under an id of its own, so that nothing is mixed up."""
    options = conditioning["transformer_options"]
    ids = [f"{one} {own}" for one in options["uuids"]] if own else options["uuids"]
    return {**conditioning, "transformer_options": {**options, "uuids": ids}}


def tiling(model, marked=False, order=lambda step: TILES):
    """As nodes do that sample an image larger than the model knows. ``marked``: each tile's id is
    its own; ``order``: the left edges in each step, which go around the image.
    """
    steps = []

    def wrapper(apply_model, call):
        steps.append(call)
        out = torch.zeros_like(call["input"])
        for left in order(len(steps)):
            columns = [(left + column) % TILED["size"][1] for column in range(10)]
            arguments = of_tile(call["c"], f"tile at {left}" if marked else "")
            out[..., columns] = apply_model(call["input"][..., columns], call["timestep"], **arguments)
        return out

    return wrapped(model, wrapper)
