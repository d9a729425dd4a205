"""Measure what it takes to find out whether ranks compute as an unknown ComfyUI does: the seconds
of a class's fingerprint, and of its trial, each from nothing, as for the first MODEL of a class.
``--only`` takes words of the cases: the file of a family, or the name of a class.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from statistics import median

from ...parallel_runtime.families import file_of
from ...parallel_runtime.watch.fingerprint import HostFiles
from ...pool.devices import Device
from ...pool.trial.process import try_in_process
from ..commands.fingerprints import classes
from .figures import CaseFigures, Figure, Goal, Options
from .lockstep import timed
from .pools import cpu_setup


def bench(options: Options) -> Iterator[Figure]:
    root, total, found = Path(options.host.comfyui), 0.0, list[bool]()
    setup = cpu_setup(options)

    def read(kind: str) -> bool:
        return bool(HostFiles(root).fingerprint(kind).functions)

    def compare(kind: str) -> None:
        found.append(try_in_process(setup, partial(Device, "cpu"), kind, lambda now: None)[0])

    for kind in options.choose(classes(), classes()[:1]):
        case = f"{file_of(kind)} {kind.partition(':')[2]}"
        is_asked_for = not options.only or any(word in case for word in options.only)
        if not is_asked_for or not read(kind):
            continue
        made = CaseFigures("trial", case, [timed(partial(read, kind)) for _ in range(options.rounds)])
        yield made.estimated("fingerprint_s", median, "s")
        total += (took := timed(partial(compare, kind)))
        yield made.counted("trial_s", took, "s")
        yield made.counted("is_same", found[-1], "", Goal(at_least=1))
    yield CaseFigures("trial", "all").counted("trial_s", total, "s")
