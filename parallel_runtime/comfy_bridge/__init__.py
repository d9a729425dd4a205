"""The formats that the pack shares with ComfyUI, both ends of each side by side.

The UI's process and the ranks import these files. A rank imports them before ComfyUI's arguments
are set (``prepare``), so what a rank uses imports ``comfy`` inside its functions.
"""
