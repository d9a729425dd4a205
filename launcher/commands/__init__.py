"""The commands of `python3 -m launcher`."""
