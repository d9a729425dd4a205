"""The nodes that a user drags into a graph."""
