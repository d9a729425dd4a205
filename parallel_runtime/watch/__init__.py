"""Finds, in the UI, the changes that other packs made to a loaded model and to ComfyUI's own
code.
"""
