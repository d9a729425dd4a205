"""The report of the run that began last."""

from __future__ import annotations

from ..runtime import Runtime
from ..settings import Choice
from ..status.collection import pool_status, run_status
from .text import report_text


def text_of(runtime: Runtime, only: Choice | None) -> str:
    """Report the run that began last, in any pool or in ``only`` one."""
    pools, last = [pool_status(*one) for one in runtime.pools(only)], runtime.last_run(only)
    run = run_status(runtime, *last) if last is not None else None
    return report_text(
        pools, run, runtime.notices.latest(), only and only.placement, runtime.planning.ahead.images
    )
