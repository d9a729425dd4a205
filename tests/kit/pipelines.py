"""Models sampled by pipelines, the truths that they are held against, and a hook into the middle of
a run.
"""

from __future__ import annotations

from functools import cache, partial

import comfy.sample
import torch
from pipemesh.lab.commands.parity import Case, sample, stock_model
from pipemesh.lab.in_process import reference
from pipemesh.parallel_runtime.client.remote_patcher import Patching, parallelize
from pipemesh.parallel_runtime.families.catalogue import PLAIN

from .bounds import bound

ALL_WARM = 9999
HEADS = 5  # and as many blocks at least: enough for four stages, uneven ones too


def case(family=PLAIN, sampler="euler", cfg=4.0, tokens="odd", mask=False) -> Case:
    return Case(family, "ulysses1", tokens, HEADS, cfg, mask, sampler)


class Truths:
    """The results of one process, each made once: of stock, and of the reference in so many
    patches; and the bound on differences from either.
    """

    def __init__(self):
        self.stock_model = cache(lambda family: stock_model(HEADS, family=family))
        self.own_model = cache(
            lambda family, patches: reference(stock_model(HEADS, family=family), patches, 1)
        )
        self.stock = cache(lambda case: sample(self.stock_model(case.family), case))
        self.patched = cache(lambda case, patches: sample(self.own_model(case.family, patches), case))
        self.bound = cache(
            lambda case: bound(partial(sample, case=case), self.stock_model(case.family), self.stock(case))
        )
        self.rounded = cache(
            lambda case, patches: sample(reference(stock_model(HEADS, torch.bfloat16), patches, 1), case)
        )


def pipelines(clients, truths):
    """Make (family, (pipefusion, ulysses, ring), patches, warm_up) -> a MODEL sampled by a pool of
    that layout. Without a ring, two degrees will do.
    """

    def make(family, layout, patches, warm_up=1, notice=lambda mode: None):
        stages, ulysses, ring = (*layout, 1)[:3]
        patching = Patching(patches, warm_up)
        return parallelize(truths.stock_model(family), clients(ulysses, ring, stages), 0.0, patching, notice)

    return make


def broken_pipelines(broken, truths):
    """Make a mutation -> a pipeline of two stages whose ranks have it, and its pool."""

    def make(mutation, family=PLAIN, ulysses=1, ring=1):
        client = broken(mutation, ulysses, ring, 2)
        return parallelize(
            truths.stock_model(family), client, holds_ui_device=False, patching=Patching(3)
        ), client

    return make


def with_callback(model, of, act, at_step=1):
    """Sample, and call ``act`` when the last patch has come to a step: the others are on their way
    by then.
    """

    def callback(step, x0, x, total):
        if step == at_step:
            act()

    real = comfy.sample.sample
    try:
        comfy.sample.sample = lambda *args, **kwargs: real(*args, callback=callback, **kwargs)
        return sample(model, of)
    finally:
        comfy.sample.sample = real
