"""Main memory: how much a process may take, how freed blocks go back to the system, and which pages
were written to.
"""

from __future__ import annotations

import ctypes
import fcntl
import io
import os
import re
import struct
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import NamedTuple

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
ENTRY_BYTES = 8  # of /proc/self/pagemap, one a page
UNTOUCHED, FILE_PAGE = 0b000, 0b101  # its three highest bits: present, swapped out, page of a file
# Of <linux/fs.h>: the call, PAGE_IS_FILE, and PAGE_IS_PRESENT or PAGE_IS_SWAPPED
PAGEMAP_SCAN, NO_FILE, IN_USE = 0xC0606610, 1 << 2, 1 << 3 | 1 << 4


# Of a control group, in each of their two versions: its limit, what it uses, and what stands before
# the names of its pages of files in memory.stat, those of the groups inside it among them
GROUP_FILES = {
    "cgroup2": ("memory.max", "memory.current", ""),
    "cgroup": ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
}


def system_memory(proc: Path = Path("/proc")) -> tuple[int, int]:
    """Returns (available, total) bytes of main memory for this process: the machine's, or its
    container's if that may take less.

    Available is more than free: the page cache, full of mapped checkpoints, gives way.
    """
    with (proc / "meminfo").open(encoding="ascii") as lines:
        first = [line.split() for line in islice(lines, 3)]  # MemTotal, MemFree, MemAvailable
    groups = [memory for folder, kind in control_groups(proc) for memory in group_memory(folder, kind)]
    available, total = zip((int(first[2][1]) << 10, int(first[0][1]) << 10), *groups, strict=True)
    return min(available), min(total)


def group_memory(folder: Path, kind: str) -> Iterator[tuple[int, int]]:
    """Yields (available, limit) bytes of a control group, nothing if it has no limit or its files
    cannot be read. All its pages of files give way before the kernel ends a process, those that
    were read twice (active) too.
    """
    limit, used, names = GROUP_FILES[kind]
    try:
        most = (folder / limit).read_text().strip()
        if most != "max":
            pages = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
            of_files = int(pages[f"{names}inactive_file"]) + int(pages[f"{names}active_file"])
            yield max(0, int(most) - int((folder / used).read_text()) + of_files), int(most)
    except (OSError, ValueError, KeyError):
        return  # the machine's own group has none of these files


def control_groups(proc: Path) -> Iterator[tuple[Path, str]]:
    """Yields the folder of each control group that this process's memory counts in, and its version
    (a key of ``GROUP_FILES``): its own group, and all around it that are mounted here. Lines of
    another form are passed over.
    """
    try:
        own = (proc / "self/cgroup").read_text(errors="surrogateescape").splitlines()
        mounts = (proc / "self/mountinfo").read_text(errors="surrogateescape").splitlines()
    except FileNotFoundError:
        return  # a system without control groups
    paths = {}
    for _number, controllers, path in (line.split(":", 2) for line in own if line.count(":") > 1):
        if not controllers or "memory" in controllers.split(","):
            paths["cgroup" if controllers else "cgroup2"] = path
    for mount in mounts:
        fields = mount.split(" ")
        try:
            # Docker Desktop's mounts on WSL have options with spaces: path=C:\Program Files\Docker
            kind, _source, *_spaced, options = fields[fields.index("-") + 1 :]
            root, folder = map(unescaped, fields[3:5])
        except ValueError:
            continue
        if kind not in paths or (kind == "cgroup" and "memory" not in options.split(",")):
            continue
        path = Path(paths[kind])
        # A path outside of the mount is another name space's: the mount is the container's own
        inside = path.relative_to(root).parts if path.is_relative_to(root) and ".." not in path.parts else ()
        yield from ((folder.joinpath(*inside[:depth]), kind) for depth in range(len(inside) + 1))


def unescaped(path: str) -> Path:
    """Returns a path of mountinfo, which writes a space as backslash, 040."""
    return Path(re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), path))


def give_back_freed() -> None:
    """Returns freed blocks, of which glibc keeps many MiB in its heap, to the system."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


class Mapping(NamedTuple):
    """Pages of a file in this process. ``is_told``: nobody else can write to them, so that
    ``is_unwritten`` tells of all writes.
    """

    addresses: range
    is_told: bool


def mapped_files() -> list[Mapping]:
    """Returns all mappings of files, by address. Shared memory is none: it is writable, and its
    file has no name any more.
    """
    found = []
    for line in Path("/proc/self/maps").read_bytes().split(b"\n"):  # a path may have any bytes
        parts = line.split(maxsplit=5)
        if len(parts) < 6 or parts[4] == b"0":
            continue
        is_told = parts[1].endswith(b"p") or b"w" not in parts[1]
        if is_told or not parts[5].endswith(b" (deleted)"):
            found.append(Mapping(range(*(int(end, 16) for end in parts[0].split(b"-"))), is_told))
    return found


def pages_of(spans: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Returns the whole pages on which spans (address, bytes) lie, each once, in as few spans."""
    pages: list[tuple[int, int]] = []
    for address, nbytes in sorted(spans):
        start, end = address // PAGE_BYTES * PAGE_BYTES, -(-(address + nbytes) // PAGE_BYTES) * PAGE_BYTES
        if pages and start <= sum(pages[-1]):
            start = pages[-1][0]
            end = max(end, sum(pages.pop()))
        pages.append((start, end - start))
    return pages


def is_unwritten(address: int, nbytes: int) -> bool:
    """True if no page of a privately mapped file was written to since it was mapped.

    The first write to such a page gives the process a copy that is no page of a file, whoever
    writes and however. False where the system does not tell.
    """
    first, last = address // PAGE_BYTES, (address + nbytes - 1) // PAGE_BYTES
    try:
        with open("/proc/self/pagemap", "rb", buffering=0) as pagemap:
            try:
                return not has_own_page(pagemap.fileno(), first * PAGE_BYTES, (last + 1) * PAGE_BYTES)
            except OSError:  # a kernel before 6.7
                return are_pages_of_files(pagemap, first, last + 1)
    except OSError:
        return False


def has_own_page(pagemap: int, start: int, end: int) -> bool:
    """Asks the kernel for the first page in this range of addresses that is this process's own. It
    looks through 24 GiB in milliseconds, and copies nothing. Raises OSError if it has no such
    call (linux/fs.h: PAGEMAP_SCAN, struct pm_scan_arg, since Linux 6.7).
    """
    region = (ctypes.c_uint64 * 3)()
    looked_for = NO_FILE, NO_FILE, IN_USE, IN_USE  # inverted, all of, any of, told
    scan = struct.pack("12Q", 96, 0, start, end, 0, ctypes.addressof(region), 1, 1, *looked_for)
    return fcntl.ioctl(pagemap, PAGEMAP_SCAN, bytearray(scan)) > 0


def are_pages_of_files(pagemap: io.RawIOBase, first: int, end: int) -> bool:
    """Reads the same from eight bytes for each page: 48 MiB for 24 GiB."""
    pagemap.seek(first * ENTRY_BYTES)
    entries = pagemap.read((end - first) * ENTRY_BYTES) or b""
    kinds = {highest >> 5 for highest in set(entries[ENTRY_BYTES - 1 :: ENTRY_BYTES])}
    return len(entries) == (end - first) * ENTRY_BYTES and kinds <= {UNTOUCHED, FILE_PAGE}
