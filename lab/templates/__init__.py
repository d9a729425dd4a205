"""The workflow templates that come with ComfyUI: found, and turned into prompts for its API."""
