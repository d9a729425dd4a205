"""The host trial itself, in a process of its own: the tiny models of a class, sampled by this
ComfyUI alone and by two ranks on the CPU. Ranks are a sequence with whole, sharded and int8 weights
(which ComfyUI's helpers read past a layer's own forward), and a pipeline. No process that serves
imports this.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch

from ...parallel_runtime.errors import OutOfMemory, PoolFailed, SharedMemoryFull
from ...parallel_runtime.families import samples_for
from ...parallel_runtime.layout import Layout
from ...parallel_runtime.refusals import require_plan
from ...parallel_runtime.wire.channel import Channel, ChannelClosed
from ...parallel_runtime.wire.messages import CountLike, TrialStep, Tried, Try
from ...parallel_runtime.wire.tree import decode_plain
from ..devices import place
from ..handle import PoolKeeper
from ..rank_setup import RankSetup
from .rounding import BOUND, bound, relative_error, rms
from .tiny_samples import sampled

if TYPE_CHECKING:
    from comfy.model_patcher import ModelPatcher

    from ...parallel_runtime.client.patch_sampling import Patching
    from ...parallel_runtime.client.remote_pool import RemotePool
    from ...parallel_runtime.families.sample import Form, Sample, Size

INT8_BOUND = 1.5  # our distance from the fp32 truth over stock's
STEPS = 2
SEQUENCE, PIPELINE = Layout(ulysses=2), Layout(pipefusion=2)
WIDE_HEADS = 8  # of models whose layers are wide enough to be quantised
INT8 = "int8_tensorwise"
GROUP = 64  # columns that one rotation or one scale covers: divides every layer that is quantised here
NARROWEST = 128


@dataclass(frozen=True)
class Compared:
    """The ``error`` of one comparison, and how much of it is ``allowed`` as rounding. ``what``
    names the sample, and how weights were kept.
    """

    what: str
    error: float
    allowed: float
    unit: str = " of the image's scale"

    @property
    def is_same(self) -> bool:
        return self.error <= self.allowed  # False for NaN

    def __str__(self) -> str:
        return f"{self.what}: off by {self.error:.2g}{self.unit}, up to {self.allowed:.2g} is rounding"


def run_trial(channel: Channel) -> None:
    """Answer the requests of ComfyUI's process until it closes the channel."""
    torch.set_num_threads(1)
    try:
        like, _ = channel.receive()
        assert isinstance(like, CountLike)
        from ...parallel_runtime.worker.preparation import make_comfyui_importable

        args = decode_plain(like.comfy_args)
        make_comfyui_importable(like.comfyui, args)
        asked, _ = channel.receive()
        assert isinstance(asked, Try)
        keeper = PoolKeeper(RankSetup(comfyui=like.comfyui, comfy_args=args))
        try:
            channel.send(tried(asked.kind, keeper, channel.send))
        finally:
            keeper.close()
    except ChannelClosed:
        return


def tried(kind: str, keeper: PoolKeeper, tell: Callable[[TrialStep], None] = lambda step: None) -> Tried:
    """Compare every tiny model of a class, ``module:Class``. A failure is a difference too, because
    another ComfyUI's code may fail in any way. Raises errors that come from this machine: they are
    no verdict on the class.
    """
    compared: list[Compared] = []
    try:
        samples = samples_of(kind)
        turns = [(*way, sample) for way in WAYS for sample in samples]
        for number, (name, layout, compare, sample) in enumerate(turns):
            tell(TrialStep(text=f"{sample.name} {name}", done=number, total=len(turns)))
            for one in compare(sample, pool_with(keeper, layout)):
                compared.append(one)
                if not one.is_same:
                    return Tried(is_same=False, says=str(one))
    except (PoolFailed, SharedMemoryFull, OutOfMemory, OSError, MemoryError):
        raise
    except Exception as error:  # noqa: BLE001 - whatever it is, this class cannot be sampled so
        where = f" after {compared[-1].what}" if compared else ""
        says = str(error).strip().partition("\n")[0] or type(error).__name__
        return Tried(is_same=False, says=f"it fails{where}: {says}")
    if not compared:
        return Tried(is_same=False, says="there is no sample of it that this ComfyUI can build")
    worst = max(compared, key=lambda one: one.error / one.allowed)
    return Tried(is_same=True, says=f"{len(compared)} comparisons, the worst: {worst}")


def samples_of(kind: str) -> list[Sample]:
    """Returns the samples whose transformer is of this class. If there is none, returns the samples
    of its base classes with the same plan. Forms that this ComfyUI lacks are left out.
    """
    import comfy.supported_models

    module, _, name = kind.partition(":")
    asked = getattr(import_module(module), name)
    of_classes: dict[type, list[Sample]] = {}
    for sample in samples_for(kind):
        if not hasattr(comfy.supported_models, sample.form.config_class):
            continue
        model = sample.form.base_model(sample.form.config(tiny(sample)), torch.float32)
        of_classes.setdefault(type(model.diffusion_model), []).append(sample)
    bases = [sample for made, found in of_classes.items() if issubclass(asked, made) for sample in found]
    return of_classes.get(asked, bases)


def tiny(sample: Sample) -> Size:
    return sample.tiny.size(sample.heads[-1])


def pool_with(keeper: PoolKeeper, layout: Layout) -> RemotePool:
    from ...parallel_runtime.client.remote_pool import RemotePool

    handle = keeper.handle(place(layout, "cpu", "gloo", ()))
    return RemotePool(handle)


