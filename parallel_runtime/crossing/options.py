"""Choose which of a MODEL's options go to the ranks; refuse by name each option that the pool
cannot honour.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from ..errors import Refused
from ..families.plan import COMPILE
from ..refusals import ON_ONE_GPU, patch_name
from ..weights.bypass import adapters_of
from ..wire.tree import is_plain, why_not_plain
from .block_code import InBlockPatches
from .kept_tokens import KEPT, kept_settings
from .named_code import OVERRIDE, SETTINGS, options_by_name, torch_settings

WHOLE = "diffusion_model"  # of a BaseModel
log = logging.getLogger("pipemesh")
# ComfyUI's own options that are read in the UI only
OF_COMFYUI = frozenset((
    "wrappers", "callbacks", "patches", "patches_replace", OVERRIDE,
    "uuids", "prefetch_dynamic_vbars", "context_window", "easycache", "ar_state",
))  # fmt: skip


def crossing_options(
    transformer_options: dict[str, Any],
    in_block: InBlockPatches | None = None,
    set_later: Callable[[str], str] = lambda name: "",
) -> dict[str, Any]:
    """Returns the ``transformer_options`` of one MODEL as the ranks get them: plain data, names of
    known functions, and numbers of the patches that ranks hold. Other options stay behind if no
    code in the ranks has their name. Raises Refused for an option that such code may read.
    ``set_later`` names the code that has set an option since the sampler was called; empty: a node.
    """
    crossing = options_by_name(transformer_options, in_block.numbers if in_block is not None else {})
    crossing[SETTINGS] = torch_settings()
    kept = in_block.kept if in_block is not None else None
    if kept is not None and (settings := kept_settings(kept, transformer_options)):
        crossing[KEPT] = settings
    for name, value in transformer_options.items():
        if name in OF_COMFYUI or (KEPT in crossing and kept is not None and name == kept.option):
            continue
        if problem := why_not_plain({name: value}):
            reader = in_block.readers.of(name) if in_block is not None else WHOLE
            if not reader:
                continue
            by = set_later(name)
            move = f"take another than {by}, which set it" if by else "remove the node that sets it"
            raise Refused(
                f"The option {problem.path} ({patch_name(problem.value)}) of this MODEL is no plain data and"
                f" cannot be sent to the pool, where {reader} may read it: {move}, or {ON_ONE_GPU}."
            )
        crossing[name] = value
    return crossing


def refuse_foreign_levers(patcher: Any) -> None:
    """Raises Refused for settings of other nodes on a MODEL beside patches and options."""
    injected = [one for items in patcher.injections.values() for one in items]
    foreign = [one for one in injected if adapters_of(one) is None]
    if foreign:
        what = f"the injection {patch_name(getattr(foreign[0], 'inject', foreign[0]))}"
    elif patcher.weight_wrapper_patches:
        what = "weight wrappers"
    elif patcher.additional_models.get("multigpu"):
        what = "MultiGPU CFG Split clones"
    else:
        return
    raise Refused(
        f"This MODEL carries {what}, which the pool cannot honour: remove the node that adds them, or bypass"
        " PipeMesh Parallelize."
    )


def hand_over_compilation(model_options: dict[str, Any], model: Any) -> bool:
    """Moves torch.compile (of the node TorchCompileModel, or of KJNodes) from a run's options to
    the options that cross: the ranks compile their blocks. Returns whether it was there. ``model``
    is the BaseModel that runs.

    In the UI it would compile the remote call, which has nothing to compile.
    """
    from comfy.patcher_extension import WrappersMP
    from comfy_api.torch_helpers.torch_compile import COMPILE_KEY, TORCH_COMPILE_KWARGS

    kwargs = dict(model_options.pop(TORCH_COMPILE_KWARGS, {}))
    options = model_options.get("transformer_options", {})
    wrappers = options.get("wrappers", {})
    around_model = wrappers.get(WrappersMP.APPLY_MODEL, {})
    if COMPILE_KEY not in around_model:
        return False
    kept = {key: wrapper for key, wrapper in around_model.items() if key != COMPILE_KEY}
    compiling = around_model[COMPILE_KEY]
    crossing = {}
    if any(options.get("patches", {}).values()):
        log.warning(
            "[PipeMesh] torch.compile is left out: nodes put code inside the blocks, and a graph would"
            " freeze it."
        )
    else:
        paths = [path for wrapper in compiling for path in compiled_paths(wrapper, model)]
        crossing = compilation(kwargs, paths, ", ".join(map(patch_name, compiling)))
    around = {**wrappers, WrappersMP.APPLY_MODEL: kept}
    model_options["transformer_options"] = {**options, "wrappers": around, **crossing}
    return True


def compiled_paths(wrapper: Any, model: Any) -> list[str]:
    """Returns the modules that a wrapper compiles, by their paths in the BaseModel. ComfyUI's
    wrapper holds the modules itself; KJNodes' module has a mapping from each model to its modules.
    """
    held = [cell.cell_contents for cell in getattr(wrapper, "__closure__", None) or ()]
    in_module = getattr(wrapper, "__globals__", {})
    for name in wrapper.__code__.co_names if hasattr(wrapper, "__code__") else ():
        if isinstance(in_module.get(name), Mapping):
            held.append(in_module[name].get(model))
    return [
        path for modules in held if isinstance(modules, dict) for path in modules if isinstance(path, str)
    ]


def compilation(kwargs: dict[str, Any], paths: list[str], wrapper: str) -> dict[str, Any]:
    """Returns the option that has ranks compile these modules; empty, with a line in the log, if
    they cannot. A filter of guards is replaced by the ranks' own.
    """
    inside = [
        path.removeprefix(WHOLE).removeprefix(".") for path in paths if f"{path}.".startswith(f"{WHOLE}.")
    ]
    settings = dict(kwargs.get("options") or {})
    settings.pop("guard_filter_fn", None)
    wanted = {"paths": inside, "kwargs": {**kwargs, "options": settings}}
    if inside and is_plain(wanted):
        return {COMPILE: wanted}
    unknown = f"which modules of the transformer {wrapper} compiles is not known"
    why = "its backend or an option is code" if inside else unknown
    log.warning("[PipeMesh] torch.compile is left out: %s. The ranks run this MODEL uncompiled.", why)
    return {}
