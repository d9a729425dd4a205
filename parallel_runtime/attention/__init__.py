"""Attention over a part of the keys: kernels that also return the log-sum-exp, and the merge of
their partial outputs.
"""
