"""PipeFusion (arXiv 2405.14430): stages of blocks, patches of the image, stale keys and values."""
