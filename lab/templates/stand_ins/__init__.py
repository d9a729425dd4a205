"""Loaders' stand-ins for the workflow templates of ComfyUI: what a file's name stands for, made
small and at random. Loaded by no server but the one of `python3 -m lab templates`.
"""
