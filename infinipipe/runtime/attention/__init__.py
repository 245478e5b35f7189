"""Attention over the slices of a chunk."""
