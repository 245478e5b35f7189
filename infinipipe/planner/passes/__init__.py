"""Passes: pure functions from value to new value."""
