"""Trees of ComfyUI that are the one of the tests, but for a few files."""

import os

WAN_FILE, ATTENTION_FILE = "comfy/ldm/wan/model.py", "comfy/ldm/modules/attention.py"
FLUX_FILES = "comfy/ldm/flux/layers.py", "comfy/ldm/flux/model.py"


def linked(source, target, real, inside=""):
    """Links to all that is in a folder; copies of the files ``real``, in folders of their own."""
    target.mkdir()
    for entry in source.iterdir():
        name = f"{inside}{entry.name}"
        if name in real:
            (target / entry.name).write_bytes(entry.read_bytes())
        elif any(one.startswith(f"{name}/") for one in real):
            linked(entry, target / entry.name, real, f"{name}/")
        elif entry.name != "__pycache__":
            os.symlink(entry, target / entry.name)
