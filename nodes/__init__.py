"""What a user drags into a graph."""
