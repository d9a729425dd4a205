"""The measurements behind ``python3 -m lab bench``: one module per name, each with
``bench(options)``, which yields its figures. Nothing imports this folder but its tests.
"""
