"""The UI's side: a stock MODEL whose forward happens in the pool."""
