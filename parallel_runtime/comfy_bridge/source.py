"""What the UI tells the pool about a stock MODEL, as plain data: where it came from, its weight
patches, what it may not carry.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import comfy.utils
import comfy.weight_adapter
import torch

from ..checkpoint import File, stat_file
from ..errors import Refused
from ..families import PLANS, plan_for
from ..families.plan import TokenPlan
from ..memory import give_back_freed
from ..wire.segment import TensorRef, dtype_name
from ..wire.tree import encode_tree, is_plain

PREFIX = "diffusion_model."
CHECKPOINT_SUFFIXES = (".safetensors", ".sft", ".ckpt", ".pt", ".pth", ".bin")


@dataclass(frozen=True, kw_only=True)
class Source:
    """How a rank gets the model: a stock factory with plain arguments, or the UI's own state dict
    through shared memory.
    """

    model: str  # the identity: equal for equal sources
    factory: str = ""
    args: tuple = ()
    index: int | None = None
    file: File | None = None


def describe_source(patcher: Any) -> Source:
    """Raises ModelError when the checkpoint is gone."""
    init = patcher.cached_patcher_init
    if init is not None:
        factory, args = init[0], tuple(init[1])
        if factory.__module__.startswith("comfy.") and is_plain(list(args)):
            files = [arg for arg in args if isinstance(arg, str) and arg.lower().endswith(CHECKPOINT_SUFFIXES)]
            file = stat_file(files[0]) if files else None
            name, index = f"{factory.__module__}:{factory.__qualname__}", init[2] if len(init) > 2 else None
            identity = encode_tree([name, list(args), index, file and file[:3]], _no_tensor)  # some mounts number their files anew
            return Source(model=hashlib.blake2b(identity, digest_size=8).hexdigest(), factory=name, args=args, index=index, file=file)
    refuse_state(patcher)
    return Source(model=f"state-{patcher.clone_base_uuid.hex}")


def refuse_state(patcher: Any) -> None:
    config = patcher.model.model_config
    if config.custom_operations is not None or getattr(config, "quant_config", None) is not None or not is_plain(config.unet_config):
        raise Refused(
            f"{type(patcher.model.diffusion_model).__name__} from this loader cannot be sent to the pool (custom or quantised operations): "
            "load it with a stock loader, or leave PipeMesh Parallelize out."
        )


def state_source(patcher: Any) -> dict[str, Any]:
    """The tree a rank rebuilds a model without a factory from."""
    config = patcher.model.model_config
    diffusion_model = patcher.model.diffusion_model
    weights = {**dict(diffusion_model.named_parameters()), **dict(diffusion_model.named_buffers())}
    state = {key: weights[key] for key in diffusion_model.state_dict()}
    for key, backup in patcher.backup.items():  # the stock path has patched these weights in place
        if key.startswith(PREFIX):
            state[key.removeprefix(PREFIX)] = backup.weight
    return {
        "config": type(config).__name__,
        "unet_config": dict(config.unet_config),
        "dtype": config.unet_config.get("dtype"),
        "manual_cast_dtype": config.manual_cast_dtype,
        "state": {key: tensor.detach() for key, tensor in state.items()},
    }


def forward_patch(diffusion_model: torch.nn.Module) -> str:
    """What the remote forward replaces: ``_forward`` where the class has one (inside the host's own
    wrappers), else ``forward``.
    """
    return PREFIX + ("_forward" if hasattr(type(diffusion_model), "_forward") else "forward")


def forward_binder(diffusion_model: torch.nn.Module, name: str) -> Callable[[tuple, dict], dict[str, Any]]:
    """(args, kwargs) of the forward called ``name`` (as ``forward_patch`` has it) -> all arguments
    by name.
    """
    signature = inspect.signature(getattr(type(diffusion_model), name.removeprefix(PREFIX)))

    def bind(args: tuple, kwargs: dict) -> dict[str, Any]:
        arguments = dict(signature.bind(None, *args, **kwargs).arguments)
        arguments.pop("self")
        arguments.update(arguments.pop("kwargs", {}))
        return arguments

    return bind


def require_plan(diffusion_model: torch.nn.Module) -> TokenPlan:
    plan = plan_for(type(diffusion_model))
    if plan is None:
        families = ", ".join(plan.family for plan in PLANS)
        name = type(diffusion_model).__name__
        raise Refused(f"{name} has no token plan (families with one: {families}): leave PipeMesh Parallelize out for this model.")
    return plan


def patch_name(value: Any) -> str:
    kind = value if hasattr(value, "__qualname__") else type(value)
    return f"{getattr(kind, '__module__', '?')}.{kind.__qualname__}"


def refuse_in_block_patches(transformer_options: dict[str, Any]) -> None:
    """Callables that must run inside the transformer, which is elsewhere. Raises Refused, naming
    the first.
    """
    patches, replacements = transformer_options.get("patches", {}), transformer_options.get("patches_replace", {})
    found = [(f"patches/{kind}", patch) for kind, items in patches.items() for patch in items]
    found += [(f"patches_replace/{kind}", patch) for kind, blocks in replacements.items() for patch in blocks.values()]
    if "optimized_attention_override" in transformer_options:
        found.append(("optimized_attention_override", transformer_options["optimized_attention_override"]))
    if found:
        kind, patch = found[0]
        raise Refused(
            f"The patch {patch_name(patch)} ({kind}) runs inside the model's blocks and cannot run in the pool: "
            "remove the node that adds it, or PipeMesh."
        )


def refuse_foreign_levers(patcher: Any) -> None:
    """What other nodes hang on a MODEL that the pool cannot honour. Raises Refused, naming it."""
    found = {
        "bypass injections": patcher.injections,
        "weight wrappers": patcher.weight_wrapper_patches,
        "MultiGPU CFG Split clones": patcher.additional_models.get("multigpu"),
    }
    for what, content in found.items():
        if content:
            raise Refused(f"This MODEL carries {what}, which the pool cannot honour: remove the node that adds them, or PipeMesh.")


def plain_options(transformer_options: dict[str, Any]) -> dict[str, Any]:
    """What crosses: plain data. Callables and foreign objects stay; nothing in a rank could read
    them, and patches are refused before.
    """
    refuse_in_block_patches(transformer_options)
    kept = {key: value for key, value in transformer_options.items() if key not in ("wrappers", "callbacks", "patches", "patches_replace")}
    return {key: value for key, value in kept.items() if key != "prefetch_dynamic_vbars" and is_plain(value)}


def plain_patches(patches: dict[str, Iterable[tuple]]) -> dict[str, list]:
    """Weight patches as trees of tensors and plain data. Raises Refused for one that carries code
    of its own.
    """

    def packed(key: str, value: Any) -> list:
        if isinstance(value, comfy.weight_adapter.WeightAdapterBase):
            return ["adapter", type(value).__name__, value.weights]
        if isinstance(value, list):
            weight, convert = value[0]
            return ["merge", convert(weight), [entry(key, item) for item in value[1:]]]
        return ["raw", value]

    def entry(key: str, item: tuple) -> list:
        strength, value, strength_model, offset, function = item
        if function is not None:
            name = patch_name(function)
            raise Refused(
                f"The weight patch of {key} carries the function {name}, which cannot run in the pool: remove the node that adds it."
            )
        return [strength, packed(key, value), strength_model, offset]

    return {key: [entry(key, item) for item in items] for key, items in patches.items() if key.startswith(PREFIX)}


def plain_objects(object_patches: dict[str, Any]) -> dict[str, Any]:
    """Object patches below the transformer. Raises Refused, naming one that is not plain data."""
    objects = {key: value for key, value in object_patches.items() if key.startswith(PREFIX)}
    for key, value in objects.items():
        if not is_plain(value):
            raise Refused(
                f"The object patch {key} ({patch_name(value)}) is code and cannot run in the pool: "
                "remove the node that adds it, or PipeMesh."
            )
    return objects


def content_id(objects: dict[str, Any]) -> str:
    """Equal for equal content, "" for nothing. Not by address: those are handed out again."""
    if not objects:
        return ""
    content = hashlib.blake2b(digest_size=8)

    def put(_path: str, tensor: torch.Tensor) -> TensorRef:
        content.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
        return TensorRef(0, tuple(tensor.shape), dtype_name(tensor.dtype))

    content.update(encode_tree(objects, put))
    return f"|{content.hexdigest()}"


def map_weights(patcher: Any, source: Source) -> int:
    """Points the UI's own unpatched CPU weights at the checkpoint's mapped pages; returns the
    private bytes given back.

    Only where file and model agree in dtype and shape, so that the stock path keeps computing the
    same.
    """
    model = patcher.model
    if source.file is None or not source.file[0].lower().endswith((".safetensors", ".sft")) or patcher.backup or patcher.is_dynamic():
        return 0
    from comfy import model_detection

    state = comfy.utils.load_torch_file(source.file[0])
    prefix = model_detection.unet_prefix_from_state_dict(state)
    bare = comfy.utils.state_dict_prefix_replace(state, {prefix: ""}, filter_keys=True) or state
    mapped = model.model_config.process_unet_state_dict(bare)
    given_back = 0
    for name, parameter in model.diffusion_model.named_parameters():
        tensor = mapped.get(name)
        same = tensor is not None and tensor.dtype == parameter.dtype and tensor.shape == parameter.shape
        if same and parameter.device.type == "cpu" and type(parameter.data) is torch.Tensor:
            parameter.data = tensor
            given_back += tensor.numel() * tensor.element_size()
    if given_back:
        give_back_freed()
    return given_back


def _no_tensor(path: str, _tensor: Any) -> Any:
    raise TypeError(f"{path} is a tensor")
