"""What crosses from the UI to the ranks beside tensors: a model's source, options, nodes' patches.
Each format has both of its ends here, side by side.

A rank imports these files before ComfyUI's arguments are set (``worker/prepare.py``), so what a
rank uses imports ``comfy`` inside its functions.
"""
