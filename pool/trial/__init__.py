"""The host trial: whether a pool computes what this ComfyUI does, found out on the CPU."""
