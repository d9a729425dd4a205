"""Files that are there whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def whole(file: Path) -> Iterator[Path]:
    """Have a file written beside its place and moved there once it is whole. Nothing stays of one
    that is interrupted or that the disk has no room for, and a file that was there stays as it was.
    """
    part = file.with_name(f"{file.name}.{os.getpid()}.part")
    try:
        yield part
        part.replace(file)
    finally:
        part.unlink(missing_ok=True)
