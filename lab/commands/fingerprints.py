"""``python3 -m lab fingerprints``: writes what PipeMesh knows of the ComfyUI that the commands run
on into ``pool/trial/known_hosts.json``, once all that faces the host has passed on it; with
``--anew`` of that one alone.
"""

from __future__ import annotations

import argparse
import ast
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from ...launcher.comfyui.host_record import ComfyInstall
from ...parallel_runtime.families import FILES
from ...parallel_runtime.watch.fingerprint import HostFiles
from ...pool.trial.known_hosts import FILE, OF_TYPES, KnownHosts, known_hosts

NOTHING = KnownHosts((), {})


def classes() -> list[str]:
    return sorted(FILES)


def with_host(known: KnownHosts, version: str, root: Path, kinds: Sequence[str] | None = None) -> KnownHosts:
    """Returns what is known, and this ComfyUI: of these classes, or of all."""
    files, digests = HostFiles(root), {kind: [*found] for kind, found in known.classes.items()}
    for kind in classes() if kinds is None else kinds:
        found = files.fingerprint(kind)
        if not found.functions:
            continue
        if found.digest not in digests.setdefault(kind, []):
            digests[kind].append(found.digest)
    types = {name for module in OF_TYPES for name in classes_in(root, module)}
    return KnownHosts(
        sorted({*known.versions, version}),
        digests,
        sorted({*known.types, *types}),
    )


def classes_in(root: Path, module: str) -> set[str]:
    """Returns the names of the classes of a module; none if the ComfyUI in a folder has it not."""
    file = root.joinpath(*module.split(".")).with_suffix(".py")
    tree = ast.parse(file.read_bytes()) if file.is_file() else ast.Module([], [])
    return {node.name for node in tree.body if isinstance(node, ast.ClassDef)}


def as_file(known: KnownHosts) -> str:
    """Returns the text of the file: a class a line."""
    text = json.dumps(asdict(known), separators=(",", ":"), sort_keys=True)
    for end in ("}", "]", '"'):
        text = text.replace(f'{end},"comfy', f'{end},\n"comfy')
    return text.replace('},"', '},\n"') + "\n"


def main(argv: Sequence[str], host: ComfyInstall) -> int:
    parser = argparse.ArgumentParser(prog="python3 -m lab fingerprints", description=__doc__)
    parser.add_argument("--anew", action="store_true", help="forget every other ComfyUI")
    parser.add_argument("--smallest", action="store_true", help="of one class; no file is written")
    options = parser.parse_args(argv)
    if options.smallest:
        print(as_file(with_host(NOTHING, host.version, Path(host.comfyui), classes()[:1])), end="")
        return 0
    known = NOTHING if options.anew else known_hosts()
    FILE.write_text(as_file(with_host(known, host.version, Path(host.comfyui))), encoding="utf-8")
    print(f"{FILE.name}: {', '.join(known_hosts.__wrapped__().versions)}")
    return 0
