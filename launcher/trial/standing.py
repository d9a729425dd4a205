"""How the models of a ComfyUI stand: tested, verified here, or neither."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from ...parallel_runtime.families.every import PLANS
from ...parallel_runtime.watch.fingerprint import HostFiles
from ..cache import cache_folder
from ..comfyui.host_record import ComfyInstall
from .host_trials import FOLDER, Verdicts
from .known_hosts import known_hosts


@dataclass(frozen=True, kw_only=True)
class HostCode:
    """The classes of ComfyUI's models that the pack divides: how many there are, those that are in
    no ComfyUI of ``tested``, and those of them that were ``verified`` here, or ``refused``.
    """

    tested: tuple[str, ...]
    classes: int
    unknown: tuple[str, ...] = ()
    verified: tuple[str, ...] = ()
    refused: tuple[str, ...] = ()


def host_code(host: ComfyInstall) -> HostCode:
    known, files = known_hosts(), HostFiles(Path(host.comfyui))
    kinds = [kind for plan in PLANS for kind in plan.models if plan.blocks]
    found = [one for one in map(files.fingerprint, kinds) if one.functions]
    unknown = [one for one in found if not known.has(one)]
    kept = Verdicts(cache_folder(os.environ) / FOLDER)
    judged = [one for one in map(kept.of, unknown) if one is not None]
    return HostCode(
        tested=tuple(known.versions),
        classes=len(found),
        unknown=tuple(one.name for one in unknown),
        verified=tuple(one.name for one in judged if one.is_same),
        refused=tuple(one.name for one in judged if not one.is_same),
    )
