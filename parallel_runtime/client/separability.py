"""Decides whether the patches of a run may run ahead of each other (free-running).

That is right only while everything between the sampler and the transformer's forward acts on each
pixel by itself. Lists here say which of ComfyUI's parts do; anything else is named and keeps the
patches together. Read: comfy/samplers.py, comfy/k_diffusion/sampling.py,
comfy/extra_samplers/uni_pc.py @ ComfyUI 0.30.0.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from types import FunctionType, MethodType
from typing import Any

import comfy.samplers
import torch
from comfy.patcher_extension import CallbacksMP, WrappersMP

from ..crossing.block_code import runs_code_in_blocks, why_all_rows
from ..families.plan import TokenPlan
from ..forward import PREFIX
from ..refusals import patch_name
from ..watch.python_file import LIBRARIES, compiled_elsewhere, is_code
from ..wire.tree import is_plain

WRAPPER_KEY = "pipemesh"
FUNCTIONS = (FunctionType, MethodType)
AROUND = ("apply_model", "_apply_model", "extra_conds", "forward")  # what a pack may put into one model
COMFYUI = os.path.dirname(os.path.dirname(os.path.realpath(comfy.samplers.__file__)))
K_DIFFUSION_SAMPLERS = frozenset((
    "ddpm", "deis", "dpm_2", "dpm_2_ancestral", "dpmpp_2m", "dpmpp_2m_cfg_pp", "dpmpp_2m_sde",
    "dpmpp_2m_sde_gpu", "dpmpp_2m_sde_heun", "dpmpp_2m_sde_heun_gpu", "dpmpp_2s_ancestral",
    "dpmpp_2s_ancestral_cfg_pp", "dpmpp_3m_sde", "dpmpp_3m_sde_gpu", "dpmpp_sde", "dpmpp_sde_gpu",
    "er_sde", "euler", "euler_ancestral", "euler_ancestral_cfg_pp", "euler_cfg_pp", "exp_heun_2_x0",
    "exp_heun_2_x0_sde", "gradient_estimation", "gradient_estimation_cfg_pp", "heun", "heunpp2",
    "ipndm", "ipndm_v", "lcm", "lms", "res_multistep", "res_multistep_ancestral",
    "res_multistep_ancestral_cfg_pp", "res_multistep_cfg_pp", "sa_solver", "sa_solver_pece",
    "seeds_2", "seeds_3",
))  # fmt: skip
SAMPLER_FUNCTIONS = {
    *(f"comfy.k_diffusion.sampling.sample_{name}" for name in K_DIFFUSION_SAMPLERS),
    "comfy.extra_samplers.uni_pc.sample_unipc",
    "comfy.extra_samplers.uni_pc.sample_unipc_bh2",
    "comfy.samplers.ksampler.<locals>.dpm_fast_function",
}
FUNCTIONS_OF_SIGMA = {"noise_scaler", "tau_func"}  # samplers' options that never see a latent
GUIDERS = {
    "comfy.samplers.CFGGuider",
    "comfy_extras.nodes_custom_sampler.Guider_Basic",
    "comfy_extras.nodes_custom_sampler.Guider_DualCFG",
}
# The last: of hooks on conds
MODEL_OPTIONS = {"transformer_options", "to_load_options", "disable_cfg1_optimization", "registered_hooks"}
OBJECT_PATCHES = {"model_sampling"}
# What get_area_and_mult and _calc_cond_batch act on
COND_LEVERS = {"area", "mask", "gligen", "control", "hooks", "default"}
MODEL_CONDS = {
    "attention_mask",
    "c_concat",
    "c_crossattn",
    "clip_fea",
    "denoise_mask",
    "encoder_hidden_states_llama3",
    "fps",
    "frame_rate",
    "guidance",
    "guiding_frame_index",
    "ofs",
    "txt_byt5",
    "y",
    *("clip_text_pooled", "num_tokens"),  # of the whole text
    *("c_ar", "c_size"),  # of the whole image
    # Tokens behind the image's
    *("context_latents", "pose_latents", "ref_latents", "ref_latents_method", "time_dim_concat"),
    "reference_motion",  # likewise
    *("audio_embed", "audio_inject_scale", "clip_fea_ref", "face_pixel_values"),  # what tokens attend to
    *(
        "camera_conditions",
        "control_video",
        "ref_mask_flag",
        "ref_mask_latents",
        "sam_latents",
        "vace_context",
        "vace_strength",
    ),  # added to tokens before the blocks
}


def why_single_timeline(
    sampler: Any,
    guider: Any,
    model_options: dict[str, Any],
    noise: torch.Tensor,
    refiners: Sequence[str] = (),
) -> str | None:
    """Names everything that keeps the patches of this run together. None: nothing does.

    ``refiners``: modules of the transformer that look at the whole image before it is cut.
    """
    reasons = [f"the model's {path}, which looks at the whole image" for path in refiners]
    reasons += _of_code(sampler, guider, model_options)
    if noise.ndim not in (4, 5):
        reasons.append(f"packed latents of shape {tuple(noise.shape)}")
    for side, conds in conds_of(guider).items():
        for cond in conds or ():
            reasons += _of_cond(side, cond)
    return " and ".join(dict.fromkeys(reasons)) or None


def why_whole(
    plan: TokenPlan,
    conds: Mapping[str, Sequence[Mapping[str, Any]] | None],
    transformer_options: Mapping[str, Any],
) -> str | None:
    """Names everything that keeps the evaluations of this run whole. None: nothing does."""
    of_conds = [
        f"{name} in the {side} conditioning"
        for side, of_side in conds.items()
        for cond in of_side or ()
        for name in plan.together.arguments
        if name in cond.get("model_conds", {})
    ]
    reasons = dict.fromkeys([*of_conds, *why_all_rows(plan, transformer_options)])
    return plan.together.always or " and ".join(reasons) or None


def has_foreign_code(sampler: Any, guider: Any, model_options: dict[str, Any]) -> bool:
    """True if the sampler, or something between it and the transformer, is not known to call the
    transformer once for each cond of an evaluation.
    """
    return any(True for _ in _of_code(sampler, guider, model_options))


def must_run_conds_in_sequence(
    patcher: Any, conds: Sequence[Sequence[Mapping[str, Any]] | None], model_options: Mapping[str, Any]
) -> bool:
    """True if conds have to be evaluated one after the other: something between the batch of conds
    and the transformer may keep a state, or weights, from one cond to the next.
    """
    options = model_options.get("transformer_options", {})
    around = (WrappersMP.CALC_COND_BATCH, WrappersMP.APPLY_MODEL, WrappersMP.DIFFUSION_MODEL)
    return (
        any(cond.get("hooks") or cond.get("default") for side in conds for cond in side or ())
        or any(kind in around for kind, _ in foreign_wrappers(options.get("wrappers", {})))
        or any(options.get("callbacks", {}).get(CallbacksMP.ON_PREPARE_STATE, {}).values())
        or any(not name.startswith(PREFIX) and name not in OBJECT_PATCHES for name in patcher.object_patches)
        or runs_code_in_blocks(patcher)
        or "model_function_wrapper" in model_options
    )


def _of_code(sampler: Any, guider: Any, model_options: Mapping[str, Any]) -> Iterator[str]:
    yield from _of_sampler(sampler)
    if not known_guider(guider):
        yield f"the guider {type(guider).__name__}"
    yield from _of_model_options(model_options)
    for name, value in guider.model_patcher.object_patches.items():
        if name.startswith(PREFIX):  # below the waist; a method of a node may look at the batch of conds
            if isinstance(value, MethodType):
                yield f"the patch {patch_name(value)}"
            continue
        if name not in OBJECT_PATCHES or not _qualified(type(value)).startswith(("comfy.", "comfy_extras.")):
            yield f"the object patch {name} ({patch_name(value)})"


def _of_sampler(sampler: Any) -> Iterator[str]:
    function = getattr(sampler, "sampler_function", None)
    if type(sampler) is not comfy.samplers.KSAMPLER or _qualified(function) not in SAMPLER_FUNCTIONS:
        name = getattr(function, "__name__", type(function or sampler).__name__)
        yield f"the sampler {name.removeprefix('sample_').removesuffix('_function')}"
    for name, value in getattr(sampler, "extra_options", {}).items():
        if name not in FUNCTIONS_OF_SIGMA and not is_plain(value):
            yield f"the sampler's option {name} ({patch_name(value)})"


def _of_model_options(model_options: Mapping[str, Any]) -> Iterator[str]:
    for name, value in model_options.items():
        if name not in MODEL_OPTIONS and is_set(value):
            yield _named(name, value)
    options = model_options.get("transformer_options", {})
    for kind, wrapper in foreign_wrappers(options.get("wrappers", {})):
        yield f"the {kind} wrapper {patch_name(wrapper)}"
    for callbacks in options.get("callbacks", {}).get(CallbacksMP.ON_PREPARE_STATE, {}).values():
        for callback in callbacks:
            yield f"the {CallbacksMP.ON_PREPARE_STATE} callback {patch_name(callback)}"
    for name, value in options.items():
        if name not in ("wrappers", "callbacks") and not is_plain(value):
            yield _named(name, value)


def foreign_wrappers(wrappers: Mapping[str, Mapping[Any, Sequence[Any]]]) -> Iterator[tuple[str, Any]]:
    """Yields (kind, wrapper) of every wrapper that is not PipeMesh's."""
    for kind, by_key in wrappers.items():
        for key, of_key in by_key.items():
            if key != WRAPPER_KEY:
                yield from ((kind, wrapper) for wrapper in of_key)


