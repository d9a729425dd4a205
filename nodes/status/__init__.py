"""The status API: shows the present state of PipeMesh, and has buttons for its pools."""
