"""Auto mode: every sampler runs in the pool, without a node of PipeMesh in the graph."""
