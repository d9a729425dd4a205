"""A device that no machine has: its tensors say that they are on it, compute on the CPU, and mix
with the CPU's no better than a GPU's do. For what the UI does where it is not on its ranks' device.
"""

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

# Torch knows the name, wants no driver for it, and ComfyUI has no branch of its own for it
DEVICE = torch.device("xla", 0)
PLENTY = 1 << 40  # bytes
MAY_MIX = {torch.ops.aten.copy_.default, torch.ops.aten.index.Tensor, torch.ops.aten.index_put_.default}


class Elsewhere(torch.Tensor):
    """A tensor on the device. ``content`` is its memory."""

    @staticmethod
    def __new__(cls, content):
        layout = {
            "strides": content.stride(),
            "storage_offset": content.storage_offset(),
            "dtype": content.dtype,
        }
        made = torch.Tensor._make_wrapper_subclass(
            cls, content.shape, **layout, device="meta"
        )  # as fake tensors do it: inside torch its device is this
        made.content = content
        return made

    device = property(lambda self: DEVICE)
    is_meta = property(lambda self: False)

    def __repr__(self):
        return f"Elsewhere({self.content})"

    def data_ptr(self):
        return self.content.data_ptr()

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return computed(func, args, kwargs or {})


class Device(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return computed(func, args, kwargs or {})


def computed(func, args, kwargs):
    if func is torch.ops.aten._has_compatible_shallow_copy_type.default:
        return type(args[0]) is type(args[1])  # else a module makes itself new parameters when it moves
    leaves = tree_flatten((args, kwargs))[0]
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    here = [isinstance(tensor, Elsewhere) for tensor in tensors if tensor.ndim]
    if any(here) and not all(here) and func not in MAY_MIX:
        raise RuntimeError(
            f"{func}: Expected all tensors to be on the same device, but found at least two devices, {DEVICE}"
            " and cpu!"
        )
    asked = [leaf.type for leaf in leaves if isinstance(leaf, torch.device)]
    on_device = asked != ["cpu"] if asked else any(isinstance(tensor, Elsewhere) for tensor in tensors)
    made = func(*tree_map(_content, args), **tree_map(_content, kwargs))
    if func._schema.is_mutable and not func._schema.name.endswith("out"):
        return args[0] if isinstance(made, torch.Tensor) else made
    return tree_map(_put, made) if on_device else made


def _content(leaf):
    if isinstance(leaf, torch.device):
        return torch.device("cpu")
    return leaf.content if isinstance(leaf, Elsewhere) else leaf


def _put(leaf):
    return Elsewhere(leaf) if isinstance(leaf, torch.Tensor) else leaf


@contextmanager
def ui_on_it(dynamic=False):
    """ComfyUI's process has this device, with memory for everything. ``dynamic``: MODELs are loaded
    as ModelPatcherDynamic does it.
    """
    import comfy.model_management as mm

    with pytest.MonkeyPatch.context() as patch, Device():
        patch.setattr(mm, "get_torch_device", lambda: DEVICE)
        patch.setattr(
            mm,
            "get_free_memory",
            lambda dev=None, torch_free_too=False: (PLENTY, PLENTY) if torch_free_too else PLENTY,
        )
        patch.setattr(
            mm,
            "get_total_memory",
            lambda dev=None, torch_total_too=False: (PLENTY, PLENTY) if torch_total_too else PLENTY,
        )
        if dynamic:
            load_on_demand(patch)
        try:
            yield
        finally:
            mm.unload_all_models()


def load_on_demand(patch):
    """Weights come to the device when they are used, and stay there until memory is wanted. In
    place of the library that does it on GPUs.
    """
    import comfy.model_patcher
    import comfy_aimdo.host_buffer
    import comfy_aimdo.model_vbar
    import comfy_aimdo.torch
    from comfy.cli_args import args

    patch.setattr(args, "disable_pinned_memory", True)
    patch.setattr(comfy_aimdo.host_buffer, "HostBuffer", HostBuffer)
    patch.setattr(comfy_aimdo.model_vbar, "ModelVBAR", Pages)
    patch.setattr(comfy_aimdo.model_vbar, "vbar_fault", lambda page: (id(page), page.pages.evicted))
    patch.setattr(comfy_aimdo.model_vbar, "vbar_signature_compare", lambda now, then: now == then)
    patch.setattr(comfy_aimdo.model_vbar, "vbar_unpin", lambda page: None)
    patch.setattr(comfy_aimdo.torch, "aimdo_to_tensor", lambda page, device: page.memory)
    patch.setattr(comfy.model_patcher, "CoreModelPatcher", comfy.model_patcher.ModelPatcherDynamic)


class HostBuffer:
    size = 0

    def __init__(self, *sizes):
        pass

    def truncate(self, *args, **kwargs):
        pass


class Pages:
    """A model's pages on the device."""

    def __init__(self, nbytes, index):
        self.allocated = self.evicted = 0

    def alloc(self, nbytes):
        self.allocated += nbytes
        return SimpleNamespace(pages=self, memory=torch.empty(nbytes, dtype=torch.uint8, device=DEVICE))

    def prioritize(self):
        pass

    def loaded_size(self):
        return self.allocated

    def free_memory(self, nbytes):
        self.evicted += 1
        return self.allocated
