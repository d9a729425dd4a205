"""Decisions about a layout from what was measured."""