def as_sequence(sample: Sample, pool: RemotePool) -> Iterator[Compared]:
    stock = sample.form.random_model(tiny(sample))
    if (truth := by_stock(sample, stock)) is None:
        return
    for weights in ("whole", "sharded"):
        yield compared_with(truth, sample, stock, in_ranks(stock, pool, weights), f"{weights} weights")
    wide = sample.tiny.size(WIDE_HEADS)
    model = int8_model(sample.form, wide)
    if model is None:
        return
    truth, stock_int8 = request(sample, sample.form.random_model(wide)), request(sample, model)
    ours = request(sample, in_ranks(model, pool, "sharded"))
    distance = rms(ours - truth) if torch.isfinite(ours).all() else float("inf")
    off = distance / max(rms(stock_int8 - truth), 1e-12)
    yield Compared(f"{sample.name}, shared-out int8 weights", off, INT8_BOUND, " times stock's own error")


def as_pipeline(sample: Sample, pool: RemotePool) -> Iterator[Compared]:
    """Every evaluation goes through both stages whole, which is exact."""
    from ...parallel_runtime.client.patch_sampling import Patching

    stock = sample.form.random_model(tiny(sample))
    why_not = require_plan(stock.model.diffusion_model).why_no_stages
    if why_not or (truth := by_stock(sample, stock)) is None:
        return
    ours = in_ranks(stock, pool, "whole", Patching(patches=2, warm_up=STEPS * 2))
    yield compared_with(truth, sample, stock, ours, "two stages")


WAYS = (("as a sequence", SEQUENCE, as_sequence), ("in two stages", PIPELINE, as_pipeline))


def compared_with(
    truth: torch.Tensor, sample: Sample, stock: ModelPatcher, ours: ModelPatcher, how: str
) -> Compared:
    error = relative_error(request(sample, ours), truth)
    allowed = BOUND if error <= BOUND else max(BOUND, bound(partial(request, sample), stock, truth))
    return Compared(f"{sample.name}, {how}", error, allowed)


def request(sample: Sample, model: ModelPatcher) -> torch.Tensor:
    """Tokens that two ranks cannot share evenly, and unequal prompts."""
    return sampled(model, sample, "odd", 4.0, sample.masks is not None, "euler", seed=7, steps=STEPS)


def by_stock(sample: Sample, stock: ModelPatcher) -> torch.Tensor | None:
    """Returns the latent that ComfyUI alone computes. None if ComfyUI fails at this sample: then it
    fails at users' models of this class too.
    """
    try:
        return request(sample, stock)
    except (OSError, MemoryError):
        raise
    except Exception:  # noqa: BLE001 - whatever it is, it is nothing of a pool's
        return None


def in_ranks(
    stock: ModelPatcher, pool: RemotePool, weights: str, patching: Patching | None = None
) -> ModelPatcher:
    from ...parallel_runtime.client.remote_patcher import parallelize

    return parallelize(stock, pool, 0.0, patching, weights=weights)


@torch.inference_mode()
def int8_model(form: Form, size: Size) -> ModelPatcher | None:
    """Build ``form.random_model(size)`` with its wide layers in int8, by ComfyUI's own quantisation
    (comfy/quant_ops.py@0.30.0); None if it has no layer so wide.
    """
    from comfy.quant_ops import QUANT_ALGOS, QuantizedTensor

    transformer = form.random_model(size).model.diffusion_model
    linear = {
        f"{name}.weight" for name, one in transformer.named_modules() if isinstance(one, torch.nn.Linear)
    }
    state = dict(transformer.state_dict())
    wide = [name for name in linear if is_large(name, state[name])]
    said = torch.tensor(list(json.dumps({"format": INT8}).encode()), dtype=torch.uint8)
    for name in wide:
        made = QuantizedTensor.from_float(state.pop(name), QUANT_ALGOS[INT8]["comfy_tensor_layout"])
        state |= {key: tensor.clone() for key, tensor in made.state_dict(name).items()}
        state[f"{name.removesuffix('.weight')}.comfy_quant"] = said
    return model_of(form, size, state, None) if wide else None


def is_large(name: str, weight: torch.Tensor) -> bool:
    """Returns whether files quantise such a layer: not the narrow layers at a model's entry and
    exit.
    """
    return (
        name.endswith(".weight")
        and weight.dim() == 2
        and min(weight.shape) >= NARROWEST
        and weight.shape[1] % GROUP == 0
    )


def model_of(form: Form, size: Size, state: dict[str, Any], dtype: torch.dtype | None) -> ModelPatcher:
    """Build the MODEL of a state dict as ComfyUI builds models of known files. ``dtype`` is the
    dtype of weights that are not quantised; the model computes in fp32.
    """
    import comfy.supported_models
    import comfy.utils
    from comfy.model_patcher import ModelPatcher

    config = getattr(comfy.supported_models, form.config_class)(form.config(size))
    config.unet_config.update(form.config(size))
    config.quant_config = comfy.utils.detect_layer_quantization(state, "")
    config.set_inference_dtype(dtype or torch.float32, None if dtype is None else torch.float32)
    model = config.get_model(state, "")
    model.load_model_weights(state, "")
    cpu = torch.device("cpu")
    return ModelPatcher(model, load_device=cpu, offload_device=cpu)
