"""Processes: the command line (`python -m launcher`), the ComfyUI it runs on, and the life of the
worker pool.
"""
