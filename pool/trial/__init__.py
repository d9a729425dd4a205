"""The host trial: finds out on the CPU whether a pool computes the same as this ComfyUI."""
