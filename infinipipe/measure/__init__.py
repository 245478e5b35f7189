"""Measures a model on this machine, through the very code that will train it."""
