"""Ways to run one model on several ranks. Each attaches to a model by its token plan, and detaches
without a trace.
"""
