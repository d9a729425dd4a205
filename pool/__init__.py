"""Pools of worker processes: their life, on this machine and on others."""
