"""The measurements behind ``python3 -m launcher bench``: one module per name, each with
``run(options) -> figures``.
"""
