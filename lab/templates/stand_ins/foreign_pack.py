"""What ComfyUI's page knows of other packs, where it makes prompts of templates: this one file,
linked into ``custom_nodes``.
"""

from __future__ import annotations

import runpy
from importlib import import_module
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
runpy.run_path(str(ROOT / "pool" / "package.py"))["register_package"](ROOT)

NODE_CLASS_MAPPINGS = import_module("pipemesh.lab.templates.stand_ins.foreign").FOREIGN
