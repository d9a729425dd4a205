"""Processes: the command line (`python -m launcher`), the ComfyUI host it runs on, and the worker
pool's life.
"""
