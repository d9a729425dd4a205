"""Patches that run inside a model's blocks and can be named: described as plain data in the UI, put
together again in a rank from code of its own.

Known are block replacements that leave a block out (Skip Layer Guidance), attention overrides that
choose one of ComfyUI's registered attention functions, and settings of torch. Such a replacement or
override is told by its bytecode, so nothing that does more is taken for it.

Read: comfy_extras/nodes_slg.py, comfy/ldm/modules/attention.py @ ComfyUI 0.30.0;
ModelPatcher.set_model_optimized_attention of later ones; KJNodes' Patch Sage Attention.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from operator import attrgetter
from types import CodeType, MappingProxyType
from typing import Any

import torch

from ..errors import Refused
from ..families.plan import LEFT_OUT
from ..refusals import patch_name
from ..watch.python_file import module_of
from .code import is_of_pack

OVERRIDE = "optimized_attention_override"
# Options as they cross
BACKEND, NODES, SETTINGS = "attention_backend", "attention_override", "torch_settings"
TORCH_SETTINGS = (
    "backends.cuda.matmul.allow_fp16_accumulation",
    "backends.cuda.matmul.allow_fp16_reduced_precision_reduction",
    "backends.cuda.matmul.allow_bf16_reduced_precision_reduction",
    "backends.cudnn.benchmark",
)
Options = Mapping[str, Any]
log = logging.getLogger("pipemesh")


def leave_out(args: Any, extra_args: Any) -> Any:
    """A block replacement that returns its arguments as they came."""
    return args


def choose(function: Callable) -> Callable:
    """An attention override that calls ``function``, as ComfyUI makes it."""

    def override(_: Any, *args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return override


def chosen(function: Callable) -> Callable:
    """In a rank: such an override. ``chosen`` is what it calls."""
    override: Any = choose(function)
    override.chosen = function
    if getattr(function, "container_function", None) is not None:
        override.container_function = function.container_function  # pyright: ignore
    return override


def choose_unwrapped(function: Any) -> Callable:
    """Likewise, as KJNodes makes it."""

    def override(_: Any, *args: Any, **kwargs: Any) -> Any:
        return function.__wrapped__(*args, **kwargs)

    return override


def does_as(function: Any, model: Callable) -> bool:
    """True if both are compiled to the same instructions on as many arguments."""
    ours, theirs = model.__code__, getattr(function, "__code__", None)
    return isinstance(theirs, CodeType) and _form(theirs) == _form(ours)


def _form(code: CodeType) -> tuple:
    counts = code.co_argcount, code.co_kwonlyargcount, len(code.co_freevars)
    return (code.co_code, code.co_names, code.co_flags & 0x0C, *counts)


def blocks_left_out(options: Options) -> list[tuple[str, int]]:
    """(kind, index) of the blocks that a node replaces by nothing."""
    replaced = options.get("patches_replace", {}).get("dit", {})
    return sorted(key for key, patch in replaced.items() if len(key) == 2 and does_as(patch, leave_out))


def attention_backend(override: Any) -> str | None:
    """Returns the name of the registered attention function that a node's override chooses; None if
    it does anything else, or if the function is of a pack that ranks may import.
    """
    if not any(does_as(override, form(override)) for form in (choose, choose_unwrapped)):
        return None
    from comfy.ldm.modules.attention import REGISTERED_ATTENTION_FUNCTIONS as registered

    (chosen,) = (cell.cell_contents for cell in override.__closure__)
    if is_of_pack(module_of(chosen)):
        return None  # ranks may have the pack's own
    names = (name for name, one in registered.items() if one is chosen or _calls_same(one, chosen))
    return next(names, None)


def _calls_same(registered: Any, chosen: Any) -> bool:
    """True if ``chosen`` is KJNodes' function over SageAttention's own choice of a kernel (its mode
    "auto"): ComfyUI's function calls the same.
    """
    if not registered.__name__ == chosen.__name__ == "attention_sage":
        return False
    kernel = getattr(registered, "__globals__", {}).get("sageattn")
    if kernel is None or not any(cell is kernel for cell in _reached(chosen)):
        return False
    _tell_of_sage()
    return True


@cache
def _tell_of_sage() -> None:
    log.info(
        "[PipeMesh] The ranks call SageAttention as ComfyUI does, which leaves keys as they are; KJNodes"
        " smooths keys. To have the call of KJNodes, name its folder in PIPEMESH_PATCH_PACKS."
    )


def _reached(function: Any, depth: int = 3) -> Iterator[Any]:
    """Yields the values that a function closes over, and the values that functions among them close
    over.
    """
    function = getattr(function, "__wrapped__", function)
    for cell in getattr(function, "__closure__", None) or ():
        yield cell.cell_contents
        if callable(cell.cell_contents) and depth:
            yield from _reached(cell.cell_contents, depth - 1)


def options_by_name(options: Options, numbers: Mapping[int, int] = MappingProxyType({})) -> dict[str, Any]:
    """In the UI: plain data in place of code inside the blocks. ``numbers``: of the patches that
    ranks hold, by their ids. Raises Refused, naming the first callable that is neither known by
    name nor held there.
    """
    found: dict[str, Any] = {}
    if lists := options.get("patches"):
        for point, patches in lists.items():
            for patch in patches:
                if id(patch) not in numbers:
                    raise refused_patch(f"patches/{point}", patch)
        found["patches"] = {point: [numbers[id(one)] for one in patches] for point, patches in lists.items()}
    if replaced := options.get("patches_replace"):
        for kind, blocks in replaced.items():
            for patch in blocks.values():
                if kind != "dit" or not does_as(patch, leave_out):
                    raise refused_patch(f"patches_replace/{kind}", patch)
        if left_out := blocks_left_out(options):
            found[LEFT_OUT] = left_out
    if OVERRIDE in options:
        override = options[OVERRIDE]
        if id(override) in numbers:
            found[NODES] = numbers[id(override)]
        elif name := attention_backend(override):
            found[BACKEND] = name
        else:
            raise refused_patch(OVERRIDE, override)
    return found


def refused_patch(place: str, patch: Any) -> Refused:
    return Refused(
        f"The patch {patch_name(patch)} ({place}) runs inside the model's blocks and cannot run in the pool:"
        " remove the node that adds it, or bypass PipeMesh Parallelize."
    )


def torch_settings() -> dict[str, Any]:
    """Returns the settings of ``TORCH_SETTINGS`` that this torch has, with their values."""
    found = {}
    for name in TORCH_SETTINGS:
        with suppress(AttributeError):
            found[name] = attrgetter(name)(torch)
    return found


def options_made(options: Options, patches: Sequence[tuple[str, Callable]] = ()) -> dict[str, Any]:
    """In a rank: the inverse of ``options_by_name``. Also sets torch's settings. Raises Refused for
    an attention function that ComfyUI does not have here.
    """
    made = {name: value for name, value in options.items() if name not in (SETTINGS, BACKEND, NODES)}
    here = torch_settings()
    for name, value in options.get(SETTINGS, {}).items():
        if here.get(name, value) != value:
            path, _, last = name.rpartition(".")
            setattr(attrgetter(path)(torch), last, value)
    if BACKEND in options:
        made[OVERRIDE] = chosen(_registered(options[BACKEND]))
    if NODES in options:
        made[OVERRIDE] = patches[options[NODES]][1]
    if "patches" in options:
        made["patches"] = {
            point: [patches[number] for number in numbers] for point, numbers in options["patches"].items()
        }
    return made


def _registered(name: str) -> Callable:
    from comfy.ldm.modules.attention import REGISTERED_ATTENTION_FUNCTIONS as registered

    if name not in registered:
        here = ", ".join(registered)
        raise Refused(
            f"A rank's ComfyUI has no attention function {name} ({here}): install its package there, or"
            " choose another."
        )
    return registered[name]
