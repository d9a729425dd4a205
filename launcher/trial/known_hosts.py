"""The ComfyUIs that PipeMesh was tested with, by the fingerprints of the classes that have a token
plan: ``known_hosts.json``, written by ``python3 -m lab fingerprints``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

from ...parallel_runtime.watch.fingerprint import Fingerprint

FILE = Path(__file__).with_name("known_hosts.json")


@dataclass(frozen=True)
class KnownHosts:
    """``versions`` of ComfyUI. ``classes``: ``module:Class`` -> its digests in them. ``functions``:
    module -> qualified name -> digests.
    """

    versions: Sequence[str]
    classes: Mapping[str, Sequence[str]]
    functions: Mapping[str, Mapping[str, Sequence[str]]]

    def has(self, found: Fingerprint) -> bool:
        return found.digest in self.classes.get(found.kind, ())

    def unknown_in(self, found: Fingerprint) -> list[str]:
        """Returns the functions of a class that no tested ComfyUI has, as ``module:name``."""
        places = ((name, *name.split(":"), digest) for name, digest in found.functions.items())
        return sorted(
            name
            for name, module, inner, digest in places
            if digest not in self.functions.get(module, {}).get(inner, ())
        )

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=0, separators=(",", ":"), sort_keys=True) + "\n"


@cache
def known_hosts() -> KnownHosts:
    return KnownHosts(**json.loads(FILE.read_text(encoding="utf-8")))
