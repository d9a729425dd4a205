"""Compute one model's forward on several ranks: both ends, the border between them, the methods."""
