"""The border between the UI process and the ranks, and nothing but the border: plain data and
tensors.
"""
