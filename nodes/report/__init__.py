"""What a run was like: figures, text, picture, node."""
