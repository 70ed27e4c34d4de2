"""Simulated studies of the papers."""
