"""The laboratory: what measures PipeMesh and holds it to stock ComfyUI. The product never imports
it, and the published pack leaves it out.
"""
