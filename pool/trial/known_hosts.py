"""The ComfyUIs that PipeMesh was tested with, by the fingerprints of the classes that have a token
plan: ``known_hosts.json``, written by ``python3 -m lab fingerprints``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ...parallel_runtime.watch.fingerprint import Fingerprint

FILE = Path(__file__).with_name("known_hosts.json")
# ComfyUI's modules with a type for each form of a model; several may have the same transformer
OF_TYPES = ("comfy.model_base", "comfy.supported_models")


@dataclass(frozen=True)
class KnownHosts:
    """``versions`` of ComfyUI. ``classes``: ``module:Class`` -> its digests in them. ``types``: the
    names of all types of models.
    """

    versions: Sequence[str]
    classes: Mapping[str, Sequence[str]]
    types: Sequence[str] = ()

    def has(self, found: Fingerprint) -> bool:
        return found.digest in self.classes.get(found.kind, ())

    def new_among(self, types: Sequence[type]) -> str:
        """Returns the first type of ComfyUI's that no tested one has, by name; empty for none."""
        new = [one.__name__ for one in types if one.__module__ in OF_TYPES and one.__name__ not in self.types]
        return new[0] if new else ""


@cache
def known_hosts() -> KnownHosts:
    return KnownHosts(**json.loads(FILE.read_text(encoding="utf-8")))


def untested(version: str, *, is_tried: bool) -> str:
    """Returns a warning if PipeMesh was not tested with this ComfyUI; empty if it was. With
    ``is_tried``, classes that differ are compared with stock.
    """
    tested = known_hosts().versions
    if version in tested:
        return ""
    what = (
        "models whose code differs are compared with stock on the CPU, once, before a pool computes them"
        if is_tried
        else "with PIPEMESH_TRIAL=0 it samples all the same and compares no images"
    )
    return f"ComfyUI {version} is not one that PipeMesh was tested with ({', '.join(tested)}): {what}."
