"""Thin Ray shells round plain classes."""
