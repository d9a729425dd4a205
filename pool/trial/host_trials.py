"""Decides whether ranks may compute a model class of this ComfyUI: at once if PipeMesh was tested
with that class, else after one comparison with stock on the CPU.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.metadata
import json
import logging
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch

from ...parallel_runtime.client.first_results import FirstResults
from ...parallel_runtime.client.shared_evaluation import Judge, SharedEvaluation
from ...parallel_runtime.errors import ModelError, OutOfMemory, PoolSpent, Refused, RunCancelled
from ...parallel_runtime.families import FILES, plan_for, samples_for
from ...parallel_runtime.families.unplanned_models import class_path
from ...parallel_runtime.layout import Layout
from ...parallel_runtime.watch.fingerprint import Fingerprint, HostFiles, host_files
from ...parallel_runtime.watch.python_file import tree_text
from ...parallel_runtime.weights.quantisation import dtypes_of
from ...parallel_runtime.wire.messages import TrialStep
from .known_hosts import KnownHosts, known_hosts
from .rounding import deviation_of

PACK = Path(__file__).resolve().parents[2]
RUNTIME, TRIAL = "parallel_runtime", "pool/trial"
NOT_IN_RANKS = ("client", "planner", "watch")  # folders of the runtime that compute nothing of a model
POLL_S = 0.05
TURN_OFF = "update PipeMesh, or set PIPEMESH_TRIAL=0 (images may then be wrong)"
NOT_AGAIN = "The comparison ended the pool, so PipeMesh does not try it again until you restart ComfyUI."
FOLDER = "trials"  # of the cache folder
log = logging.getLogger("pipemesh")


@dataclass(frozen=True)
class Verdict:
    """Whether ranks compute a class, ``module:Class``, of a ComfyUI as stock does. ``digest``: of
    its code. ``says``: the comparison that it rests on.
    """

    kind: str
    digest: str
    comfyui: str
    is_same: bool
    says: str
    seconds: float = 0.0

    @property
    def name(self) -> str:
        return self.kind.partition(":")[2]


@dataclass(frozen=True, kw_only=True)
class HostCode:
    """Counts the ``classes`` of ComfyUI's models that the pack divides. ``unknown`` are in no
    ComfyUI of ``tested``; of these, some were ``verified`` here, some ``refused``.
    """

    tested: tuple[str, ...]
    classes: int
    unknown: tuple[str, ...] = ()
    verified: tuple[str, ...] = ()
    refused: tuple[str, ...] = ()


class TrialLost(Exception):
    """A class could not be tried, for the given reason. A later trial may succeed."""


BEGINNING = TrialStep(text="its workers start", done=0, total=1)
# Tries a class, and is told what to call when something is compared. Raises TrialLost
TryClass = Callable[[str, Callable[[TrialStep], None]], tuple[bool, str]]


class Verdicts:
    """The verdicts that a machine keeps: a file each in a folder, so that two ComfyUIs write none
    at once.
    """

    def __init__(self, folder: Path):
        self._folder = folder

    def of(self, found: Fingerprint) -> Verdict | None:
        """Returns the verdict on a class; None if there is no readable one."""
        try:
            return Verdict(**json.loads(self._file(found).read_bytes()))
        except (OSError, ValueError, TypeError):
            return None

    def void_on(self, found: Fingerprint) -> list[Path]:
        """Returns the files of verdicts on a class, each of which holds for some other code."""
        return [one for one in self._folder.glob("*.json") if f'"{found.kind}"'.encode() in bytes_of(one)]

    def keep(self, found: Fingerprint, verdict: Verdict) -> None:
        """Writes a verdict. If it cannot be written, it holds until ComfyUI ends."""
        file = self._file(found)
        with suppress(OSError):
            self._folder.mkdir(parents=True, exist_ok=True)
            new = file.with_suffix(f".{os.getpid()}")
            try:
                new.write_text(json.dumps(asdict(verdict), indent=1), encoding="utf-8")
                new.replace(file)
            finally:
                new.unlink(missing_ok=True)

    def _file(self, found: Fingerprint) -> Path:
        """The file of all that a verdict on a class depends on."""
        made_by = f"pack {pack_digest()} torch {torch.__version__} kitchen {kitchen_version()}"
        key = f"{found.kind} {found.digest} {made_by}"
        return self._folder / f"{hashlib.blake2b(key.encode(), digest_size=16).hexdigest()}.json"


def host_code(comfyui: Path, kept: Verdicts) -> HostCode:
    """Returns how the models of the ComfyUI in a folder stand."""
    known, files = known_hosts(), HostFiles(comfyui)
    found = [one for one in map(files.fingerprint, FILES) if one.functions]
    unknown = [one for one in found if not known.has(one)]
    judged = [one for one in map(kept.of, unknown) if one is not None]
    return HostCode(
        tested=tuple(known.versions),
        classes=len(found),
        unknown=tuple(one.name for one in unknown),
        verified=tuple(one.name for one in judged if one.is_same),
        refused=tuple(one.name for one in judged if not one.is_same),
    )


def kitchen_version() -> str:
    """Returns the version of comfy-kitchen, which has ComfyUI's kernels; empty if it is not
    installed.
    """
    try:
        return importlib.metadata.version("comfy-kitchen")
    except importlib.metadata.PackageNotFoundError:
        return ""


class HostTrials:
    """Every class of the ComfyUI in a folder, of this ``version``, that was asked for. May be asked
    from any thread. ``try_class`` tries one class after the other, each in a thread of its own;
    without it, ranks may compute every class. ``notice`` takes messages to the user.
    """

    def __init__(
        self,
        comfyui: Path,
        version: str,
        try_class: TryClass | None,
        kept: Verdicts,
        *,
        notice: Callable[[str], None] = lambda text: None,
        known: Callable[[], KnownHosts] = known_hosts,
    ):
        self.version = version
        self._found = cache(host_files(comfyui.resolve()).fingerprint)
        self._try_class = try_class
        self._kept = kept
        self.firsts = FirstResults(notice=notice)
        self._known = known
        self._now = BEGINNING
        self._lock = threading.Lock()
        self._turn = threading.Lock()
        self._begun: dict[str, Future[Verdict] | None] = {}  # None: not to be compared

    def verdicts(self) -> tuple[Verdict, ...]:
        """Returns the verdicts on classes that were asked for and that no tested ComfyUI has."""
        done = [one for one in list(self._begun.values()) if one is not None and one.done()]
        return tuple(one.result() for one in done if one.exception() is None)

    def pending(self) -> tuple[str, ...]:
        """Returns the names of classes that are being compared."""
        begun = list(self._begun.items())
        return tuple(kind.partition(":")[2] for kind, one in begun if one is not None and not one.done())

    def begin(self, transformer: type, again: bool = False) -> Future[Verdict] | None:
        """Begins the trial of an unknown class, unless it has begun. None if nothing has to be
        tried: a class whose blocks are not cut is computed as it is. With ``again`` a lost trial
        begins once more. Raises Refused if ComfyUI's files cannot be read.
        """
        plan = plan_for(transformer)
        if self._try_class is None or plan is None or not plan.blocks:
            return None
        kind = class_path(transformer)
        with self._lock:
            begun = self._begun.get(kind)
            is_lost = begun is not None and begun.done() and begun.exception() is not None
            if kind not in self._begun or (again and is_lost):
                begun = self._begun[kind] = self._judged(self._found(kind))
            return begun

    def require(self, transformer: type, model: Any = None) -> None:
        """Raises Refused unless a class may be computed by ranks now, in the form that a BaseModel
        of ComfyUI's has.
        """
        if (judged := self._of_known_form(transformer, model)) is None:
            return
        if not judged.done():
            raise Refused(
                f"{transformer.__name__} of this ComfyUI ({self.version}) is being compared with stock on"
                " the CPU, once."
            )
        self._require_same(transformer, judged)

    def admit(
        self,
        transformer: type,
        interrupted: Callable[[], bool],
        tell: Callable[[TrialStep], None] = lambda now: None,
        model: Any = None,
    ) -> None:
        """Waits until a class may be computed by ranks, and tells how far its comparison is. Raises
        Refused if it may not, RunCancelled.
        """
        if (judged := self._of_known_form(transformer, model, again=True)) is None:
            return
        while not judged.done():
            if interrupted():
                raise RunCancelled("The run was cancelled.")
            tell(self._now)
            wait([judged], POLL_S)
        self._require_same(transformer, judged)

    def _of_known_form(self, transformer: type, model: Any, again: bool = False) -> Future[Verdict] | None:
        """Begins as ``begin`` does. A trial compares the samples' forms. Raises Refused for a form
        that no sample and no tested ComfyUI has, because it may run other code of the class.
        """
        judged = self.begin(transformer, again)
        if judged is None or model is None:
            return judged
        config = type(model.model_config)
        samples = samples_for(class_path(transformer))
        is_compared = config.__name__ in [one.form.config_class for one in samples]
        if not is_compared and (new := self._known().new_among((type(model), config))):
            raise Refused(
                f"{new} of this ComfyUI ({self.version}) is a new form of {transformer.__name__}, and no"
                f" comparison with stock covers it: {TURN_OFF}."
            )
        return judged

    def first(self, model: Any, layout: Layout) -> Judge | None:
        """Returns the judge of the first evaluation of a BaseModel that ranks share, once for each
        class and number format. None for a class of a tested ComfyUI, and if it was judged already.
        If the evaluation differs, the class is refused as after a trial.
        """
        transformer = type(model.diffusion_model)
        if self.begin(transformer) is None:
            return None
        kind, numbers = class_path(transformer), dtypes_of(model)
        name = f"{kind} in {numbers}"
        with self._lock:
            if name in self._begun:
                return None
            found = self._found(kind)
            if (kept := self._kept.of(replace(found, kind=name))) is not None:
                self._begun[name] = done(kept)
                return None

        def judge(shared: SharedEvaluation) -> None:
            try:
                error = deviation_of(shared, numbers)
            except PoolSpent as lost:
                self._begun[name] = None
                self.not_judged(model, str(lost), NOT_AGAIN)
                return
            except (OutOfMemory, ModelError, Refused) as lost:
                self.not_judged(model, str(lost))
                return
            how = "" if error.computed_in == numbers else f", computed in {error.computed_in}"
            says = (
                f"its first evaluation in {numbers} with {layout.product()}{how}: off by {error.size:.2g} of"
                f" its scale from that of one worker, up to {error.allowed:.2g} is rounding"
            )
            judged = replace(found, kind=name) if error.is_rounding else found
            self._begun[judged.kind] = done(self._verdict(judged, error.is_rounding, says))
            if not error.is_rounding:
                self.require(transformer)

        return judge

    def not_judged(self, model: Any, why: str, *next_time: str) -> None:
        """Tells the user, once for its class and numbers, that the first evaluation of such a
        BaseModel could not be judged. Every run tries again to judge it, unless the comparison
        ended the pool: it would end the next pool too.
        """
        name = f"{type(model.diffusion_model).__name__} in {dtypes_of(model)}"
        self.firsts.not_judged(
            f"The first evaluation of {name} that workers shared, on an untested ComfyUI ({self.version}),",
            why,
            *next_time,
        )

    def _require_same(self, transformer: type, judged: Future[Verdict]) -> None:
        name = f"{transformer.__name__} of this ComfyUI ({self.version})"
        if (lost := judged.exception()) is not None:
            raise Refused(f"{name} could not be compared with stock ({lost}): {TURN_OFF}.")
        verdict = judged.result()
        if not verdict.is_same:
            raise Refused(
                f"{name} is computed otherwise in workers than by ComfyUI alone ({verdict.says}; its code is"
                f" {verdict.digest}, PipeMesh's {pack_digest()}): {TURN_OFF}."
            )

    def _judged(self, found: Fingerprint) -> Future[Verdict] | None:
        if self._known().has(found):
            return None
        if (kept := self._kept.of(found)) is not None:
            return done(kept)
        if void := self._kept.void_on(found):
            log.info(
                "[PipeMesh] No saved verdict on %s counts here: the %d in %s are of another PipeMesh, torch"
                " or ComfyUI.",
                found.name,
                len(void),
                void[0].parent,
            )
        self.firsts.tell(
            found.kind,
            f"{found.name} of this ComfyUI ({self.version}) is not the one that PipeMesh was tested"
            " with: it is compared with stock on the CPU, once.",
        )
        future: Future[Verdict] = Future()
        threading.Thread(
            target=self._compare, args=(found, future), name="pipemesh-trial", daemon=True
        ).start()
        return future

    def _compare(self, found: Fingerprint, future: Future[Verdict]) -> None:
        assert self._try_class is not None
        with self._turn:
            began, self._now = time.monotonic(), BEGINNING
            try:
                is_same, says = self._try_class(found.kind, lambda now: setattr(self, "_now", now))
                future.set_result(self._verdict(found, is_same, says, round(time.monotonic() - began, 1)))
            except Exception as error:  # noqa: BLE001 - whatever it is, a sampling waits for this future
                log.warning("[PipeMesh] %s could not be compared with stock: %s", found.name, error)
                future.set_exception(error)

    def _verdict(self, found: Fingerprint, is_same: bool, says: str, seconds: float = 0.0) -> Verdict:
        """Keeps the verdict on a class."""
        verdict = Verdict(found.kind, found.digest, self.version, is_same, says, seconds)
        self._kept.keep(found, verdict)
        said = "verified" if is_same else "NOT the same"
        took = f", {seconds:.0f} s" if seconds else ""
        log.info("[PipeMesh] %s of ComfyUI %s: %s%s. %s", found.name, self.version, said, took, says)
        return verdict


def bytes_of(file: Path) -> bytes:
    """Returns the content of a file; nothing if it cannot be read."""
    try:
        return file.read_bytes()
    except OSError:
        return b""


def done(verdict: Verdict) -> Future[Verdict]:
    future: Future[Verdict] = Future()
    future.set_result(verdict)
    return future


@cache
def pack_digest(pack: Path = PACK) -> str:
    """Returns a digest of PipeMesh's own code that computes and compares; if it changes, classes
    are tried anew. It hashes syntax trees without docstrings, so that a new comment changes
    nothing.
    """
    runtime = pack / RUNTIME
    files = [one for one in runtime.rglob("*.py") if one.relative_to(runtime).parts[0] not in NOT_IN_RANKS]
    files += (pack / TRIAL).glob("*.py")
    hashed = hashlib.blake2b(digest_size=8)
    for file in sorted(files):
        text = tree_text(ast.parse(file.read_bytes()))
        hashed.update(f"{file.relative_to(pack).as_posix()}\n{text}\n".encode())
    return hashed.hexdigest()
