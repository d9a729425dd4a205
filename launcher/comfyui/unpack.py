"""Unpack a tree of plain files from a tar archive that is not trusted. Standard library only."""

from __future__ import annotations

import lzma
import shutil
import tarfile
import zlib
from pathlib import Path, PurePosixPath

from ..errors import LaunchError

NOT_IN_A_NAME = ("\\", ":", "\0")  # a part with one of these is a path, a drive or a stream on some system


def unpack_folder(archive: Path, inside: str, target: Path) -> None:
    """Unpacks the files under `<top>/<inside>/` of a tar archive into `target`; all under `<top>/`
    where `inside` is empty. Nothing is ever written outside of `target`. Raises LaunchError.

    The names are judged here, not by tarfile's `filter`, which early releases of Python 3.10 and
    3.11 do not have. No link is made, so no member can lead out by another one.
    """
    wanted = PurePosixPath(inside).parts
    try:
        with tarfile.open(archive) as tar:
            for member in tar:
                if leads_out(member.name):
                    leads = "which leads out of the folder that it is unpacked into"
                    raise _refusal(archive, f"holds {member.name!r}, {leads}")
                below = PurePosixPath(member.name).parts[1:]
                if below[: len(wanted)] != wanted or member.isdir() or len(below) == len(wanted):
                    continue
                source = tar.extractfile(member) if member.isfile() else None
                if source is None:
                    raise _refusal(archive, f"holds {member.name}, which is no plain file")
                path = target.joinpath(*below[len(wanted) :])
                path.parent.mkdir(parents=True, exist_ok=True)
                with source, path.open("wb") as out:
                    shutil.copyfileobj(source, out)
    except (tarfile.TarError, EOFError, zlib.error, lzma.LZMAError, OSError) as error:
        if getattr(error, "errno", None) is not None:
            raise  # without a number, gzip and bz2 say so that the data is none of theirs
        why = str(error).splitlines()[0].rstrip(":")
        raise _refusal(archive, f"is no whole tar archive ({why})") from error


def leads_out(name: str) -> bool:
    """True for the name of a member that is not below its folder on every system."""
    path = PurePosixPath(name)
    return path.is_absolute() or ".." in path.parts or any(mark in name for mark in NOT_IN_A_NAME)


def _refusal(archive: Path, why: str) -> LaunchError:
    return LaunchError(f"{archive} {why}: take another archive of ComfyUI's tree.")
