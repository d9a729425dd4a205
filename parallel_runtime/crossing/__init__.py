"""Holds both ends of each format in which a model, its patches and the options of an evaluation
cross from the UI to the ranks. Tensors cross through segments (``wire``).

A model crosses as a loader and its arguments, or as a configuration and a state dict (``source``).
Options of an evaluation cross if they are plain data (``options``). Blocks that are left out, an
attention function and settings of torch cross by name (``named_code``). Code of nodes inside blocks
crosses once, when the model is loaded (``block_code``): objects as plain data and tensors
(``patch_objects``), functions and classes as references to files that a rank has too (``code``),
and the values that this code reads in its pack's modules (``pack_state``). Evaluations name that
code by numbers.

A rank imports these files before ComfyUI's arguments are set (``worker/preparation.py``), so the
functions that a rank calls import ``comfy`` inside.
"""
