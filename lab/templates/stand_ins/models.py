"""MODELs in place of files: ComfyUI's own class of a sample of the registry, with random weights,
in the format that the file's name says.
"""

from __future__ import annotations

import zlib
from dataclasses import replace
from typing import Any

import comfy.model_patcher
import comfy.supported_models
import comfy.utils
import torch

from ....parallel_runtime.families import FILES
from ....parallel_runtime.families.catalogue import NOT_HERE, SAMPLES
from ....parallel_runtime.families.sample import Form, Sample, Size
from ....parallel_runtime.families.unplanned_models import why_no_plan
from ...quantised_files import FORMATS, quantised_state
from ..surgery import EXACT
from .names import DTYPES, MODELS, UNPLANNED, ModelShape, NotStoodFor, UnknownName, known, known_whole
from .names import FORMATS as FORMATS_OF_NAMES


def format_of(name: str, weight_dtype: str) -> str:
    return known(FORMATS_OF_NAMES, name, "weight format") or known(DTYPES, weight_dtype, "weight dtype")


def require_sample(shape: ModelShape) -> Sample:
    """Raises NotStoodFor if the registry has no such sample because it has no such plan."""
    if shape.sample in SAMPLES:
        return SAMPLES[shape.sample]
    if shape.sample in NOT_HERE:
        raise NotStoodFor(NOT_HERE[shape.sample])
    model_class = UNPLANNED.get(shape.sample, "")
    if not model_class or model_class in FILES:
        raise UnknownName(f"the registry has no sample {shape.sample}")
    raise NotStoodFor(f"{model_class.rpartition(':')[2]} has no token plan ({why_no_plan(model_class)})")


def form_of(shape: ModelShape) -> tuple[Form, Size]:
    """The form of a file as it was detected, drawn under the names of its own state dict."""
    if shape.form is not None:
        return shape.form, Size(heads=shape.heads, head_dim=16, blocks=())
    sample = require_sample(shape)
    config_class = shape.config_class or sample.form.config_class
    form = replace(
        sample.form,
        file=None,
        config_class=config_class,
        config=lambda size: {**sample.form.config(size), **shape.changes},
    )
    return form, sample.tiny.size(shape.heads)


def make_model(name: str, weight_dtype: str = "default") -> Any:
    """The MODEL that a file of that name stands for. Raises UnknownName."""
    plain_name = name.removesuffix(EXACT)
    shape, form_name = known_whole(MODELS, plain_name, "model"), format_of(plain_name, weight_dtype)
    form, size = form_of(shape)
    seed = zlib.crc32(plain_name.encode()) % 1000
    model = form.random_model(size, seed)
    return model if name != plain_name or not form_name else in_format(model, form, size, form_name)


def in_format(model: Any, form: Form, size: Size, name: str) -> Any:
    """The same MODEL with its large layers stored in one of ``FORMATS``, as ComfyUI loads it."""
    given = FORMATS[name]
    state, _ = comfy.utils.convert_old_quants(
        quantised_state(model.model.diffusion_model.state_dict(), given), ""
    )
    config = getattr(comfy.supported_models, form.config_class)(form.config(size))
    config.unet_config.update(form.config(size))
    config.quant_config = comfy.utils.detect_layer_quantization(state, "")
    config.set_inference_dtype(*((torch.float32, None) if given.algorithm else (given.dtype, torch.float32)))
    made = config.get_model(state, "")
    made.load_model_weights(state, "")
    return comfy.model_patcher.ModelPatcher(
        made, load_device=model.load_device, offload_device=model.offload_device
    )
