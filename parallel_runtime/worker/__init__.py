"""The rank's side: load models, apply weight patches, run evaluations when told to."""
