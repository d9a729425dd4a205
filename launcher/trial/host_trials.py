"""Decides whether ranks may compute a class of this ComfyUI: at once where it is one that PipeMesh
was tested with, else when it has been compared with stock on the CPU, once.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

import torch

from ...parallel_runtime.errors import Refused, RunCancelled
from ...parallel_runtime.families import plan_for
from ...parallel_runtime.watch.fingerprint import Fingerprint, HostFiles
from .known_hosts import KnownHosts, known_hosts

PACK = Path(__file__).resolve().parents[2]
POLL_S = 0.05
NAMED = 2  # functions that a notice names
TURN_OFF = "set PIPEMESH_TRIAL=0 to sample it all the same, or update PipeMesh"
log = logging.getLogger("pipemesh")


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Whether ranks compute a class, ``module:Class``, of a ComfyUI as stock does. ``says``: the
    comparison that it rests on.
    """

    kind: str
    comfyui: str
    is_same: bool
    says: str
    seconds: float = 0.0

    @property
    def name(self) -> str:
        return self.kind.partition(":")[2]


class TrialLost(Exception):
    """A class could not be tried, for the reason given: another time it may be."""


# Tries a class, and is told what to call with each thing that was compared. Raises TrialLost
TryClass = Callable[[str, Callable[[str], None]], tuple[bool, str]]


