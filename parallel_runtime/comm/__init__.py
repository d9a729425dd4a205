"""Messages between ranks, on torch.distributed alone."""
