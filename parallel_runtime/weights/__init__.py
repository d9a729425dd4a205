"""Holds a model's weights: on the file's pages in the UI; whole, sharded or offloaded on ranks.

The UI's process and the ranks import these files. A rank imports them before ComfyUI's arguments
are set (``worker/preparation.py``), so the functions that a rank calls import ``comfy`` inside.
"""
