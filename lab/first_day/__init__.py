"""What a machine with GPUs shows on its first day: steps that say a figure and a verdict each."""
