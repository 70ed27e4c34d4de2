"""Measured and predicted performance."""
