"""Measure a queue of four seeds: two at once, in two groups of one rank each, beside stock's one
after the other.
"""

from __future__ import annotations

from collections.abc import Iterator

from .figures import Figure, Options
from .groups import bench_of

GOAL = 0.95  # beside sampling, each result is copied, kept and compared


def bench(options: Options) -> Iterator[Figure]:
    yield from bench_of("queue", options, GOAL)
