"""What ComfyUI loads as a custom node pack: this one file, linked into ``custom_nodes``. It makes
the checkout importable and puts the stand-ins in the loaders' places.
"""

from __future__ import annotations

import runpy
from importlib import import_module
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
runpy.run_path(str(ROOT / "pool" / "package.py"))["register_package"](ROOT)

NODE_CLASS_MAPPINGS = import_module("pipemesh.lab.templates.stand_ins.nodes").OWN_NODES
import_module("pipemesh.lab.templates.stand_ins.nodes").stand_in_for_loaders()
