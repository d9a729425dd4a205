"""Stand in for the operations of ComfyUI-GGUF: the names, the tensor class and where weights are
dequantised and patched are the pack's, by its published behaviour.
"""

import enum
from types import SimpleNamespace

import comfy.lora
import comfy.ops
import torch

from .dequant import dequantize


class GGMLQuantizationType(enum.IntEnum):
    F32 = 0
    Q8_0 = 8


gguf = SimpleNamespace(GGMLQuantizationType=GGMLQuantizationType)
PLAIN = (None, GGMLQuantizationType.F32)


class GGMLTensor(torch.Tensor):
    def __new__(cls, content, tensor_type, tensor_shape, patches=()):
        return content.as_subclass(cls)

    def __init__(self, content, tensor_type, tensor_shape, patches=()):
        self.tensor_type, self.tensor_shape, self.patches = tensor_type, tensor_shape, list(patches)

    def to(self, *args, **kwargs):
        moved = super().to(*args, **kwargs)
        moved.tensor_type, moved.tensor_shape = self.tensor_type, self.tensor_shape
        moved.patches = list(self.patches)
        return moved

    def clone(self, *args, **kwargs):
        return self

    def detach(self, *args, **kwargs):
        return self

    @property
    def shape(self):
        return getattr(self, "tensor_shape", self.size())


class GGMLOps(comfy.ops.manual_cast):
    class Linear(comfy.ops.manual_cast.Linear):
        dequant_dtype = None
        patch_dtype = None

        def __init__(self, in_features, out_features, bias=True, device=None, dtype=None):
            torch.nn.Module.__init__(self)
            self.in_features, self.out_features = in_features, out_features
            self.weight = self.bias = None

        def _load_from_state_dict(self, state_dict, prefix, *args):
            for name in ("weight", "bias"):
                if f"{prefix}{name}" in state_dict:
                    setattr(
                        self, name, torch.nn.Parameter(state_dict[f"{prefix}{name}"], requires_grad=False)
                    )

        def _save_to_state_dict(self, destination, prefix, keep_vars):
            for name in ("weight", "bias"):
                if getattr(self, name) is not None:
                    destination[f"{prefix}{name}"] = torch.zeros_like(getattr(self, name), device="meta")

        def number(self, tensor, dtype):
            if tensor is None:
                return None
            if getattr(tensor, "tensor_type", None) in PLAIN:
                return tensor.as_subclass(torch.Tensor).to(dtype)
            weight = dequantize(
                tensor.as_subclass(torch.Tensor), tensor.tensor_shape, self.dequant_dtype or dtype
            ).to(dtype)
            for patches, key in tensor.patches:
                weight = comfy.lora.calculate_weight(
                    move_patch_to_device(patches, weight.device), weight, key
                )
            return weight

        def forward_comfy_cast_weights(self, input):
            return torch.nn.functional.linear(
                input, self.number(self.weight, input.dtype), self.number(self.bias, input.dtype)
            )


def move_patch_to_device(item, device):
    if isinstance(item, (list, tuple)):
        return type(item)(move_patch_to_device(part, device) for part in item)
    return item.to(device) if isinstance(item, torch.Tensor) else item
