"""Describes in the UI how a MODEL is made, and makes it again in a rank.

A source is either a stock factory with plain arguments, or a model configuration and a state dict
that go through shared memory.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ..checkpoint import File, check_file, ends_of, stat_file
from ..errors import Refused
from ..forward import PREFIX
from ..refusals import ON_ONE_GPU
from ..watch.attributes import Attributes
from ..watch.python_file import assigned_first
from ..weights.comparison import Weights
from ..weights.gguf import described_operations, described_weight, import_operations, is_ggml, rebuilt_weight
from ..weights.quantisation import is_quantised, named_tensors
from ..wire.tree import encode_plain, is_plain

Dtypes = tuple[torch.dtype | None, torch.dtype | None]
CHECKPOINT_SUFFIXES = (".safetensors", ".sft", ".ckpt", ".pt", ".pth", ".bin")


@dataclass(frozen=True, kw_only=True)
class Source:
    """How a rank gets a model. Without a ``factory`` the UI sends its state dict.

    ``model``: the identity, equal for equal sources. ``dtypes``: the weights' dtype, and the dtype
    to which they are cast for computing (None: no other), as the UI's ComfyUI resolved them.
    """

    model: str
    factory: str = ""
    args: tuple = ()
    index: int | None = None
    file: File | None = None
    dtypes: Dtypes = (None, None)
    weights: Weights = field(init=False, compare=False, repr=False)
    attributes: Attributes = field(init=False, compare=False, repr=False)

    def __post_init__(self):
        object.__setattr__(self, "weights", Weights(self.file if self.factory else None))
        object.__setattr__(self, "attributes", Attributes())

    @property
    def title(self) -> str:
        """The name by which users know the model: its file's."""
        return Path(self.file[0]).name if self.file else self.model

    def tree(self) -> dict[str, Any]:
        """Returns the arguments for ``call_factory`` in a rank. Raises Refused if the file is gone
        or has changed.
        """
        check_file(self.file)
        return {
            "factory": self.factory,
            "args": self.args,
            "index": self.index,
            "file": self.file,
            "ends": ends_of(self.file[0]) if self.file else b"",
            "dtypes": self.dtypes,
        }


def checkpoint_of(patcher: Any) -> str:
    """In the UI: returns the path of the file that a MODEL was read from; empty if none is
    known.
    """
    init = getattr(patcher, "cached_patcher_init", None)
    files = (
        arg
        for arg in (init[1] if init is not None else ())
        if isinstance(arg, str) and arg.lower().endswith(CHECKPOINT_SUFFIXES)
    )
    return next(files, "")


def describe_source(patcher: Any) -> Source:
    """In the UI: the source of a stock MODEL. Raises ModelError if the checkpoint is gone, Refused
    for a model that no rank can rebuild.
    """
    init = patcher.cached_patcher_init
    if init is not None:
        factory, args = init[0], tuple(init[1])
        if factory.__module__.startswith("comfy.") and is_plain(list(args)):
            path = checkpoint_of(patcher)
            file = stat_file(path) if path else None
            name, index = f"{factory.__module__}:{factory.__qualname__}", init[2] if len(init) > 2 else None
            dtypes = resolved_dtypes(patcher.model.model_config)
            # Some mounts number their files anew
            identity = encode_plain([name, list(args), index, file and file[:3], dtypes])
            model = hashlib.blake2b(identity, digest_size=8).hexdigest()
            return Source(model=model, factory=name, args=args, index=index, file=file, dtypes=dtypes)
    refuse_state(patcher)
    return Source(model=f"state-{patcher.clone_base_uuid.hex}")


def refuse_state(patcher: Any) -> None:
    """Raises Refused for a model that cannot be rebuilt from its configuration and state dict."""
    config = patcher.model.model_config
    described_operations(config.custom_operations)
    if not is_plain(config.unet_config) or not is_plain(config.quant_config):
        name = type(patcher.model.diffusion_model).__name__
        raise Refused(
            f"{name} from this loader cannot be sent to the pool (its configuration is no plain data): "
            f"load it with a stock loader, or {ON_ONE_GPU}."
        )


def resolved_dtypes(config: Any) -> Dtypes:
    """In the UI: returns the dtypes that ComfyUI chose."""
    return config.unet_config.get("dtype"), config.manual_cast_dtype


@contextmanager
def resolving_as(dtypes: Dtypes) -> Iterator[None]:
    """In a rank: its ComfyUI resolves dtypes to these. Its own device may be another one, or have
    other memory free, and arguments come in the UI's dtype.
    """
    import comfy.model_management as mm

    weights, cast = dtypes
    own = mm.unet_dtype, mm.unet_manual_cast
    if weights is not None:
        mm.unet_dtype, mm.unet_manual_cast = (lambda *args, **kwargs: weights), (lambda *args, **kwargs: cast)
    try:
        yield
    finally:
        mm.unet_dtype, mm.unet_manual_cast = own


def call_factory(name: str, args: tuple, index: int | None, dtypes: Dtypes = (None, None)) -> Any:
    """In a rank: calls the stock loader that made the UI's model. Returns its ModelPatcher."""
    module, function = name.split(":")
    if not module.startswith("comfy."):
        raise Refused(f"The model's loader {name} is not ComfyUI's own: use a stock loader.")
    with resolving_as(dtypes):
        made = getattr(importlib.import_module(module), function)(*args)
    return made if index is None else made[index]


