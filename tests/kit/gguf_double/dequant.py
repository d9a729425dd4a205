"""Eight bits per number and an fp16 scale for 32 of them, as GGUF's Q8_0."""

import torch

BLOCK = 32


def quantize(weight):
    blocks = weight.reshape(-1, BLOCK).float()
    scales = (blocks.abs().amax(1, keepdim=True) / 127).half()
    numbers = (blocks / scales.float().clamp(min=1e-8)).round().to(torch.int8)
    rows = torch.cat([scales.view(torch.uint8), numbers.view(torch.uint8)], dim=1)
    return rows.reshape(weight.shape[0], -1)


def dequantize(content, shape, dtype):
    rows = content.reshape(-1, 2 + BLOCK)
    scales, numbers = rows[:, :2].contiguous().view(torch.float16), rows[:, 2:].contiguous().view(torch.int8)
    return (numbers.float() * scales.float()).reshape(shape).to(dtype)
