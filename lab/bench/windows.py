"""Measure context windows: two of one image, in two groups of one rank each, beside stock's two in
turn.
"""

from __future__ import annotations

from collections.abc import Iterator

from .figures import Figure, Options
from .groups import bench_of


def bench(options: Options) -> Iterator[Figure]:
    yield from bench_of("windows", options, goal=0.95)
