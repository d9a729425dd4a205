"""``python3 -m lab parity --layouts N ...``: compare stock ComfyUI with the pool in every
layout of N ranks, with and without cfg, with prompts of equal and unequal length, and a batch.

A pipeline is compared twice: with all evaluations whole it is stock's, and with one whole
evaluation it is the plain loop over patches in one process.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from ...parallel_runtime.families.catalogue import PLAIN, SAMPLES
from ...parallel_runtime.layout import Layout, layouts_of
from ...pool.trial.rounding import bound, relative_error
from ...pool.trial.tiny_samples import conditioning

if TYPE_CHECKING:
    from ...launcher.comfyui.host_record import ComfyInstall

HEADS, STEPS, SEED = 5, 3, 7
BLOCKS = (3, 3)  # at least one for each of six stages
PATCHES, ALL_WARM = 3, 9999
STOCK, PLAIN_LOOP = "stock", "the plain loop over patches"


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
            return comfy.sample.sample(
                model,
                noise,
                STEPS,
                self.cfg,
                "euler",
                "simple",
                *prompts,
                latent,
                disable_pbar=True,
                seed=SEED,
            )


def asked() -> list[Asked]:
    return [Asked(*values) for values in itertools.product((1.0, 4.0), ((13, 7), (16, 16)), (1, 3))]


def stock_model() -> Any:
    sample = SAMPLES[PLAIN]
    return sample.form.random_model(replace(sample.tiny.size(HEADS), blocks=BLOCKS), 0, torch.float32)


def compared(layouts: Sequence[Layout], host: ComfyInstall) -> Iterator[dict[str, Any]]:
    """Yield a record for every layout, sampling and truth. One pool runs at a time."""
    from ...parallel_runtime.client.patch_sampling import Patching
    from ...parallel_runtime.client.remote_patcher import parallelize
    from ...parallel_runtime.client.remote_pool import RemotePool
    from ...pool.devices import place
    from ...pool.handle import PoolHandle
    from ...pool.rank_setup import RankSetup
    from ..in_process import reference

    setup = RankSetup(comfyui=host.comfyui, comfy_args={"cpu": True})
    stock, in_patches = stock_model(), reference(stock_model(), PATCHES, 1)
    truths = {(STOCK, one): one(stock) for one in asked()} | {
        (PLAIN_LOOP, one): one(in_patches) for one in asked()
    }
    bounds = {one: bound(one, stock, truths[STOCK, one]) for one in asked()}
    for layout in layouts:
        handle = PoolHandle(place(layout, "cpu", "gloo", ()), setup)
        pool, pipelined = RemotePool(handle), layout.stages > 1
        try:
            for truth, warm_up in ((STOCK, ALL_WARM), (PLAIN_LOOP, 1))[: 1 + pipelined]:
                ours = parallelize(stock, pool, 0.0, Patching(PATCHES, warm_up) if pipelined else None)
                for one in asked():
                    error = relative_error(one(ours), truths[truth, one])
                    yield {
                        **record_of(layout, truth, one),
                        "error": error,
                        "bound": bounds[one],
                        "ok": error <= bounds[one],
                    }
        finally:
            handle.close()


def record_of(layout: Layout, truth: str, one: Asked) -> dict[str, Any]:
    return {
        "layout": layout.product(),
        "held_to": truth,
        "cfg": one.cfg,
        "texts": list(one.texts),
        "batch": one.batch,
    }


def main(ranks: Sequence[int], host: ComfyInstall, as_json: bool) -> int:
    bad = 0
    for record in compared([layout for number in ranks for layout in layouts_of(number)], host):
        bad += not record["ok"]
        what = (
            f"{record['layout']}, cfg {record['cfg']:g}, texts {record['texts']}, batch {record['batch']},"
            f" held to {record['held_to']}"
        )
        print(
            (
                json.dumps(record)
                if as_json
                else f"{'ok ' if record['ok'] else 'BAD'} {record['error']:.2g} {what}"
            ),
            flush=True,
        )
    return 1 if bad else 0
