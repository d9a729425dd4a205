"""Ranks with one thing broken."""
