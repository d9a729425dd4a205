"""Finds, in the UI, what other packs changed of a loaded model and of ComfyUI's own code."""
