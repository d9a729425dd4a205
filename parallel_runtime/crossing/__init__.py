"""What crosses from the UI to the ranks beside tensors, with both ends of each format side by side.

A model crosses as a loader and its arguments, or as a configuration and a state dict (``source``).
Options of an evaluation cross where they are plain data (``options``); blocks that are left out, an
attention function and settings of torch cross by name (``by_name``). Code of nodes inside blocks
crosses once, when the model is loaded (``in_block``): objects as plain data and tensors
(``by_reference``), functions and classes as references to files that a rank has too (``code``), and
what this code reads in its pack's modules as values (``pack_state``). Evaluations name it by
numbers.

A rank imports these files before ComfyUI's arguments are set (``worker/prepare.py``), so what a
rank uses imports ``comfy`` inside its functions.
"""
