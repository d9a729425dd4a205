"""Unpacks a tar archive that is not trusted. Standard library only."""

from __future__ import annotations

import gzip
import lzma
import sys
import tarfile
import zlib
from pathlib import Path


class UnpackError(Exception):
    """An archive that is not unpacked: one sentence with the next move."""


def unpack(archive: Path, folder: Path) -> None:
    """Unpacks an archive and writes nothing outside of `folder`. Raises UnpackError."""
    if not hasattr(tarfile, "data_filter"):
        raise UnpackError(
            f"Python {sys.version.split()[0]} cannot keep the files of {archive} inside a folder: run this"
            " command with Python 3.10.12, 3.11.4, 3.12 or newer."
        )
    try:
        with tarfile.open(archive) as tar:
            tar.extractall(folder, filter="data")
    except (tarfile.TarError, EOFError, zlib.error, lzma.LZMAError, gzip.BadGzipFile) as error:
        why = str(error).partition("\n")[0].rstrip(":")
        raise UnpackError(f"{archive} cannot be unpacked ({why}): take another archive.") from error
