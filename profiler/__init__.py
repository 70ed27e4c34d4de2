"""Measuring and predicting."""