class VerdictFile:
    """The verdicts that a machine keeps, by what they depend on."""

    def __init__(self, path: Path):
        self._path = path

    def read(self) -> dict[str, Verdict]:
        """Returns what is there; nothing where it cannot be read."""
        try:
            return {key: Verdict(**one) for key, one in json.loads(self._path.read_bytes()).items()}
        except (OSError, ValueError, TypeError):
            return {}

    def keep(self, key: str, verdict: Verdict) -> None:
        """Adds one. It is known until ComfyUI ends where it cannot be written."""
        every = {name: asdict(one) for name, one in {**self.read(), key: verdict}.items()}
        with suppress(OSError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile("w", dir=self._path.parent, delete=False) as file:
                json.dump(every, file, indent=1)
            os.replace(file.name, self._path)


VERDICTS = "trials.json"  # in the cache folder


def kept_verdicts(cache: Path, found: Iterable[Fingerprint]) -> list[Verdict]:
    """Returns the verdicts on these classes that this machine keeps, for this pack and torch."""
    kept = VerdictFile(cache / VERDICTS).read()
    return [kept[key] for key in map(key_of, found) if key in kept]


def key_of(found: Fingerprint) -> str:
    """Returns what a verdict on a class depends on."""
    return f"{found.kind} {found.digest} pack {pack_digest()} torch {torch.__version__}"


class Trials:
    """Tries classes of a ComfyUI of this ``version``, one after the other, each in a thread that
    ends with it. ``tell`` is told what is compared.
    """

    def __init__(
        self,
        version: str,
        try_class: TryClass,
        file: VerdictFile,
        tell: Callable[[str], None] = lambda text: None,
    ):
        self.version = version
        self._try = try_class
        self._file = file
        self._tell = tell
        self._turn = threading.Lock()

    def kept(self, found: Fingerprint) -> Verdict | None:
        return self._file.read().get(key_of(found))

    def begin(self, found: Fingerprint) -> Future[Verdict]:
        future: Future[Verdict] = Future()
        threading.Thread(target=self._run, args=(found, future), name="pipemesh-trial", daemon=True).start()
        return future

    def _run(self, found: Fingerprint, future: Future[Verdict]) -> None:
        with self._turn:
            began = time.monotonic()
            try:
                is_same, says = self._try(
                    found.kind,
                    lambda what: self._tell(
                        f"PipeMesh: {found.name} is compared with stock on the CPU, {what}"
                    ),
                )
            except Exception as error:  # noqa: BLE001 - whatever it is, a sampling waits for this future
                log.warning("[PipeMesh] %s could not be compared with stock: %s", found.name, error)
                future.set_exception(error)
                return
            seconds = round(time.monotonic() - began, 1)
        verdict = Verdict(kind=found.kind, comfyui=self.version, is_same=is_same, says=says, seconds=seconds)
        self._file.keep(key_of(found), verdict)
        said = "verified on the CPU" if is_same else "NOT the same"
        log.info("[PipeMesh] %s of ComfyUI %s: %s, %.0f s. %s", found.name, self.version, said, seconds, says)
        future.set_result(verdict)


class HostTrials:
    """Every class of the ComfyUI in a folder that was asked for. May be asked from any thread.
    ``notice`` is told what a user should know. Where it is not ``is_on``, all may be computed.
    """

    def __init__(
        self,
        comfyui: Path,
        trials: Trials,
        *,
        is_on: bool = True,
        notice: Callable[[str], None] = lambda text: None,
        known: Callable[[], KnownHosts] = known_hosts,
    ):
        self._files = HostFiles(comfyui)
        self._trials = trials
        self._is_on = is_on
        self._notice = notice
        self._known = known
        self._lock = threading.Lock()
        self._begun: dict[str, Future[Verdict] | None] = {}  # None: as in a ComfyUI that was tested

    @property
    def version(self) -> str:
        return self._trials.version

    def verdicts(self) -> tuple[Verdict, ...]:
        """Returns those of classes that were asked for and that no tested ComfyUI has."""
        done = [one for one in list(self._begun.values()) if one is not None and one.done()]
        return tuple(one.result() for one in done if one.exception() is None)

    def pending(self) -> tuple[str, ...]:
        """Returns the names of classes that are being compared."""
        return tuple(
            kind.partition(":")[2]
            for kind, one in list(self._begun.items())
            if one is not None and not one.done()
        )

    def begin(self, transformer: type) -> Future[Verdict] | None:
        """Begins the trial of a class that is not known, unless it has begun; None where nothing
        has to be tried: a class without blocks that are cut is computed as it is.
        """
        plan = plan_for(transformer)
        if not self._is_on or plan is None or not plan.blocks:
            return None
        kind = f"{transformer.__module__}:{transformer.__qualname__}"
        with self._lock:
            begun = self._begun.get(kind)
            if kind not in self._begun or (
                begun is not None and begun.done() and begun.exception() is not None
            ):
                begun = self._begun[kind] = self._judged(self._files.fingerprint(kind))
            return begun

    def require(self, transformer: type) -> None:
        """Raises Refused unless a class may be computed by ranks now."""
        if (judged := self.begin(transformer)) is None:
            return
        if not judged.done():
            raise Refused(
                f"{transformer.__name__} of this ComfyUI ({self.version}) is being compared with stock on"
                " the CPU, once."
            )
        self._require_same(transformer, judged)

    def admit(self, transformer: type, interrupted: Callable[[], bool]) -> None:
        """Waits until a class may be computed by ranks. Raises Refused where it may not,
        RunCancelled.
        """
        if (judged := self.begin(transformer)) is None:
            return
        while not judged.done():
            if interrupted():
                raise RunCancelled("The run was cancelled.")
            wait([judged], POLL_S)
        self._require_same(transformer, judged)

    def _require_same(self, transformer: type, judged: Future[Verdict]) -> None:
        name = f"{transformer.__name__} of this ComfyUI ({self.version})"
        if (lost := judged.exception()) is not None:
            raise Refused(f"{name} could not be compared with stock ({lost}): {TURN_OFF}.")
        if not judged.result().is_same:
            raise Refused(
                f"{name} is not computed in workers as by ComfyUI alone ({judged.result().says}): {TURN_OFF}."
            )

    def _judged(self, found: Fingerprint) -> Future[Verdict] | None:
        if self._known().has(found):
            return None
        if (kept := self._trials.kept(found)) is not None:
            future: Future[Verdict] = Future()
            future.set_result(kept)
            return future
        unknown = self._known().unknown_in(found)
        named = ", ".join(one.partition(":")[2] for one in unknown[:NAMED])
        more = f" and {len(unknown) - NAMED} more" if len(unknown) > NAMED else ""
        differs = f" ({named}{more} differ)" if unknown else ""
        self._notice(
            f"{found.name} of this ComfyUI ({self.version}) is not the one that PipeMesh was tested"
            f" with{differs}: it is compared with stock on the CPU, once."
        )
        return self._trials.begin(found)


@cache
def pack_digest() -> str:
    """Returns a name of PipeMesh's own code that computes: another one is tried anew."""
    hashed = hashlib.blake2b(digest_size=8)
    for folder in ("launcher", "parallel_runtime"):
        for file in sorted((PACK / folder).rglob("*.py")):
            hashed.update(file.read_bytes())
    return hashed.hexdigest()
