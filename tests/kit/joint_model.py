"""A model of two streams that attend as one, without ComfyUI: all that a plan and a method need."""

import torch
from pipemesh.parallel_runtime.families.plan import Blocks, Leave, TokenPlan

BLOCKS, HEADS, WIDTH = 8, 3, 6
PLAN = TokenPlan(
    streams=("txt", "img"),
    blocks=(Blocks(path="blocks", tokens={"txt": ("txt",), "img": ("img",)}),),
    leave=Leave(path="head", stream="img"),
)
IMAGE = 13


def attention_basic(q, k, v, heads, mask=None, skip_reshape=False, skip_output_reshape=False):
    if not skip_reshape:
        q, k, v = (t.unflatten(-1, (heads, -1)).transpose(1, 2) for t in (q, k, v))
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, mask)
    return out if skip_output_reshape else out.transpose(1, 2).flatten(2)


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = torch.nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, txt, img, mask, options):
        x = torch.cat((txt, img), 1)
        attend = options.get("optimized_attention_override", lambda attention, *args: attention(*args))
        x = x + attend(attention_basic, *self.qkv(x).chunk(3, -1), HEADS, mask)
        return x.split([txt.shape[1], img.shape[1]], 1)


class Model(torch.nn.Module):
    def __init__(self, blocks=BLOCKS):
        super().__init__()
        torch.manual_seed(3)
        self.blocks = torch.nn.ModuleList([Block() for _ in range(blocks)])
        self.head = torch.nn.Linear(WIDTH, 2)

    def forward(self, txt, img, mask, transformer_options):
        for block in self.blocks:
            txt, img = block(txt, img, mask, transformer_options)
        return self.head(img)


def inputs(text, mask=False):
    generator = torch.Generator().manual_seed(text)
    total = text + IMAGE
    return {
        "txt": torch.randn(1, text, WIDTH, generator=generator),
        "img": torch.randn(1, IMAGE, WIDTH, generator=generator),
        "mask": torch.randn(total, total, generator=generator) if mask else None,
        "transformer_options": {},
    }


CONDS = [inputs(5, mask=True), inputs(2)]  # by branch; of the second, most ranks have no text
