"""Measure the data axis: two images of a batch in two groups of one rank each, beside stock's batch
of two.
"""

from __future__ import annotations

from collections.abc import Iterator

from .figures import Figure, Options
from .groups import bench_of


def bench(options: Options) -> Iterator[Figure]:
    yield from bench_of("data", options)
