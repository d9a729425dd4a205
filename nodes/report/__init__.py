"""Report a run: its figures, their text, and the node that shows both."""
