"""Decides on layouts by measurements and published figures."""