def _of_cond(side: str, cond: Mapping[str, Any]) -> Iterator[str]:
    for name in sorted(COND_LEVERS & cond.keys()):
        if cond[name] is not None and cond[name] is not False:
            yield f"{name} on the {side} conditioning"
    for name in sorted(cond.get("model_conds", {}).keys() - MODEL_CONDS):
        yield f"{name} in the {side} conditioning"


def is_set(value: Any) -> bool:
    """True unless the value is None, False or empty. A tensor counts as set."""
    return isinstance(value, torch.Tensor) or bool(value)


def _named(name: str, value: Any) -> str:
    functions = value if isinstance(value, list) else [value]
    return f"{name} ({', '.join(patch_name(function) for function in functions)})"


def is_hosts_own(model: Any) -> bool:
    """True if a model's classes and its transformer's are ComfyUI's, and have no code of others."""
    both = (model, model.diffusion_model)
    kinds = {kind for one in both for kind in type(one).__mro__ if kind.__module__.startswith("comfy.")}
    return (
        all(type(one) in kinds for one in both)
        and not any(isinstance(vars(one).get(name), FUNCTIONS) for one in both for name in AROUND)
        and not any(
            compiled_elsewhere(value, LIBRARIES)
            for kind in kinds
            for value in vars(kind).values()
            if is_code(value)
        )
    )


def conds_of(guider: Any) -> Mapping[str, Any]:
    """Returns a guider's conds; before it samples, the conds that it was given."""
    return guider.conds if hasattr(guider, "conds") else guider.original_conds


def known_guider(guider: Any) -> bool:
    """True for guiders of ComfyUI that sample one model and have no code of other packs."""
    return _qualified(type(guider)) in GUIDERS


def _qualified(thing: Any) -> str:
    """Module and name as an import has them. ComfyUI's server loads its extra nodes under their
    paths.
    """
    kind = thing if hasattr(thing, "__qualname__") else type(thing)
    module = kind.__module__.removeprefix(COMFYUI + os.sep).replace(os.sep, ".")
    return f"{module}.{kind.__qualname__}"
