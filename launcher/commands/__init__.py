"""What `python3 -m launcher` can be told to do."""
