"""Collectives over tokens, on torch.distributed alone."""
