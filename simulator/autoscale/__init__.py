"""Fleets of 8 to 256 GPUs that grow and shrink, as fluids in steps of a second."""
