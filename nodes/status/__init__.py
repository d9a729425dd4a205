"""The status API: what PipeMesh does now, and buttons for its pools."""
