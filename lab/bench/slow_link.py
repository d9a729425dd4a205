"""Carry frames between two machines, which are network namespaces, as a link does that takes so
many bytes a second and some time: ``slow_link.py NAMESPACE DEVICE NAMESPACE DEVICE BYTES_PER_S
DELAY_S``. ``netem`` does so too, where a kernel has it.

It makes both devices (TAP), which go when it ends, and prints a line when they are there. Frames
have up to 64 KB: the kernel hands them over before it would segment them.
"""

import ctypes
import errno
import fcntl
import os
import select
import signal
import struct
import sys
from collections import deque
from pathlib import Path
from time import perf_counter

CLONE_NEWNET, PR_SET_PDEATHSIG = 0x40000000, 1
TUNSETIFF, TUNSETOFFLOAD = 0x400454CA, 0x400454D0
TAP = 0x0002 | 0x1000 | 0x4000  # without packet information, with a header of what is to be segmented
SEGMENTED = 1 | 2 | 4  # checksums, TCP over IPv4 and IPv6
MOST = 1 << 17  # bytes of a frame


def enter(namespace: str) -> None:
    """Have this thread open devices and connections on that machine from now on."""
    with Path("/run/netns", namespace).open() as there:
        if ctypes.CDLL(None, use_errno=True).setns(there.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "setns")


def device(namespace: str, name: str) -> int:
    enter(namespace)
    made = os.open("/dev/net/tun", os.O_RDWR)
    fcntl.ioctl(made, TUNSETIFF, struct.pack("16sH22x", name.encode(), TAP))
    fcntl.ioctl(made, TUNSETOFFLOAD, SEGMENTED)
    return made


def carry(ends: tuple[int, int], bytes_per_s: float, delay_s: float) -> None:
    other = dict(zip(ends, ends[::-1], strict=True))
    there: dict[int, deque[tuple[float, bytes]]] = {end: deque() for end in ends}  # on their way, and due
    sent_s = dict.fromkeys(ends, 0.0)  # when the last one to that end has left
    while True:
        due = [frames[0][0] for frames in there.values() if frames]
        for end in select.select(ends, (), (), max(0.0, min(due) - perf_counter()) if due else None)[0]:
            frame, to = os.read(end, MOST), other[end]
            sent_s[to] = max(sent_s[to], perf_counter()) + len(frame) / bytes_per_s
            there[to].append((sent_s[to] + delay_s, frame))
        for end, frames in there.items():
            while frames and frames[0][0] <= perf_counter():
                send(end, frames.popleft()[1])


def send(end: int, frame: bytes) -> None:
    """Hand a frame over. One to a machine whose device is not up is lost, as on a cable."""
    try:
        os.write(end, frame)
    except OSError as error:
        if error.errno != errno.EIO:
            raise


if __name__ == "__main__":
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    near, at_near, far, at_far, speed, delay = sys.argv[1:]
    both = device(near, at_near), device(far, at_far)
    print("joined", flush=True)
    carry(both, float(speed), float(delay))
