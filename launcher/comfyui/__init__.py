"""The ComfyUI that commands run on: found, installed, started."""
