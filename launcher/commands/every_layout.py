"""``python3 -m launcher parity --layouts N``: compare stock ComfyUI with the pool in every layout
of N ranks, with and without cfg, with prompts of equal and unequal length, and a batch.

All evaluations of a pipeline are whole, so it is exact as well.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ...parallel_runtime.families import PLAIN
from ...parallel_runtime.layout import Layout, layouts_of
from .parity import conditioning, stock_model
from .rounding import bound, relative_error

if TYPE_CHECKING:
    from ..comfyui.find import ComfyInstall

HEADS, STEPS, SEED = 5, 3, 7
PATCHES, ALL_WARM = 3, 9999


@dataclass(frozen=True)
class Asked:
    """What is sampled: ``texts`` are the tokens of both prompts."""

    cfg: float
    texts: tuple[int, int]
    batch: int

    def __call__(self, model: Any) -> torch.Tensor:
        import comfy.sample

        latent = torch.zeros(self.batch, 16, 13, 12)
        prompts = [conditioning(number, tokens) for number, tokens in zip((1, 2), self.texts, strict=True)]
        with torch.inference_mode():
            noise = comfy.sample.prepare_noise(latent, SEED)
            return comfy.sample.sample(model, noise, STEPS, self.cfg, "euler", "simple", *prompts, latent, disable_pbar=True, seed=SEED)


def asked() -> list[Asked]:
    return [Asked(*values) for values in itertools.product((1.0, 4.0), ((13, 7), (16, 16)), (1, 3))]


def compared(ranks: int, host: ComfyInstall) -> Iterator[dict[str, Any]]:
    """Yield a record for every layout and sampling. One pool runs at a time."""
    from ...parallel_runtime.client.patchwise import Patching
    from ...parallel_runtime.client.remote_patcher import parallelize
    from ...parallel_runtime.client.remote_pool import RemotePool
    from ..pool.devices import place
    from ..pool.handle import PoolHandle
    from ..pool.rank_setup import RankSetup

    setup = RankSetup(comfyui=host.comfyui, comfy_args={"cpu": True})
    stock = stock_model(HEADS, family=PLAIN)
    truths = {one: one(stock) for one in asked()}
    bounds = {one: bound(one, stock, truth) for one, truth in truths.items()}
    for layout in layouts_of(ranks):
        handle = PoolHandle(place(layout, "cpu", "gloo", ()), setup)
        try:
            patching = Patching(PATCHES, ALL_WARM) if layout.pipefusion > 1 else None
            ours = parallelize(stock, RemotePool(handle, shares_weights=layout.pipefusion == 1), 0.0, patching)
            for one, truth in truths.items():
                error = relative_error(one(ours), truth)
                yield {**record_of(layout, one), "error": error, "bound": bounds[one], "ok": error <= bounds[one]}
        finally:
            handle.close()


def record_of(layout: Layout, one: Asked) -> dict[str, Any]:
    return {"layout": layout.product(), "cfg": one.cfg, "texts": list(one.texts), "batch": one.batch}


def main(ranks: int, host: ComfyInstall, as_json: bool) -> int:
    bad = 0
    for record in compared(ranks, host):
        bad += not record["ok"]
        what = f"{record['layout']}, cfg {record['cfg']:g}, texts {record['texts']}, batch {record['batch']}"
        print(json.dumps(record) if as_json else f"{'ok ' if record['ok'] else 'BAD'} {record['error']:.2g} {what}", flush=True)
    return 1 if bad else 0
