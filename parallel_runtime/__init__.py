"""What runs in parallel, and how: layouts, the wire, the worker's engine, the client side."""
