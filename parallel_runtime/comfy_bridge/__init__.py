"""Both ends of every format shared with ComfyUI, side by side."""