def find_here(path: str) -> str:
    """In a rank on another machine: returns the path of a model file of the UI's ComfyUI: the same
    path, or the same place in this ComfyUI's own models folder. If neither exists, it is the place
    where the file belongs.
    """
    import comfy

    parts, root = Path(path).parts, Path(comfy.__path__[0]).parent
    places = [root.joinpath(*parts[index:]) for index, part in enumerate(parts) if part == "models"]
    return next((str(place) for place in (path, *places) if os.path.exists(place)), str([path, *places][-1]))


def state_source(patcher: Any, weights: Weights | None = None) -> dict[str, Any]:
    """In the UI: the tree from which a rank builds a model without a factory. ``weights`` notes
    what was sent.
    """
    config = patcher.model.model_config
    diffusion_model = patcher.model.diffusion_model
    named = {**dict(diffusion_model.named_parameters()), **dict(diffusion_model.named_buffers())}
    whole = {key: tensor for key, tensor in named.items() if not is_quantised(tensor)}
    state = {key: whole.get(key, tensor) for key, tensor in diffusion_model.state_dict().items()}
    late = {key: described_weight(tensor) for key, tensor in state.items() if is_ggml(tensor)}
    state = {key: tensor for key, tensor in state.items() if key not in late and not tensor.is_meta}
    unpatched = {
        **patcher.object_patches_backup,
        **{key: backup.weight for key, backup in patcher.backup.items()},
    }
    for key, original in unpatched.items():  # patches in place are sent for themselves
        name = key.removeprefix(PREFIX)
        if isinstance(original, torch.Tensor) and name in state:
            state |= named_tensors(name, original) if is_quantised(original) else {name: original}
    state = {key: tensor.detach() for key, tensor in state.items()}
    if weights is not None:
        weights.note_sent({**state, **{key: described["content"] for key, described in late.items()}})
    return {
        "config": type(config).__name__,
        "unet_config": dict(config.unet_config),
        "quant_config": config.quant_config,
        "dtypes": resolved_dtypes(config),
        "operations": described_operations(config.custom_operations),
        "patch_on_device": bool(getattr(patcher, "patch_on_device", False)),
        "ggml": late,
        "state": state,
    }


def build_from_state(source: dict[str, Any]) -> Any:
    """In a rank: a ModelPatcher from ``state_source``'s tree. Its tensors lie in shared memory."""
    import comfy.model_management
    import comfy.model_patcher
    import comfy.supported_models

    config = getattr(comfy.supported_models, source["config"])(source["unet_config"])
    config.unet_config.update(source["unet_config"])
    config.quant_config = source["quant_config"]
    device = comfy.model_management.get_torch_device()
    config.set_inference_dtype(*source["dtypes"])
    state = source["state"]
    if source["operations"] is not None:
        operations = import_operations(source["operations"])
        config.custom_operations = operations.GGMLOps
        state |= {key: rebuilt_weight(described, operations) for key, described in source["ggml"].items()}
    model = config.get_model(state, "")
    model.load_model_weights(state, "")
    patcher = comfy.model_patcher.ModelPatcher(model, load_device=device, offload_device=torch.device("cpu"))
    patcher.patch_on_device = source["patch_on_device"]
    return patcher


def describe_vae(vae: Any, kind: str = "vae") -> Source:
    """In the UI: the source of a VAE or an upscale model. Its weights are sent as they are."""
    path = checkpoint_of(vae.patcher)
    file = stat_file(path) if path and os.path.exists(path) else None
    return Source(model=f"{kind}-{uuid.uuid4().hex}-{numbers_id(vae, kind)}", file=file)


def numbers_id(vae: Any, kind: str = "vae") -> str:
    """Returns the end of a VAE's name in ranks: another one once a node has changed its numbers."""
    numbers = json.dumps(vae_numbers(vae.first_stage_model)) if kind == "vae" else ""
    return hashlib.blake2b(numbers.encode(), digest_size=4).hexdigest()


def vae_numbers(model: Any) -> dict[str, Any]:
    """Returns the numbers that the class of a VAE took from its file's metadata: a node may have
    changed them since. Numbers that ComfyUI's patchers note on the module are left out.
    """
    own = vars(model) if getattr(model, "config", None) is not None else {}
    names = assigned_first(type(model))
    return {name: one for name, one in own.items() if name in names and isinstance(one, (bool, int, float))}


def vae_source(vae: Any) -> dict[str, Any]:
    """In the UI: the tree from which a rank builds a VAE."""
    model = vae.first_stage_model
    state = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    metadata, config = None, getattr(model, "config", None)
    if config is not None:
        metadata = {"config": json.dumps({"vae": {**config, **vae_numbers(model)}})}
    return {"vae": type(model).__name__, "dtype": vae.vae_dtype, "state": state, "metadata": metadata}


def build_vae(source: dict[str, Any], device: torch.device) -> torch.nn.Module:
    """In a rank: the module that decodes and encodes, of ``vae_source``'s tree. Raises Refused."""
    import comfy.sd

    given = {"sd": source["state"], "dtype": source["dtype"], "metadata": source["metadata"]}
    model = comfy.sd.VAE(**given, device=device).first_stage_model
    if type(model).__name__ != source["vae"] or model.state_dict().keys() != source["state"].keys():
        raise Refused(
            f"ComfyUI makes another VAE of the weights of this {source['vae']}: leave PipeMesh Parallelize"
            " VAE out."
        )
    return model.to(device=device, dtype=source["dtype"])
