"""The report and the picture of the run that began last."""

from __future__ import annotations

from PIL.Image import Image

from ...parallel_runtime.client.run_picture import draw_run
from ..runtime import Runtime
from ..settings import Choice
from ..status.collection import pool_status, run_status
from .text import plan_heads, report_text


def text_of(runtime: Runtime, only: Choice | None) -> str:
    """Report the run that began last, in any pool or in ``only`` one."""
    pools, last = [pool_status(*one) for one in runtime.pools(only)], runtime.last_run(only)
    run = run_status(runtime, *last) if last is not None else None
    return report_text(
        pools, run, runtime.notices.latest(), only and only.placement, runtime.planning.ahead.images
    )


def draw_last_run(runtime: Runtime, only: Choice | None = None) -> Image | None:
    """Draw the run that began last, in any pool or in ``only`` one. None unless it was sampled in
    patches, over gloo: NCCL works beside the clock that ranks look at.
    """
    last = runtime.last_run(only)
    if last is None or last[0].placement.backend == "nccl":
        return None
    handle, pool, run = last
    names = [f"{rank} {device.name}" for rank, device in enumerate(handle.placement.devices)]
    return draw_run(names, list(run.evaluations), plan_heads(run_status(runtime, handle, pool, run).plan))
